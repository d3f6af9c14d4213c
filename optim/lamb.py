"""LAMB: timm's own steps, with a state that WeightState keeps.

Second moments stay in float32: rounded to nearest in float16, whose smallest number is 6e-8, an average with
beta2 = 0.999 loses gradients below 5e-3, and a root of 0 in the place of 1e-4 makes the step a hundred times too long.
"""

from __future__ import annotations

import timm.optim
import torch

from optim.base import OPTIMIZERS, HasSlots
from recipe import optimization


@OPTIMIZERS.implements(optimization.Lamb)
class Lamb(HasSlots, timm.optim.Lamb):
    """LAMB with bias correction and without timm's clipping of the gradients. With t = step + 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w;  w = w - lr |w| / |u| u

    Where a norm is 0 the ratio is 1. Groups with `always_adapt=False` and no weight decay take w = w - lr u, as in
    the authors' code, which exempts biases and normalisation layers from both. timm does not report the ratios. m is
    float32, too: in float16 it would carry rounding noise of 3e-8 and more, which the division by sqrt(v) turns into
    steps where gradients are not much larger.

    Source: You et al., 1904.00962, algorithm 2; timm's Lamb, which follows NVIDIA's.
    """

    slots = optimization.Lamb.all_slots

    @classmethod
    def of(cls, section: optimization.Lamb, groups: list) -> Lamb:
        betas = (section.beta1, section.beta2)
        return cls(groups, lr=0.0, betas=betas, eps=section.eps, bias_correction=True, max_grad_norm=None)

    @staticmethod
    def options(section: optimization.Lamb, skipped: bool) -> dict:
        return {**HasSlots.options(section, skipped), "always_adapt": not skipped}

    def at_step(self, step: int) -> None:
        """Set the count of the bias correction, which includes skipped steps: averages are too small by 1/t at most."""
        for group in self.param_groups:
            group["step"] = torch.tensor(float(step))  # float32, exact to 16.7 million; timm adds 1
