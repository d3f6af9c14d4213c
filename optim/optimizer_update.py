"""An update by any torch optimizer of float32 parameters: from the state to scratch and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, NamedTuple, Optional

import torch
from torch import nn

from optim.layout import Buffers, Layout, Run, in_parts, in_rows
from optim.norms import Norms, WholeModel, clip_factor, repaired
from optim.rounding import RoundingBits, round_stochastically, write

if TYPE_CHECKING:
    from optim.base import HasSlots


class Target(NamedTuple):
    """All that an update changes.

    parameters: of a module, views of the working buffer.
    layout: of the buffers.
    buffers: gradients, weights and slots.
    bits: of stochastic rounding, or None.
    clip_norm: largest norm of the gradient of the whole model, or None.
    model: of which the parameters are all or some.
    """

    parameters: Dict[str, nn.Parameter]
    layout: Layout
    buffers: Buffers
    bits: Optional[RoundingBits]
    clip_norm: Optional[float]
    model: WholeModel


class OptimizerUpdate:
    """Steps an optimizer in float32 scratch memory.

    On a CPU, float32 weights of a module that computes in float32 are stepped in place, and
    `finite` is read before. All others are stepped in scratch, which has the slots and the weights,
    and the result is stored under a mask.

    run: runs the passes.
    """

    def __init__(
        self,
        target: Target,
        create_optimizer: Callable[[Dict[str, nn.Parameter]], HasSlots],
    ):
        """
        Args:
            target: what the update changes.
            create_optimizer: creates the optimizer of named float32 parameters.
        """
        layout = target.layout
        buffers = target.buffers
        self.run: Run = in_parts
        self._layout = layout
        self._buffers = buffers
        self._bits = target.bits
        self._clip_norm = target.clip_norm
        self._model = target.model
        self._gradients = layout.views(buffers.gradients)

        # Step in the state itself where the host may skip a step that would spoil it.
        same = buffers.weights is buffers.working
        single = buffers.working.dtype == torch.float32
        self._in_place = same and single and layout.device.type == "cpu"

        # Float32 weights: the module's own parameters where they are that, and no state that a step
        # without a finite gradient would spoil; else scratch.
        self._weights = buffers.working
        masters = target.parameters
        if not self._in_place and (same or not single):
            self._weights = layout.zeros(torch.float32)
            masters = {}
            for name, view in zip(layout.names, layout.views(self._weights)):
                masters[name] = nn.Parameter(view)
        self._masters = list(masters.values())

        # The optimizer, and its state of each parameter, float32 whatever the slots' dtype is.
        self.optimizer = create_optimizer(masters)
        self._slots = buffers.slots
        if not self._in_place:
            self._slots = {name: layout.zeros(torch.float32) for name in buffers.slots}
        self._give_slots()

    def _give_slots(self) -> None:
        """Make the optimizer's state of each parameter views of the slots' buffers."""
        for slot, buffer in self._slots.items():
            for master, view in zip(self._masters, self._layout.views(buffer)):
                self.optimizer.state[master][slot] = view

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """Divide the gradients. See WeightState.prepare for `divisor` and the result."""
        # NaN is the lowest and the highest element; a norm takes twenty times as long on a CPU.
        lowest, highest = torch.aminmax(self._buffers.gradients.div_(divisor))
        return torch.isfinite(lowest) & torch.isfinite(highest)

    def apply(self, index: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """Make the step.

        Args:
            index, lr, finite, measure: see WeightState.apply, also for the result.
        """
        gradients = self._buffers.gradients
        before: Optional[torch.Tensor] = None
        if measure:
            before = self._buffers.weights.to(torch.float32, copy=True)

        # Before the step: some optimizers write into the gradients.
        gradient_norm: Optional[torch.Tensor] = None
        if measure or self._clip_norm:
            gradient_norm = self._norm(gradients)
        if self._clip_norm and gradient_norm is not None:
            gradients.mul_(clip_factor(self._clip_norm, gradient_norm))

        # In place nothing can be taken back, so there the host reads `finite`; scratch memory may
        # become NaN, since its result is stored under a mask.
        is_stepped = not self._in_place or bool(finite)
        if is_stepped:
            self._step(index, lr)

        # Before the result is stored: the difference is what the optimizer subtracted.
        norms = None
        if gradient_norm is not None and before is not None:
            subtracted = self._weights - before
            if not is_stepped:
                subtracted.fill_(float("nan"))
            norms = Norms(
                gradient=gradient_norm.float(),
                weight=self._norm(before).float(),
                update=self._norm(subtracted).float(),
                trust={},
            )

        if not self._in_place:
            self._store_all(index, finite)
        return norms

    def _store_all(self, index: int, finite: torch.Tensor) -> None:
        """Write scratch into weights and slots, where `finite`, and renew the module's weights."""
        self._store(self._buffers.weights, self._weights, index, "weight", finite=finite)
        for slot, buffer in self._buffers.slots.items():
            self._store(buffer, self._slots[slot], index, slot, finite=finite)
        self._buffers.refresh()

    def _step(self, index: int, lr: float) -> None:
        """Make the optimizer's step, from the state into scratch."""
        # The state is the truth, and scratch may hold the result of a step that was not stored.
        if not self._in_place:
            self._weights.copy_(self._buffers.weights)
            for slot, buffer in self._buffers.slots.items():
                self._slots[slot].copy_(buffer)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        for master, view in zip(self._masters, self._gradients):
            master.grad = view
        # Before the step: the libraries add 1 to this count, then use it.
        self.optimizer.at_step(index)
        self.optimizer.step()
        # Where the masters are the module's own parameters, the next backward pass would otherwise
        # add into the sum, to which what it leaves is then added once more.
        for master in self._masters:
            master.grad = None

    def _store(
        self,
        state: torch.Tensor,
        source: torch.Tensor,
        index: int,
        slot: str,
        finite: torch.Tensor,
    ) -> None:
        """Write scratch into the state, where `finite`."""
        if self._bits is None or state.dtype != torch.float16:
            write(state, source, keep=finite)
            return
        round_stochastically(
            source,
            self._bits,
            index,
            slot,
            out=state,
            keep=finite,
            run=self.run,
        )

    def _norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the norm of a buffer over the whole model, float64 []."""
        # torch's norms in few launches; the ones that float32 cannot hold are made again.
        norms = torch._foreach_norm(self._layout.views(flat))
        squares = torch.stack(norms).double().square()
        rows = in_rows(flat)
        (squares,) = repaired([squares], self._layout, lambda place: (rows[place],))
        return self._model.norm(squares)
