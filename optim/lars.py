"""LARS: layer-wise adaptive rate scaling, in the two forms that large-batch recipes use."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable

import torch
from torch.optim import Optimizer

from optim.base import OPTIMIZERS, HasSlots
from optim.lars_update import LarsUpdate
from optim.norms import in_float32, norm
from optim.optimizer_update import Target
from recipe.optimization import Lars


@OPTIMIZERS.implements(Lars)
class LARS(HasSlots, Optimizer):
    """Momentum SGD whose step for each tensor is proportional to the tensor's norm.

    With eta = `trust_coefficient`, mu = `momentum`, wd = `weight_decay`:

    `trust="gradient"`, the published form, learning rate inside the momentum buffer:
        ratio = eta |w| / (|g| + wd |w| + eps);  m = mu m + lr ratio (g + wd w);  w = w - m
        or with `nesterov`  w = w - (mu m + lr ratio (g + wd w))
    `trust="momentum"`, the form that LAMB with beta2 = 1 takes (and so IPUs can run):
        m = mu m + (1 - mu) g;  u = m + wd w;  ratio = eta |w| / (|u| + eps);  w = w - lr ratio u

    Where a norm is 0 the ratio is 1 in the first form, as in the published code, and eta in the second, as
    in PopART. Groups with `adapt=False` take plain momentum (or Nesterov's) without weight decay: m = mu m + lr g
    in the first form, and the same step through w = w - lr m / (1 - mu) in the second. `lr_scale` multiplies a
    group's learning rate. Gradients are read, never written. Ratios and momentum are float32, norms are exact to
    float32 rounding whatever the finite values are.

    Source: You, Gitman and Ginsburg, 1708.03888, algorithm 1; the skip list and the place of the learning
    rate follow the TensorFlow 1 implementation that the G16 recipe used. Nesterov momentum: SimCLR's LARS with classic
    momentum, and timm's, which differs in the place of the rate. Second form: You et al., 1904.00962.
    """

    slots, numbers = Lars.all_slots, ("momentum", "trust_coefficient", "trust", "nesterov", "eps")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        trust: str = "gradient",
        eps: float = 0.0,
        nesterov: bool = False,
    ):
        """Args: params: tensors, or groups with their own `weight_decay`, `adapt` and `lr_scale`."""
        assert trust in ("gradient", "momentum"), trust
        assert trust == "gradient" or not nesterov, "the second form has no Nesterov momentum"
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eps": eps, "nesterov": nesterov}
        super().__init__(params, {**defaults, "trust_coefficient": trust_coefficient, "adapt": True, "lr_scale": 1.0})
        self.trust = trust
        self.trust_ratios: dict = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have gradients, without host-device synchronisation.

        For those who have no WeightState, and as a reference. Leaves the ratios, float32 [], in `trust_ratios`.
        """
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(group, weight, weight.grad.float())

    def _step(self, group: dict, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        lr, mu, published = group["lr"] * group["lr_scale"], group["momentum"], self.trust == "gradient"
        if not self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
        momentum = self.state[weight]["momentum_buffer"]
        if not published:
            momentum.mul_(mu).add_(gradient, alpha=1 - mu)
        direction = gradient if published else momentum
        if not group["adapt"]:
            step = direction * (lr if published else lr / (1 - mu))
        else:
            decayed = direction + group["weight_decay"] * weight.float()
            weight_norm = norm(weight)
            length = norm(gradient if published else decayed)
            below = length + group["eps"] + (group["weight_decay"] * weight_norm if published else 0.0)
            without_norm = 1.0 if published else group["trust_coefficient"]
            ratio = group["trust_coefficient"] * weight_norm / below
            ratio = torch.where((weight_norm > 0) & (length > 0), ratio, without_norm)
            step = decayed * in_float32(lr * ratio)
            self.trust_ratios[weight] = in_float32(ratio)
        if published:
            momentum.mul_(mu).add_(step)
            step = momentum * mu + step if group["nesterov"] else momentum
        weight.sub_(step)

    @staticmethod
    def options(section: Lars, skipped: bool) -> dict:
        others = {"adapt": False, "lr_scale": section.skip_lr_scale} if skipped else {}
        return {**HasSlots.options(section, skipped), **others}

    def create_update(self, target: Target, create: object) -> LarsUpdate:
        return update_class(target.layout.device)(self, target)


def update_class(device: torch.device) -> type:
    """LarsUpdate, or on CUDA Triton's, where there is Triton."""
    if device.type == "cuda" and torch.version.hip is None:
        with contextlib.suppress(ImportError):
            from optim.kernels.lars import TritonLarsUpdate

            return TritonLarsUpdate
    return LarsUpdate
