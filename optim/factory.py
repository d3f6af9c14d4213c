"""From the recipe's optimizer section to an optimizer with its parameter groups."""

from __future__ import annotations

from typing import Dict, Iterable, Set

from torch import nn

from optim.lars import LARS
from recipe.config import Optimizer


def create(section: Optimizer, parameters: Dict[str, nn.Parameter], norm_parameters: Iterable[str]) -> LARS:
    """The optimizer of `section` for named float32 parameters; its learning rate is set at each step.

    Args:
        norm_parameters: names of the parameters that belong to normalisation layers.
    """
    skipped = skipped_names(section, parameters, norm_parameters)
    groups = [
        {
            "params": [parameter for name, parameter in parameters.items() if name not in skipped],
            "weight_decay": section.weight_decay,
        },
        {
            "params": [parameter for name, parameter in parameters.items() if name in skipped],
            "weight_decay": 0.0,
            "adapt": False,
            "lr_scale": section.skip_lr_scale,
        },
    ]
    return LARS(
        [group for group in groups if group["params"]],
        lr=0.0,
        momentum=section.momentum,
        trust_coefficient=section.trust_coefficient,
        trust=section.trust,
        eps=section.eps,
    )


def skipped_names(section: Optimizer, parameters: Iterable[str], norm_parameters: Iterable[str]) -> Set[str]:
    """Parameters without trust ratio and weight decay: `bias` covers all biases, `norm` the scales of norms."""
    norms = set(norm_parameters)
    skipped = set()
    for name in parameters:
        kind = "bias" if name.split(".")[-1] == "bias" else "norm" if name in norms else None
        if kind in section.skip:
            skipped.add(name)
    return skipped
