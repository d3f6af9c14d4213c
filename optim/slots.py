"""What an optimizer keeps for each parameter, and what keeps it between the steps."""

from __future__ import annotations

from types import MappingProxyType
from typing import Mapping, NamedTuple

import torch

# Of all optimizers here. A state is given with entries of others, and this tells them from what another optimizer kept.
SLOT_NAMES = ("momentum_buffer", "square_avg", "exp_avg", "exp_avg_sq")


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
