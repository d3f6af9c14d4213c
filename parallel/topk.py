"""Exchanges of gradients' largest values: Top-k, and gTop-k by tree, butterfly or owners.

Needs no torch until one is created.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, List, Sequence, Tuple, Type, TypeVar

from parallel import costs
from parallel.costs import Link
from parallel.exchange import BYTES, METHODS, Gradient, Method, Running, Setup
from recipe import exchange
from recipe.exchange import Auto, Exchange, GTopK, TopK

_COUNT = 4  # bytes of a number of entries

SparseT = TypeVar("SparseT", bound=exchange.Sparse)


class Sparse(Method[SparseT]):
    """A replica sends k of its values with their indices.

    Each round of the exchange is a message of so many.
    """

    sparse = True
    work = "select"
    auto_keys: ClassVar[Tuple[str, ...]] = ("density",)

    @abstractmethod
    def rounds(self, replicas: int) -> int:
        """Return the messages, one after the other, until all `replicas` have the result."""

    def messages(self, link: Link, replicas: int, entries: int, wire: str) -> float:
        """Return the seconds until all replicas have the sum of sparse vectors.

        Args:
            link: of each replica.
            replicas: how many there are.
            entries: of each vector.
            wire: type of the values that travel, as in `costs.message_bytes`.
        """
        return self.rounds(replicas) * link.message(costs.message_bytes(entries, wire))

    def entries(self, gradient: Gradient) -> int:
        """Return the values of a `gradient` that a replica sends after the warm-up of densities."""
        sparse = gradient.elements - gradient.whole
        return max(1, round(self.section.density * sparse))

    def seconds_over(
        self,
        levels: Sequence[Tuple[int, Link]],
        replicas: int,
        gradient: Gradient,
        size: int,
    ) -> float:
        """Return the seconds of all messages over the farthest link of `levels`; see Method.

        Beside the sparse vectors rings carry what is sent whole, and sketches.
        """
        # Any replica may send to any other one, so that the farthest link counts.
        _, link = levels[-1]
        seconds = 0.0
        if gradient.whole:
            seconds += costs.ring(link, replicas, 4 * gradient.whole)
        if self.section.compress != "gradient" and gradient.layers:
            seconds += costs.ring(link, replicas, 4 * self.section.sketch * gradient.layers)
        entries = self.entries(gradient)
        return seconds + self.messages(link, replicas, entries, self.section.sent)

    def create(self, setup: Setup) -> Running:
        """Create the exchange for a run. See Method: `setup`."""
        # It loads torch, which plans and predictions do without.
        from parallel.sparse_exchange import SparseExchange

        return SparseExchange(setup, self.section)


@METHODS.implements(TopK)
class Topk(Sparse[TopK]):
    """All replicas gather all vectors around a ring, P - 1 messages.

    Shi et al., 1901.04359, count log2 P latencies, those of another algorithm: gloo and NCCL send
    round a ring.
    """

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """Return Top-k with the keys of `section`."""
        return [cls(_section(TopK, section))]

    def rounds(self, replicas: int) -> int:
        """Return the messages of a ring of so many `replicas`."""
        return replicas - 1


@METHODS.implements(GTopK)
class GTopk(Sparse[GTopK]):
    """Merges of two vectors at a time, or sums by owners: docs/exchange.md has the messages.

    Sources: tree: Shi et al., 1901.04359: 2 a log2 P + 4 k beta log2 P, with beta for each of an
    entry's two numbers;
    butterfly: Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication
    operations in MPICH.
    """

    auto_keys = ("density", "pattern")

    @classmethod
    def variants(cls, section: Exchange) -> List[Method]:
        """Return each pattern with the other keys of `section`."""
        patterns = ("owners", "butterfly", "tree")
        return [cls(_section(GTopK, section, pattern=pattern)) for pattern in patterns]

    def rounds(self, replicas: int) -> int:
        """Return the messages of the pattern for so many `replicas`, one after the other."""
        ceiling = (replicas - 1).bit_length()
        if self.section.pattern == "butterfly":
            floor = replicas.bit_length() - 1
            # Where P is no power of two there is a round before and one after.
            return floor + 2 * (floor != ceiling)
        if self.section.pattern == "tree":
            return 2 * ceiling
        return replicas - 1 + 3 * ceiling

    def bytes_sent(self, replicas: int, gradient: Gradient) -> float:
        """Return the bytes that a replica sends of a `gradient`; see Method.

        Of a tree's messages half count, as its rounds go one way at a time.
        """
        whole = super().bytes_sent(replicas, gradient)
        if self.section.pattern != "tree":
            return whole
        entries = self.entries(gradient)
        return whole - self.messages(BYTES, replicas, entries, self.section.sent) / 2

    def messages(self, link: Link, replicas: int, entries: int, wire: str) -> float:
        """Return the seconds of all messages. See Sparse: `link`, `replicas`, `entries`, `wire`."""
        if self.section.pattern != "owners" or replicas == 1:
            return super().messages(link, replicas, entries, wire)
        rounds = (replicas - 1).bit_length()
        part = costs.message_bytes(-(-entries // replicas), wire)
        # How many entries go to each owner, and the entries; then histograms of the sums, and the
        # largest sums.
        counts = rounds * link.message(_COUNT * replicas / 2)
        sent = (replicas - 1) * link.message(part)
        histograms = costs.gathered(link, replicas, _COUNT * costs.BINS)
        result = costs.gathered(link, replicas, part)
        return counts + sent + (histograms + result)


def _section(kind: Type[SparseT], section: Exchange, **keys: Any) -> SparseT:
    """Return a sparse method's section after the warm-up of densities.

    Args:
        kind: of the result.
        section: of any method: its keys that the other has, too, are kept.
        keys: of the result.
    """
    if isinstance(section, Auto):
        keys["wire"] = section.sent
    elif not section.sparse:
        return kind(density=section.density, **keys)
    method = kind.default_name()
    result = section.to(method, delay=0, density_warmup=[], dense_steps=0, **keys)
    assert isinstance(result, kind), "a method's name stands for its class"
    return result
