"""From the recipe's optimizer section to an optimizer with its parameter groups."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Dict, Iterable, Set

from torch import nn

from optim import controls, lars  # noqa: F401  (register themselves)
from optim.base import OPTIMIZERS, HasSlots
from recipe.optimization import Optimizer

# So does a file that is named like an optimizer.
for _name in Optimizer.kinds:
    if importlib.util.find_spec(f"{__package__}.{_name}"):
        importlib.import_module(f"{__package__}.{_name}")


def create(section: Optimizer, parameters: Dict[str, nn.Parameter], norm_parameters: Iterable[str]) -> HasSlots:
    """The torch optimizer of `section` for named float32 parameters; its learning rate is set at each step.

    Skipped parameters have no weight decay; with LARS and LAMB no trust ratio either. The others have the ratio
    even where `weight_decay` is 0. norm_parameters: names of the parameters that belong to normalisation layers.
    """
    kind, skipped = OPTIMIZERS.of(section), skipped_names(section, parameters, norm_parameters)
    groups = [
        {
            "params": [parameter for name, parameter in parameters.items() if (name in skipped) == skip],
            **kind.options(section, skip),
        }
        for skip in (False, True)
    ]
    optimizer = kind.of(section, [group for group in groups if group["params"]])
    optimizer.slots = section.slots
    return optimizer


def skipped_names(section: Optimizer, parameters: Iterable[str], norm_parameters: Iterable[str]) -> Set[str]:
    """The parameters that `skip` names: `bias` covers all biases, `norm` the scales of norms."""
    names = set(parameters)
    biases = {name for name in names if name.split(".")[-1] == "bias"}
    kinds = {"bias": biases, "norm": names.intersection(norm_parameters) - biases}
    return {name for kind in section.skip for name in kinds[kind]}
