"""The persistent weights and optimizer state, float16 or float32, and the buffers a step needs around them.

Three kinds of memory, each one flat buffer with a view per parameter:
- the state (weights, and one buffer per slot of the optimizer): all that persists, 4 bytes a parameter in
  float16 with LARS or SGD, 8 with RMSprop, 10 with LAMB, whose moments stay in float32;
- the working copy: the module's own parameters in the compute dtype, refreshed from the state after each update;
- scratch: float32 gradients, and what the optimizer needs in float32 while it steps.
Where all is float32 on a CPU the three are one: a step that must not be made can be left out there, because to ask
costs nothing. Other devices make every step in scratch, and store it under a mask.
"""

from __future__ import annotations

import contextlib
from types import MappingProxyType
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from optim.gradients import Gradients
from optim.rounding import RoundingBits, round_stochastically

_ALIGNMENT = 16  # elements: every parameter starts at a multiple of 32 bytes in float16, of 64 in float32
# Of all optimizers here. A state is given with entries of others, and this tells them from what another optimizer kept.
_SLOT_NAMES = ("momentum_buffer", "square_avg", "exp_avg", "exp_avg_sq")


class Slot(NamedTuple):
    """A state tensor of each parameter: its first value, and whether it may persist in float16."""

    initial: float = 0.0
    half: bool = True


class HasSlots:
    """What WeightState asks of an optimizer beside what torch's have: mixed into the class of each.

    `slots`: by name, the tensors that the optimizer keeps in `state[parameter]`. `trust_ratios`: of the last step,
    parameter -> float32 []; empty for an optimizer that has none or does not tell them.
    """

    slots: Mapping[str, Slot]
    trust_ratios: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({})

    def at_step(self, step: int) -> None:
        """Called before update `step`, from 0: sets whatever else the optimizer counts, from this number alone.

        So nothing of it is saved and a resumed run has it exactly. Steps that were skipped count like all others.
        """


class Norms(NamedTuple):
    """Euclidean norms over all parameters, float32 []; trust ratios by parameter, float32 []."""

    gradient: torch.Tensor
    weight: torch.Tensor
    update: torch.Tensor
    trust: Dict[str, torch.Tensor]


class Elsewhere:
    """What the processes that compute other stages and replicas have to say. This one is of a process that is alone."""

    def all_finite(self, finite: torch.Tensor) -> torch.Tensor:
        """Whether `finite`, bool [], holds for all stages and replicas."""
        return finite

    def sum_over_stages(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a float64 tensor over the stages of this replica."""
        return values


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
        tree: Optional[Tuple[int, Sequence[Sequence[str]]]] = None,
        elsewhere: Optional[Elsewhere] = None,
    ):
        """
        Args:
            parameters: (name, parameter) of the module, all of one dtype (the compute dtype) and device. They
                become views of the working copy; the weights start as their values, rounded to `dtype`.
            create_optimizer: makes the torch optimizer of named float32 parameters, a HasSlots.
            dtype: torch.float16 or torch.float32; slots that may not be float16 are float32 in any case.
            rounding: "stochastic" or "nearest", for float16.
            seed: of the rounding.
            clip_norm: largest norm of the gradient of the whole model.
            model: names of the whole model's parameters, where `parameters` are a part of them.
            tree: adds gradients in tree order; accumulation, and the names that get gradients together
                (see optim/gradients.py).
            elsewhere: the other stages and replicas.
        """
        self._parameters = dict(parameters)
        self._model = list(model or self._parameters)
        self._clip_norm, self._elsewhere = clip_norm, elsewhere or Elsewhere()
        first = next(iter(self._parameters.values()))
        self._layout, length = _lay_out(self._parameters)
        self._device = first.device
        self._compute = first.dtype

        def flat(kind: torch.dtype, value: float = 0.0) -> torch.Tensor:
            return torch.full((length,), value, dtype=kind, device=self._device)

        self._working = flat(self._compute)
        for parameter, view in zip(self._parameters.values(), self._views(self._working)):
            view.copy_(parameter.data)
            parameter.data = view
        self.gradients = Gradients(self._parameters, self._layout, length, *(tree or (None, ())))
        self._masters = self._create_masters(flat)
        self.optimizer = create_optimizer(self._masters)
        assert set(self.optimizer.slots) <= set(_SLOT_NAMES), f"name {list(self.optimizer.slots)} in _SLOT_NAMES"
        self._scratch = {name: flat(torch.float32) for name in self.optimizer.slots}
        for slot, buffer in self._scratch.items():
            for master, view in zip(self._masters.values(), self._views(buffer)):
                self.optimizer.state[master][slot] = view

        self._in_place = self._device.type == "cpu" and dtype == self._compute == torch.float32
        if self._in_place:
            self._weights, self._slots = self._working, self._scratch
            for name, slot in self.optimizer.slots.items():
                self._slots[name].fill_(slot.initial)
        else:
            self._weights = self._working.to(dtype, copy=True)
            self._slots = {
                name: flat(dtype if slot.half else torch.float32, slot.initial)
                for name, slot in self.optimizer.slots.items()
            }
        self._bits: Optional[RoundingBits] = None
        if dtype == torch.float16 and rounding == "stochastic":
            places = {name: (start, parameter.numel()) for name, (start, parameter) in self._placed()}
            self._bits = RoundingBits(places, length, seed, self._device)
        self._refresh()

    @torch.no_grad()
    def update(
        self, step: int, lr: float, divisor: torch.Tensor, measure: bool
    ) -> Tuple[torch.Tensor, Optional[Norms]]:
        """One optimizer update from the accumulated gradients divided by `divisor`.

        If a gradient is not finite nothing changes; no host-device synchronisation either way.

        Args:
            step: number of the update, from 0: selects the random bits, and is the optimizer's count of steps.
            lr: learning rate.
            divisor: float32 []: loss scale times accumulation.
            measure: also return the norms.

        Returns:
            finite: bool [], whether the update was made; the norms, if measured.
        """
        flat = self.gradients.flat.div_(divisor)
        lowest, highest = torch.aminmax(flat)  # NaN is both; a norm takes twenty times as long on a CPU
        finite = self._elsewhere.all_finite(torch.isfinite(lowest) & torch.isfinite(highest))
        before = self._weights.to(torch.float32, copy=True) if measure else None
        # Before the step: some optimizers write into the gradients.
        gradient = self._norm(flat) if measure or self._clip_norm else None
        if self._clip_norm:
            flat.mul_((self._clip_norm / gradient).clamp(max=1.0))  # infinite for a norm of 0, and so 1
        if not self._in_place or finite:
            self._step(step, lr)
        norms = self._norms(gradient, before) if measure else None
        if not self._in_place:
            self._store(self._weights, self._master, step, "weight", finite)
            for slot, buffer in self._slots.items():
                self._store(buffer, self._scratch[slot], step, slot, finite)
            self._refresh()
        return finite, norms

    def _step(self, step: int, lr: float) -> None:
        """The optimizer's step, from the state into scratch."""
        self._to_scratch()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for master, view in zip(self._masters.values(), self.gradients.views):
            master.grad = view
        self.optimizer.at_step(step)
        self.optimizer.step()

    def state_dict(self) -> dict:
        """{"weights": {name: tensor}, slot: {name: tensor}, ...} on the CPU, in the state's dtype."""
        return {key: self.by_name(buffer) for key, buffer in self._buffers().items()}

    def load_state_dict(self, state: dict) -> None:
        """Takes over what `state_dict` gave: exactly if the dtypes agree, else rounded to nearest.

        Raises:
            ValueError: tensors missing, unknown, or of another shape; names the first. Slots missing, or kept by
                another optimizer; names them all. Nothing is changed then.
        """
        buffers = self._buffers()
        missing = [key for key in buffers if key not in state]
        foreign = [key for key in _SLOT_NAMES if key in state and key not in buffers]
        if missing or foreign:
            faults = [f"{key} is missing" for key in missing]
            faults += [f"{key} belongs to another optimizer than {type(self.optimizer).__name__}" for key in foreign]
            raise ValueError("; ".join(faults))
        for key in buffers:
            self._check(state[key])
        for key, buffer in buffers.items():
            self._fill(buffer, state[key])
        self._refresh()

    def places(self) -> List[Tuple[int, nn.Parameter]]:
        """First element of each parameter in a flat buffer, and the parameter, in this order."""
        return [place for _, place in self._placed()]

    @property
    def flat(self) -> torch.Tensor:
        """The persistent weights: [length], all parameters behind one another, padded with zeros between."""
        return self._weights

    @contextlib.contextmanager
    def shown(self, flat: torch.Tensor) -> Iterator[None]:
        """Within it the module has the weights in `flat`, laid out as the property is; nothing else may be done."""
        own = self._working.clone()
        try:
            self._working.copy_(flat)
            yield
        finally:
            self._working.copy_(own)

    def replace(self, weights: Dict[str, torch.Tensor]) -> None:
        """Puts `weights` in the place of those parameters, rounded to nearest; the others and the slots stay."""
        for name, view in zip(self._parameters, self._views(self._weights)):
            if name in weights:
                view.copy_(weights[name])
        self._refresh()

    def by_name(self, flat: torch.Tensor) -> Dict[str, torch.Tensor]:
        """The parts of a buffer laid out as `flat` is, copied to the CPU."""
        return {name: view.to("cpu", copy=True) for name, view in zip(self._parameters, self._views(flat))}

    def own(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Those of a whole model's tensors that are not of parameters which other processes have."""
        elsewhere = set(self._model) - set(self._parameters)
        return {name: tensor for name, tensor in tensors.items() if name not in elsewhere}

    def load_flat(self, flat: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
        """Fills a buffer with what `by_name` gave. Raises ValueError as `load_state_dict` does."""
        self._check(tensors)
        self._fill(flat, tensors)

    @property
    def bytes_per_parameter(self) -> float:
        """Of the persistent state, alignment included."""
        total = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers().values())
        return total / sum(parameter.numel() for parameter in self._parameters.values())

    def _fill(self, flat: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
        for name, view in zip(self._parameters, self._views(flat)):
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

    def _create_masters(self, flat: Callable[[torch.dtype], torch.Tensor]) -> Dict[str, nn.Parameter]:
        """What the optimizer updates: the module's parameters where they are float32, else float32 scratch."""
        if self._compute == torch.float32:
            self._master = self._working
            return self._parameters
        self._master = flat(torch.float32)
        views = self._views(self._master)
        return {name: nn.Parameter(view) for name, view in zip(self._parameters, views)}

    def _to_scratch(self) -> None:
        self._master.copy_(self._weights)
        for slot, buffer in self._slots.items():
            self._scratch[slot].copy_(buffer)

    def _store(self, state: torch.Tensor, source: torch.Tensor, step: int, slot: str, finite: torch.Tensor) -> None:
        if self._bits is not None and state.dtype == torch.float16:
            round_stochastically(source, self._bits, step, slot, out=state, keep=finite)
        else:
            state.copy_(torch.where(finite, source.to(state.dtype), state))

    def _refresh(self) -> None:
        self._working.copy_(self._weights)

    def _norms(self, gradient: torch.Tensor, before: torch.Tensor) -> Norms:
        """After the step and before it is stored: the difference to `before` is what the optimizer subtracted."""
        return Norms(gradient, self._norm(before), self._norm(self._master - before), self._trust_ratios())

    def _norm(self, flat: torch.Tensor) -> torch.Tensor:
        """Euclidean norm of the whole model's vector of which `flat` is this process's part, float32 [].

        Of squares by parameter, each of which is computed in one place: so the stages do not change a bit of it.
        """
        norms = torch.stack(torch._foreach_norm(self._views(flat)))
        return self._of_whole_model(norms.double().square()).sum().sqrt().float()

    def _trust_ratios(self) -> Dict[str, torch.Tensor]:
        names = {id(master): name for name, master in self._masters.items()}
        own = {names[id(master)]: ratio for master, ratio in self.optimizer.trust_ratios.items()}
        if len(self._parameters) == len(self._model):
            return own
        absent = torch.full((), -1.0, device=self._device)  # a ratio is never negative
        ratios = torch.stack([own.get(name, absent) for name in self._parameters])
        shifted = self._of_whole_model(ratios.double() + 1)  # what no stage has stays 0; NaN is not 0
        return {name: (shifted[place] - 1).float() for place, name in enumerate(self._model) if shifted[place] != 0}

    def _of_whole_model(self, values: torch.Tensor) -> torch.Tensor:
        """A value for each own parameter, float64, at its place among those of all parameters of the model."""
        if len(self._parameters) == len(self._model):
            return values
        places = {name: place for place, name in enumerate(self._model)}
        whole = torch.zeros(len(self._model), dtype=torch.float64, device=self._device)
        whole[[places[name] for name in self._parameters]] = values
        return self._elsewhere.sum_over_stages(whole)

    def _buffers(self) -> Dict[str, torch.Tensor]:
        return {"weights": self._weights, **self._slots}

    def _placed(self) -> list:
        return [(name, (self._layout[name], parameter)) for name, parameter in self._parameters.items()]

    def _views(self, buffer: torch.Tensor) -> list:
        return [
            buffer[start : start + parameter.numel()].view(parameter.shape) for _, (start, parameter) in self._placed()
        ]


def _lay_out(parameters: Dict[str, nn.Parameter]) -> Tuple[Dict[str, int], int]:
    """First element of each parameter in a flat buffer, and the buffer's length."""
    layout, length = {}, 0
    for name, parameter in parameters.items():
        layout[name] = length
        length += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    return layout, length
