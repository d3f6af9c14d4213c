"""Predicted seconds of messages on the links between replicas; needs no torch.

Every replica has a link of its own, and sends and receives at the same time. Computation is not in these figures.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

_INDEX = 4  # bytes
BLOCK = 256  # values that share a scale where few bits are sent
BINS = 16  # of the counts of magnitudes by which owners find the largest sums


class Link(NamedTuple):
    """A message of n bytes takes `latency` + n `seconds_per_byte` seconds."""

    latency: float
    seconds_per_byte: float

    def message(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency + size * self.seconds_per_byte


def quantized_bytes(values: float, bits: int) -> float:
    """Bytes of so many values of 8 or 4 bits, with a float32 scale for each block."""
    return -(-values // BLOCK) * (4 + BLOCK * bits // 8)


def message_bytes(entries: int, wire: str) -> int:
    """Bytes of a sparse vector of `entries` values and their int32 indices, as `parallel/messages.py` packs it.

    Args: wire: type of the values: float32; float16, in pairs and with a word for their exponent; int8 or int4.
    """
    if wire.startswith("int"):
        return entries * _INDEX + int(quantized_bytes(entries, int(wire[3:])))
    return entries * _INDEX + (4 * entries if wire == "float32" else 4 + -(-entries // 2) * 4)


def ring(link: Link, replicas: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes around a ring, 2 (P - 1) messages of a P-th each.

    Source: Shi et al., 1901.04359: 2 (P - 1) a + 2 (P - 1) / P m b.
    """
    return 2 * (replicas - 1) * link.message(size / replicas)


def gathered(link: Link, replicas: int, size: float) -> float:
    """Seconds until all replicas have what each sends, of `size` bytes, by `bruck.all_gather`."""
    return (replicas - 1).bit_length() * link.latency + (replicas - 1) * size * link.seconds_per_byte


def rings(levels: Sequence[Tuple[int, Link]], size: float) -> float:
    """Seconds of an all-reduce of `size` bytes over several kinds of links, each joining so many groups.

    Each level reduces and scatters among its groups, so that the next, farther one carries a share; then they gather.
    """
    seconds = 0.0
    for count, link in levels:
        seconds += ring(link, count, size)
        size /= count
    return seconds
