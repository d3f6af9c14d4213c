"""Counter-based randomness: every draw of a run is a pure function of its purpose.

A draw is named by integers and strings ("augment", seed, epoch, sample). The name is hashed to a
key, which integer mixing expands. Stages, replicas, workers, recomputation and resume therefore
draw the same numbers without sharing any state. The mixers use only operators, so they serve Python
integers, NumPy arrays and torch tensors.
"""

import hashlib
from typing import Any, Union

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF


def key(*words: Union[int, str]) -> int:
    """Return the 64-bit key of a draw named by `words`, e.g. key("cutmix", seed, step, number).

    It is a hash by BLAKE2b. ("ab", "c") and ("a", "bc") differ, as do 1 and "1".
    """
    # The type keeps 1 and "1" apart; ASCII's unit separator is in none of our words.
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix32(x: Any) -> Any:
    """Map 32-bit integers to others, one to one and elementwise.

    Source: `lowbias32` of Wellons, "Prospecting for Hash Functions" (2018).

    Args:
        x: in [0, 2**32), an int, or an array or tensor of (u)int64, of whose products only the low
            32 bits count.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def bits32(draw: int, counter: Any) -> Any:
    """Return 32 random bits for each counter, elementwise as `mix32`.

    Args:
        draw: 64-bit key of the draw.
        counter: in [0, 2**32).
    """
    low = draw & MASK32
    high = draw >> 32
    # Two rounds of mixing: by one, two draws would be permutations of each other.
    return mix32((mix32(counter ^ low) + high) & MASK32)


class Stream:
    """Numbers in sequence from one key, for plain Python code: SplitMix64 (Steele, Lea and Flood,
    OOPSLA 2014).
    """

    def __init__(self, draw: int):
        self._state = draw

    def bits(self) -> int:
        """Return the next 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & MASK64
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
        return z ^ (z >> 31)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a float in [low, high), 53 bits fine; rounding may give `high` where `low` is not
        0.
        """
        unit = (self.bits() >> 11) * 2.0**-53
        return low + (high - low) * unit

    def integer(self, stop: int) -> int:
        """Return an integer in [0, stop); its bias is below stop / 2**64."""
        return (self.bits() * stop) >> 64
