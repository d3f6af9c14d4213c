"""The interface of exchange methods, for engines, predictions and `exchange.method: auto`.

Needs no torch.

A method is a class in a file of its own, registered for the class of its section::

    @METHODS.implements(TopK)
    class Topk(Method): ...
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ClassVar,
    Dict,
    Generic,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Type,
    TypeVar,
)

from pydantic import ValidationError

from common.errors import ConfigError
from parallel.costs import Link
from parallel.evidence import MEASURED
from recipe.exchange import Auto, Exchange
from recipe.kinds import Registry
from recipe.section import Section, first_fault

if TYPE_CHECKING:
    import torch

    from parallel.groups import Group
    from parallel.processes import Processes
    from recipe.division import Batch

# Files of the methods, each of several: `auto` weighs those that it may take in this order, from the
# most faithful to the one that sends least.
_FILES = ("dense", "topk")
BYTES = Link(0.0, 1.0)  # on which a message takes as many seconds as it has bytes

SectionT = TypeVar("SectionT", bound=Exchange)


class Gradient(NamedTuple):
    """Sizes of the largest stage's gradient.

    elements: all of them.
    whole: those that every method sends whole.
    layers: parameters of which replicas that compress updates send a sketch.
    sums: partial sums that a replica sends in tree order, on average.
    """

    elements: int
    whole: int = 0
    layers: int = 0
    sums: float = 1.0


class ReplicaUpdate(Protocol):
    """A replica's part of an update: see optim.replica_update.ReplicaUpdate."""

    def __call__(
        self,
        residual: torch.Tensor,
        gradient: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        density: float,
    ) -> None:
        """Add the update that `gradient` makes to `residual`, float32 [length] each.

        Args:
            residual: of which a share, the `density`, is sent.
            gradient: sums over this replica's micro batches; it may be overwritten.
            divisor: float32 [], makes a mean of the sum over all replicas.
            finite: bool [], whether anything may change.
            density: from 0 to 1.
        """

    def state(self) -> Dict[str, torch.Tensor]:
        """Return the state for later steps: float32 [length] each."""


class Weights(Protocol):
    """The weights of a stage, as a method that moves them sees them."""

    @property
    def flat(self) -> torch.Tensor:
        """Return the weights, float16 or float32 [length]."""

    def own_state(self) -> Dict[str, torch.Tensor]:
        """Return all that an update changes by name, [length] each; to be written to."""

    def refresh(self) -> None:
        """Let the module compute with what was written to `own_state`."""

    def store(self, start: int, end: int, values: torch.Tensor, index: int) -> None:
        """Replace the weights from `start` up to `end`.

        Args:
            start: first place in `flat`.
            end: the place behind the last.
            values: float32 [end - start].
            index: of the update, whose random bits round them, the same on all replicas.
        """


class Setup(NamedTuple):
    """The engine's part of an exchange.

    batch: how the global batch is divided; None where gradients travel as they are.
    processes: all processes of the run.
    gradients: float32 [length], of this process.
    places: first element there of each parameter, and the parameter.
    collect: called with the index of each parameter whose gradient is ready, before it is sent; None
        where nothing is to be collected.
    group: the replicas of this stage; None for a single one. Under `exchange.delay` it is a further
        group, so that a thread may send beside what travels in `processes.replica_group`.
    steps_per_epoch: None for an engine that does not train.
    replica_update: adds an update to a residual; None where gradients are compressed.
    weights: for methods that move them; None where there are none.
    """

    batch: Optional[Batch]
    processes: Processes
    gradients: torch.Tensor
    places: Sequence[Tuple[int, torch.Tensor]]
    collect: Optional[Callable[[int], None]]
    group: Group
    steps_per_epoch: Optional[int]
    replica_update: Optional[ReplicaUpdate] = None
    weights: Optional[Weights] = None


class Running:
    """An exchange on one replica. Every replica calls `__call__` and `mean`.

    overlaps: sending can begin within the last backward pass, which the engine announces by `arm`.
    delays: the exchange implements `exchange.delay` itself.
    states_are_means: another number of replicas keeps the mean of their states, not the sum.
    """

    overlaps: bool = False
    delays: bool = False
    states_are_means: bool = False

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Replace this replica's gradient by what its optimizer takes.

        That is the sum over replicas, the same bits on all of them; where updates are compressed,
        the sum of updates, times `divisor`. A method whose replicas make updates alone leaves each
        a gradient of its own.

        Args:
            buffer: float32 [length], sums over this replica's micro batches times the loss scale.
            step: the update's first step, from 0.
            divisor: float32 [], what makes a mean of the result: the loss scale times the number of
                micro batches that were added, in all steps of the update; those of this replica
                alone where the method's `sums` is false.
        """
        raise NotImplementedError

    def arm(self) -> None:
        """Prepare to send within the backward pass that follows, the last one of the update."""

    def disarm(self) -> None:
        """Take back `arm`, also after the backward pass; every replica that has armed calls.

        Gradients that were sent within it are of no use afterwards.
        """

    def set_shares(self, shares: Sequence[range], sums: Sequence[torch.Tensor]) -> None:
        """Take note of the micro batches that replicas compute from the next step on.

        The engine calls this before the first step, and whenever shares change.

        Args:
            shares: micro batches of each replica.
            sums: float32 [length] each, of the largest subtrees in this replica's share
                (`recipe/shares.py`), where micro batches are added up in tree order; the first is
                the gradients.
        """

    def weights_replaced(self) -> None:
        """Take note that the run goes on from other weights, the same on all replicas."""

    def after_update(self, step: int) -> None:
        """Do what follows an update, which has been made.

        Args:
            step: the update's first step, from 0.
        """

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the mean over replicas of a buffer that is laid out as the weights.

        Args:
            flat: [length], float16 or float32.

        Returns:
            The mean, float32 [length]; None where all replicas have the same.
        """
        return None

    def state(self) -> Dict[str, torch.Tensor]:
        """Return the state of this replica for later steps: [length] each."""
        return {}

    def loaded(self) -> None:
        """Take note that the tensors of `state` have been written to."""

    def common_state(self) -> Dict[str, torch.Tensor]:
        """Return the state for later steps that a stage's replicas share: float32 [length] each."""
        return {}

    def close(self) -> None:
        """End threads, once other replicas need nothing more of this one."""


class Method(ABC, Generic[SectionT]):
    """An exchange method with the keys of a section.

    sparse: a replica sends a share of its gradient and keeps the rest as state.
    complete: each replica gets the sum of all gradients, to the rounding of what is sent.
    auto_keys: the keys that `auto` sets in a recipe, beside those that both methods have.
    """

    sparse: ClassVar[bool] = False
    complete: ClassVar[bool] = False
    auto_keys: ClassVar[Tuple[str, ...]] = ()

    def __init__(self, section: SectionT):
        self.section = section

    @property
    def exact(self) -> bool:
        """Return whether each replica gets the sum of all gradients to float32 rounding."""
        return False

    @property
    def name(self) -> str:
        """Return the method's name, with its pattern if it has several."""
        return self.section.variant

    @property
    def sums(self) -> bool:
        """Return whether the result is the sum over all replicas; see `Exchange.sums`."""
        return self.section.sums

    @property
    def work(self) -> str:
        """Return the computation that `auto` times for it: "select", "round" or none ("")."""
        rounds = self.section.sent_bits or self.section.sent != "float32"
        return "round" if rounds else ""

    def overrides(self, section: Exchange) -> List[str]:
        """Return the overrides that change a recipe with another `section` to this method.

        Raises:
            ConfigError: its keys do not go with those of `section`.
        """
        method = self.section.method
        taken = self.taken_by(section)
        # Only what differs from the section as it is when the method alone is changed.
        defaults = taken.defaults()
        keys: Dict[str, Any] = {"method": method}
        for key in self.auto_keys:
            value = getattr(taken, key)
            if value != getattr(section, key, defaults[key]):
                keys[key] = value
        # Keys that this method refuses go back to their defaults.
        keys.update(section.refused_by(method))
        return [f"exchange.{key}={str(value).lower()}" for key, value in keys.items()]

    def taken_by(self, section: Exchange) -> Exchange:
        """Return the section of this method with all keys that it shares with another `section`.

        Raises:
            ConfigError: they do not go together.
        """
        keys = {key: getattr(self.section, key) for key in self.auto_keys}
        try:
            return section.to(self.section.method, **keys)
        except ValidationError as error:
            _, words = first_fault(error, lambda *place: "")
            raise ConfigError(f"exchange.method {self.section.method}: {words}") from None

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """Return the forms of this method that are compared with others.

        Args:
            section: whose keys they take over where they have them.
        """
        return []

    def seconds(self, link: Link, replicas: int, gradient: Gradient) -> float:
        """Return the seconds on the network if every replica has one link, for float32 gradients.

        Args:
            link: of each replica.
            replicas: how many there are.
            gradient: its sizes.
        """
        return self.seconds_over([(replicas, link)], replicas, gradient, size=4)

    def bytes_sent(self, replicas: int, gradient: Gradient) -> float:
        """Return the bytes of payload that the busiest replica sends in an update.

        Args:
            replicas: how many there are.
            gradient: its sizes.
        """
        return self.seconds(BYTES, replicas, gradient)

    @abstractmethod
    def seconds_over(
        self,
        levels: Sequence[Tuple[int, Link]],
        replicas: int,
        gradient: Gradient,
        size: int,
    ) -> float:
        """Return the seconds on a network with several kinds of links.

        Args:
            levels: groups that meet, and their link, from the nearest to the farthest.
            replicas: how many there are on all levels.
            gradient: its sizes.
            size: bytes of a value.
        """

    def create(self, setup: Setup) -> Optional[Running]:
        """Create the exchange for a run. Every rank calls.

        Args:
            setup: the engine's part of it.

        Returns:
            The exchange; None where there is nothing to do.
        """
        return None


METHODS: Registry[Type[Method]] = Registry("an exchange method")


def of(section: Exchange) -> Method:
    """Return the method of a `section`; that of `auto` is dense until a run has measured."""
    if isinstance(section, Auto):
        section = section.to("dense")
    method = _methods().of(section)
    return method(section)


def variants(section: Exchange) -> List[Method]:
    """Return the forms of all methods, each with the keys of `section` that it has.

    They are in order, from the most faithful on.
    """
    forms = []
    for _, method in _in_order():
        forms += method.variants(section)
    return forms


def candidates(section: Exchange) -> List[Method]:
    """Return the methods that `auto` chooses from, from the most faithful on.

    They are the variants with the keys of `section`, and those of which a loss was measured.
    """
    methods: List[Method] = []
    for kind, method in _in_order():
        forms = method.variants(section)
        labels = {form.section.label for form in forms}
        methods += forms
        # A form whose loss is known counts also where the recipe's keys say another.
        for measured, _ in MEASURED:
            if type(measured) is kind and measured.label not in labels:
                methods.append(method(measured))
    return methods


def named(name: str) -> Method:
    """Return the method of that `name`, with the defaults of its keys."""
    # Sending nothing is no variant, since `auto` never takes it.
    methods = [of(Exchange(method="none")), *variants(Exchange(method="auto"))]
    return next(method for method in methods if method.name == name)


def _in_order() -> List[Tuple[Type[Section], Type[Method]]]:
    """Return the sections of all methods and these, from the most faithful on.

    The files of this package are in that order, those of users follow.
    """
    modules = [f"{__package__}.{file}" for file in _FILES]

    def place(registered: Tuple[Type[Section], Type[Method]]) -> int:
        """Return the place of the file that has a method."""
        _, method = registered
        module = method.__module__
        return modules.index(module) if module in modules else len(modules)

    # Not the order of registration: whoever imports one of these files registers its methods first.
    return sorted(_methods().items(), key=place)


def _methods() -> Registry[Type[Method]]:
    """Return METHODS once the methods of this package are registered."""
    # Only now, as the files of methods import this one.
    for file in _FILES:
        importlib.import_module(f"{__package__}.{file}")
    return METHODS
