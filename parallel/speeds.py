"""Shares of a step's micro batches that follow the measured speeds of replicas. Needs no torch."""

from __future__ import annotations

import statistics
from typing import FrozenSet, List, Optional, Sequence, Tuple

from recipe.shares import divide

_GAIN = 0.05  # of a step's time, below which shares stay: else noise would move them after every measurement
_SLOW = 1.25  # times the median of all replicas' seconds a micro batch
_NAMED = 8  # replicas whose shares are printed one by one


class Speeds:
    """The rule by which shares change. All ranks give it the same numbers, and get the same shares."""

    def __init__(self, least: int):
        """Args: least: micro batches of a replica in a step."""
        self._least = least
        self._slow: FrozenSet[int] = frozenset()

    def follow(self, shares: Sequence[range], seconds: Sequence[float]) -> Tuple[Optional[List[range]], List[str]]:
        """The shares for the next steps, None where they stay, and lines for the user.

        They change where a step is predicted to take 5 % less. A replica is named when it becomes slower than 1.25
        times the median, and when it no longer is.

        Args: seconds: that each replica needs for a micro batch, above 0.
        """
        lines: List[str] = []
        middle = statistics.median_low(seconds)
        slow = frozenset(replica for replica, each in enumerate(seconds) if each > _SLOW * middle)
        for replica in sorted(slow ^ self._slow):
            what = "has become slow" if replica in slow else "is no longer slow"
            times = f"{1e3 * seconds[replica]:.4g} ms a micro batch, the median replica {1e3 * middle:.4g} ms"
            lines.append(f"replica {replica} {what}: {times}")
        self._slow = slow
        found = divide(shares[-1].stop, [1 / each for each in seconds], self._least)
        before, after = (max(len(share) * each for share, each in zip(all_, seconds)) for all_ in (shares, found))
        if after > (1 - _GAIN) * before:
            return None, lines
        counts = [len(share) for share in found]
        each = ", ".join(map(str, counts)) if len(counts) <= _NAMED else f"{min(counts)} to {max(counts)}"
        lines.append(f"micro batches of the replicas from here on: {each}; {1 - after / before:.0%} less time")
        return found, lines
