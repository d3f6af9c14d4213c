"""The interface of an optimizer: parameter groups from its section, its slots, and the update that is made with it."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Type

import torch
from torch import nn

from optim.optimizer_update import OptimizerUpdate
from recipe.kinds import Registry
from recipe.optimization import Optimizer, Slot

OPTIMIZERS: Registry[Type[HasSlots]] = Registry("an optimizer")


class HasSlots:
    """Mixed into the torch optimizer that implements a section's class, before it.

    slots: by name, the tensors that the optimizer keeps in `state[parameter]`.
    """

    slots: Mapping[str, Slot]

    @classmethod
    def of(cls, section: Any, groups: list) -> HasSlots:
        """An optimizer with the section's numbers for parameter groups that have `options`."""
        raise NotImplementedError

    @staticmethod
    def options(section: Any, skipped: bool) -> dict:
        """Options of the group of skipped parameters, or of the others."""
        return {"weight_decay": 0.0 if skipped else section.weight_decay}

    def at_step(self, step: int) -> None:
        """Set whatever else the optimizer counts before update `step`, from 0, from this number alone.

        So nothing of it is saved and a resumed run has it exactly. Steps that were skipped count like all others.
        """

    def replica_rules(self, parameters: Dict[str, nn.Parameter], device: torch.device) -> Any:
        """The Rules of ReplicaUpdate, for an optimizer whose section has `replica_update`."""
        raise NotImplementedError

    def create_update(
        self,
        parameters: Dict[str, nn.Parameter],
        create_optimizer: Callable[[Dict[str, nn.Parameter]], HasSlots],
        gradients: list,
        *shared: Any,
    ) -> Any:
        """How WeightState makes an update: arguments as of OptimizerUpdate."""
        return OptimizerUpdate(parameters, create_optimizer, gradients, *shared)


def all_slots() -> Dict[str, Slot]:
    """By name, the slots of every kind of optimizer."""
    return {name: slot for kind in Optimizer.kinds.values() for name, slot in kind.all_slots.items()}
