"""The signals that ask a sweep to stop: the first lets the trials that run save and end, the second ends them."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Dict, Optional

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


class StopRequest:
    """Within it, SIGTERM, SIGINT and SIGUSR1 are noted. `asked`: to stop. `hurry`: a second time. `name`: of the first.

    SIGUSR1 never hurries: SLURM may send it to a sweep and its trials alike, as it does to runs.
    """

    def __init__(self) -> None:
        self.asked = self.hurry = False
        self.name = ""
        self._since = 0.0
        self._old: Dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        self._old = {number: signal.signal(number, self._note) for number in _NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if not self.asked:
            self.asked, self.name, self._since = True, signal.Signals(number).name, time.monotonic()
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            self.hurry = True
