"""From the recipe's optimizer section to an optimizer with its parameter groups."""

from __future__ import annotations

from typing import Dict, Iterable, Set

from torch import nn

from optim.controls import SGD, Lamb, RMSprop
from optim.lars import LARS
from optim.slots import HasSlots
from recipe.config import Optimizer


def create(section: Optimizer, parameters: Dict[str, nn.Parameter], norm_parameters: Iterable[str]) -> HasSlots:
    """The torch optimizer of `section` for named float32 parameters; its learning rate is set at each step.

    Skipped parameters have no weight decay; with LARS and LAMB no trust ratio either. The others have the ratio
    even where `weight_decay` is 0.

    Args:
        norm_parameters: names of the parameters that belong to normalisation layers.
    """
    skipped = skipped_names(section, parameters, norm_parameters)
    usual, exempt = {"weight_decay": section.weight_decay}, {"weight_decay": 0.0}
    if section.name == "lars":
        exempt.update(adapt=False, lr_scale=section.skip_lr_scale)
    elif section.name == "lamb":
        usual.update(always_adapt=True)
        exempt.update(always_adapt=False)
    groups = [
        {"params": [parameter for name, parameter in parameters.items() if (name in skipped) == skip], **options}
        for skip, options in ((False, usual), (True, exempt))
    ]
    return _of_groups(section, [group for group in groups if group["params"]])


def _of_groups(section: Optimizer, groups: list) -> HasSlots:
    if section.name == "sgd":
        return SGD(groups, section.momentum, section.nesterov)
    if section.name == "rmsprop":
        return RMSprop(groups, section.momentum, section.alpha, section.eps)
    if section.name == "lamb":
        return Lamb(groups, section.beta1, section.beta2, section.eps)
    return LARS(
        groups,
        lr=0.0,
        momentum=section.momentum,
        trust_coefficient=section.trust_coefficient,
        trust=section.trust,
        eps=section.eps,
    )


def skipped_names(section: Optimizer, parameters: Iterable[str], norm_parameters: Iterable[str]) -> Set[str]:
    """The parameters that `skip` names: `bias` covers all biases, `norm` the scales of norms."""
    norms = set(norm_parameters)
    skipped = set()
    for name in parameters:
        kind = "bias" if name.split(".")[-1] == "bias" else "norm" if name in norms else None
        if kind in section.skip:
            skipped.add(name)
    return skipped
