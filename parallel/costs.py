"""Seconds that an exchange of gradients takes on the network, predicted from what one message costs. Needs no torch.

A message of n bytes takes a + n b seconds: a is the latency, b the seconds per byte. Every replica has a link of its
own, and sends and receives at the same time. What processors do, to select, add and merge, is not in these figures.
"""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple

_FLOAT32, _HALF, _INDEX = 4, 2, 4  # bytes
_BYTES_OF_VALUE = {"float32": _FLOAT32, "float16": _HALF}


class Link(NamedTuple):
    """Of a replica to the others: seconds of a message however short, and those that each of its bytes adds."""

    latency: float
    seconds_per_byte: float

    def message(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency + size * self.seconds_per_byte


def message_bytes(entries: int, wire: str) -> int:
    """Bytes of a sparse vector of `entries` values, with their int32 indices, as `parallel/sparse.py` sends it.

    Args:
        wire: type of the values, float32 or float16; the latter come in pairs, behind a word for their exponent.
    """
    values = entries * _BYTES_OF_VALUE[wire]
    return entries * _INDEX + (values if wire == "float32" else -(-values // _INDEX) * _INDEX + _INDEX)


def dense(link: Link, replicas: int, elements: int) -> float:
    """Seconds of an all-reduce of float32 [elements] around a ring: 2 (P - 1) a + 2 (P - 1) / P m b.

    Source: Shi et al., 1901.04359.
    """
    return _ring(link, replicas, elements * _FLOAT32)


def half(link: Link, replicas: int, elements: int) -> float:
    """As `dense`, for 16 bits a value: each replica sends P - 1 shares and then gathers as many sums of shares."""
    return _ring(link, replicas, elements * _HALF)


def topk(link: Link, replicas: int, message: int) -> float:
    """Seconds in which all replicas gather all vectors of `message` bytes around a ring: (P - 1) (a + n b).

    Source: Shi et al., 1901.04359, who count log2 P latencies, those of another algorithm: gloo and NCCL send
    round a ring, P - 1 times.
    """
    return (replicas - 1) * link.message(message)


def gtopk_tree(link: Link, replicas: int, message: int) -> float:
    """Seconds up a tree to replica 0 and down again: 2 ceil(log2 P) (a + n b).

    Source: Shi et al., 1901.04359: 2 a log2 P + 4 k beta log2 P, with beta for each of an entry's two numbers.
    """
    return 2 * _rounds(replicas) * link.message(message)


def gtopk_butterfly(link: Link, replicas: int, message: int) -> float:
    """Seconds of floor(log2 P) rounds in which replicas swap in pairs, floor(log2 P) (a + n b).

    Where P is no power of two, two more: the replicas beyond it hand theirs in before and are told the result after.

    Source: Thakur, Rabenseifner and Gropp, 2005, Optimization of collective communication operations in MPICH:
    recursive doubling.
    """
    whole = replicas.bit_length() - 1
    return (whole + 2 * (replicas != 1 << whole)) * link.message(message)


SPARSE: Dict[str, Callable[[Link, int, int], float]] = {
    "topk": topk,
    "gtopk butterfly": gtopk_butterfly,
    "gtopk tree": gtopk_tree,
}


def _ring(link: Link, replicas: int, size: int) -> float:
    """2 (P - 1) messages, each a P-th of `size` bytes."""
    return 2 * (replicas - 1) * link.message(size / replicas)


def _rounds(replicas: int) -> int:
    """ceil(log2 P)."""
    return (replicas - 1).bit_length()
