"""Loss scaling: keeps small gradients of half-precision arithmetic out of the subnormal numbers."""

from __future__ import annotations

from typing import Dict, Mapping

import torch

_GROWTH_INTERVAL = 2000  # finite steps before a dynamic scale doubles, as torch.amp.GradScaler has it
_STATE = ("scale", "_finite_steps", "skipped", "skipped_in_row")


class LossScale:
    """The factor on the loss, kept on the device, static or dynamic, and a count of skipped steps.

    Source of the dynamic rule: Micikevicius et al., 1710.03740.
    """

    def __init__(self, scale: float, dynamic: bool, device: torch.device):
        self._dynamic = dynamic
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self._finite_steps = self.skipped = self.skipped_in_row = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, finite: torch.Tensor) -> None:
        """Counts a step. finite: bool [], on the device; nothing waits for it."""
        # Never in place: what was handed out, or loaded, keeps its value.
        self.skipped = self.skipped + ~finite
        self.skipped_in_row = torch.where(finite, 0, self.skipped_in_row + 1)
        if self._dynamic:
            self._finite_steps = torch.where(finite, self._finite_steps + 1, 0)
            grow = self._finite_steps == _GROWTH_INTERVAL
            self._finite_steps = torch.where(grow, 0, self._finite_steps)
            factor = torch.where(grow, 2.0, torch.where(finite, 1.0, 0.5))
            self.scale = (self.scale * factor).clamp_(2.0**-14, 2.0**24)

    def state(self) -> Dict[str, torch.Tensor]:
        """On the device."""
        return {name: getattr(self, name) for name in _STATE}

    def state_dict(self) -> Dict[str, torch.Tensor]:
        """On the CPU."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.state().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name in _STATE:
            setattr(self, name, state[name].to(self.scale.device, copy=True))
