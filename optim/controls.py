"""The optimizers that LARS is compared with: the libraries' own steps, with a state that WeightState can keep.

Second moments stay in float32, because squares of small gradients underflow in float16, whose smallest number is
6e-8. To nearest, an average that takes in a share of 0.001 of each square (beta2 = 0.999) loses gradients below 5e-3;
at random, one in sixty of 1e-3 leaves 6e-8 where 1e-9 was due, and the others 0. A root of 0 in the place of 1e-4
makes the step a hundred times too long with LAMB's eps of 1e-6.
"""

from __future__ import annotations

from typing import Any, Iterable

import timm.optim
import torch

from optim.slots import HasSlots, Slot


class SGD(HasSlots, torch.optim.SGD):
    """torch's SGD without dampening: m = mu m + g + wd w;  w = w - lr m, with Nesterov w = w - lr (g + wd w + mu m).

    Without momentum it keeps no state. With Nesterov's momentum and no weight decay torch's multi-tensor form, which
    runs on GPUs, leaves its step in the gradients.

    Source: Goyal et al., 1706.02677, whose momentum holds no learning rate either (remark 2).
    """

    def __init__(self, params: Iterable[Any], momentum: float, nesterov: bool = False):
        """Args: params: groups with their own `weight_decay`."""
        super().__init__(params, lr=0.0, momentum=momentum, nesterov=nesterov)
        self.slots = {"momentum_buffer": Slot()} if momentum else {}


class RMSprop(HasSlots, timm.optim.RMSpropTF):
    """TensorFlow's RMSprop, on which EfficientNets were first trained; g is the gradient plus wd w:

        v = alpha v + (1 - alpha) g^2;  m = mu m + lr g / sqrt(v + eps);  w = w - m

    v starts at 1, not at 0: the first steps are short. Without momentum m is not kept.

    Source: Tan and Le, 1905.11946, section 5.2; timm's RMSpropTF.
    """

    def __init__(self, params: Iterable[Any], momentum: float, alpha: float, eps: float):
        """Args: params: groups with their own `weight_decay`."""
        super().__init__(params, lr=0.0, momentum=momentum, alpha=alpha, eps=eps, lr_in_momentum=True)
        self.slots = {"square_avg": Slot(initial=1.0, half=False)}
        if momentum:
            self.slots["momentum_buffer"] = Slot()

    def at_step(self, step: int) -> None:
        """timm counts the steps of each parameter and reads the counts nowhere, but they must be there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["step"] = torch.tensor(float(step))


class Lamb(HasSlots, timm.optim.Lamb):
    """LAMB with bias correction and without timm's clipping of the gradients. With t = step + 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + wd w;  w = w - lr |w| / |u| u

    Where a norm is 0 the ratio is 1. Groups with `always_adapt=False` and no weight decay take w = w - lr u, as in
    the authors' code, which exempts biases and normalisation layers from both. timm keeps the ratios to itself:
    `trust_ratios` stays empty. m is float32, too: in float16 it would carry rounding noise of 3e-8 and more, which the
    division by sqrt(v) turns into steps where gradients are not much larger.

    Source: You et al., 1904.00962, algorithm 2; timm's Lamb, which follows NVIDIA's.
    """

    def __init__(self, params: Iterable[Any], beta1: float, beta2: float, eps: float):
        """Args: params: groups with their own `weight_decay` and `always_adapt`."""
        super().__init__(params, lr=0.0, betas=(beta1, beta2), eps=eps, bias_correction=True, max_grad_norm=None)
        self.slots = {"exp_avg": Slot(half=False), "exp_avg_sq": Slot(half=False)}

    def at_step(self, step: int) -> None:
        """Sets what the bias correction counts.

        Steps skipped as not finite count too: after one, averages of t - 1 gradients are corrected as if of t, which
        leaves them too small by 1/t at most.
        """
        for group in self.param_groups:
            group["step"] = torch.tensor(float(step))  # float32, exact to 16.7 million; timm adds 1
