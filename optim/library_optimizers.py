"""The optimizers of torch and timm that LARS is compared with, with a state that WeightState keeps.

Their steps are the libraries' own. Second moments stay in float32: in float16, whose smallest
number is 6e-8, an average with beta2 = 0.999 loses gradients below 5e-3, and a root of 0 in the place of
1e-4 makes the step a hundred times too long. So do first moments that are divided by such a root,
where rounding noise of 3e-8 and more would become steps.
"""

from __future__ import annotations

from typing import Any, Dict, List

import timm.optim
import torch

from optim.base import OPTIMIZERS, HasSlots
from recipe import optimization


class _CountsByParameter(HasSlots):
    """Sets the count of steps of each parameter.

    It includes skipped updates: averages are too small by 1/t at most.
    """

    def at_step(self, index: int) -> None:
        """Set the count of each parameter to `index`."""
        # A tensor on the CPU, as the libraries keep it: reading it does not wait for a GPU.
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(index))


@OPTIMIZERS.implements(optimization.Sgd)
class SGD(HasSlots, torch.optim.SGD):
    """torch's SGD without dampening, with the gradient g:

        m = mu m + g + wd w;  w = w - lr m, with Nesterov w = w - lr (g + wd w + mu m)

    Without momentum it keeps no state. Its multi-tensor form may leave the step in the gradients.

    Source: Goyal et al., 1706.02677, whose momentum holds no learning rate either (remark 2).
    """

    numbers = ("momentum", "nesterov")


@OPTIMIZERS.implements(optimization.RmsProp)
class RMSprop(_CountsByParameter, timm.optim.RMSpropTF):
    """TensorFlow's RMSprop, on which EfficientNets were first trained; g is the gradient plus wd w:

        v = alpha v + (1 - alpha) g^2;  m = mu m + lr g / sqrt(v + eps);  w = w - m

    v starts at 1, not at 0: the first steps are short. Without momentum m is not kept.

    Source: Tan and Le, 1905.11946, section 5.2; timm's RMSpropTF.
    """

    numbers = ("alpha", "eps", "momentum")


@OPTIMIZERS.implements(optimization.Lamb)
class Lamb(HasSlots, timm.optim.Lamb):
    """LAMB with bias correction, without timm's clipping of the gradients. With t = index + 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w;  w = w - lr |w| / |u| u

    Where a norm is 0 the ratio is 1. Groups with `always_adapt=False` and no weight decay take
    w = w - lr u, as in the authors' code, which exempts biases and normalisation layers from both.
    timm does not report the ratios.

    Source: You et al., 1904.00962, algorithm 2; timm's Lamb, which follows NVIDIA's.
    """

    @classmethod
    def of(cls, section: optimization.Lamb, groups: List[Dict[str, Any]]) -> Lamb:
        """Return LAMB with the numbers of `section`."""
        # max_grad_norm None: timm would clip by the norm of this stage's gradient, where
        # `optimizer.clip_norm` means that of the whole model.
        return cls(
            groups,
            lr=0.0,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            bias_correction=True,
            max_grad_norm=None,
        )

    @staticmethod
    def options(section: optimization.Lamb, skipped: bool) -> Dict[str, Any]:
        """Return the options of HasSlots; `skipped` parameters have no ratio."""
        # Without always_adapt timm leaves out the ratio where there is no weight decay; a recipe
        # without weight decay still wants the ratio for all others.
        return {**HasSlots.options(section, skipped), "always_adapt": not skipped}

    def at_step(self, index: int) -> None:
        """Set the count of each group to `index`."""
        for group in self.param_groups:
            # float32, exact to 16.7 million. timm adds 1.
            group["step"] = torch.tensor(float(index))


@OPTIMIZERS.implements(optimization.AdamW)
class AdamW(_CountsByParameter, torch.optim.AdamW):
    """Adam with decoupled weight decay. With t = index + 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        w = (1 - lr wd) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Source: Loshchilov and Hutter, 1711.05101, algorithm 2, with the rate in the decay; torch's
    AdamW.
    """

    @classmethod
    def of(cls, section: optimization.AdamW, groups: List[Dict[str, Any]]) -> AdamW:
        """Return AdamW with the numbers of `section`."""
        return cls(groups, lr=0.0, betas=(section.beta1, section.beta2), eps=section.eps)
