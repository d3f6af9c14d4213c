"""The persistent weights and optimizer state, float16 or float32, and the buffers around them.

Three kinds of memory, each one flat buffer with a view per parameter: the state (weights, and one
buffer per slot of the optimizer), which is all that persists; the working copy, which is the
module's own parameters in the compute dtype, refreshed after each update, and the same memory where
the weights persist in that dtype; and float32 gradients.
"""

from __future__ import annotations

import contextlib
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import nn

from optim.base import HasSlots, Update, all_slots
from optim.compilation import compiled
from optim.gradients import Gradients
from optim.lars_update import Rules
from optim.layout import Buffers, Layout
from optim.norms import Norms, Stages, WholeModel
from optim.optimizer_update import Target
from optim.replica_update import ReplicaUpdate
from optim.rounding import RoundingBits, round_stochastically


class WeightState:
    """Weights and optimizer state of a module, in `dtype`; the only copy that persists.

    gradients: of the parameters, to be added up over a step.
    optimizer: the torch optimizer.
    """

    def __init__(
        self,
        parameters: Iterable[Tuple[str, nn.Parameter]],
        create_optimizer: Callable[[Dict[str, nn.Parameter]], HasSlots],
        *,
        dtype: torch.dtype,
        rounding: str,
        seed: int,
        clip_norm: Optional[float] = None,
        stages: Optional[Stages] = None,
        tree: Optional[Tuple[Sequence[int], Sequence[Sequence[str]]]] = None,
    ):
        """
        Args:
            parameters: (name, parameter) of the module, all of one dtype (the compute dtype) and
                device. They become views of the working copy; the weights start as their values,
                rounded to `dtype`.
            create_optimizer: creates the torch optimizer of named float32 parameters.
            dtype: torch.float16 or torch.float32; slots that may not be float16 are float32 in any
                case.
            rounding: "stochastic" or "nearest", for float16.
            seed: of the rounding.
            clip_norm: largest norm of the gradient of the whole model.
            stages: of the model, where `parameters` are those of one; None: they are all.
            tree: leaves and parts of `Gradients`, to add in tree order.
        """
        self._parameters = dict(parameters)
        self._layout = Layout(self._parameters)
        # Names of the parameters that other stages have.
        self._elsewhere: Set[str] = set()
        if stages is not None:
            self._elsewhere = set(stages.parameters) - set(self._parameters)

        # The order matters: gradients and optimizer are of parameters that lie in the buffer.
        working = self._move_parameters()
        leaves, parts = tree or (None, ())
        self.gradients = Gradients(self._parameters, self._layout, leaves, parts)
        self.optimizer = create_optimizer(self._parameters)

        self._buffers = self._create_buffers(working, dtype)
        self._bits: Optional[RoundingBits] = None
        if dtype == torch.float16 and rounding == "stochastic":
            self._bits = self._create_bits(seed)
        self._target = Target(
            parameters=self._parameters,
            layout=self._layout,
            buffers=self._buffers,
            bits=self._bits,
            clip_norm=clip_norm,
            model=WholeModel(self._layout.names, stages, self._layout.device),
        )

        # Last: it may create a further optimizer, and scratch memory beside these buffers.
        self._update: Update = self.optimizer.create_update(self._target, create_optimizer)
        # Weights may have been rounded to float16: the module computes with what persists.
        self.refresh()

    def _move_parameters(self) -> torch.Tensor:
        """Make the parameters views of a flat buffer of their dtype; return the buffer."""
        compute = next(iter(self._parameters.values())).dtype
        working = self._layout.zeros(compute)
        # By `data`: the parameters stay the same objects, which the module and others hold.
        for parameter, view in zip(self._parameters.values(), self._layout.views(working)):
            view.copy_(parameter.data)
            parameter.data = view
        return working

    def _create_buffers(self, working: torch.Tensor, dtype: torch.dtype) -> Buffers:
        """Create what persists in `dtype`, around the `working` copy.

        The weights are the working copy itself where the dtypes are the same.
        """
        slots = {}
        for name, slot in self.optimizer.slots.items():
            slot_dtype = dtype if slot.half else torch.float32
            slots[name] = self._layout.zeros(slot_dtype, slot.initial)
        weights = working if dtype == working.dtype else working.to(dtype)
        return Buffers(self.gradients.flat, weights, working, slots)

    def _create_bits(self, seed: int) -> RoundingBits:
        """Create the random bits by which float16 weights and slots are rounded."""
        layout = self._layout
        return RoundingBits(layout.places, layout.length, seed, layout.device)

    def compile_update(self) -> str:
        """Let the update's passes run compiled, where the weights lie on a CPU.

        Returns:
            A line for the user that says whether they do.
        """
        self._update.run, note = compiled(self._buffers, self._bits is not None)
        return note

    @torch.no_grad()
    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """Prepare an update from the accumulated gradients, without waiting for a device.

        Args:
            divisor: float32 [], what makes a mean of the sum that lies in the gradients: the loss
                scale times the number of micro batches that were added, in all steps of the update.

        Returns:
            Whether all gradients of this process are finite, bool [].
        """
        return self._update.prepare(divisor)

    @torch.no_grad()
    def apply(self, index: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """Make the update that was prepared, once; on CUDA without waiting for the device.

        Args:
            index: of the update, from 0: selects the random bits of rounding, and is what the
                optimizer has counted before.
            lr: learning rate.
            finite: bool [], whether all stages and replicas have finite gradients: if not, nothing
                changes.
            measure: return norms.
        """
        return self._update.apply(index, lr, finite, measure)

    def update(
        self,
        index: int,
        lr: float,
        divisor: torch.Tensor,
        measure: bool,
    ) -> Tuple[torch.Tensor, Optional[Norms]]:
        """Prepare and make an update in which no other process takes part.

        Args:
            index: see `apply`.
            lr: see `apply`.
            divisor: see `prepare`.
            measure: see `apply`.

        Returns:
            `finite`, and norms if `measure`.
        """
        finite = self.prepare(divisor)
        return finite, self.apply(index, lr, finite, measure)

    def create_replica_update(self, optimizer: HasSlots, **arguments: Any) -> ReplicaUpdate:
        """Create a replica's part of the updates by another optimizer.

        Args:
            optimizer: of the same parameters.
            arguments: of ReplicaUpdate.
        """
        rules = Rules(optimizer, self._parameters, self._layout.device)
        return ReplicaUpdate(rules, self._target, **arguments)

    def not_finite(self) -> List[str]:
        """Return the names of the parameters whose gradient is not finite. Waits for the device.

        The gradients are those of the last step, after the exchange.
        """
        # One parameter after the other is slow on a GPU, but this only explains an update that
        # failed.
        names = []
        for name, view in zip(self._parameters, self.gradients.views):
            if not view.isfinite().all():
                names.append(name)
        return names

    def state_dict(
        self,
        flat: Optional[torch.Tensor] = None,
    ) -> Dict[str, Dict[str, torch.Tensor]]:
        """Return {"weights": {name: tensor}, slot: {name: tensor}, ...} on the CPU.

        Args:
            flat: weights to give instead of these, laid out as `self.flat` is.

        Returns:
            Tensors of the state's dtypes.
        """
        buffers = self.own_state()
        # Averaged weights are float32 in another buffer; files hold them as they hold weights.
        if flat is not None:
            buffers["weights"] = flat.to(self.flat.dtype)
        return {key: self.by_name(buffer) for key, buffer in buffers.items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load a state: exactly if the dtypes agree, else rounded to nearest.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: tensors are missing, unknown, or of another shape: the first is named. Slots
                are missing, or of another optimizer: all are named. Nothing is changed then.
        """
        buffers = self.own_state()
        kind = type(self.optimizer).__name__
        faults = [f"{key} is missing" for key in buffers if key not in state]
        # Keys that no optimizer has are other things of a checkpoint: the caller's.
        for key in all_slots():
            if key in state and key not in buffers:
                faults.append(f"{key} belongs to another optimizer than {kind}")
        if faults:
            raise ValueError("; ".join(faults))
        # All are checked before the first is changed.
        for key in buffers:
            self._check(state[key])
        for key, buffer in buffers.items():
            self._fill(buffer, state[key])
        self.refresh()

    def places(self) -> List[Tuple[int, nn.Parameter]]:
        """Return the first element of each parameter in a flat buffer, and the parameter."""
        places = []
        for name, parameter in self._parameters.items():
            first, _ = self._layout.places[name]
            places.append((first, parameter))
        return places

    @property
    def flat(self) -> torch.Tensor:
        """The persistent weights, [length]: all parameters in order, padded with zeros between."""
        return self._buffers.weights

    @contextlib.contextmanager
    def shown(self, flat: torch.Tensor) -> Iterator[None]:
        """Give the module other weights within a context, for evaluation.

        Args:
            flat: the weights, laid out as `self.flat` is.
        """
        working = self._buffers.working
        # A copy, since these may be the persistent weights themselves.
        trained = working.clone()
        try:
            working.copy_(flat)
            yield
        finally:
            working.copy_(trained)

    def own_state(self) -> Dict[str, torch.Tensor]:
        """Return all that an update changes by name: [length] each, laid out as `flat`.

        Call `refresh` after writing to it.
        """
        return {"weights": self._buffers.weights, **self._buffers.slots}

    def refresh(self) -> None:
        """Set the module's parameters to the persistent weights."""
        self._buffers.refresh()

    @torch.no_grad()
    def store(self, start: int, end: int, values: torch.Tensor, index: int) -> None:
        """Replace some elements of `flat`.

        Args:
            start: first element.
            end: behind the last one.
            values: float32; as float16, they are rounded by random bits of the update.
            index: of the update, from 0.
        """
        flat = self.flat
        if self._bits is None:
            flat[start:end].copy_(values)
        else:
            whole = flat.float()  # rounding keeps all values that float16 holds
            whole[start:end] = values
            keep = torch.ones((), dtype=torch.bool, device=flat.device)
            # Bits of their own ("mean"): those of the weights have served this update already.
            round_stochastically(whole, self._bits, index, "mean", out=flat, keep=keep)
        self.refresh()

    def replace(self, weights: Dict[str, torch.Tensor]) -> None:
        """Replace some parameters' weights, rounded to nearest; the others and the slots stay.

        Args:
            weights: by name.
        """
        self._fill(self.flat, weights)
        self.refresh()

    def by_name(self, flat: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Return the parts of a buffer, copied to the CPU.

        Args:
            flat: laid out as `self.flat` is.
        """
        # Copies even on a CPU: these are for files, and the buffers change with the next update.
        views = self._layout.views(flat)
        return {name: view.to("cpu", copy=True) for name, view in zip(self._parameters, views)}

    def own(self, tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Return a whole model's `tensors` without those of parameters of other processes."""
        # By what others have, not by what this process has: an unknown name is to stay, an error.
        return {name: tensor for name, tensor in tensors.items() if name not in self._elsewhere}

    def load_flat(self, flat: torch.Tensor, tensors: Dict[str, torch.Tensor]) -> None:
        """Fill a buffer.

        Args:
            flat: laid out as `self.flat` is.
            tensors: what `by_name` returned.

        Raises:
            ValueError: as by `load_state_dict`.
        """
        self._check(tensors)
        self._fill(flat, tensors)

    def _fill(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors into their parts of a buffer."""
        for name, view in zip(self._parameters, self._layout.views(flat)):
            if name in tensors:
                view.copy_(tensors[name])

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError if these are not a tensor for each parameter, in its shape."""
        # A dict and not a set: the first fault in the order of the model is the one to name.
        for name in {**self._parameters, **tensors}:
            if name not in tensors:
                raise ValueError(f"{name} is missing")
            if name not in self._parameters:
                raise ValueError(f"{name} is unknown")
            expected = list(self._parameters[name].shape)
            shape = list(tensors[name].shape)
            if expected != shape:
                raise ValueError(f"{name} is {shape}, the model's is {expected}")
