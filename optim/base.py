"""The interface of an optimizer: parameter groups from its section, its slots, and the update that is made with it."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Set, Type

from torch import nn

from optim.optimizer_update import OptimizerUpdate, Target
from recipe.kinds import Registry
from recipe.optimization import Optimizer, Slot

OPTIMIZERS: Registry[Type[HasSlots]] = Registry("an optimizer")


class HasSlots:
    """Mixed into the torch optimizer that implements a section's class, before it.

    slots: by name, the tensors that the optimizer keeps in `state[parameter]`; `factory.create` sets the section's.
    numbers: keys of the section that are arguments of the optimizer.
    """

    slots: Mapping[str, Slot]
    numbers: Sequence[str] = ()

    @classmethod
    def of(cls, section: Any, groups: list) -> HasSlots:
        """An optimizer with the section's numbers for parameter groups that have `options`."""
        return cls(groups, lr=0.0, **{key: getattr(section, key) for key in cls.numbers})

    @classmethod
    def groups(
        cls, section: Any, parameters: Mapping[str, nn.Parameter], skipped: Set[str], hidden: Mapping[str, int]
    ) -> List[dict]:
        """Return the parameter groups: one of the skipped parameters, and one of all others; either may be empty.

        Args:
            section: of the recipe.
            parameters: by name.
            skipped: names of those that `skip` names.
            hidden: result of `factory.hidden_layers`, for optimizers that step matrices in another way.
        """
        return [
            {
                "params": [parameter for name, parameter in parameters.items() if (name in skipped) == skip],
                **cls.options(section, skip),
            }
            for skip in (False, True)
        ]

    @staticmethod
    def options(section: Any, skipped: bool) -> dict:
        """Options of the group of skipped parameters, or of the others."""
        return {"weight_decay": 0.0 if skipped else section.weight_decay}

    def at_step(self, step: int) -> None:
        """Set whatever else the optimizer counts before update `step`, from 0: from this number alone, so that nothing
        of it is saved and a resumed run has it exactly. Skipped steps count like all others."""

    def create_update(self, target: Target, create: Callable[[Dict[str, nn.Parameter]], HasSlots]) -> Any:
        """How WeightState makes an update. Args: create: of WeightState, for parameters elsewhere."""
        return OptimizerUpdate(target, create)


def all_slots() -> Dict[str, Slot]:
    """By name, the slots of every kind of optimizer."""
    return {name: slot for kind in Optimizer.kinds.values() for name, slot in kind.all_slots.items()}
