"""An update by any torch optimizer of float32 parameters: from the state to float32 scratch, a step, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, NamedTuple, Optional

import torch
from torch import nn

from optim.layout import Buffers, Layout, Run, in_parts, in_rows
from optim.norms import Norms, WholeModel, clip_factor, repaired
from optim.rounding import RoundingBits, round_stochastically

if TYPE_CHECKING:
    from optim.base import HasSlots


class Target(NamedTuple):
    """What an update changes: parameters of a module, views of the working buffer, and the rest as of WeightState."""

    parameters: Dict[str, nn.Parameter]
    layout: Layout
    buffers: Buffers
    bits: Optional[RoundingBits]
    clip_norm: Optional[float]
    model: WholeModel


class OptimizerUpdate:
    """Steps an optimizer in float32 scratch memory: slots, and weights, where the module's own are not float32.

    On a CPU, a float32 state of a module that computes in float32 is its own scratch, and `finite` is read before the
    step. All others step in scratch, and store the result under a mask.
    """

    def __init__(self, target: Target, create_optimizer: Callable[[Dict[str, nn.Parameter]], HasSlots]):
        self.run: Run = in_parts
        masters, layout, buffers, self._bits, self._clip_norm, self._model = target
        self._layout, self._buffers, self._gradients = layout, buffers, layout.views(buffers.gradients)
        same, single = buffers.weights is buffers.working, buffers.working.dtype == torch.float32
        self._in_place = same and single and layout.device.type == "cpu"
        self._weights = buffers.working
        if not (self._in_place or (single and not same)):
            self._weights = layout.zeros(torch.float32)
            masters = {name: nn.Parameter(view) for name, view in zip(layout.names, layout.views(self._weights))}
        self._masters = list(masters.values())
        self.optimizer = create_optimizer(masters)
        self._slots = buffers.slots if self._in_place else {name: layout.zeros(torch.float32) for name in buffers.slots}
        for slot, buffer in self._slots.items():
            for master, view in zip(self._masters, layout.views(buffer)):
                self.optimizer.state[master][slot] = view

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """As WeightState.prepare."""
        # NaN is the lowest and the highest element; a norm takes twenty times as long on a CPU.
        lowest, highest = torch.aminmax(self._buffers.gradients.div_(divisor))
        return torch.isfinite(lowest) & torch.isfinite(highest)

    def apply(self, step: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """As WeightState.apply."""
        flat = self._buffers.gradients
        before = self._buffers.weights.to(torch.float32, copy=True) if measure else None
        # Before the step: some optimizers write into the gradients.
        gradient = self._norm(flat) if measure or self._clip_norm else None
        if self._clip_norm:
            flat.mul_(clip_factor(self._clip_norm, gradient))
        if not self._in_place or finite:
            self._step(step, lr)
        # Before the result is stored: the difference is what the optimizer subtracted.
        norms = None
        if measure:
            lengths = gradient, self._norm(before), self._norm(self._weights - before)
            norms = Norms(*(each.float() for each in lengths), {})
        if not self._in_place:
            self._store(self._buffers.weights, self._weights, step, "weight", finite)
            for slot, buffer in self._buffers.slots.items():
                self._store(buffer, self._slots[slot], step, slot, finite)
            self._buffers.refresh()
        return norms

    def _step(self, step: int, lr: float) -> None:
        """The optimizer's step, from the state into scratch."""
        if not self._in_place:
            self._weights.copy_(self._buffers.weights)
            for slot, buffer in self._buffers.slots.items():
                self._slots[slot].copy_(buffer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for master, view in zip(self._masters, self._gradients):
            master.grad = view
        self.optimizer.at_step(step)
        self.optimizer.step()

    def _store(self, state: torch.Tensor, source: torch.Tensor, step: int, slot: str, finite: torch.Tensor) -> None:
        if self._bits is not None and state.dtype == torch.float16:
            round_stochastically(source, self._bits, step, slot, out=state, keep=finite, run=self.run)
        else:
            state.copy_(torch.where(finite, source.to(state.dtype), state))

    def _norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Of the whole model, float64 []."""
        squares = torch.stack(torch._foreach_norm(self._layout.views(flat))).double().square()
        rows = in_rows(flat)
        return self._model.norm(repaired([squares], self._layout, lambda place: (rows[place],))[0])
