"""What training does not change: weights and running statistics of blocks that are not trained."""

from __future__ import annotations

from typing import Dict, Mapping, Set

import torch
from torch import nn

from engines import state


class Frozen:
    """The parameters and running statistics of a process's part that keep their values to the bit.

    They have no gradient, no optimizer and no message between replicas. Checkpoints contain them
    among all other weights, so whoever reads one need not know what was trained.

    modules: to be as in evaluation while others train: without dropout, by running statistics.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, torch.Tensor],
        modules: Mapping[str, nn.Module],
    ):
        """
        Args:
            parameters: by name, in the dtype that the model computes in.
            buffers: running statistics by name.
            modules: of these.
        """
        self._parameters = dict(parameters)
        self._buffers = dict(buffers)
        self.modules = modules
        # Float32: a working copy of half precision would lose bits of the weights it starts from.
        self._weights = {name: each.detach().float() for name, each in self._parameters.items()}

    @property
    def names(self) -> Set[str]:
        """The names of all of these tensors."""
        return {*self._parameters, *self._buffers}

    def live_state(self) -> Dict[str, torch.Tensor]:
        """Return the tensors as they are, by name; call `refresh` after writing to them."""
        return {**self._weights, **self._buffers}

    def refresh(self) -> None:
        """Set the module's parameters to the persistent weights."""
        with torch.no_grad():
            for name, weight in self._weights.items():
                self._parameters[name].copy_(weight)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take those of `tensors` that are of these names."""
        for name, tensor in self.live_state().items():
            if name in tensors:
                tensor.copy_(tensors[name])
        self.refresh()

    def add_to(self, saved: dict) -> None:
        """Add these tensors to the weights and buffers of an engine's state, and of its averages.

        Args:
            saved: the state, changed in place.
        """
        for part in (saved, *saved["averages"].values()):
            part["weights"].update(state.on_cpu(self._weights))
            part["buffers"].update(state.on_cpu(self._buffers))

    def load_from(self, saved: dict) -> None:
        """Load what `add_to` has added.

        Args:
            saved: the state of an engine, with weights and buffers.

        Raises:
            ValueError: a tensor is missing, or has another shape; names it.
        """
        # All are checked before the first is changed.
        stored = {**saved["weights"], **saved["buffers"]}
        for name, tensor in self.live_state().items():
            if name not in stored:
                raise ValueError(f"{name} is missing")
            state.check_shapes({name: stored[name]}, {name: tuple(tensor.shape)})
        self.load(stored)
