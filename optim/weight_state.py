"""The persistent weights and optimizer state, float16 or float32, and the buffers a step needs around them.

Three kinds of memory, each one flat buffer with a view per parameter: the state (weights, and one buffer per slot of
the optimizer), which is all that persists; the working copy, which is the module's own parameters in the compute dtype,
refreshed after each update, and the same memory where the weights persist in that dtype; and float32 gradients.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from optim.base import HasSlots, all_slots
from optim.compilation import compiled
from optim.gradients import Gradients
from optim.lars_update import Rules
from optim.layout import Buffers, Layout
from optim.norms import Norms, WholeModel
from optim.optimizer_update import Target
from optim.replica_update import ReplicaUpdate
from optim.rounding import RoundingBits, round_stochastically


class WeightState:
    """Weights and optimizer state of a module, in `dtype`; the only copy that persists."""

    def __init__(
        self,
        parameters: Iterable[Tuple[str, nn.Parameter]],
        create_optimizer: Callable[[Dict[str, nn.Parameter]], HasSlots],
        *,
        dtype: torch.dtype,
        rounding: str,
        seed: int,
        clip_norm: Optional[float] = None,
        model: Optional[Sequence[str]] = None,
        tree: Optional[Tuple[Sequence[int], Sequence[Sequence[str]]]] = None,
        sum_over_stages: Optional[Callable[[torch.Tensor], torch.Tensor]] = None,
        compile: bool = False,
    ):
        """
        Args:
            parameters: (name, parameter) of the module, all of one dtype (the compute dtype) and device. They
                become views of the working copy; the weights start as their values, rounded to `dtype`.
            create_optimizer: makes the torch optimizer of named float32 parameters.
            dtype: torch.float16 or torch.float32; slots that may not be float16 are float32 in any case.
            rounding: "stochastic" or "nearest", for float16. seed: of the rounding.
            clip_norm: largest norm of the gradient of the whole model. model: names of all its parameters.
            tree: leaves and parts of `Gradients`, to add in tree order.
            sum_over_stages: of a float64 tensor, in place, where `parameters` are those of one stage of several.
            compile: compile the update on a CPU.
        """
        self._parameters = dict(parameters)
        self._model = list(model or self._parameters)
        compute = next(iter(self._parameters.values())).dtype
        self._layout = Layout(self._parameters)
        working = self._layout.zeros(compute)
        for parameter, view in zip(self._parameters.values(), self._layout.views(working)):
            view.copy_(parameter.data)
            parameter.data = view
        self.gradients = Gradients(self._parameters, self._layout, *(tree or (None, ())))
        self.optimizer = create_optimizer(self._parameters)
        slots = {
            name: self._layout.zeros(dtype if slot.half else torch.float32, slot.initial)
            for name, slot in self.optimizer.slots.items()
        }
        weights = working if dtype == compute else working.to(dtype)
        self._buffers = Buffers(self.gradients.flat, weights, working, slots)
        self._bits = None
        if dtype == torch.float16 and rounding == "stochastic":
            self._bits = RoundingBits(self._layout.places, self._layout.length, seed, self._layout.device)
        whole = WholeModel(self._layout.names, self._model, sum_over_stages, self._layout.device)
        self._target = Target(self._parameters, self._layout, self._buffers, self._bits, clip_norm, whole)
        self._update = self.optimizer.create_update(self._target, create_optimizer)
        self.notes: Tuple[str, ...] = ()
        if compile and self._layout.device.type == "cpu":
            self._update.run, note = compiled(self._buffers, self._bits is not None)
            self.notes = (note,)
        self.refresh()

    @torch.no_grad()
    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """Prepare an update from the accumulated gradients divided by `divisor`, float32 []: loss scale times
        accumulation. Return whether all gradients of this process are finite, bool [], without waiting for a device."""
        return self._update.prepare(divisor)

    @torch.no_grad()
    def apply(self, step: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """Make the update that was prepared, once; on CUDA without waiting for the device. Return norms if `measure`.

        Args:
            step: number of the update, from 0: selects the random bits, and is the optimizer's count of steps.
            finite: bool [], whether all stages and replicas have finite gradients: if not, nothing changes.
        """
        return self._update.apply(step, lr, finite, measure)

    def update(
        self, step: int, lr: float, divisor: torch.Tensor, measure: bool
    ) -> Tuple[torch.Tensor, Optional[Norms]]:
        """Prepare and make an update that no other process has a part in; `finite` and the norms."""
        finite = self.prepare(divisor)
        return finite, self.apply(step, lr, finite, measure)

    def create_replica_update(self, optimizer: HasSlots, **arguments: Any) -> ReplicaUpdate:
        """A replica's part of what `optimizer`, of the same parameters, would do. Args: those of ReplicaUpdate."""
        return ReplicaUpdate(Rules(optimizer, self._parameters, self._layout.device), self._target, **arguments)

    def not_finite(self) -> List[str]:
        """Names of the parameters whose gradient of the last step, after the exchange, is not finite. Waits."""
        return [name for name, view in zip(self._parameters, self.gradients.views) if not view.isfinite().all()]

    def state_dict(self, flat: Optional[torch.Tensor] = None) -> dict:
        """{"weights": {name: tensor}, slot: {name: tensor}, ...} on the CPU, in the state's dtype.

        Args: flat: weights to give instead of these, laid out as `flat` is.
        """
        weights = {} if flat is None else {"weights": flat.to(self.flat.dtype)}
        return {key: self.by_name(buffer) for key, buffer in {**self.own_state(), **weights}.items()}

    def load_state_dict(self, state: dict) -> None:
        """Load what `state_dict` gave: exactly if the dtypes agree, else rounded to nearest.

        Raises ValueError, and changes nothing: tensors missing, unknown, or of another shape; names the first. Slots
        missing, or of another optimizer; names them all.
        """
        buffers, kind = self.own_state(), type(self.optimizer).__name__
        faults = [f"{key} is missing" for key in buffers if key not in state]
        foreign = [key for key in all_slots() if key in state and key not in buffers]
        faults += [f"{key} belongs to another optimizer than {kind}" for key in foreign]
        if faults:
            raise ValueError("; ".join(faults))
        for key in buffers:
            self._check(state[key])
        for key, buffer in buffers.items():
            self._fill(buffer, state[key])
        self.refresh()

    def places(self) -> List[Tuple[int, nn.Parameter]]:
        """First element of each parameter in a flat buffer, and the parameter, in this order."""
        return [(self._layout.places[name][0], parameter) for name, parameter in self._parameters.items()]

    @property
    def flat(self) -> torch.Tensor:
        """The persistent weights: [length], all parameters behind one another, padded with zeros between."""
        return self._buffers.weights

    @contextlib.contextmanager
    def shown(self, flat: torch.Tensor) -> Iterator[None]:
        """A context in which the module has the weights in `flat`, laid out as the property is, for evaluation."""
        working = self._buffers.working
        own = working.clone()
        try:
            working.copy_(flat)
            yield
        finally:
            working.copy_(own)

    def own_state(self) -> Dict[str, torch.Tensor]:
        """All that an update changes, by name: [length] each, laid out as `flat`; `refresh` when it is written to."""
        return {"weights": self._buffers.weights, **self._buffers.slots}

    def refresh(self) -> None:
        """The module's parameters become the persistent weights."""
        self._buffers.refresh()

    @torch.no_grad()
    def store(self, start: int, end: int, values: torch.Tensor, step: int) -> None:
        """Replace elements of `flat` by float32 values; as float16, rounded by bits of this step."""
        flat = self.flat
        if self._bits is None:
            flat[start:end].copy_(values)
        else:
            whole = flat.float()  # what float16 holds, rounding keeps
            whole[start:end] = values
            keep = torch.ones((), dtype=torch.bool, device=flat.device)
            round_stochastically(whole, self._bits, step, "mean", out=flat, keep=keep)
        self.refresh()

    def replace(self, weights: Dict[str, torch.Tensor]) -> None:
        """Replaces the weights of those parameters, rounded to nearest; the others and the slots stay."""
        self._fill(self.flat, weights)
        self.refresh()

    def by_name(self, flat: torch.Tensor) -> Dict[str, torch.Tensor]:
        """The parts of a buffer laid out as `flat` is, copied to the CPU."""
        return {name: view.to("cpu", copy=True) for name, view in zip(self._parameters, self._layout.views(flat))}

    def own(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """A whole model's tensors without those of parameters that other processes have."""
        others = set(self._model) - set(self._parameters)
        return {name: tensor for name, tensor in tensors.items() if name not in others}

    def load_flat(self, flat: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
        """Fills a buffer with what `by_name` gave. Raises ValueError as `load_state_dict` does."""
        self._check(tensors)
        self._fill(flat, tensors)

    def _fill(self, flat: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
        for name, view in zip(self._parameters, self._layout.views(flat)):
            if name in tensors:
                view.copy_(tensors[name])

    def _check(self, tensors: Dict[str, torch.Tensor]) -> None:
        for name in {**self._parameters, **tensors}:
            if name not in tensors:
                raise ValueError(f"{name} is missing")
            if name not in self._parameters:
                raise ValueError(f"{name} is unknown")
            expected, found = tuple(self._parameters[name].shape), tuple(tensors[name].shape)
            if expected != found:
                raise ValueError(f"{name} is {list(found)}, the model's is {list(expected)}")
