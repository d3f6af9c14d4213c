"""Exchanges of the largest values of gradients: Top-k, and gTop-k over a tree, a butterfly or owners.

Needs no torch until one is created.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, List, Sequence, Tuple

from parallel import costs
from parallel.costs import Link
from parallel.exchange import BYTES, METHODS, Gradient, Method, Running, Setup
from recipe.exchange import Auto, Exchange, GTopK, TopK

_COUNT = 4  # bytes of a number of entries


class Sparse(Method):
    """A replica sends k of its values with their indices; each round of the exchange is a message of so many."""

    sparse = True
    work = "select"
    taken = ("density",)

    @abstractmethod
    def rounds(self, replicas: int) -> int:
        """Messages one after the other until all replicas have the result."""

    def messages(self, link: Link, replicas: int, entries: int, wire: str) -> float:
        """Seconds until all replicas have the sum of vectors of so many entries."""
        return self.rounds(replicas) * link.message(costs.message_bytes(entries, wire))

    def entries(self, gradient: Gradient) -> int:
        """Values that a replica sends, after the warm-up of densities."""
        return max(1, round(self.section.density * (gradient.elements - gradient.whole)))

    def seconds_over(self, levels: Sequence[Tuple[int, Link]], replicas: int, gradient: Gradient, size: int) -> float:
        """Every message, and the rings of what is sent whole and of sketches, over the farthest links in use."""
        link = levels[-1][1]
        sketches = 0 if self.section.compress == "gradient" else 4 * self.section.sketch * gradient.layers
        rings = sum(costs.ring(link, replicas, size) for size in (4 * gradient.whole, sketches) if size)
        return rings + self.messages(link, replicas, self.entries(gradient), self.section.sent)

    def create(self, setup: Setup) -> Running:
        from parallel.sparse_exchange import SparseExchange

        return SparseExchange(setup, self.section)


@METHODS.implements(TopK)
class Topk(Sparse):
    """All replicas gather all vectors around a ring, P - 1 messages.

    Shi et al., 1901.04359, count log2 P latencies, those of another algorithm: gloo and NCCL send round a ring.
    """

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        return [cls(_section(section, "topk"))]

    def rounds(self, replicas: int) -> int:
        return replicas - 1


@METHODS.implements(GTopK)
class GTopk(Sparse):
    """Merges of two vectors at a time, or sums by owners: docs/exchange.md has the messages.

    Sources: tree: Shi et al., 1901.04359: 2 a log2 P + 4 k beta log2 P, with beta for each of an entry's two numbers;
    butterfly: Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication operations in MPICH.
    """

    taken = ("density", "pattern")

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        return [cls(_section(section, "gtopk", pattern=pattern)) for pattern in ("owners", "butterfly", "tree")]

    def rounds(self, replicas: int) -> int:
        ceiling = (replicas - 1).bit_length()
        if self.section.pattern == "butterfly":
            floor = replicas.bit_length() - 1
            return floor + 2 * (floor != ceiling)
        return 2 * ceiling if self.section.pattern == "tree" else replicas - 1 + 3 * ceiling

    def bytes_sent(self, replicas: int, gradient: Gradient) -> float:
        """Of a tree's messages half: its rounds go one way at a time."""
        whole = super().bytes_sent(replicas, gradient)
        if self.section.pattern != "tree":
            return whole
        return whole - self.messages(BYTES, replicas, self.entries(gradient), self.section.sent) / 2

    def messages(self, link: Link, replicas: int, entries: int, wire: str) -> float:
        if self.section.pattern != "owners" or replicas == 1:
            return super().messages(link, replicas, entries, wire)
        part = costs.message_bytes(-(-entries // replicas), wire)
        counts = (replicas - 1).bit_length() * link.message(_COUNT * replicas / 2)
        gathered = [costs.gathered(link, replicas, size) for size in (_COUNT * costs.BINS, part)]
        return counts + (replicas - 1) * link.message(part) + sum(gathered)


def _section(section: Exchange, method: str, **keys: Any) -> Exchange:
    """That of a sparse method after the warm-up of densities, with the keys of another section that it has, too."""
    if isinstance(section, Auto):
        keys["wire"] = section.sent
    elif not section.sparse:
        return Exchange(method=method, density=section.density, **keys)
    return section.to(method, delay=0, density_warmup=[], dense_steps=0, **keys)
