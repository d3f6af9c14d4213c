"""Exchanges of whole gradients or weights, and none at all. Needs no torch until one is created."""

from __future__ import annotations

from typing import ClassVar, List, Optional, Sequence, Tuple

from parallel import costs
from parallel.costs import Link
from parallel.exchange import METHODS, Gradient, Method, Running, Setup
from recipe import exchange
from recipe.exchange import Exchange


@METHODS.implements(exchange.Dense)
class Dense(Method[Exchange]):
    """All-reduce of float32 values, in the library's order or a tree's (`parallel/reduce.py`)."""

    complete = True
    auto_keys: ClassVar[Tuple[str, ...]] = ("bits",)

    @property
    def exact(self) -> bool:
        """Return whether nothing is rounded on the way."""
        return not self.work

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """Return dense with the keys of `section`, without delay."""
        return [cls(section.to("dense", delay=0))]

    def seconds_over(
        self,
        levels: Sequence[Tuple[int, Link]],
        replicas: int,
        gradient: Gradient,
        size: int,
    ) -> float:
        """Return the seconds of rings on all `levels` for a `gradient` with values of `size` bytes.

        See Method.
        """
        bits = self.section.sent_bits
        width = size if self.section.sent == "float32" else 2
        sent = float(gradient.elements * width)
        if bits:
            sent = costs.quantized_bytes(gradient.elements, bits)
        # One half of a ring's bytes are partial sums, the other half is the one sum, gathered.
        return costs.rings(levels, sent * (gradient.sums + 1) / 2)

    def create(self, setup: Setup) -> Optional[Running]:
        """Create the sum that the section asks for; None for one replica with nothing to round.

        See Method: `setup`.
        """
        # These load torch, which plans and predictions do without.
        from parallel.quantized import QuantizedReduction
        from parallel.reduce import Reduction

        if self.section.sent_bits:
            return QuantizedReduction(setup, self.section.sent_bits)
        if setup.group is None:
            return None
        return Reduction(setup, self.section)


@METHODS.implements(exchange.Half)
class Half(Dense):
    """A sum in float32 of values that travel in 16 bits.

    Each replica sends P - 1 shares, then gathers as many sums.
    """

    auto_keys = ()

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """Return half with the `wire` of a `section` that has one; none where that is float32."""
        if isinstance(section, exchange.Auto) and section.wire == "float32":
            return []
        if isinstance(section, (exchange.Half, exchange.Auto)):
            return [cls(section.to("half", delay=0))]
        return [cls(Exchange(method="half"))]


@METHODS.implements(exchange.NoExchange)
class NoExchange(Method[Exchange]):
    """Nothing is sent, and replicas drift apart: for measuring what an exchange costs."""

    def seconds_over(
        self,
        levels: Sequence[Tuple[int, Link]],
        replicas: int,
        gradient: Gradient,
        size: int,
    ) -> float:
        """Return 0, whatever the `levels`, `replicas`, `gradient` and `size`."""
        return 0.0


@METHODS.implements(exchange.Local)
class Local(Method[exchange.Local]):
    """All-reduce of the weights, in float32, once in `local_steps` updates.

    Times are the mean over updates.
    """

    auto_keys = ("local_steps", "bits")

    def seconds_over(
        self,
        levels: Sequence[Tuple[int, Link]],
        replicas: int,
        gradient: Gradient,
        size: int,
    ) -> float:
        """Return the seconds of one mean over all `levels`, divided by the updates between two.

        See Method.
        """
        section = self.section
        # Fragments take turns: so many smaller means in the same updates.
        elements = gradient.elements / section.fragments
        sent = 4 * elements
        if section.bits:
            sent = costs.quantized_bytes(elements, section.bits)
        return section.fragments * costs.rings(levels, sent) / section.local_steps

    def create(self, setup: Setup) -> Running:
        """Create local steps, also for one replica, which an outer optimizer moves.

        See Method: `setup`.
        """
        # It loads torch, which plans and predictions do without.
        from parallel.local_steps import LocalSteps

        return LocalSteps(setup, self.section)
