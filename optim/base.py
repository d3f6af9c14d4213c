"""The interface of an optimizer: parameter groups from its section, its slots, and its update."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Set, Type

import torch
from torch import nn

from optim.layout import Run
from optim.norms import Norms
from optim.optimizer_update import OptimizerUpdate, Target
from recipe import optimization
from recipe.kinds import Registry
from recipe.optimization import Slot

OPTIMIZERS: Registry[Type[HasSlots]] = Registry("an optimizer")


class Update(Protocol):
    """Makes updates of a `Target`: see `WeightState.prepare` and `WeightState.apply`.

    run: runs its passes; may be replaced.
    """

    run: Run

    def prepare(self, divisor: torch.Tensor) -> torch.Tensor:
        """Prepare an update, and return whether all gradients are finite: bool [].

        Args:
            divisor: float32 [], of the gradients. It is kept, or their buffer is divided at once.
        """

    def apply(self, index: int, lr: float, finite: torch.Tensor, measure: bool) -> Optional[Norms]:
        """Make the update that was prepared.

        Args:
            index: of the update, from 0.
            lr: learning rate.
            finite: bool [], whether anything may change.
            measure: return norms.
        """


class HasSlots(torch.optim.Optimizer):
    """Base of our optimizers: keys of a recipe, and slots, for a class of torch or timm.

    A subclass names it first, and then the library's class, whose `step` it keeps.

    slots: by name, the tensors that the optimizer keeps in `state[parameter]`; `factory.create`
        sets the section's.
    numbers: keys of the section that are arguments of the optimizer.
    """

    slots: Mapping[str, Slot]
    numbers: Sequence[str] = ()

    @classmethod
    def of(cls, section: Any, groups: List[Dict[str, Any]]) -> HasSlots:
        """Return an optimizer with the section's numbers.

        Args:
            section: of the recipe.
            groups: parameter groups with their `options`.
        """
        # The library's constructor takes them, but that of torch's base class, which types know,
        # takes other arguments.
        create: Callable[..., HasSlots] = cls
        return create(groups, lr=0.0, **{key: getattr(section, key) for key in cls.numbers})

    @classmethod
    def groups(
        cls,
        section: Any,
        parameters: Mapping[str, nn.Parameter],
        skipped: Set[str],
        hidden: Mapping[str, int],
    ) -> List[Dict[str, Any]]:
        """Return two parameter groups: all others, and the skipped ones; either may be empty.

        Args:
            section: of the recipe.
            parameters: by name.
            skipped: names of those that `skip` names.
            hidden: result of `factory.hidden_layers`, for optimizers that step matrices in another
                way.
        """
        usual = []
        exempt = []
        for name, parameter in parameters.items():
            if name in skipped:
                exempt.append(parameter)
            else:
                usual.append(parameter)
        return [
            {"params": usual, **cls.options(section, False)},
            {"params": exempt, **cls.options(section, True)},
        ]

    @staticmethod
    def options(section: Any, skipped: bool) -> Dict[str, Any]:
        """Return the options of the group of skipped parameters, or of the others.

        Args:
            section: of the recipe.
            skipped: which of them.
        """
        return {"weight_decay": 0.0 if skipped else section.weight_decay}

    def at_step(self, index: int) -> None:
        """Set all that the optimizer counts before its next step.

        It follows from the index alone, so nothing of it is saved, and a resumed run has it
        exactly. Skipped updates count like all others.

        Args:
            index: of the update, from 0.
        """

    def create_update(
        self,
        target: Target,
        create: Callable[[Dict[str, nn.Parameter]], HasSlots],
    ) -> Update:
        """Return the update that a WeightState makes with this optimizer.

        Args:
            target: what the update changes.
            create: creates such an optimizer for parameters elsewhere.
        """
        return OptimizerUpdate(target, create)


def all_slots() -> Dict[str, Slot]:
    """Return the slots of every kind of optimizer by name."""
    slots: Dict[str, Slot] = {}
    for kind in optimization.Optimizer.kinds.values():
        assert issubclass(kind, optimization.Optimizer)  # only its subclasses register there
        slots.update(kind.all_slots)
    return slots
