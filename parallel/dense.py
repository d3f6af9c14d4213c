"""Exchanges of whole gradients or weights, and none at all. Needs no torch until one is created."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from parallel import costs
from parallel.costs import Link
from parallel.exchange import METHODS, Gradient, Method, Running, Setup
from recipe import exchange
from recipe.exchange import Exchange


@METHODS.implements(exchange.Dense)
class Dense(Method):
    """All-reduce of float32 values, in the library's order or that of a tree (`parallel/reduce.py`)."""

    complete = True
    taken = ("bits",)

    @property
    def exact(self) -> bool:
        return not self.work

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        return [cls(section.to("dense", delay=0))]

    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        bits, width = self.section.sent_bits, size if self.section.sent == "float32" else 2
        sent = costs.quantized_bytes(gradient.elements, bits) if bits else float(gradient.elements * width)
        return costs.rings(levels, sent * (gradient.sums + 1) / 2)  # partial sums are sent, and one is gathered

    def create(self, setup: Setup) -> Optional[Running]:
        from parallel.reduce import QuantizedReduction, Reduction

        if self.section.sent_bits:
            return QuantizedReduction(setup, self.section.sent_bits)
        return None if setup.group is None else Reduction(setup, self.section)


@METHODS.implements(exchange.Half)
class Half(Dense):
    """A sum in float32 of values that travel in 16 bits: each replica sends P - 1 shares, then gathers as many sums."""

    taken = ()

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        if isinstance(section, exchange.Auto) and section.wire == "float32":
            return []
        given = isinstance(section, (exchange.Half, exchange.Auto))
        return [cls(section.to("half", delay=0) if given else Exchange(method="half"))]


@METHODS.implements(exchange.NoExchange)
class NoExchange(Method):
    """Nothing is sent, and replicas drift apart: for measuring what an exchange costs."""

    sums = False

    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        return 0.0


@METHODS.implements(exchange.Local)
class Local(Method):
    """All-reduce of the weights, in float32, once in `local_steps` updates; times are the mean over updates."""

    taken = ("local_steps", "bits")

    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        section = self.section
        elements = gradient.elements / section.fragments
        sent = costs.quantized_bytes(elements, section.bits) if section.bits else 4 * elements
        return section.fragments * costs.rings(levels, sent) / section.local_steps

    def create(self, setup: Setup) -> Running:
        from parallel.local_steps import LocalSteps

        return LocalSteps(setup, self.section)
