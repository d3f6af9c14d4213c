"""Where the weights are in files of other programs: timm, torchvision, torch.compile, DDP, Lightning and the like.

Such a file has state dicts somewhere in nested dictionaries, and wrappers put prefixes before the names in them. Keys
of dictionaries and prefixes are treated alike: a tensor's name is the whole way to it, as in
`state_dict.model.conv_stem.weight`. A model is found by a parameter that every model of a family has
(`Family.anchors`); what stands before that is its place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError
from common.text import listed
from models.families import FAMILIES

TRAINED = "trained"
EMA = "ema"
Tensors = Dict[str, torch.Tensor]
_DEEPEST = 6  # dictionaries within dictionaries; deeper ones hold no weights
# Wrappers within torch that can stand anywhere in a name. `module` of DistributedDataParallel stands at the beginning.
_INNER_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Keys and prefixes under which programs keep the one model that they train.
_USUAL = {"state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params"}
_AVERAGE = re.compile(r"(?<![a-z])(ema|avg|averaged?|swa)(?![a-z])", re.IGNORECASE)
# Among the keys that lead to a tensor; not `optimal` or `optimized`.
_OF_OPTIMIZERS = re.compile(r"optimizer|(^|[._])optims?([._]|$)", re.IGNORECASE)
_COUNT = "n_averaged"  # which torch.optim.swa_utils.AveragedModel has beside its `module`


class Chosen(NamedTuple):
    """Weights of one model. which: `trained` or `ema`. notes: lines about a choice that was made."""

    tensors: Tensors
    which: str
    notes: Tuple[str, ...]


def choose(path: Path, content: object, which: Optional[str]) -> Chosen:
    """Return the weights of the model in a file's content, under the names that they have in that model.

    Args:
        path: of the file, for errors.
        content: nested dictionaries; only their tensors matter.
        which: `trained` or `ema`; None: trained. A file with averaged weights alone gives those for `trained`, too.

    Raises CheckpointError: there are no weights, no averaged ones though they are wanted, or those of several models.
    """
    tensors: Tensors = {}
    for name, tensor in _tensors(content):
        short = _without_wrappers(name)
        if short in tensors:
            raise CheckpointError(f"{path}: has {short} twice, once as {name}; save one model by itself")
        tensors[short] = tensor
    weights = {name: tensor for name, tensor in tensors.items() if not _is_count(tensor)}
    if not weights:
        raise CheckpointError(
            f"{path}: not weights: neither a checkpoint of this program nor a state dict: {_described(content)}"
        )
    places = _anchored(weights) or _usual(weights)
    averaged = [place for place in places if _is_average(place, tensors)]
    trained = [place for place in places if place not in averaged]
    if which == EMA and not averaged:
        has = f"its weights are {TRAINED} ({', '.join(map(_shown, trained))})"
        raise CheckpointError(f"{path}: has no {EMA}, {has}; ask for {TRAINED}")
    taken = EMA if which == EMA or not trained else TRAINED
    candidates = averaged if taken == EMA else trained
    place = _only(path, candidates)
    # Of the names below the place, those below another model's place are not this model's.
    others = [each for each in places if each != place]
    inner = tuple(each for each in others if each.startswith(place))
    own = {}
    for name, tensor in weights.items():
        if name.startswith(place) and not name.startswith(inner):
            _check_is_plain(path, name, tensor)
            own[name[len(place) :]] = tensor.detach()  # it may be a parameter
    return Chosen(own, taken, tuple(_notes(path, place, taken, averaged, trained, which)))


def _notes(
    path: Path, place: str, taken: str, averaged: Sequence[str], trained: Sequence[str], which: Optional[str]
) -> Iterator[str]:
    """Yield a line where the file left a choice."""
    here = _shown(place)
    if averaged and trained:
        other = TRAINED if taken == EMA else EMA
        left = ", ".join(map(_shown, trained if taken == EMA else averaged))
        remedy = f"model.init_weights={other}, or --weights {other}, takes the others"
        yield f"{path}: of its {TRAINED} and {EMA} weights the {taken} ones are taken ({here}, not {left}); {remedy}"
    elif averaged and which != EMA:
        yield f"{path}: has {EMA} weights only ({here}); these are taken"
    alike = [_shown(each) for each in (averaged if taken == EMA else trained) if each != place]
    if alike:
        yield f"{path}: of several models that of {here} is taken, not {', '.join(alike)}"


def _tensors(content: object) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield all tensors in nested dictionaries with the keys that lead to them, but for those of optimizers.

    A dictionary that is there several times counts once, so that a small file cannot take long.
    """
    pending = [("", content, 0)]
    seen = set()
    while pending:
        way, found, depth = pending.pop(0)
        if not isinstance(found, dict) or id(found) in seen or depth > _DEEPEST or _OF_OPTIMIZERS.search(way):
            continue
        seen.add(id(found))
        for key, value in found.items():
            if isinstance(key, str) and isinstance(value, torch.Tensor):
                yield way + key, value
            elif isinstance(key, str):
                pending.append((f"{way}{key}.", value, depth + 1))


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _INNER_WRAPPERS)


def _is_count(tensor: torch.Tensor) -> bool:
    """Whether it is a count of batches, epochs or averaged models, which nothing here reads."""
    return tensor.dim() == 0 and not tensor.is_floating_point()


def _check_is_plain(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise CheckpointError for a tensor whose elements are not in memory one by one, or not real."""
    kinds = {
        "sparse": tensor.layout != torch.strided,
        "quantized": tensor.is_quantized,
        "complex": tensor.is_complex(),
        "without values": tensor.device.type != "cpu",
    }
    for kind, is_so in kinds.items():
        if is_so:
            raise CheckpointError(f"{path}: {name} is a tensor that is {kind}; save the weights as ordinary tensors")


def _anchored(names: Mapping[str, torch.Tensor]) -> List[str]:
    """Places of models of a known family; none where a file has no parameter that all of them have."""
    anchors = [anchor for _, family in FAMILIES.items() for anchor in family.anchors]
    anchors.sort(key=len, reverse=True)  # `stem.conv_stem.weight` ends with timm's `conv_stem.weight`
    places = []
    for name in names:
        anchor = next((each for each in anchors if name == each or name.endswith(f".{each}")), None)
        if anchor is not None:
            places.append(name[: -len(anchor)])
    return places


def _usual(names: Mapping[str, torch.Tensor]) -> List[str]:
    """Places by usual keys and prefixes alone; the whole file where these tell several models apart."""
    places = []
    for name in names:
        parts = name.split(".")[:-1]
        known = next((i for i, part in enumerate(parts) if not _is_usual(part)), len(parts))
        place = "".join(f"{part}." for part in parts[:known])
        if place not in places:
            places.append(place)
    trained = [place for place in places if not _AVERAGE.search(place)]
    return places if len(trained) <= 1 and len(places) - len(trained) <= 1 else [""]


def _is_usual(part: str) -> bool:
    return part in _USUAL or _AVERAGE.search(part) is not None


def _is_average(place: str, tensors: Tensors) -> bool:
    """Whether the model at a place is an average of others, by the words on the way or by AveragedModel's count."""
    parent = place
    while parent == "module." or parent.endswith(".module."):
        parent = parent[: -len("module.")]
    return _AVERAGE.search(place) is not None or f"{parent}{_COUNT}" in tensors


def _only(path: Path, places: Sequence[str]) -> str:
    """The one place, or of several the one that has usual names only."""
    if len(places) == 1:
        return places[0]
    usual = [place for place in places if _USUAL.issuperset(place.split(".")[:-1])]
    if len(usual) == 1:
        return usual[0]
    names = ", ".join(map(_shown, places))
    raise CheckpointError(f"{path}: has several models ({names}); save the state dict of one of them by itself")


def _shown(place: str) -> str:
    return place.rstrip(".") or "the names without a prefix"


def _described(content: object) -> str:
    """What a file holds, for an error: its kind, and the keys of a dictionary."""
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__}"
    return f"it is a dictionary of {listed([str(key) for key in content])}" if content else "it is an empty dictionary"
