"""The interface of exchange methods, for engines, predictions and `exchange.method: auto`. Needs no torch.

A method is a class in a file of its own, registered for the class of its section::

    @METHODS.implements(TopK)
    class Topk(Method): ...
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from parallel.costs import Link
from parallel.evidence import MEASURED
from recipe.exchange import Auto, Exchange
from recipe.kinds import Registry

if TYPE_CHECKING:
    import torch
    from torch import distributed, nn

    from parallel.processes import Processes
    from recipe.division import Batch

# In the order in which `auto` weighs them: from the most faithful method to the one that sends least.
_FILES = ("dense", "topk")
BYTES = Link(0.0, 1.0)  # on which a message takes as many seconds as it has bytes


class Gradient(NamedTuple):
    """Sizes of the largest stage's gradient: all elements, those that every method sends whole, and parameters of
    which replicas that compress updates send a sketch. sums: of partial ones that a replica sends in tree order."""

    elements: int
    whole: int = 0
    layers: int = 0
    sums: float = 1.0


class Setup(NamedTuple):
    """What an engine gives to a method.

    gradients: float32 [length], of this process. places: each parameter and its first element there. collect: called
    with the index of each parameter whose gradient is ready, before it is sent. group: the replicas of this stage; None
    for a single one. steps_per_epoch: None for an engine that does not train. contribution: the
    `optim.replica_update.ReplicaUpdate` that adds an update to a residual; None where gradients are compressed.
    weights: `flat`, float16 or float32 [length]; `own_state()`, all that an update changes, [length] by name;
    `refresh()` after writing to it; `store(start, end, values, step)` of float32 values, the same bits on all replicas.
    """

    batch: Batch
    processes: Processes
    gradients: torch.Tensor
    places: Sequence[Tuple[int, nn.Parameter]]
    collect: Callable[[int], None]
    group: Optional[distributed.ProcessGroup]
    steps_per_epoch: Optional[int]
    contribution: Any = None
    weights: Any = None


class Running:
    """An exchange on one replica. Every replica calls `__call__` and `mean`.

    overlaps: sending can begin within the last backward pass, which `arm()` announces. delays: the exchange implements
    `exchange.delay` itself. states_are_means: another number of replicas keeps the mean of their states, not the sum.
    """

    overlaps: bool = False
    delays: bool = False
    states_are_means: bool = False

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Replace this replica's gradient by the sum over replicas, the same bits on all of them; where updates are
        compressed, by that of updates, times `divisor`.

        Args:
            buffer: float32 [length], sums over this replica's micro batches times the loss scale.
            step: number of the update, from 0.
            divisor: float32 [], the loss scale times the micro batches of all replicas.
        """
        raise NotImplementedError

    def divide(self, shares: Sequence[range], sums: Sequence[torch.Tensor]) -> None:
        """From the next step on replicas compute these shares of its micro batches; called before the first step.

        Args: sums: float32 [length] each, of the largest subtrees in this replica's share (`recipe/shares.py`), where
            micro batches are added up in tree order; the first is the gradients.
        """

    def after_update(self, step: int) -> None:
        """Called when update `step` has been made."""

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        """Mean over replicas of such a buffer, float32; None where all have the same."""
        return None

    def state(self) -> Dict[str, torch.Tensor]:
        """State of this replica for later steps: [length] each."""
        return {}

    def loaded(self) -> None:
        """Called when the tensors of `state` have been written to."""

    def common_state(self) -> Dict[str, torch.Tensor]:
        """State for later steps that all replicas of a stage share: float32 [length] each."""
        return {}

    def close(self) -> None:
        """End threads, once other replicas need nothing more of this one."""


class Method(ABC):
    """An exchange method with the keys of a section.

    sparse: a replica sends a share of its gradient and keeps the rest as state. sums: the result is the sum over all
    replicas. complete: each replica gets the sum of all gradients, to the rounding of what is sent. exact: to float32
    rounding. taken: the keys that `auto` sets in a recipe, beside those that both methods have.
    """

    sparse: ClassVar[bool] = False
    sums: ClassVar[bool] = True
    complete: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    taken: ClassVar[Tuple[str, ...]] = ()

    def __init__(self, section: Exchange):
        self.section = section

    @property
    def name(self) -> str:
        """The method, and its pattern if it has several."""
        return self.section.variant

    @property
    def work(self) -> str:
        """The computation that `auto` times for this method: "select", "round" or none ("")."""
        return "round" if self.section.sent_bits or self.section.sent != "float32" else ""

    def overrides(self, section: Exchange) -> List[str]:
        """Overrides that change a recipe with another section to this method."""
        method = self.section.method
        before, after = section.to(method), self.taken_by(section)
        changed = {key: value for key, value in after if value != getattr(before, key)}
        given = {"method": method, **changed, **section.refused_by(method)}
        return [f"exchange.{key}={str(value).lower()}" for key, value in given.items()]

    def taken_by(self, section: Exchange) -> Exchange:
        """The section of this method with all keys that it shares with another section."""
        return section.to(self.section.method, **{key: getattr(self.section, key) for key in self.taken})

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """The forms of this method that are compared with others, with the keys that another section has for them."""
        return []

    def seconds(self, link: Link, replicas: int, gradient: Gradient) -> float:
        """Seconds on the network, if every replica has such a link and gradients are float32."""
        return self.seconds_over([(replicas, link)], replicas, gradient, 4)

    def bytes_sent(self, replicas: int, gradient: Gradient) -> float:
        """Bytes of payload that the busiest replica sends in an update."""
        return self.seconds(BYTES, replicas, gradient)

    @abstractmethod
    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        """Seconds on a network with several kinds of links.

        Args: levels: groups that meet, and their link, from the nearest to the farthest. size: bytes of a value.
        """

    def create(self, setup: Setup) -> Optional[Running]:
        """The exchange for a run; None where there is nothing to do. Every rank calls."""
        return None


METHODS: Registry[Type[Method]] = Registry("an exchange method")


def of(section: Exchange) -> Method:
    """The method of a section; that of `auto` is dense until a run has measured."""
    return _methods().of(section.to("dense") if isinstance(section, Auto) else section)(section)


def variants(section: Exchange) -> List[Method]:
    """The forms of all methods, from the most faithful on, each with the section's keys for it."""
    return [variant for _, method in _methods().items() for variant in method.variants(section)]


def candidates(section: Exchange) -> List[Method]:
    """All that `auto` chooses from, from the most faithful on: variants with the section's keys, what was measured."""
    found = []
    for keys, method in _methods().items():
        own = method.variants(section)
        labels = {each.section.label for each in own}
        measured = [each for each, _ in MEASURED if type(each) is keys and each.label not in labels]
        found += [*own, *map(method, measured)]
    return found


def named(name: str) -> Method:
    """The method of that name, with the defaults of its keys."""
    found = [of(Exchange(method="none")), *variants(Exchange(method="auto"))]
    return next(method for method in found if method.name == name)


def _methods() -> Registry[Type[Method]]:
    """METHODS, with the methods of this package."""
    for file in _FILES:
        importlib.import_module(f"{__package__}.{file}")
    return METHODS
