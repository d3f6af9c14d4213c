"""Weights from wherever they come: run folders, checkpoints, exported files, timm's and torch's state dicts."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError, ConfigError
from common.json_io import parse_json
from common.text import listed
from models.families import FAMILIES, timm_name
from recipe import loading, timm_weights
from recipe.config import Model, Recipe
from training import foreign
from training.checkpoint import CheckpointFolder, load_named
from training.foreign import EMA, TRAINED
from training.unpickling import unpickled_of_others

_say = functools.partial(print, flush=True)
_CLASSIFIER = "classifier."


class StoredWeights(NamedTuple):
    """Weights of a model in a file. recipe: YAML text of their run; recipe, classes: None where the file has none.
    notes: lines for the user about what was taken of the file."""

    path: Path
    tensors: Dict[str, torch.Tensor]
    recipe: Optional[str] = None
    classes: Optional[List[str]] = None
    which: str = TRAINED
    notes: Tuple[str, ...] = ()


def read(path: str, which: Optional[str] = None, best: bool = False) -> StoredWeights:
    """Return the weights in a run folder (newest whole checkpoint, with `best` the one with the highest top-1), a
    checkpoint, .safetensors, a torch file, or what recipe/timm_weights.py describes.

    Args: which: `trained`, `step_average` or `epoch_average`, which only checkpoints have, or `ema`, which files of
    other programs may have. None: trained, or with `best` those that scored best. Raises CheckpointError where there
    are no such weights.
    """
    wanted = timm_weights.parse(path)
    if wanted is not None and wanted.file is None:
        return _downloaded(wanted.name)
    path = wanted.file if wanted is not None else path
    place = Path(path)
    if place.is_dir():
        return _of_run(place, which, best)
    if best:
        raise CheckpointError(f"{path}: the best checkpoint is chosen in a run folder; name one")
    which = which or TRAINED
    if not place.exists():
        raise CheckpointError(f"{path}: no such file or folder; name a run folder, a checkpoint or a weights file")
    if place.suffix == ".safetensors":
        stored = _of_safetensors(place, which)
    else:
        content = unpickled_of_others(place)
        if isinstance(content, dict) and {"format", "engine"} <= set(content):
            return _of_checkpoint(place, load_named(place, _say), which)
        stored = _of_others(place, content, which)
    if which not in (TRAINED, stored.which):
        raise CheckpointError(f"{path}: has no {which}, its weights are {stored.which}; ask for {TRAINED}")
    return stored


def opened(
    path: str, which: Optional[str], best: bool, config: Optional[str], overrides: Sequence[str]
) -> Tuple[StoredWeights, Recipe]:
    """Return the weights that a command names, and their recipe: see `read` and `recipe_of`.

    Args: which: None: in files of other programs, those that `model.init_weights` of `config` names.
    """
    stored = read(path, which, best)
    recipe = recipe_of(stored, config, overrides)
    if which is None and stored.recipe is None and recipe.model.init_weights == EMA:
        stored = read(path, EMA, best)
    return stored, recipe


def recipe_of(stored: Any, config: Optional[str], overrides: Sequence[str]) -> Recipe:
    """Return the recipe in the file `config`, or else the model's own, with overrides."""
    if config:
        return loading.load(config, overrides)
    if stored.recipe is None:
        raise ConfigError(f"{stored.path}: does not say which recipe it was trained by; name it by --config FILE")
    return loading.loads(stored.recipe, str(stored.path), overrides)


def is_classifier(section: Model, name: str) -> bool:
    """Return whether a tensor of a model, by its name here, is one of the classifier's, with a row for each class."""
    return timm_name(section, name).startswith(_CLASSIFIER)


def fitted(
    stored: StoredWeights, shapes: Dict[str, Tuple[int, ...]], section: Model, new_classifier: bool
) -> Tuple[Dict[str, torch.Tensor], List[str]]:
    """Return the stored tensors under a model's names, and the names of those that the file does not have.

    Args: shapes: of the model's parameters and persistent buffers. section: of the recipe, whose family knows timm's
    names, which the file may use. new_classifier: whether a classifier for other classes may be left out.

    Raises CheckpointError: a tensor of the model is missing or of another shape, or the file has one more.
    """
    theirs = {name: timm_name(section, name) for name in shapes}
    ours = {**{timm: name for name, timm in theirs.items()}, **{name: name for name in shapes}}
    found = {ours[name]: tensor for name, tensor in stored.tensors.items() if name in ours}
    # torch's count of batches is left out: nothing here reads it.
    others = [name for name in stored.tensors if name not in ours and not name.endswith("num_batches_tracked")]
    if not found:
        fault = f"none of its tensors ({listed(others)}) has a name of the model in the recipe"
        raise CheckpointError(f"{stored.path}: {fault}; name weights of {section.name}")
    if others:
        fault = f"{listed(others)} {'have' if others[1:] else 'has'} no place in the model of the recipe"
        raise CheckpointError(f"{stored.path}: {fault}; {_remedy(section, stored)}")
    fresh = []
    for name, shape in shapes.items():
        tensor, of_classifier = found.get(name), is_classifier(section, name)
        if tensor is not None and tuple(tensor.shape) == tuple(shape):
            continue
        if new_classifier and of_classifier:
            found.pop(name, None)
            fresh.append(name)
            continue
        fault = "is missing" if tensor is None else f"is {list(tensor.shape)}, the model's is {list(shape)}"
        classes = f"set model.classes={len(tensor)}" if tensor is not None and of_classifier else None
        raise CheckpointError(f"{stored.path}: {name} {fault}; {classes or _remedy(section, stored)}")
    return found, fresh


def _remedy(section: Model, stored: StoredWeights) -> str:
    """Return `set KEY=VALUE ...` for the keys in which the recipe's model differs from the stored one.

    Where no key shows it, the two are not the same kind of model, and no key would help.
    """
    own = section.model_dump()
    keys = FAMILIES.of(section).keys_of({name: tuple(tensor.shape) for name, tensor in stored.tensors.items()})
    differing = [f"model.{key}={value}" for key, value in keys.items() if own.get(key) != value]
    return f"set {' '.join(differing)}" if differing else f"name weights of {section.name} as the recipe has it"


def _of_run(folder: Path, which: Optional[str], best: bool) -> StoredWeights:
    checkpoints = CheckpointFolder(folder / "checkpoints", keep_last=2, keep_best=True)
    load = checkpoints.load_best if best else checkpoints.load_newest
    content = load(warn=_say)
    if content is None:
        what = "scored checkpoint" if best else "checkpoint"
        raise CheckpointError(f"{folder}: no {what} in this folder; name a run folder that holds one")
    path = checkpoints.path(content["progression"]["step"])
    if best and which is None:
        top1 = top1_by_weights(content["progression"]["scores"])
        which = max(top1, key=lambda name: (top1[name], name == TRAINED))
    return _of_checkpoint(path, content, which or TRAINED)


def top1_by_weights(scores: Mapping[str, Any]) -> Dict[str, float]:
    """Return top-1 of the trained weights and of the averages in an evaluation's scores."""
    averages = {name: each["top1"] for name, each in scores.items() if isinstance(each, dict)}
    return {TRAINED: scores["top1"], **averages}


def _downloaded(name: str) -> StoredWeights:
    import timm

    try:
        model = timm.create_model(name, pretrained=True)  # from its cache or its hub
    except Exception as error:  # no such weights, no network, no room
        fault = f"cannot be downloaded ({' '.join(str(error).split())[:200]})"
        raise CheckpointError(f"timm:{name}: {fault}; give a file by model.init_from=timm:{name}:FILE") from None
    return StoredWeights(Path(f"timm:{name}"), model.state_dict())


def _of_checkpoint(path: Path, content: dict, which: str) -> StoredWeights:
    """Raises CheckpointError also where something is missing: a file by itself has no checksum."""
    try:
        state = content["engine"]
        if which != TRAINED:
            averages = {name: average for name, average in state.get("averages", {}).items() if average["count"] > 0}
            if which not in averages:
                raise CheckpointError(f"{path}: has no {which}; it has {', '.join([TRAINED, *averages])}")
            state = averages[which]
        tensors = {**state["weights"], **state.get("buffers", {})}
        return StoredWeights(path, tensors, content["recipe"], content.get("classes"), which)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged: its content is not a checkpoint's ({error})") from None


def _of_safetensors(path: Path, which: str) -> StoredWeights:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole .safetensors file: {error}") from None
    if not {"recipe", "weights"} & set(metadata):
        return _of_others(path, tensors, which)
    classes = names_in_json(metadata.get("classes", "null"), path)
    return StoredWeights(path, tensors, metadata.get("recipe"), classes, metadata.get("weights", TRAINED))


def names_in_json(text: str, path: Path) -> Optional[List[str]]:
    """Names of classes in the metadata of a file; None for null. Raises CheckpointError."""
    with contextlib.suppress(ValueError):
        names = parse_json(text)
        if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            return names
    raise CheckpointError(f"{path}: damaged: the names of its classes cannot be read")


def _of_others(path: Path, content: object, which: str) -> StoredWeights:
    chosen = foreign.choose(path, content, which)
    return StoredWeights(path, chosen.tensors, which=chosen.which, notes=chosen.notes)


def run_folder_of(path: Path) -> Optional[Path]:
    """Return the run folder of a checkpoint, or of what tools.export made of one; None outside of one."""
    folder = path.parent.parent
    inside = path.parent.name in ("checkpoints", "export")
    return folder if inside and (folder / "config.yaml").exists() else None
