"""Loss scaling: keeps small gradients of half-precision arithmetic out of the subnormal numbers."""

from __future__ import annotations

from typing import Dict, Mapping

import torch

# Finite updates before a dynamic scale doubles, as in torch.amp.GradScaler.
_GROWTH_INTERVAL = 2000
# Bounds of a dynamic scale. They keep a run whose updates all fail, or none, from 0 and infinity.
_SMALLEST = 2.0**-14
_LARGEST = 2.0**24
_STATE = ("scale", "_finite_steps", "skipped", "skipped_in_row")


class LossScale:
    """The factor on the loss, static or dynamic, and a count of skipped updates; on the device.

    Source of the dynamic rule: Micikevicius et al., 1710.03740.

    scale: float32 [].
    skipped, skipped_in_row: int64 [], skipped updates of the run, and the last ones without a break.
    """

    def __init__(self, scale: float, dynamic: bool, device: torch.device):
        """
        Args:
            scale: the first.
            dynamic: halve the scale where an update is not finite, double it after 2000 that are.
            device: of the state.
        """
        self._dynamic = dynamic
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        # One tensor for all three: none is ever written to, see `update`.
        self._finite_steps = zero
        self.skipped = zero
        self.skipped_in_row = zero

    def update(self, finite: torch.Tensor) -> None:
        """Count an update, without waiting for the device.

        Args:
            finite: bool [], whether its gradients were finite.
        """
        # Never in place: a tensor that was handed out, or loaded, keeps its value.
        self.skipped = self.skipped + ~finite
        self.skipped_in_row = torch.where(finite, 0, self.skipped_in_row + 1)
        if self._dynamic:
            steps = torch.where(finite, self._finite_steps + 1, 0)
            grow = steps == _GROWTH_INTERVAL
            self._finite_steps = torch.where(grow, 0, steps)
            factor = torch.where(finite, 1.0, 0.5)
            factor = torch.where(grow, 2.0, factor)
            self.scale = (self.scale * factor).clamp_(_SMALLEST, _LARGEST)

    def state(self) -> Dict[str, torch.Tensor]:
        """Return all that persists by name, on the device."""
        return {name: getattr(self, name) for name in _STATE}

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """Return all that persists by name, on the CPU."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.state().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the `state` that `state_dict` returned."""
        for name in _STATE:
            setattr(self, name, state[name].to(self.scale.device, copy=True))
