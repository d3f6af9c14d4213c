"""Checks for faults that would end a run only after it has begun.

They need no torch, and come before there is a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from common.errors import CheckpointError, ConfigError
from models import balance, shapes
from recipe import timm_weights
from recipe.batch import output_folder, training_image_sizes
from recipe.config import Recipe
from recipe.network import CLASSIFIER
from training import loggers, mirror, services  # noqa: F401  services register themselves
from training.run_folder import has_begun

# As many stages any model has blocks for, so that a plan with no more of them needs no torch.
_FEW_PARTS = 4
_CHECKPOINTS = "checkpoints/step-*.json"
_WITHIN = "step-*.pt"  # in the folder of the checkpoints itself


def check(recipe: Recipe) -> None:
    """Refuse a run that cannot begin on this machine.

    Args:
        recipe: of the run.

    Raises:
        ConfigError: the package of a logger or of the mirror's store is missing, the mirror lies in
            the run folder or around it, or the model lacks a block that the recipe names.
        CheckpointError: the weights to start from are not there, and no mirror can have a
            checkpoint in their place.
    """
    # What a run would meet only minutes later, once images are listed and the engine is built.
    loggers.check(recipe.log)
    if recipe.checkpoint.mirror is not None:
        mirror.check_package(recipe.checkpoint.mirror)
        mirror.check_place(recipe.checkpoint.mirror, Path(output_folder(recipe)))
    _check_blocks(recipe)
    if recipe.model.init_from and not _may_be_resumed(recipe):
        _check_weights(recipe.model.init_from)


def _may_be_resumed(recipe: Recipe) -> bool:
    """Return whether a run may have a checkpoint, and so need no weights to start from."""
    folder = Path(output_folder(recipe))
    if any(folder.glob(_CHECKPOINTS)):
        return True
    # An empty folder is filled from its mirror, which is not connected here. Where that has no
    # checkpoint either, weights that are not there are refused as they are read.
    return recipe.checkpoint.mirror is not None and not has_begun(folder)


def _check_blocks(recipe: Recipe) -> None:
    """Raise ConfigError for cut points, or blocks to recompute or to train, that the model lacks."""
    split = recipe.parallel.split
    recompute = recipe.parallel.recompute
    train = recipe.model.train
    # Of a model of timm the blocks are known only once it is traced: where no key names one, a plan
    # needs no torch.
    names_blocks = any(isinstance(value, list) and value for value in (split, recompute, train))
    if not names_blocks and recipe.parallel.parts <= _FEW_PARTS:
        return
    blocks = shapes.blocks(recipe.model, max(training_image_sizes(recipe)))
    names = list(blocks)
    # Before hundreds of processes have started.
    able = sum(block.parameters > 0 for block in blocks.values())
    if recipe.parallel.parts > able:
        raise ConfigError(balance.too_many_parts(recipe.parallel.parts, able))
    if isinstance(split, list):
        try:
            balance.split_names(names, split)
        except ValueError as error:
            raise ConfigError(f"parallel.split: {error}") from None
    if isinstance(recompute, list):
        balance.check_blocks("parallel.recompute", recompute, names)
    if isinstance(train, list):
        trainable = [name for name in names if blocks[name].parameters]
        outside = [name for name in train if not _may_name_a_part(name, trainable)]
        balance.check_blocks("model.train", outside, [CLASSIFIER, *trainable])


def _may_name_a_part(name: str, blocks: Sequence[str]) -> bool:
    """Return whether a name may stand for blocks, or for something within one.

    What is within a block is known only once the model is built (models/trained_parts.py).
    """
    return any(
        f"{block}.".startswith(f"{name}.") or name.startswith(f"{block}.") for block in blocks
    )


def _check_weights(init_from: str) -> None:
    """Raise CheckpointError where weights that ought to be on this machine are not there."""
    # Only that they are there; reading them takes torch, and is done once the engine is built.
    pretrained = timm_weights.parse(init_from)
    path = Path(init_from)
    if pretrained is not None:
        if pretrained.file is None:
            return  # timm downloads them
        path = Path(pretrained.file)
    remedy = "name a run folder, a checkpoint or a weights file; model.init_from=null starts anew"
    if not path.exists():
        raise CheckpointError(f"model.init_from: {path}: no such file or folder; {remedy}")
    if path.is_dir() and not any(path.glob(_CHECKPOINTS)) and not any(path.glob(_WITHIN)):
        raise CheckpointError(f"model.init_from: {path}: no checkpoint in this folder; {remedy}")
