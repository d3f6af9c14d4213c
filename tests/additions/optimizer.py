"""An optimizer of one's own: a share of the gradient's sign, added to a share of the gradient."""

from typing import Literal

import torch
from pydantic import Field

from optim.base import OPTIMIZERS, HasSlots
from recipe.optimization import Optimizer


class Sign(Optimizer):
    """Steps by the sign of the gradient."""

    name: Literal["sign"] = "sign"
    share: float = Field(
        1.0, ge=0, le=1, description="share of the sign in a step; the rest is the gradient's"
    )


@OPTIMIZERS.implements(Sign)
class SignUpdate(HasSlots, torch.optim.Optimizer):
    """w = w - lr (share sign(g) + (1 - share) g), without state."""

    slots = Sign.all_slots

    @classmethod
    def of(cls, section: Sign, groups: list) -> "SignUpdate":
        return cls(groups, {"lr": 0.0, "share": section.share})

    @staticmethod
    def options(section: Sign, skipped: bool) -> dict:
        return {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                step = torch.lerp(parameter.grad, parameter.grad.sign(), group["share"])
                parameter.add_(step, alpha=-float(group["lr"]))
