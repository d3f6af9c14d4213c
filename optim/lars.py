"""LARS: layer-wise adaptive rate scaling, in the two forms that large-batch recipes use."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, NoReturn, Optional, Type, overload

import torch

from optim import lars_formula
from optim.base import OPTIMIZERS, HasSlots
from optim.lars_formula import Hyperparameters
from optim.lars_update import LarsUpdate
from optim.norms import clamped
from optim.optimizer_update import Target
from recipe.optimization import Lars


@OPTIMIZERS.implements(Lars)
class LARS(HasSlots):
    """Momentum SGD whose step for each tensor is proportional to the tensor's norm.

    With eta = `trust_coefficient`, mu = `momentum`, wd = `weight_decay`:

    `trust="gradient"`, the published form, learning rate inside the momentum buffer:
        ratio = eta |w| / (|g| + wd |w| + eps);  m = mu m + lr ratio (g + wd w);  w = w - m
        or with `nesterov`  w = w - (mu m + lr ratio (g + wd w))
    `trust="momentum"`, the form that LAMB with beta2 = 1 takes (and so IPUs can run):
        m = mu m + (1 - mu) g;  u = m + wd w;  ratio = eta |w| / (|u| + eps);  w = w - lr ratio u

    Where a norm is 0 the ratio is 1 in the first form, as in the published code, and eta in the
    second, as in PopART. Groups with `adapt=False` take plain momentum (or Nesterov's) without
    weight decay: m = mu m + lr g in the first form, and the same step through
    w = w - lr m / (1 - mu) in the second. `lr_scale` multiplies a group's learning rate. Gradients
    are read, never written. Ratios and momentum are float32, norms are exact to float32 rounding
    whatever the finite values are.

    Source: You, Gitman and Ginsburg, 1708.03888, algorithm 1; the skip list and the place of the
    learning rate follow the TensorFlow 1 implementation that the G16 recipe used. Nesterov
    momentum: SimCLR's LARS with classic momentum, and timm's, which differs in the place of the
    rate. Second form: You et al., 1904.00962.

    trust_ratios: by parameter, float32 [], those of the last `step`.
    """

    slots = Lars.all_slots
    numbers = ("momentum", "trust_coefficient", "trust", "nesterov", "eps")

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
        """
        Args:
            params: tensors, or groups with their own `weight_decay`, `adapt` and `lr_scale`.
            lr: learning rate.
            momentum: mu above.
            weight_decay: wd above.
            trust_coefficient: eta above.
            trust: "gradient" or "momentum", the form.
            eps: added to the divisor of the ratio.
            nesterov: look one step ahead along the momentum; of the first form.
        """
        assert trust in ("gradient", "momentum"), trust
        assert trust == "gradient" or not nesterov, "the second form has no Nesterov momentum"
        # The form is the same for all groups, since an update makes one pass over all of them;
        # whatever else `skip` or a user may set for some parameters is an option of a group.
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "adapt": True,
            "lr_scale": 1.0,
        }
        super().__init__(params, defaults)
        self.trust = trust
        self.trust_ratios: Dict[torch.Tensor, torch.Tensor] = {}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> NoReturn: ...

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], float]] = None) -> None:
        """Update all parameters that have gradients, without waiting for the device.

        For loops without a WeightState, which has a faster update of its own.

        Args:
            closure: None. torch's interface has it, for optimizers that evaluate the loss again.
        """
        assert closure is None
        for group in self.param_groups:
            settings = Hyperparameters(
                trust=self.trust,
                nesterov=group["nesterov"],
                momentum=group["momentum"],
                weight_decay=group["weight_decay"],
                trust_coefficient=group["trust_coefficient"],
                eps=group["eps"],
                adapt=group["adapt"],
            )
            lr = group["lr"] * group["lr_scale"]
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, weight.grad, lr, settings)

    def _step(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        lr: float,
        settings: Hyperparameters,
    ) -> None:
        """Update one parameter and its momentum."""
        state = self.state[weight]
        # Float32 whatever the weight's dtype: half precision would lose small steps in the sum.
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight, dtype=torch.float32)
        momentum = state["momentum_buffer"]
        after = lars_formula.updated(
            weight.float(),
            momentum,
            gradient.float(),
            lr=lr,
            settings=settings,
        )
        weight.copy_(after.weight)
        momentum.copy_(after.momentum)
        if after.ratio is not None:
            self.trust_ratios[weight] = clamped(after.ratio)

    @staticmethod
    def options(section: Lars, skipped: bool) -> Dict[str, Any]:
        """Return the options of HasSlots; `skipped` parameters have a rate of their own."""
        options = HasSlots.options(section, skipped)
        # Without a ratio a step is as long as the gradient, which wants another rate.
        if skipped:
            options["adapt"] = False
            options["lr_scale"] = section.skip_lr_scale
        return options

    def create_update(self, target: Target, create: object) -> LarsUpdate:
        """Return an update of `target` that needs no scratch memory."""
        return update_class(target.layout.device)(self, target)


def update_class(device: torch.device) -> Type[LarsUpdate]:
    """Return LarsUpdate, or on CUDA that by Triton, where there is Triton.

    Args:
        device: of the weights.
    """
    # ROCm's GPUs are of type "cuda", too; Triton's code here is NVIDIA's. Imported here, because
    # importing Triton fails on machines without it.
    if device.type == "cuda" and torch.version.hip is None:
        with contextlib.suppress(ImportError):
            from optim.kernels.lars import TritonLarsUpdate

            return TritonLarsUpdate
    return LarsUpdate
