"""Averages of the weights over steps and epochs, with the running statistics that belong to them."""

from __future__ import annotations

import contextlib
from typing import Callable, Dict, Iterator, List, Sequence, Tuple

import torch

from engines import state
from engines.base import AVERAGES
from engines.listeners import StepListener
from optim.averaging import WeightAverage
from optim.weight_state import WeightState
from recipe.course import Update
from recipe.optimization import Average

STEP, EPOCH = AVERAGES


class Averages(StepListener):
    """The averages that a recipe asks for; none is also possible.

    What is averaged is the persistent weights in one tensor, and each running statistic.
    """

    def __init__(
        self,
        section: Average,
        weights: WeightState,
        buffers: Dict[str, torch.Tensor],
    ):
        """
        Args:
            section: which averages, and their decay.
            weights: of this process.
            buffers: running statistics by name; the tensors stay the same.
        """
        self._weights = weights
        self._buffers = buffers
        self._by_name: Dict[str, WeightAverage] = {}
        decays = {STEP: section.step_decay, EPOCH: section.epoch_decay}
        for name, decay in decays.items():
            if decay is not None:
                self._by_name[name] = WeightAverage(decay, self._sources())

    def applied(self, update: Update, finite: torch.Tensor) -> None:
        if STEP in self._by_name:
            # Where an update is left out the weights are as before, and must not count again.
            counts = finite.long() * update.steps
            self._by_name[STEP].add(self._sources(), counts=counts)

    def end_epoch(self) -> None:
        """Add the weights to the average over epochs, if there is one."""
        if EPOCH in self._by_name:
            self._by_name[EPOCH].add(self._sources())

    def filled(self) -> Tuple[str, ...]:
        """Return the names of the averages that hold something. Waits for the device."""
        return tuple(name for name, average in self._by_name.items() if average.count)

    def flat(self) -> Dict[str, torch.Tensor]:
        """Return each average of the weights, float32 [length], laid out as these, by name."""
        return {name: average.tensors[0] for name, average in self._by_name.items()}

    @contextlib.contextmanager
    def shown(self, name: str, mean: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Show the model an average, or the trained weights, within a context.

        Args:
            name: one of `filled()`, or "trained".
            mean: of a tensor laid out as the weights, over replicas; all of them call.
        """
        sources = self._by_name[name].tensors if name in self._by_name else self._sources()
        weights = mean(sources[0])
        # The module has the trained weights already.
        if weights is self._weights.flat:
            yield
            return
        # An average of weights goes with the average of their running statistics.
        trained = [buffer.clone() for buffer in self._buffers.values()]
        with self._weights.shown(weights):
            try:
                self._fill_buffers(sources[1:])
                yield
            finally:
                self._fill_buffers(trained)

    def means(self, mean: Callable[[torch.Tensor], torch.Tensor]) -> Dict[str, torch.Tensor]:
        """Return each average of the weights by name, with the mean over replicas.

        Args:
            mean: of a tensor laid out as the weights, over replicas; all of them call.
        """
        return {name: mean(flat) for name, flat in self.flat().items()}

    def state_dict(self, means: Dict[str, torch.Tensor]) -> dict:
        """Return the averages by name, on the CPU: weights, buffers and count of each.

        Args:
            means: of `means`.
        """
        saved = {}
        for name, average in self._by_name.items():
            # No mean of these: where weights have one, in local steps, recipes have no statistics.
            buffers = dict(zip(self._buffers, average.tensors[1:]))
            saved[name] = {
                "weights": self._weights.by_name(means[name]),
                "buffers": state.on_cpu(buffers),
                "count": average.count.to("cpu", copy=True),
            }
        return saved

    def load_state_dict(self, saved: dict) -> None:
        """Load what `state_dict` gave.

        Args:
            saved: the averages by name.

        Raises:
            ValueError: an average, or a tensor of it, is missing or does not fit.
        """
        for name, average in self._by_name.items():
            part = saved[name]
            weights, *statistics = average.tensors
            self._weights.load_flat(weights, part["weights"])
            state.load_buffers(dict(zip(self._buffers, statistics)), part["buffers"])
            average.count = part["count"].to(weights.device, copy=True)

    def live_state(self) -> Dict[str, torch.Tensor]:
        """Return all tensors that steps change, as they are."""
        tensors = {}
        for name, average in self._by_name.items():
            for number, tensor in enumerate([average.count, *average.tensors]):
                tensors[f"{name} {number}"] = tensor
        return tensors

    def names(self) -> Tuple[str, ...]:
        """Return the names of the averages that the recipe asks for."""
        return tuple(self._by_name)

    def _sources(self) -> List[torch.Tensor]:
        return [self._weights.flat, *self._buffers.values()]

    def _fill_buffers(self, values: Sequence[torch.Tensor]) -> None:
        for buffer, value in zip(self._buffers.values(), values):
            buffer.copy_(value)
