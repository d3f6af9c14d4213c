"""RMSprop: timm's own steps, with a state that WeightState keeps."""

from __future__ import annotations

import timm.optim
import torch

from optim.base import OPTIMIZERS, HasSlots
from recipe.optimization import RmsProp


@OPTIMIZERS.implements(RmsProp)
class RMSprop(HasSlots, timm.optim.RMSpropTF):
    """TensorFlow's RMSprop, on which EfficientNets were first trained; g is the gradient plus wd w:

        v = alpha v + (1 - alpha) g^2;  m = mu m + lr g / sqrt(v + eps);  w = w - m

    v starts at 1, not at 0: the first steps are short. It stays float32, because squares of small gradients underflow
    in float16, whose smallest number is 6e-8. Without momentum m is not kept.

    Source: Tan and Le, 1905.11946, section 5.2; timm's RMSpropTF.
    """

    @classmethod
    def of(cls, section: RmsProp, groups: list) -> RMSprop:
        numbers = {"alpha": section.alpha, "eps": section.eps, "momentum": section.momentum}
        made = cls(groups, lr=0.0, lr_in_momentum=True, **numbers)
        made.slots = section.slots
        return made

    def at_step(self, step: int) -> None:
        """Set timm's counts of steps, one a parameter, which timm reads nowhere, but which must be there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(step))
