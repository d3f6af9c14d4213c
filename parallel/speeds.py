"""Shares of a step's micro batches that follow the measured speeds of replicas. Needs no torch."""

from __future__ import annotations

import statistics
from typing import FrozenSet, List, Optional, Sequence, Tuple

from recipe.shares import by_speed

# With less gain, of a step's time, shares stay: noise would move them after every measurement.
_GAIN = 0.05
_SLOW = 1.25  # times the median of all replicas' seconds a micro batch
_NAMED = 8  # replicas whose shares are printed one by one


class Speeds:
    """The rule by which shares change.

    All ranks give it the same numbers, and get the same shares.
    """

    def __init__(self, least: int):
        """
        Args:
            least: micro batches that a replica computes in a step at least.
        """
        self._least = least
        self._slow: FrozenSet[int] = frozenset()  # replicas that the user was last told are slow

    def follow(
        self,
        shares: Sequence[range],
        seconds: Sequence[float],
    ) -> Tuple[Optional[List[range]], List[str]]:
        """Decide on the shares for the next steps.

        They change where a step is predicted to take 5 % less. A replica is named when it becomes
        slower than 1.25 times the median, and when it no longer is.

        Args:
            shares: micro batches of each replica in the steps that were measured.
            seconds: that each replica needs for a micro batch, above 0.

        Returns:
            The new shares, None where they stay, and lines for the user.
        """
        # Would other shares end a step noticeably sooner? All ranks have the same figures, and so
        # answer alike without a message.
        lines = self._changes(seconds)
        speeds = [1 / time for time in seconds]
        proposed = by_speed(shares[-1].stop, speeds, self._least)
        before = _step_seconds(shares, seconds)
        after = _step_seconds(proposed, seconds)
        if after > (1 - _GAIN) * before:
            return None, lines
        # They would: tell the user how many micro batches each replica gets.
        counts = [len(share) for share in proposed]
        if len(counts) <= _NAMED:
            listed = ", ".join(map(str, counts))
        else:
            listed = f"{min(counts)} to {max(counts)}"
        gain = f"{1 - after / before:.0%} less time"
        lines.append(f"micro batches of the replicas from here on: {listed}; {gain}")
        return proposed, lines

    def _changes(self, seconds: Sequence[float]) -> List[str]:
        """Return a line for each replica that has become slow, or no longer is."""
        # The lower one, so that of two replicas the slower can be told.
        median = statistics.median_low(seconds)
        slow = frozenset(replica for replica, time in enumerate(seconds) if time > _SLOW * median)
        lines = []
        for replica in sorted(slow ^ self._slow):
            change = "has become slow" if replica in slow else "is no longer slow"
            lines.append(
                f"replica {replica} {change}: {1e3 * seconds[replica]:.4g} ms a micro batch, "
                f"the median replica {1e3 * median:.4g} ms"
            )
        self._slow = slow
        return lines


def _step_seconds(shares: Sequence[range], seconds: Sequence[float]) -> float:
    """Return the seconds of a step, for which the slowest replica decides."""
    return max(len(share) * time for share, time in zip(shares, seconds))
