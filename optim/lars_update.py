"""The update by LARS in two passes over gradients and state: no scratch memory, and no Python for each parameter.

Tensors of elements are [rows, ROW], what is the same for a row [rows, 1]; arithmetic is float32. A scale [] on the
gradients undoes loss scale and accumulation. See LARS for the formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Optional, Tuple

import torch
from torch.optim import Optimizer

from optim.layout import Run, in_parts, in_rows
from optim.norms import Norms, clamped, clip_factor, host_may_read, repaired
from optim.optimizer_update import Target
from optim.rounding import lower, random_bits, rounded, upper

if TYPE_CHECKING:
    from optim.lars import LARS


class LarsUpdate:
    """Steps as `lars` does, from the state to the state; its own step is not called.

    The first pass adds up squares, from which the trust ratios follow; the second makes the step, rounds and stores
    it, and renews the module's parameters. With `trust="momentum"` and a clipped gradient there are three: the ratios
    need the momentum, and that the clipped gradient.
    """

    def __init__(self, lars: LARS, target: Target):
        self.run: Run = in_parts
        parameters, self._layout, self._buffers, self._bits, self._clip_norm, self._model = target
        device = self._layout.device
        self.host_may_read = host_may_read(device)  # whether to step; elsewhere a mask decides
        self._rules = Rules(lars, parameters, device)
        self._decay = self._layout.spread(self._rules.decay)

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """As WeightState.prepare: the first pass."""
        scale = divisor.reciprocal()
        gradient, weight, finite, *directions = self._sums(scale)
        self._prepared = scale, gradient, weight, directions
        return finite

    def apply(self, step: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """As WeightState.apply: the other passes."""
        scale, gradient, weight, directions = self._prepared
        gradient_norm = self._model.norm(gradient) if measure or self._clip_norm else None
        if self._clip_norm:
            clip = clip_factor(self._clip_norm, gradient_norm)
            scale, gradient = scale * clip, gradient * clip.double().square()
            if directions:
                directions = self._sums(scale)[3:]
        ratio = self._ratios(weight, directions[0] if directions else gradient)
        if not self.host_may_read or finite:
            subtracted = self._step(step, scale, lr, ratio, None if self.host_may_read else finite, measure)
        else:
            subtracted = torch.full_like(weight, float("nan"))
        if not measure:
            return None
        lengths = gradient_norm, self._model.norm(weight), self._model.norm(subtracted)
        return Norms(*(each.float() for each in lengths), self._model.ratios(self._rules.named(ratio)))

    def _sums(self, scale: torch.Tensor) -> List[torch.Tensor]:
        """By parameter, float64, the sums of squares of the gradient, of the weights and, by_momentum, of the
        direction; before the last, bool [], whether all gradients are finite."""
        gradient, weight, momentum, _ = self._rows()
        buffers = gradient, weight
        others = (momentum, self._decay) if self._rules.by_momentum else (None, None)
        sums = self.run(sum_rows, (*buffers, *others), (scale, self._rules.mu))
        gradient, weight, wrong, *directions = [self._layout.sums(each) for each in sums]
        finite = torch.isfinite(wrong.sum())

        def squared(place: slice) -> Tuple[torch.Tensor, ...]:
            rows = [None if each is None else each[place] for each in (*buffers, *others)]
            return terms(*rows, scale, self._rules.mu)

        gradient, weight, *directions = repaired([gradient, weight, *directions], self._layout, squared)
        return [gradient, weight, finite, *directions]

    def _ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """As Rules.ratios."""
        return self._rules.ratios(weight, direction)

    def _step(
        self, step: int, scale: torch.Tensor, lr: float, ratios: torch.Tensor, keep: Optional[torch.Tensor], measure
    ) -> Optional[torch.Tensor]:
        """The second pass. Return sums of squares of what was subtracted, by parameter, float64, if `measure`. ratios:
        by parameter, float32. keep: bool [], where False nothing changes; None: True."""
        bit_rows = draws = None
        if self._bits is not None:
            bit_rows = self._bits.rows
            draws = (self._bits.lanes, self._bits.draw(step, "weight")[0])
        rate = self._layout.spread(clamped(lr * self._rules.lr_scale * ratios))
        rows = (*self._rows(), rate, self._decay, bit_rows)
        form = self._rules.by_momentum, self._rules.nesterov
        squares = self.run(step_rows, rows, (*form, scale, self._rules.mu, draws, keep))
        return self._layout.sums(squares) if measure else None

    def _rows(self) -> Tuple[Optional[torch.Tensor], ...]:
        """Gradient, weights, momentum, and the module's parameters where they are not the weights."""
        buffers = self._buffers
        working = None if buffers.working is buffers.weights else in_rows(buffers.working)
        momentum = buffers.slots["momentum_buffer"]
        return in_rows(buffers.gradients), in_rows(buffers.weights), in_rows(momentum), working


class Rules:
    """The hyperparameters of a LARS by parameter, and the trust ratios that follow from them. SGD has none of these.

    by_momentum, mu, nesterov: of the optimizer. adapted: names of the parameters that have a trust ratio, and their
    places; `adapt` is a mask of them. decay, float32, coefficient, eps, lr_scale, float64: [parameters]; directions
    are multiplied by learning rate x lr_scale x ratio.
    """

    def __init__(self, optimizer: Optimizer, parameters: Dict[str, torch.Tensor], device: torch.device):
        self.by_momentum = getattr(optimizer, "trust", "gradient") == "momentum"
        self.mu = optimizer.defaults["momentum"]
        self.nesterov = optimizer.defaults["nesterov"]
        same = [(group["momentum"], group["nesterov"]) == (self.mu, self.nesterov) for group in optimizer.param_groups]
        assert all(same), "one momentum for all parameters"
        group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        groups = [group_of[id(parameter)] for parameter in parameters.values()]

        def column(key: str, default: float) -> torch.Tensor:
            return torch.tensor([group.get(key, default) for group in groups], dtype=torch.float64, device=device)

        adapt = [group.get("adapt", False) for group in groups]
        self.adapted = {name: place for place, name in enumerate(parameters) if adapt[place]}
        self.adapt = torch.tensor(adapt, device=device)
        self.decay = (column("weight_decay", 0.0) * column("adapt", True)).float()
        self.coefficient, self.eps = column("trust_coefficient", 0.0), column("eps", 0.0)
        # The momentum of the second form is an average: plain momentum, which is a sum, is so many times as long.
        plain = 1 / (1 - self.mu) if self.by_momentum else 1.0
        scale = column("lr_scale", 1.0)
        self.lr_scale = torch.where(self.adapt, scale, scale * plain)

    def ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Trust ratios, float32 [parameters], 1 where there is none. weight, direction: sums of squares of the weights,
        and of the gradient, or by_momentum of momentum and weight decay; float64 [parameters]."""
        weight, direction = weight.sqrt(), direction.sqrt()
        if self.by_momentum:
            ratio, otherwise = self.coefficient * weight / (direction + self.eps), self.coefficient
        else:
            ratio, otherwise = self.coefficient * weight / (direction + self.decay * weight + self.eps), 1.0
        ratio = torch.where((weight > 0) & (direction > 0), ratio, otherwise)
        return clamped(torch.where(self.adapt, ratio, 1.0))

    def named(self, ratios: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Those of the parameters that have one, by name, float32 []."""
        return {name: ratios[place] for name, place in self.adapted.items()}


def sum_rows(gradient, weight, momentum, decay, scale, mu: float) -> Tuple[torch.Tensor, ...]:
    """Sums over each row of g^2 and w^2, and 0 or, where a gradient is not finite, NaN; [rows] each. With the momentum
    also of u^2, u = mu m + (1 - mu) g + decay w."""
    g, w, *directions = terms(gradient, weight, momentum, decay, scale, mu)
    found = (g * g).sum(1), (w * w).sum(1), (g - g).sum(1)
    return (*found, *((u * u).sum(1) for u in directions))


def terms(gradient, weight, momentum, decay, scale, mu: float) -> Tuple[torch.Tensor, ...]:
    """g, w and, with the momentum, u of `sum_rows`, in float32: [rows, ROW] each."""
    g = gradient * scale
    w = weight.float()
    if momentum is None:
        return g, w
    return g, w, momentum.float() * mu + g * (1 - mu) + decay * w


def step_rows(
    gradient, weight, momentum, working, rate, decay, bit_rows,
    by_momentum: bool, nesterov: bool, scale, mu: float, draws, keep,
) -> torch.Tensor:  # fmt: skip
    """m = mu m + rate (g + decay w);  w = w - m, or with Nesterov momentum w = w - (mu m + rate (g + decay w)),
    or by_momentum m = mu m + (1 - mu) g;  w = w - rate (m + decay w); written into weight, momentum and working.

    Returns sums over each row of squares of what was subtracted, [rows].

    Args:
        working: the module's parameters, where they are not the weights themselves.
        rate: learning rate times trust ratio.
        bit_rows, draws: for stochastic rounding: rows of a RoundingBits, and its lanes and its draw; else to nearest.
        keep: bool [], where False nothing changes; None: True.
    """
    g, w, m = gradient * scale, weight.float(), momentum.float() * mu
    if by_momentum:
        m = m + g * (1 - mu)
        subtracted = (m + decay * w) * rate
    else:
        added = (g + decay * w) * rate
        m = m + added
        subtracted = m * mu + added if nesterov else m
    words = None if draws is None else random_bits(bit_rows, *draws)
    for value, targets, chosen in ((w - subtracted, (weight, working), upper), (m, (momentum,), lower)):
        stored = targets[0].dtype
        half = words is not None and stored == torch.float16
        value = rounded(value, chosen(words)) if half else value.to(stored)
        for target in targets:
            if target is not None:
                target.copy_(value if keep is None else torch.where(keep, value.to(target.dtype), target))
    return (subtracted * subtracted).sum(1)
