"""Weights of a model from any kind of file.

Run folders, checkpoints, exported files, and state dicts of timm, torch and other programs.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import CheckpointError, ConfigError, UserError
from common.json_io import parse_json
from common.text import listed
from models.families import FAMILIES, is_classifier, timm_name
from recipe import loading, timm_weights
from recipe.config import Data, Model, Recipe
from recipe.images import scores_training_images
from training import foreign
from training.checkpoint import CheckpointFolder, load_named
from training.foreign import EMA, TRAINED
from training.unpickling import unpickled_of_others

_say = functools.partial(print, flush=True)
# Orders of class folders, which weights have that do not name their classes.
TIMM_ORDER = "timm"
BYTE_ORDER = "bytes"
_OF_CHECKPOINTS = {"format", "engine"}  # keys that only our checkpoints have, both of them


class StoredWeights(NamedTuple):
    """Weights of a model in a file.

    path: of the file; `timm:NAME` for weights that timm has downloaded.
    tensors: by their names here, or by timm's.
    recipe: YAML text of the run that trained them; None where the file has none.
    classes: names by label; None where the file has none.
    which: `trained`, or the name of an average.
    notes: lines for the user about a choice among the weights in the file.
    order: of class folders, as a file of tools.export says it: see `class_order`.
    """

    path: Path
    tensors: Dict[str, torch.Tensor]
    recipe: Optional[str] = None
    classes: Optional[List[str]] = None
    which: str = TRAINED
    notes: Tuple[str, ...] = ()
    order: Optional[str] = None


def read(path: str, which: Optional[str] = None, best: bool = False) -> StoredWeights:
    """Return the weights in a file or folder.

    Args:
        path: a run folder, whose newest whole checkpoint is read; a checkpoint, .safetensors or
            torch file; or what recipe/timm_weights.py describes.
        which: `trained`; `step_average` or `epoch_average`, which only checkpoints have; or `ema`,
            which files of other programs may have. None: trained, or with `best` those that scored
            best.
        best: read the run folder's checkpoint with the highest top-1 instead.

    Raises:
        CheckpointError: there are no such weights.
    """
    pretrained = timm_weights.parse(path)
    if pretrained is not None and pretrained.file is not None:
        path = pretrained.file
        pretrained = None  # read like any other file
    place = Path(path)
    if pretrained is None and place.is_dir():
        return _read_run(place, which, best)
    if best:
        fault = "the best checkpoint is chosen in a run folder; name one"
        raise CheckpointError(f"{path}: {fault}")
    if pretrained is not None:
        # Before they are on their way.
        _check_which(path, which, TRAINED)
        return _download(pretrained.name)
    if not place.exists():
        fault = "no such file or folder; name a run folder, a checkpoint or a weights file"
        raise CheckpointError(f"{path}: {fault}")
    # A file of other programs may have averaged weights alone, which are read for trained ones.
    stored = _read_file(place, which or TRAINED)
    _check_which(path, which, stored.which)
    return stored


def opened(
    path: str,
    which: Optional[str],
    best: bool,
    config: Optional[str],
    overrides: Sequence[str],
) -> Tuple[StoredWeights, Recipe]:
    """Return the weights that a command names, and their recipe.

    Args:
        path: see `read`.
        which: see `read`. None: in files of other programs, those that `model.init_weights` of
            `config` names.
        best: see `read`.
        config: see `recipe_of`. Weights of timm, whose name stands for a model, need none.
        overrides: see `recipe_of`.
    """
    # The recipe is known only once the file is read, and may name averages in it: then read again.
    stored = read(path, which, best)
    note = None
    if timm_weights.parse(path) is not None and not config:
        recipe = loading.of_weights(path, overrides)
        note = timm_weights.preparation(recipe.model, recipe.data)
    else:
        recipe = recipe_of(stored, config, overrides)
    if which is None and stored.recipe is None and recipe.model.init_weights == EMA:
        stored = read(path, EMA, best)
    if note:
        stored = stored._replace(notes=(*stored.notes, note))
    return stored, recipe


def recipe_of(stored: Any, config: Optional[str], overrides: Sequence[str]) -> Recipe:
    """Return the recipe of a stored model.

    Args:
        stored: `StoredWeights` or an `ExportedModel`.
        config: file of a recipe, which counts in the place of the model's own.
        overrides: `section.key=value` each.

    Raises:
        ConfigError: neither has a recipe, or it is not valid.
    """
    if config:
        return loading.load(config, overrides)
    if stored.recipe is None:
        fault = "does not say which recipe it was trained by; name it by --config FILE"
        raise ConfigError(f"{stored.path}: {fault}")
    return loading.loads(stored.recipe, str(stored.path), overrides)


def trained_on(stored: Any, scored: Data) -> bool:
    """Return whether a stored model was trained on images that are scored, as far as addresses tell.

    Args:
        stored: `StoredWeights` or an `ExportedModel`.
        scored: section of the recipe whose validation images are scored.
    """
    if stored.recipe is None:
        return False
    # The run may have had an older version, whose recipe is not valid any more.
    try:
        trained = loading.loads(stored.recipe, str(stored.path)).data
    except UserError:
        return False
    return scores_training_images(trained, scored)


def fitted(
    stored: StoredWeights,
    shapes: Dict[str, Tuple[int, ...]],
    section: Model,
    new_classifier: bool,
) -> Tuple[Dict[str, torch.Tensor], List[str]]:
    """Return the stored tensors under a model's names.

    Args:
        stored: weights under our names or timm's.
        shapes: of the model's parameters and persistent buffers.
        section: of the model.
        new_classifier: whether a classifier for other classes may be left out.

    Returns:
        Tensors by name, and the names of those of the classifier that are left out.

    Raises:
        CheckpointError: a tensor of the model is missing or of another shape, or the file has one
            that the model does not have.
    """
    # Every tensor must fit: a layer that is left out silently would keep its random weights.
    tensors = _renamed(stored, shapes, section)
    fresh = []
    for name, shape in shapes.items():
        tensor = tensors.get(name)
        if tensor is not None and tuple(tensor.shape) == tuple(shape):
            continue
        of_classifier = is_classifier(section, name)
        if new_classifier and of_classifier:
            # One of another shape goes, too, or it would be loaded all the same.
            tensors.pop(name, None)
            fresh.append(name)
            continue
        # The tensor does not fit, and must: say which key of the recipe would make it fit.
        if tensor is None:
            fault = "is missing"
        else:
            fault = f"is {list(tensor.shape)}, the model's is {list(shape)}"
        if tensor is not None and of_classifier and tensor.dim() > 0:
            remedy = f"set model.classes={len(tensor)}"
        else:
            remedy = _remedy(section, stored)
        raise CheckpointError(f"{stored.path}: {name} {fault}; {remedy}")
    return tensors, fresh


def top1_by_weights(scores: Mapping[str, Any]) -> Dict[str, float]:
    """Return top-1 of the trained weights and of the averages, each by its name.

    Args:
        scores: of an evaluation, as in a checkpoint's `progression`.
    """
    # Averages are dictionaries among the plain numbers of the trained weights.
    top1 = {TRAINED: scores["top1"]}
    for name, value in scores.items():
        if isinstance(value, dict):
            top1[name] = value["top1"]
    return top1


def best_of(scores: Mapping[str, Any]) -> str:
    """Return the name of the weights with the highest top-1; at a tie of the trained ones.

    Args:
        scores: as for `top1_by_weights`.
    """
    top1 = top1_by_weights(scores)
    return max(top1, key=lambda name: (top1[name], name == TRAINED))


def names_in_json(text: str, path: Path) -> Optional[List[str]]:
    """Return the names of classes in the metadata of a file; None for null.

    Args:
        text: JSON.
        path: of the file, for errors.

    Raises:
        CheckpointError: it is no list of texts.
    """
    with contextlib.suppress(ValueError):  # not JSON
        # Anybody can edit metadata: texts of another form are damage, not names.
        names = parse_json(text)
        if names is None:
            return None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    raise CheckpointError(f"{path}: damaged: the names of its classes cannot be read")


def class_order(stored: Any) -> str:
    """Return the order of class folders that a model has whose file does not name its classes.

    Args:
        stored: `StoredWeights` or an `ExportedModel`.

    Returns:
        TIMM_ORDER for weights of other programs, BYTE_ORDER for our own.
    """
    # An exported file has a recipe even if its weights are another program's, so it says it.
    if stored.order is not None:
        return stored.order
    return TIMM_ORDER if stored.recipe is None else BYTE_ORDER


def run_folder_of(path: Path) -> Optional[Path]:
    """Return the run folder that a file belongs to; None outside of one.

    Args:
        path: of a checkpoint, or of what tools.export made of one.
    """
    # A path that was typed within the folder does not have its name.
    absolute = Path(os.path.abspath(path))
    is_short = len(path.parts) < 3
    folder = absolute.parent.parent if is_short else path.parent.parent
    # A copy of the folder elsewhere counts like the original: it has its own configuration.
    inside = absolute.parent.name in ("checkpoints", "export")
    return folder if inside and (folder / "config.yaml").exists() else None


def _renamed(
    stored: StoredWeights,
    shapes: Dict[str, Tuple[int, ...]],
    section: Model,
) -> Dict[str, torch.Tensor]:
    """Return the stored tensors under a model's names; raise CheckpointError for other tensors."""
    # A file may use either kind of name; where a name is one of both kinds, ours counts.
    our_names = {timm_name(section, name): name for name in shapes}
    our_names.update({name: name for name in shapes})
    tensors = {}
    unknown = []
    for name, tensor in stored.tensors.items():
        if name in our_names:
            tensors[our_names[name]] = tensor
        elif not name.endswith("num_batches_tracked"):  # torch's count, which nothing here reads
            unknown.append(name)
    if not tensors:
        fault = f"none of its tensors ({listed(unknown)}) has a name of the model in the recipe"
        raise CheckpointError(f"{stored.path}: {fault}; name weights of {section.name}")
    if unknown:
        have = "have" if len(unknown) > 1 else "has"
        fault = f"{listed(unknown)} {have} no place in the model of the recipe"
        raise CheckpointError(f"{stored.path}: {fault}; {_remedy(section, stored)}")
    return tensors


def _remedy(section: Model, stored: StoredWeights) -> str:
    """Return `set KEY=VALUE ...` for the keys in which the recipe differs from the stored model.

    Where no key shows it, the two are not the same kind of model, and no key would help.
    """
    # Families can read their keys off the shapes of a model's tensors.
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.tensors.items()}
    keys = FAMILIES.of(section).keys_of(shapes)
    values = section.model_dump()
    differing = [f"model.{key}={value}" for key, value in keys.items() if values.get(key) != value]
    if differing:
        return f"set {' '.join(differing)}"
    return f"name weights of {section.name} as the recipe has it"


def _check_which(path: str, which: Optional[str], found: str) -> None:
    """Raise CheckpointError where other weights are asked for than those that were found."""
    if which not in (None, TRAINED, found):
        fault = f"has no {which}, its weights are {found}; ask for {TRAINED}"
        raise CheckpointError(f"{path}: {fault}")


def _download(name: str) -> StoredWeights:
    """Return the weights of timm's model `name`, from its cache or its hub."""
    import timm

    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # no such weights, no network, no room
        reason = " ".join(str(error).split())[:200]
        remedy = f"give a file by model.init_from=timm:{name}:FILE"
        raise CheckpointError(f"timm:{name}: cannot be downloaded ({reason}); {remedy}") from None
    return StoredWeights(Path(f"timm:{name}"), model.state_dict())


def _read_run(folder: Path, which: Optional[str], best: bool) -> StoredWeights:
    """Return the weights of a run folder's newest, or best, checkpoint. Raises CheckpointError."""
    # The folder of the checkpoints themselves is as good.
    place = folder if any(folder.glob("step-*.pt")) else folder / "checkpoints"
    # Only read: nothing is pruned, so that the numbers to keep do not matter.
    checkpoints = CheckpointFolder(place, keep_last=2, keep_best=True)
    load = checkpoints.load_best if best else checkpoints.load_newest
    content = load(warn=_say)
    if content is None:
        missing = "scored checkpoint" if best else "checkpoint"
        fault = f"no {missing} in this folder; name a run folder that holds one"
        raise CheckpointError(f"{folder}: {fault}")
    progression = content["progression"]
    # The checkpoint was chosen for the best top-1 of all its weights: take those.
    if best and which is None:
        which = best_of(progression["scores"])
    return _of_checkpoint(checkpoints.path(progression["step"]), content, which or TRAINED)


def _read_file(path: Path, which: str) -> StoredWeights:
    """Return the weights in a file, by whatever program. Raises CheckpointError."""
    if path.suffix == ".safetensors":
        return _read_safetensors(path, which)
    content = unpickled_of_others(path)
    if isinstance(content, dict) and set(content) >= _OF_CHECKPOINTS:
        return _of_checkpoint(path, load_named(path, _say), which)
    return _of_other_program(path, content, which)


def _of_checkpoint(path: Path, content: dict, which: str) -> StoredWeights:
    """Return the weights in a checkpoint's content.

    Raises CheckpointError also where something is missing: a file by itself has no checksum.
    """
    # Averages lie beside the trained weights, and have the same form.
    try:
        state = content["engine"]
        if which != TRAINED:
            averages = _begun_averages(state)
            if which not in averages:
                names = ", ".join([TRAINED, *averages])
                raise CheckpointError(f"{path}: has no {which}; it has {names}")
            state = averages[which]
        return StoredWeights(
            path=path,
            tensors={**state["weights"], **state.get("buffers", {})},
            recipe=content["recipe"],
            classes=content.get("classes"),
            which=which,
        )
    except (KeyError, TypeError, AttributeError) as error:
        fault = f"damaged: its content is not a checkpoint's ({error})"
        raise CheckpointError(f"{path}: {fault}") from None


def _begun_averages(state: dict) -> Dict[str, dict]:
    """Return the averages in an engine's state that are over at least one set of weights."""
    averages = state.get("averages", {})
    return {name: average for name, average in averages.items() if average["count"] > 0}


def _read_safetensors(path: Path, which: str) -> StoredWeights:
    """Return the weights in a .safetensors file, which may be another program's."""
    from safetensors import SafetensorError, safe_open

    # Names are asked for by keys(): the object is no mapping.
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole .safetensors file: {error}") from None
    # Files of tools.export say what they are; all others are recognised by their names.
    if "recipe" not in metadata and "weights" not in metadata:
        return _of_other_program(path, tensors, which)
    return StoredWeights(
        path=path,
        tensors=tensors,
        recipe=metadata.get("recipe"),
        classes=names_in_json(metadata.get("classes", "null"), path),
        which=metadata.get("weights", TRAINED),
        order=metadata.get("order"),
    )


def _of_other_program(path: Path, content: object, which: str) -> StoredWeights:
    """Return the weights of the one model in another program's file."""
    chosen = foreign.choose(path, content, which)
    return StoredWeights(path, chosen.tensors, which=chosen.which, notes=chosen.notes)
