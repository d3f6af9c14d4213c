"""What is known of a trial: the record that the study keeps and the files show. Loads nothing."""

from __future__ import annotations

from typing import NamedTuple, Optional

from tools.sweeping.candidates import Parameters

COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING = "complete", "pruned", "impossible", "failed", "running"
STATES = (COMPLETE, PRUNED, IMPOSSIBLE, FAILED, RUNNING)


class Record(NamedTuple):
    """A trial as it stands in the study."""

    number: int
    state: str  # one of STATES
    parameters: Parameters
    value: Optional[float]  # of the metric; of one that is not complete at its last evaluation, if it had any
    epochs: Optional[float]
    seconds: Optional[float]  # of training
    reason: Optional[str]  # why it is not complete
