"""Which parameters of a model a recipe trains, and which modules are then as in evaluation."""

from __future__ import annotations

from typing import Dict, List, Set

from torch import nn

from common.errors import ConfigError
from models.base import BlockList
from models.families import is_classifier
from recipe.network import CLASSIFIER, Model


def trained_names(section: Model, model: BlockList) -> Set[str]:
    """Return the names of the parameters that `model.train` names.

    Args:
        section: of the model.
        model: whole.

    Raises:
        ConfigError: a block that the model does not have, or a classifier without a name.
    """
    names = [name for name, _ in model.named_parameters()]
    if section.train == "all":
        return set(names)
    wanted = [section.train] if isinstance(section.train, str) else section.train
    trained: Set[str] = set()
    for block in wanted:
        if block == CLASSIFIER:
            found = [name for name in names if is_classifier(section, name)]
        else:
            # A stage's name, such as blocks.6, stands for all of its blocks.
            found = [name for name in names if name.startswith(f"{block}.")]
        if not found:
            raise ConfigError(f"model.train: {block} is not a block; {_known(model)}")
        trained.update(found)
    return trained


def _known(model: BlockList) -> str:
    """Return which names there are."""
    blocks = [name for name in model.names if any(True for _ in model.block(name).parameters())]
    return f"the blocks are {CLASSIFIER}, {', '.join(blocks)}"


def freeze(model: BlockList, trained: Set[str]) -> None:
    """Compute no gradient of the parameters that are not `trained`, names of `trained_names`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def frozen_modules(model: nn.Module) -> Dict[str, nn.Module]:
    """Return the outermost modules that have parameters, of which none is trained, by name.

    Args:
        model: of which `freeze` may have frozen a part.
    """
    frozen: Dict[str, nn.Module] = {}
    _collect(model, "", frozen)
    return frozen


def _collect(module: nn.Module, name: str, frozen: Dict[str, nn.Module]) -> None:
    """Add the frozen modules in `module`, itself included, to `frozen`."""
    trains: List[bool] = [parameter.requires_grad for parameter in module.parameters()]
    if not trains or all(trains):
        return
    if not any(trains):
        frozen[name] = module
        return
    # Some of it is trained and some is not: frozen modules are further in.
    for child_name, child in module.named_children():
        _collect(child, f"{name}.{child_name}" if name else child_name, frozen)
