"""The update by LARS in two passes over gradients and state: no scratch memory, and no Python for each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn

from optim import lars_passes
from optim.layout import Buffers, Layout, Run, in_parts, in_rows
from optim.norms import Norms, WholeModel
from optim.rounding import RoundingBits

if TYPE_CHECKING:
    from optim.lars import LARS


class LarsUpdate:
    """Steps as LARS does, from the state to the state.

    The first pass adds up squares, from which the trust ratios follow; the second makes the step, rounds and stores
    it, and renews the module's parameters. With `trust="momentum"` and a clipped gradient there are three: the ratios
    need the momentum, and that the clipped gradient.
    """

    def __init__(
        self,
        lars: LARS,
        parameters: Dict[str, nn.Parameter],
        layout: Layout,
        buffers: Buffers,
        bits: Optional[RoundingBits],
        clip_norm: Optional[float],
        model: WholeModel,
    ):
        """Args: lars: of `parameters`, the module's; its step is not called."""
        self.run: Run = in_parts
        self.asks = layout.device.type == "cpu"  # whether to step: that costs nothing there, elsewhere a mask decides
        self._rules = Rules(lars, parameters, layout.device)
        self._layout, self._model, self._clip_norm = layout, model, clip_norm
        self._adapted = [(place, name) for place, name in enumerate(layout.names) if self._rules.adapted[place]]
        self._bits, self._buffers = bits, buffers
        self._decay = layout.spread(self._rules.decay)

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """As WeightState.prepare: the first pass."""
        scale = divisor.reciprocal()
        gradient, weight, wrong, *directions = self._sums(scale)
        self._prepared = scale, gradient, weight, directions
        return self._finite(wrong)

    def apply(self, step: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """As WeightState.apply: the other passes."""
        scale, gradient, weight, directions = self._prepared
        gradient_norm = self._model.norm(gradient) if measure or self._clip_norm else None
        if self._clip_norm:
            clip = (self._clip_norm / gradient_norm).clamp(max=1.0)  # infinite for a norm of 0, and so 1
            scale, gradient = scale * clip, gradient * clip.double().square()
            if directions:
                directions = self._sums(scale)[3:]
        ratio = self._ratios(weight, directions[0] if directions else gradient)
        made = not self.asks or bool(finite)
        squares = self._step(step, scale, lr, ratio, None if self.asks else finite) if made else None
        if not measure:
            return None
        subtracted = self._by_parameter(squares) if made else torch.full_like(weight, float("nan"))
        norm = self._model.norm
        trust = self._model.ratios({name: ratio[place] for place, name in self._adapted})
        return Norms(gradient_norm, norm(weight), norm(subtracted), trust)

    def _sums(self, scale: torch.Tensor) -> List[torch.Tensor]:
        """By parameter, float64."""
        gradient, weight, momentum, _ = self._rows()
        if self._rules.trust == "gradient":
            sums = self.run(lars_passes.gradient_sums, (gradient, weight), (scale,))
        else:
            rows = (gradient, weight, momentum, self._decay)
            sums = self.run(lars_passes.momentum_sums, rows, (scale, self._rules.mu))
        return [self._layout.sums(each) for each in sums]

    def _finite(self, wrong: torch.Tensor) -> torch.Tensor:
        """Bool []: whether no parameter's sum is NaN."""
        return torch.isfinite(wrong.sum())

    def _ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """As Rules.ratios."""
        return self._rules.ratios(weight, direction)

    def _step(
        self, step: int, scale: torch.Tensor, lr: float, ratios: torch.Tensor, keep: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """The second pass. Returns sums of squares of what was subtracted, for `_by_parameter`.

        Args:
            ratios: by parameter, float32.
            keep: bool [], where False nothing changes; None: True.
        """
        function = lars_passes.gradient_step if self._rules.trust == "gradient" else lars_passes.momentum_step
        bit_rows = draws = None
        if self._bits is not None:
            bit_rows = self._bits.rows
            draws = (self._bits.lanes, self._bits.draw(step, "weight")[0])
        rate = self._layout.spread((lr * self._rules.lr_scale * ratios).float())
        rows = (*self._rows(), rate, self._decay, bit_rows)
        return self.run(function, rows, (scale, self._rules.mu, draws, keep))

    def _by_parameter(self, sums: torch.Tensor) -> torch.Tensor:
        """What `_step` gave, by parameter, float64."""
        return self._layout.sums(sums)

    def _rows(self) -> Tuple[Optional[torch.Tensor], ...]:
        """Gradient, weights, momentum, and the module's parameters where they are not the weights."""
        buffers = self._buffers
        working = None if buffers.working is buffers.weights else in_rows(buffers.working)
        momentum = buffers.slots["momentum_buffer"]
        return in_rows(buffers.gradients), in_rows(buffers.weights), in_rows(momentum), working


class Rules:
    """The hyperparameters of a LARS by parameter, and the trust ratios that follow from them.

    trust, mu: of the LARS. adapted: whether each parameter has a trust ratio, also as a tensor `adapt`. decay, float32,
    coefficient, eps, lr_scale, float64: [parameters]; directions are multiplied by learning rate x lr_scale x ratio.
    """

    def __init__(self, lars: LARS, parameters: Dict[str, torch.Tensor], device: torch.device):
        self.trust, self.mu = lars.trust, lars.defaults["momentum"]
        assert all(group["momentum"] == self.mu for group in lars.param_groups), "one momentum for all parameters"
        group_of = {id(parameter): group for group in lars.param_groups for parameter in group["params"]}
        groups = [group_of[id(parameter)] for parameter in parameters.values()]

        def column(values: Iterable[float]) -> torch.Tensor:
            return torch.tensor(list(values), dtype=torch.float64, device=device)

        self.adapted = [group["adapt"] for group in groups]
        self.decay = column(group["weight_decay"] * group.get("decays", group["adapt"]) for group in groups).float()
        self.adapt = torch.tensor(self.adapted, device=device)
        self.coefficient = column(group["trust_coefficient"] for group in groups)
        self.eps = column(group["eps"] for group in groups)
        # The momentum of the second form is an average: plain momentum, which is a sum, is so many times as long.
        plain = 1.0 if self.trust == "gradient" else 1 / (1 - self.mu)
        self.lr_scale = column(group["lr_scale"] * (1.0 if group["adapt"] else plain) for group in groups)

    def ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Trust ratios, float32 [parameters], 1 where there is none.

        Args:
            weight, direction: sums of squares of the weights, and of the gradient (trust gradient) or of momentum and
                weight decay (trust momentum); float64.
        """
        weight, direction = weight.sqrt(), direction.sqrt()
        if self.trust == "gradient":
            ratio, otherwise = self.coefficient * weight / (direction + self.decay * weight + self.eps), 1.0
        else:
            ratio, otherwise = self.coefficient * weight / (direction + self.eps), self.coefficient
        ratio = torch.where((weight > 0) & (direction > 0), ratio, otherwise)
        return torch.where(self.adapt, ratio, 1.0).float()
