"""Weights in files of other programs: timm, torchvision, torch.compile, DDP, Lightning and so on.

Such a file has state dicts somewhere in nested dictionaries, and wrappers put prefixes before the
names in them. Keys of dictionaries and prefixes are treated alike: a tensor's name consists of all
keys that lead to it, as in `state_dict.model.conv_stem.weight`. A model is recognised by a
parameter that every model of a family has (`Family.anchors`); what stands before that is its
prefix.
"""

from __future__ import annotations

import collections
import itertools
import re
from pathlib import Path
from typing import Deque, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError
from common.text import listed
from models.families import FAMILIES

TRAINED = "trained"
EMA = "ema"
Tensors = Dict[str, torch.Tensor]
_DEEPEST = 6  # dictionaries within dictionaries; deeper ones hold no weights
# Wrappers within torch that can stand anywhere in a name. DistributedDataParallel's `module` stands
# at the beginning.
_INNER_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Keys and prefixes under which programs keep the one model that they train.
_USUAL = {
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net",
    "network",
    "module",
    "weights",
    "params",
}
_AVERAGE = re.compile(r"(?<![a-z])(ema|avg|averaged?|swa)(?![a-z])", re.IGNORECASE)
# Among the keys that lead to a tensor; not `optimal` or `optimized`.
_OF_OPTIMIZERS = re.compile(r"optimizer|(^|[._])optims?([._]|$)", re.IGNORECASE)
_COUNT = "n_averaged"  # which torch.optim.swa_utils.AveragedModel has beside its `module`


class Chosen(NamedTuple):
    """Weights of one model.

    tensors: by their names in that model.
    which: `trained` or `ema`.
    notes: lines for the user about a choice that was made.
    """

    tensors: Tensors
    which: str
    notes: Tuple[str, ...]


class _Choice(NamedTuple):
    """The model that is chosen among those in a file.

    which: `trained` or `ema`.
    prefix: of the model.
    alike: prefixes of other models of that kind.
    other_kind: prefixes of its models.
    """

    which: str
    prefix: str
    alike: Sequence[str]
    other_kind: Sequence[str]


def choose(path: Path, content: object, which: Optional[str]) -> Chosen:
    """Return the weights of the model in a file's content.

    Args:
        path: of the file, for errors.
        content: nested dictionaries; only their tensors matter.
        which: `trained` or `ema`; None: trained. A file with averaged weights alone gives those for
            `trained`, too.

    Raises:
        CheckpointError: there are no weights, no averaged ones though they are asked for, or those
            of several models.
    """
    # Counts are no weights, but show which model is an average.
    tensors = _unwrapped(path, content)
    weights = {name: tensor for name, tensor in tensors.items() if not _is_count(tensor)}
    if not weights:
        fault = "not weights: neither a checkpoint of this program nor a state dict"
        raise CheckpointError(f"{path}: {fault}: {_described(content)}")
    # Where the file's models are, and which of them are averages.
    prefixes = _anchored(weights) or _usual(weights)
    averaged = [prefix for prefix in prefixes if _is_average(prefix, tensors)]
    trained = [prefix for prefix in prefixes if prefix not in averaged]
    if which == EMA and not averaged:
        shown = ", ".join(map(_shown, trained))
        fault = f"has no {EMA}, its weights are {TRAINED} ({shown})"
        raise CheckpointError(f"{path}: {fault}; ask for {TRAINED}")
    # Which of them is chosen.
    if which == EMA or not trained:
        choice = _chosen(path, EMA, averaged, trained)
    else:
        choice = _chosen(path, TRAINED, trained, averaged)
    model = _of_model(path, weights, choice.prefix, prefixes)
    return Chosen(model, choice.which, tuple(_notes(path, choice, asked_for=which)))


def _chosen(path: Path, which: str, prefixes: Sequence[str], other_kind: Sequence[str]) -> _Choice:
    """Choose among the models of one kind, `prefixes`."""
    prefix = _only(path, prefixes)
    alike = [candidate for candidate in prefixes if candidate != prefix]
    return _Choice(which, prefix, alike, other_kind)


def _of_model(path: Path, weights: Tensors, prefix: str, prefixes: Sequence[str]) -> Tensors:
    """Return the weights of the model at `prefix`, one of the `prefixes`, by their names there."""
    # A name below another model's longer prefix is that model's.
    longer = [other for other in prefixes if other != prefix and other.startswith(prefix)]
    model = {}
    for name, tensor in weights.items():
        if name.startswith(prefix) and not name.startswith(tuple(longer)):
            _check_is_plain(path, name, tensor)
            model[name[len(prefix) :]] = tensor.detach()  # it may be a parameter
    return model


def _notes(path: Path, choice: _Choice, asked_for: Optional[str]) -> Iterator[str]:
    """Yield a line for the user where the file left a choice."""
    which = choice.which
    chosen = _shown(choice.prefix)
    if choice.other_kind:
        other = TRAINED if which == EMA else EMA
        left = ", ".join(map(_shown, choice.other_kind))
        remedy = f"model.init_weights={other}, or --weights {other}, takes the others"
        line = f"of its {TRAINED} and {EMA} weights the {which} ones are taken"
        yield f"{path}: {line} ({chosen}, not {left}); {remedy}"
    elif which == EMA and asked_for != EMA:
        yield f"{path}: has {EMA} weights only ({chosen}); these are taken"
    if choice.alike:
        alike = ", ".join(map(_shown, choice.alike))
        yield f"{path}: of several models that of {chosen} is taken, not {alike}"


def _unwrapped(path: Path, content: object) -> Tensors:
    """Return all tensors by name without wrappers; raise CheckpointError for a name of two."""
    tensors: Tensors = {}
    for name, tensor in _tensors(content):
        parts = [part for part in name.split(".") if part not in _INNER_WRAPPERS]
        short = ".".join(parts)
        if short in tensors:
            fault = f"has {short} twice, once as {name}"
            raise CheckpointError(f"{path}: {fault}; save one model by itself")
        tensors[short] = tensor
    return tensors


def _tensors(content: object) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield all tensors in nested dictionaries by name, but for those of optimizers.

    A dictionary that is there several times counts once, so that a small file cannot take long.
    """
    # Breadth first: of a dictionary that is in several places the shortest name counts.
    pending: Deque[Tuple[str, object, int]] = collections.deque([("", content, 0)])
    seen = set()
    while pending:
        prefix, value, depth = pending.popleft()
        if not isinstance(value, dict) or id(value) in seen:
            continue
        if depth > _DEEPEST or _OF_OPTIMIZERS.search(prefix):
            continue
        seen.add(id(value))
        for key, inner in value.items():
            if not isinstance(key, str):
                continue
            if isinstance(inner, torch.Tensor):
                yield prefix + key, inner
            else:
                pending.append((f"{prefix}{key}.", inner, depth + 1))


def _is_count(tensor: torch.Tensor) -> bool:
    """Return whether it counts batches, epochs or averaged models, which nothing here reads."""
    return tensor.dim() == 0 and not tensor.is_floating_point()


def _check_is_plain(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for elements that are not in memory one by one, or not real."""
    # torch would convert some of these silently, or fail far from here.
    kinds = {
        "sparse": tensor.layout != torch.strided,
        "quantized": tensor.is_quantized,
        "complex": tensor.is_complex(),
        "without values": tensor.device.type != "cpu",
    }
    for kind, is_so in kinds.items():
        if is_so:
            fault = f"{name} is a tensor that is {kind}; save the weights as ordinary tensors"
            raise CheckpointError(f"{path}: {fault}")


def _anchored(names: Mapping[str, torch.Tensor]) -> List[str]:
    """Return prefixes of models of a known family: none where no name ends with an anchor."""
    anchors = [anchor for _, family in FAMILIES.items() for anchor in family.anchors]
    anchors.sort(key=len, reverse=True)  # ours, `stem.conv_stem.weight`, ends with one of timm's
    prefixes = []
    for name in names:
        for anchor in anchors:
            if name == anchor or name.endswith(f".{anchor}"):
                prefixes.append(name[: -len(anchor)])
                break
    return prefixes


def _usual(names: Mapping[str, torch.Tensor]) -> List[str]:
    """Return prefixes that consist of usual keys alone.

    Where these tell several models apart, the whole file is one model: its prefix is empty.
    """
    # The path to the weights of one model, e.g. `state_dict.model.`, up to the first unusual key.
    prefixes = []
    with_matrices = set()
    for name, tensor in names.items():
        parts = itertools.takewhile(_is_usual, name.split(".")[:-1])
        prefix = "".join(f"{part}." for part in parts)
        if prefix not in prefixes:
            prefixes.append(prefix)
        if tensor.dim() > 1:
            with_matrices.add(prefix)
    # Programs keep single numbers and vectors beside a model: scores, states of generators. Only a
    # model has matrices.
    models = [prefix for prefix in prefixes if prefix in with_matrices] or prefixes
    averages = [prefix for prefix in models if _AVERAGE.search(prefix)]
    if len(averages) > 1 or len(models) - len(averages) > 1:
        return [""]
    return models


def _is_usual(part: str) -> bool:
    """Return whether programs keep the model that they train under such a key."""
    return part in _USUAL or _AVERAGE.search(part) is not None


def _is_average(prefix: str, tensors: Tensors) -> bool:
    """Return whether the model at `prefix` is an average of others.

    A word in the prefix says so, or AveragedModel's count beside its `module`.
    """
    # DistributedDataParallel may be around AveragedModel, or within it.
    parent = prefix
    while parent == "module." or parent.endswith(".module."):
        parent = parent[: -len("module.")]
    return _AVERAGE.search(prefix) is not None or f"{parent}{_COUNT}" in tensors


def _only(path: Path, prefixes: Sequence[str]) -> str:
    """Return the one prefix, or of several the one that has usual names only."""
    # Beside a model there may be a teacher, say, whose prefix is none of the usual ones.
    if len(prefixes) == 1:
        return prefixes[0]
    usual = [prefix for prefix in prefixes if _USUAL.issuperset(prefix.split(".")[:-1])]
    if len(usual) == 1:
        return usual[0]
    shown = ", ".join(map(_shown, prefixes))
    remedy = "save the state dict of one of them by itself"
    raise CheckpointError(f"{path}: has several models ({shown}); {remedy}")


def _shown(prefix: str) -> str:
    """Return a prefix as messages show it."""
    return prefix.rstrip(".") or "the names without a prefix"


def _described(content: object) -> str:
    """Return the kind of what a file holds, and the keys of a dictionary, for an error."""
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}"
    if not content:
        return "it is an empty dictionary"
    return f"it is a dictionary of {listed([str(key) for key in content])}"
