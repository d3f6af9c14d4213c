"""AdamW: torch's own steps, with a state that WeightState keeps."""

from __future__ import annotations

import torch

from optim.base import OPTIMIZERS, HasSlots
from recipe import optimization


@OPTIMIZERS.implements(optimization.AdamW)
class AdamW(HasSlots, torch.optim.AdamW):
    """Adam with decoupled weight decay. With t = step + 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Both averages stay float32, for LAMB's reasons (`optim/lamb.py`).

    Source: Loshchilov and Hutter, 1711.05101, algorithm 2, with the rate in the decay; torch's AdamW.
    """

    slots = optimization.AdamW.all_slots

    @classmethod
    def of(cls, section: optimization.AdamW, groups: list) -> AdamW:
        return cls(groups, lr=0.0, betas=(section.beta1, section.beta2), eps=section.eps)

    def at_step(self, step: int) -> None:
        """Set torch's counts of steps, which include skipped ones: averages are too small by 1/t at most."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(step))
