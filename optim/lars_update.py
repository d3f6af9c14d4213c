"""The update by LARS in two passes over gradients and state, for all parameters at once.

It takes no scratch memory, and no Python for each parameter. Tensors of elements are [rows, ROW],
what is the same for a row [rows, 1]; arithmetic is float32. A scale [] on the gradients undoes loss
scale and accumulation. See LARS for the formulas, lars_formula.py for the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch.optim import Optimizer

from optim.layout import Run, in_parts, in_rows
from optim.norms import Norms, clamped, clip_factor, host_may_read, repaired
from optim.optimizer_update import Target
from optim.rounding import lower, random_bits, rounded, upper, write

if TYPE_CHECKING:
    from optim.lars import LARS


class Sums(NamedTuple):
    """Results of the first pass.

    gradient, weight, direction: sums of squares by parameter, float64 [parameters]; of the
        direction with `trust="momentum"` only.
    finite: bool [], whether all gradients are finite.
    """

    gradient: torch.Tensor
    weight: torch.Tensor
    direction: Optional[torch.Tensor]
    finite: torch.Tensor


class LarsUpdate:
    """Steps as `lars` does, from the state to the state; `LARS.step` is not called.

    The first pass adds up squares, from which the trust ratios follow; the second makes the step,
    rounds and stores it, and renews the module's parameters. With `trust="momentum"` and a clipped
    gradient there are three: the ratios need the momentum, and that the clipped gradient.

    run: runs the passes.
    host_may_read: decide by `finite` on the host whether to step; elsewhere a mask decides.
    """

    def __init__(self, lars: LARS, target: Target):
        """
        Args:
            lars: with one momentum for all parameters.
            target: what is updated.
        """
        self.run: Run = in_parts
        self._layout = target.layout
        self._buffers = target.buffers
        self._bits = target.bits
        self._clip_norm = target.clip_norm
        self._model = target.model
        device = self._layout.device
        self.host_may_read = host_may_read(device)
        self._rules = Rules(lars, target.parameters, device)
        self._decay = self._layout.spread(self._rules.decay)

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """Make the first pass. See WeightState.prepare for `divisor` and the result."""
        scale = divisor.reciprocal()
        sums = self._sums(scale)
        # Kept for `apply`: in between all processes agree on whether everything is finite.
        self._prepared = scale, sums
        return sums.finite

    def apply(self, index: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """Make the other passes.

        Args:
            index, lr, finite, measure: see WeightState.apply, also for the result.
        """
        scale, sums = self._prepared
        gradient_norm: Optional[torch.Tensor] = None
        if measure or self._clip_norm:
            gradient_norm = self._model.norm(sums.gradient)
        if self._clip_norm and gradient_norm is not None:
            # The limit is on the norm of the whole model's gradient.
            clip = clip_factor(self._clip_norm, gradient_norm)
            scale, sums = self._clipped(scale, sums, clip)

        direction = sums.gradient if sums.direction is None else sums.direction
        ratios = self._ratios(sums.weight, direction)

        # Reading `finite` saves a CPU the mask; another device would have to be waited for.
        if not self.host_may_read:
            subtracted = self._step(index, scale, lr, ratios, keep=finite, measure=measure)
        elif finite:
            subtracted = self._step(index, scale, lr, ratios, keep=None, measure=measure)
        else:
            subtracted = torch.full_like(sums.weight, float("nan"))

        if not measure:
            return None
        assert gradient_norm is not None and subtracted is not None  # they are measured
        return Norms(
            gradient=gradient_norm.float(),
            # The weights are those before the step: the first pass has added up their squares.
            weight=self._model.norm(sums.weight).float(),
            update=self._model.norm(subtracted).float(),
            trust=self._model.ratios(self._rules.named(ratios)),
        )

    def _clipped(
        self,
        scale: torch.Tensor,
        sums: Sums,
        clip: torch.Tensor,
    ) -> Tuple[torch.Tensor, Sums]:
        """Return the scale and the sums of the gradients times `clip`, float32 []."""
        scale = scale * clip
        # A sum of squares scales by the square, but the momentum's direction is no multiple of the
        # gradient: its sum takes another pass.
        gradient = sums.gradient * clip.double().square()
        direction = sums.direction
        if direction is not None:
            direction = self._sums(scale).direction
        return scale, sums._replace(gradient=gradient, direction=direction)

    def _sums(self, scale: torch.Tensor) -> Sums:
        """Make the first pass."""
        rows = self._sum_rows()
        constants = SumConstants(scale, self._rules.mu)
        gradient, weight, wrong, *direction = self.run(sum_rows, rows, constants)
        # One NaN, of any row, reaches the sum of all.
        finite = torch.isfinite(self._layout.sums(wrong).sum())

        def squared(place: slice) -> List[torch.Tensor]:
            """Return what was squared at a `place`, some rows."""
            return terms(rows.part(place), constants)

        sums = [self._layout.sums(squares) for squares in (gradient, weight, *direction)]
        gradient, weight, *direction = repaired(sums, self._layout, squared)
        return Sums(gradient, weight, direction[0] if direction else None, finite)

    def _sum_rows(self) -> SumRows:
        """Return the rows that the first pass reads."""
        # The published form's direction is the gradient: its momentum need not be read.
        momentum = None
        decay = None
        if self._rules.by_momentum:
            momentum = in_rows(self._buffers.slots["momentum_buffer"])
            decay = self._decay
        return SumRows(
            gradient=in_rows(self._buffers.gradients),
            weight=in_rows(self._buffers.weights),
            momentum=momentum,
            decay=decay,
        )

    def _ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Return the trust ratios: see Rules.ratios."""
        return self._rules.ratios(weight, direction)

    def _step(
        self,
        index: int,
        scale: torch.Tensor,
        lr: float,
        ratios: torch.Tensor,
        keep: Optional[torch.Tensor],
        measure: bool,
    ) -> Optional[torch.Tensor]:
        """Make the second pass.

        Args:
            index: of the update, from 0.
            scale: of the gradients.
            lr: learning rate.
            ratios: by parameter, float32.
            keep: bool [], where False nothing changes; None is True.
            measure: return sums.

        Returns:
            Sums of squares of what was subtracted, by parameter, float64, if `measure`.
        """
        buffers = self._buffers
        bits = self._bits
        # In float64 until it is clamped: the product may be larger than a float32.
        rate = self._layout.spread(clamped(lr * self._rules.lr_scale * ratios))
        # None for what there is not: copies of the module's own weights, bits of a float32 state.
        rows = StepRows(
            gradient=in_rows(buffers.gradients),
            weight=in_rows(buffers.weights),
            momentum=in_rows(buffers.slots["momentum_buffer"]),
            working=None if buffers.working is buffers.weights else in_rows(buffers.working),
            rate=rate,
            decay=self._decay,
            bits=None if bits is None else bits.rows,
        )
        # One draw serves weight and momentum, which take different bits of a word.
        constants = StepConstants(
            by_momentum=self._rules.by_momentum,
            nesterov=self._rules.nesterov,
            scale=scale,
            mu=self._rules.mu,
            lanes=None if bits is None else bits.lanes,
            draw=0 if bits is None else bits.draw(index, "weight")[0],
            keep=keep,
        )
        squares = self.run(step_rows, rows, constants)
        return self._layout.sums(squares) if measure else None


_Options = Mapping[str, Any]  # of one of torch's parameter groups


class Rules:
    """Hyperparameters of a LARS by parameter, and the trust ratios that follow. SGD has no ratios.

    by_momentum, mu, nesterov: of the optimizer.
    adapted: name -> number of the parameters that have a trust ratio; `adapt` is a mask of them.
    decay: float32 [parameters].
    coefficient, eps: float64 [parameters].
    lr_scale: float64 [parameters]; directions are multiplied by learning rate x lr_scale x ratio.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
    ):
        """
        Args:
            optimizer: LARS or SGD, with one momentum for all parameters.
            parameters: of the optimizer, by name.
            device: of the results.
        """
        self.by_momentum: bool = getattr(optimizer, "trust", "gradient") == "momentum"
        self.mu: float = optimizer.defaults["momentum"]
        self.nesterov: bool = optimizer.defaults["nesterov"]
        groups = self._groups(optimizer, parameters)

        # Which parameters have a ratio. SGD's groups have no `adapt`.
        adapt = [bool(group.get("adapt", False)) for group in groups]
        self.adapted = {name: number for number, name in enumerate(parameters) if adapt[number]}
        self.adapt = torch.tensor(adapt, device=device)

        # Where LARS does not adapt it does not decay; SGD, which never adapts, does.
        decays = _column(groups, "weight_decay", 0.0, device)
        self.decay = (decays * _column(groups, "adapt", True, device)).float()
        self.coefficient = _column(groups, "trust_coefficient", 0.0, device)
        self.eps = _column(groups, "eps", 0.0, device)

        # The momentum of the second form is an average: plain momentum, which is a sum, is so many
        # times as long.
        plain = 1 / (1 - self.mu) if self.by_momentum else 1.0
        scale = _column(groups, "lr_scale", 1.0, device)
        self.lr_scale = torch.where(self.adapt, scale, scale * plain)

    def _groups(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.Tensor],
    ) -> List[_Options]:
        """Return the options of the group of each parameter, after checking their momentum."""
        group_of: Dict[int, _Options] = {}
        for group in optimizer.param_groups:
            same = group["momentum"] == self.mu and group["nesterov"] == self.nesterov
            assert same, "one momentum for all parameters"
            for parameter in group["params"]:
                group_of[id(parameter)] = group
        return [group_of[id(parameter)] for parameter in parameters.values()]

    def ratios(self, weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        """Return the trust ratios, float32 [parameters], 1 where there is none.

        Args:
            weight: sums of squares of the weights, float64 [parameters].
            direction: those of the gradient, or by_momentum of momentum and weight decay.
        """
        weight = weight.sqrt()
        direction = direction.sqrt()
        # Where a norm is 0 the two forms have other ratios: see LARS.
        if self.by_momentum:
            ratio = self.coefficient * weight / (direction + self.eps)
            ratio = torch.where((weight > 0) & (direction > 0), ratio, self.coefficient)
        else:
            below = direction + self.decay * weight + self.eps
            ratio = self.coefficient * weight / below
            ratio = torch.where((weight > 0) & (direction > 0), ratio, 1.0)
        return clamped(torch.where(self.adapt, ratio, 1.0))

    def named(self, ratios: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Return by name, float32 [], those of the `ratios` that are trust ratios."""
        return {name: ratios[number] for name, number in self.adapted.items()}


def _column(
    groups: List[_Options],
    key: str,
    default: float,
    device: torch.device,
) -> torch.Tensor:
    """Return the value of `key` for each parameter, float64 [parameters]."""
    values = [group.get(key, default) for group in groups]
    return torch.tensor(values, dtype=torch.float64, device=device)


class SumRows(NamedTuple):
    """Rows of `sum_rows`. momentum, decay: both None where the direction is the gradient."""

    gradient: torch.Tensor  # [rows, ROW]
    weight: torch.Tensor  # [rows, ROW]
    momentum: Optional[torch.Tensor]  # [rows, ROW]
    decay: Optional[torch.Tensor]  # [rows, 1]

    def part(self, place: slice) -> SumRows:
        """Return the rows at a `place`."""
        return SumRows(
            gradient=self.gradient[place],
            weight=self.weight[place],
            momentum=None if self.momentum is None else self.momentum[place],
            decay=None if self.decay is None else self.decay[place],
        )


class SumConstants(NamedTuple):
    """The same for all rows of `sum_rows`: scale [] of the gradients, and momentum."""

    scale: torch.Tensor
    mu: float


def sum_rows(rows: SumRows, constants: SumConstants) -> Tuple[torch.Tensor, ...]:
    """Add up squares over each row.

    Args:
        rows: of the state and the gradients.
        constants: the same for all.

    Returns:
        [rows] each: sums of g^2; of w^2; 0 or, where a gradient is not finite, NaN; and with the
        momentum of u^2, u = mu m + (1 - mu) g + decay w.
    """
    g, w, *direction = terms(rows, constants)
    # g - g is 0, or NaN where g is infinite or NaN: finiteness for no further read of memory.
    gradient = (g * g).sum(1)
    weight = (w * w).sum(1)
    wrong = (g - g).sum(1)
    return (gradient, weight, wrong, *((u * u).sum(1) for u in direction))


def terms(rows: SumRows, constants: SumConstants) -> List[torch.Tensor]:
    """Return g, w and, with the momentum, u of `sum_rows`, float32 [rows, ROW] each.

    Args:
        rows, constants: as there.
    """
    mu = constants.mu
    g = rows.gradient * constants.scale
    w = rows.weight.float()
    if rows.momentum is None or rows.decay is None:
        return [g, w]
    average = rows.momentum.float() * mu + g * (1 - mu)
    return [g, w, average + rows.decay * w]


class StepRows(NamedTuple):
    """Rows of `step_rows`.

    working: the module's parameters, where they are not the weights themselves.
    rate: learning rate times trust ratio.
    bits: of a RoundingBits, for stochastic rounding of a float16 state; None: to nearest.
    """

    gradient: torch.Tensor  # [rows, ROW]
    weight: torch.Tensor  # [rows, ROW]
    momentum: torch.Tensor  # [rows, ROW]
    working: Optional[torch.Tensor]  # [rows, ROW]
    rate: torch.Tensor  # [rows, 1]
    decay: torch.Tensor  # [rows, 1]
    bits: Optional[torch.Tensor]  # int32 [rows, 1]


class StepConstants(NamedTuple):
    """The same for all rows of `step_rows`.

    by_momentum, nesterov: form of LARS.
    scale: of the gradients, [].
    mu: momentum.
    lanes, draw: of the random bits, where there are some.
    keep: bool [], where False nothing changes; None is True.
    """

    by_momentum: bool
    nesterov: bool
    scale: torch.Tensor
    mu: float
    lanes: Optional[torch.Tensor]
    draw: int
    keep: Optional[torch.Tensor]


def step_rows(rows: StepRows, constants: StepConstants) -> torch.Tensor:
    """Make a step, and write it into weight, momentum and working.

    m = mu m + rate (g + decay w);  w = w - m, or with Nesterov momentum
    w = w - (mu m + rate (g + decay w)), or by_momentum
    m = mu m + (1 - mu) g;  w = w - rate (m + decay w).

    Args:
        rows: of the state and the gradients.
        constants: the same for all.

    Returns:
        Sums over each row of squares of what was subtracted, [rows].
    """
    # In the order of operations of update.cpp, which makes the same bits.
    mu = constants.mu
    g = rows.gradient * constants.scale
    w = rows.weight.float()
    m = rows.momentum.float() * mu
    if constants.by_momentum:
        m = m + g * (1 - mu)
        subtracted = (m + rows.decay * w) * rows.rate
    else:
        added = (g + rows.decay * w) * rows.rate
        m = m + added
        subtracted = m * mu + added if constants.nesterov else m
    w = w - subtracted

    # Rounded before they are written: the module's parameters are copies of what is stored.
    if rows.bits is None:
        w = w.to(rows.weight.dtype)
        m = m.to(rows.momentum.dtype)
    else:
        assert constants.lanes is not None  # of the same RoundingBits as rows.bits
        words = random_bits(rows.bits, constants.lanes, constants.draw)
        w = rounded(w, upper(words))
        m = rounded(m, lower(words))
    write(rows.weight, w, constants.keep)
    if rows.working is not None:
        write(rows.working, w, constants.keep)
    write(rows.momentum, m, constants.keep)
    return (subtracted * subtracted).sum(1)
