"""LARS: layer-wise adaptive rate scaling, in the two forms that large-batch recipes use."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, List

import torch
from torch.optim import Optimizer

from optim.base import OPTIMIZERS, HasSlots
from optim.lars_update import LarsUpdate
from optim.layout import Layout
from recipe.optimization import Lars


@OPTIMIZERS.implements(Lars)
class LARS(HasSlots, Optimizer):
    """Momentum SGD whose step for each tensor is proportional to the tensor's norm.

    With eta = `trust_coefficient`, mu = `momentum`, wd = `weight_decay`:

    `trust="gradient"`, the published form, learning rate inside the momentum buffer:
        ratio = eta |w| / (|g| + wd |w| + eps);  m = mu m + lr ratio (g + wd w);  w = w - m
    `trust="momentum"`, the form that LAMB with beta2 = 1 takes (and so IPUs can run):
        m = mu m + (1 - mu) g;  u = m + wd w;  ratio = eta |w| / (|u| + eps);  w = w - lr ratio u

    Where a norm is 0 the ratio is 1 in the first form, as in the published code, and eta in the second, as
    in PopART. Groups with `adapt=False` take plain momentum without weight decay: m = mu m + lr g in the
    first form, and the same step through w = w - lr m / (1 - mu) in the second. `lr_scale` multiplies a
    group's learning rate. Gradients are read, never written. Norms, ratios and momentum are float32.

    Source: You, Gitman and Ginsburg, 1708.03888, algorithm 1; the skip list and the place of the learning
    rate follow the TensorFlow 1 implementation that the G16 recipe used. Second form: You et al., 1904.00962.
    """

    slots = Lars.all_slots

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        trust: str = "gradient",
        eps: float = 0.0,
    ):
        """Args: params: tensors, or groups with their own `weight_decay`, `adapt` and `lr_scale`."""
        assert trust in ("gradient", "momentum"), trust
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "adapt": True,
            "lr_scale": 1.0,
        }
        super().__init__(params, defaults)
        self.trust = trust
        self.trust_ratios: dict = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of all parameters that have gradients; no host-device synchronisation.

        Leaves each adapted parameter's ratio, a 0-dimensional float32 tensor, in `trust_ratios`.
        """
        assert closure is None, "LARS takes gradients, not a closure"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            momenta = [self._momentum(parameter) for parameter in parameters]
            update = self._gradient_form if self.trust == "gradient" else self._momentum_form
            update(group, parameters, gradients, momenta)

    @classmethod
    def of(cls, section: Lars, groups: list) -> LARS:
        numbers = {key: getattr(section, key) for key in ("momentum", "trust_coefficient", "trust", "eps")}
        return cls(groups, lr=0.0, **numbers)

    @staticmethod
    def options(section: Lars, skipped: bool) -> dict:
        others = {"adapt": False, "lr_scale": section.skip_lr_scale} if skipped else {}
        return {**HasSlots.options(section, skipped), **others}

    def create_update(self, parameters: dict, _: object, gradients: list, layout: Layout, *shared: Any) -> LarsUpdate:
        """The update from state to state; `step` is for those who have no WeightState."""
        return update_class(layout.device)(self, parameters, layout, *shared)

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.float32)
        return state["momentum_buffer"]

    def _gradient_form(self, group: dict, weights: list, gradients: list, momenta: list) -> None:
        lr, decay = group["lr"] * group["lr_scale"], group["weight_decay"]
        torch._foreach_mul_(momenta, group["momentum"])
        if not group["adapt"]:
            torch._foreach_add_(momenta, gradients, alpha=lr)
        else:
            weight_norms, gradient_norms = _norms(weights), _norms(gradients)
            ratios = group["trust_coefficient"] * weight_norms
            ratios = ratios / (gradient_norms + decay * weight_norms + group["eps"])
            ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, torch.ones_like(ratios))
            directions = torch._foreach_add(gradients, weights, alpha=decay)
            torch._foreach_mul_(directions, list((lr * ratios).unbind()))
            torch._foreach_add_(momenta, directions)
            self.trust_ratios.update(zip(weights, ratios.unbind()))
        torch._foreach_sub_(weights, momenta)

    def _momentum_form(self, group: dict, weights: list, gradients: list, momenta: list) -> None:
        lr, decay, mu = group["lr"] * group["lr_scale"], group["weight_decay"], group["momentum"]
        torch._foreach_mul_(momenta, mu)
        torch._foreach_add_(momenta, gradients, alpha=1 - mu)
        if not group["adapt"]:
            torch._foreach_add_(weights, momenta, alpha=-lr / (1 - mu))
            return
        directions = torch._foreach_add(momenta, weights, alpha=decay)
        weight_norms, direction_norms = _norms(weights), _norms(directions)
        quotients = weight_norms / (direction_norms + group["eps"])
        quotients = torch.where((weight_norms > 0) & (direction_norms > 0), quotients, torch.ones_like(quotients))
        ratios = group["trust_coefficient"] * quotients
        torch._foreach_mul_(directions, list((lr * ratios).unbind()))
        torch._foreach_sub_(weights, directions)
        self.trust_ratios.update(zip(weights, ratios.unbind()))


def _norms(tensors: List[torch.Tensor]) -> torch.Tensor:
    """Euclidean norms, float32 [len(tensors)]: in float16 the norm of a million 80s is already infinite."""
    return torch.stack(torch._foreach_norm([tensor.float() for tensor in tensors]))


def update_class(device: torch.device) -> type:
    """LarsUpdate, or on CUDA Triton's, where there is Triton."""
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from optim.kernels.lars import TritonLarsUpdate

            return TritonLarsUpdate
    return LarsUpdate
