"""Signals to the launcher: the first asks the ranks to save and end, the second ends them at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Dict

_SAME_SECONDS = 0.5  # timeout(1) and some terminals deliver one signal twice


class Signals:
    """Handles SIGINT, SIGTERM, SIGUSR1 and SIGQUIT from its creation on.

    SIGUSR1 requests a stop, too, and never hurries: SLURM's --signal may send it to launcher and ranks alike. SIGQUIT
    hurries at once. `stopping`: a stop was requested. `hurry`: a second time.
    """

    def __init__(self):
        self.stopping = self.hurry = False
        self._since = 0.0
        self._ranks: Dict[int, subprocess.Popen] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT):
            signal.signal(number, self._receive)

    def watch(self, ranks: Dict[int, subprocess.Popen]) -> None:
        """From now on these ranks get the signals, also one that came before."""
        self._ranks = ranks
        self._pass_on()

    def _receive(self, number: int, frame) -> None:
        if number == signal.SIGQUIT:
            self.stopping = self.hurry = True
        elif not self.stopping:
            self.stopping, self._since = True, time.monotonic()
            name = signal.Signals(number).name
            text = f"{name}: the ranks finish their step, save and end; a second signal ends them at once\n"
            os.write(2, text.encode())
        elif number != signal.SIGUSR1 and time.monotonic() - self._since > _SAME_SECONDS:
            self.hurry = True
        else:
            return
        self._pass_on()

    def _pass_on(self) -> None:
        if self.hurry:
            kill(self._ranks, signal.SIGKILL)
        elif self.stopping:  # to the ranks alone: their workers would die of it
            for rank in self._ranks.values():
                rank.send_signal(signal.SIGUSR1)


def kill(ranks: Dict[int, subprocess.Popen], number: int) -> None:
    """Sends a signal to the ranks with all their children, also to children that a dead rank has left behind."""
    for rank in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, number)
