"""Predicted seconds of messages on the links between replicas; needs no torch.

Every replica has a link of its own, and sends and receives at the same time. Computation is not in
these figures.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence, Tuple

BLOCK = 256  # values that share a scale where few bits are sent
BINS = 16  # of the counts of magnitudes by which owners find the largest sums
_INDEX = 4  # bytes of an index, int32
_SCALE = 4  # bytes of a block's scale, float32


class Link(NamedTuple):
    """A message of n bytes takes `latency` + n `seconds_per_byte` seconds."""

    latency: float
    seconds_per_byte: float

    def message(self, size: float) -> float:
        """Return the seconds of one message of `size` bytes."""
        return self.latency + size * self.seconds_per_byte


def quantized_bytes(values: float, bits: int) -> float:
    """Return the bytes of quantized values, with a float32 scale for each block.

    Args:
        values: how many there are.
        bits: of a value, 8 or 4.
    """
    # The last block is sent whole, however few of its values count.
    blocks = -(-values // BLOCK)
    return blocks * (_SCALE + BLOCK * bits // 8)


def message_bytes(entries: int, wire: str) -> int:
    """Return the bytes of a sparse vector, as `parallel/messages.py` packs it.

    Args:
        entries: values with an int32 index each.
        wire: type of the values: float32; float16, in pairs and with a word for their exponent;
            int8 or int4.
    """
    indices = entries * _INDEX
    if wire.startswith("int"):
        bits = int(wire[3:])
        return indices + int(quantized_bytes(entries, bits))
    if wire == "float32":
        return indices + 4 * entries
    # float16: whole words of 32 bits, and one more for the exponent.
    pairs = -(-entries // 2)
    return indices + 4 + 4 * pairs


def ring(link: Link, replicas: int, size: float) -> float:
    """Return the seconds of an all-reduce around a ring, 2 (P - 1) messages of a P-th each.

    Args:
        link: of each replica.
        replicas: P.
        size: bytes that are reduced.

    Source: Shi et al., 1901.04359: 2 (P - 1) a + 2 (P - 1) / P m b.
    """
    return 2 * (replicas - 1) * link.message(size / replicas)


def gathered(link: Link, replicas: int, size: float) -> float:
    """Return the seconds until all replicas have what each sends by `bruck.all_gather`.

    Args:
        link: of each replica.
        replicas: how many there are.
        size: bytes that each sends.
    """
    rounds = (replicas - 1).bit_length()
    return rounds * link.latency + (replicas - 1) * size * link.seconds_per_byte


def rings(levels: Sequence[Tuple[int, Link]], size: float) -> float:
    """Return the seconds of an all-reduce over several kinds of links.

    Each level reduces and scatters among its groups, so that the next, farther one carries a share;
    then they gather.

    Args:
        levels: groups that a link joins, and the link, from the nearest to the farthest.
        size: bytes that are reduced.
    """
    seconds = 0.0
    for count, link in levels:
        seconds += ring(link, count, size)
        size /= count
    return seconds
