"""Heartbeats between ranks, which notice the end of another rank whatever this one waits for."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Optional

import torch
import torch.distributed as dist

from parallel import ending, groups
from parallel.joining import RENDEZVOUS_SECONDS
from parallel.topology import Topology

if TYPE_CHECKING:
    from parallel.elastic import Elastic

_HEARTBEAT_SECONDS = 5.0
_ALIVE = 1
_DONE = 0


class Watch:
    """Ends this process at once when another is gone, whatever this one waits for.

    One thread sends a heartbeat to the rank after this one every few seconds, another listens to
    the rank before it. If that one dies, the connection breaks; if it is stopped or hangs, or its
    host loses power, the heartbeats end. This rank then exits too, so the failure propagates to all
    ranks. NCCL would wait for ever.
    """

    def __init__(self, topology: Topology, silence: float, elastic: Optional[Elastic]):
        """Begin to watch; every rank must call.

        Args:
            topology: of this process.
            silence: seconds without a heartbeat after which a rank counts as lost.
            elastic: what then ends this generation of processes; None ends the process.
        """
        self._topology = topology
        self._silence = silence
        self._elastic = elastic
        # A group of its own: its messages must not wait behind those of the computation.
        timeout = timedelta(seconds=RENDEZVOUS_SECONDS)
        self._group = groups.new_group(timeout=timeout, backend="gloo")
        self._before = (topology.rank - 1) % topology.world
        self._after = (topology.rank + 1) % topology.world
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._speak, name="watch", daemon=True),
            threading.Thread(target=self._listen, name="watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End the watch without a fault; every rank must call."""
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _speak(self) -> None:
        """Send heartbeats to the rank after this one."""
        # Four heartbeats in the silence that is allowed: one may be late on a busy host.
        pause = min(_HEARTBEAT_SECONDS, self._silence / 4)
        # The receiver is gone, which this rank learns by the one before it, or this generation is,
        # with its groups.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._done.wait(pause):
                dist.send(torch.tensor([_ALIVE]), self._after, group=self._group)
            dist.send(torch.tensor([_DONE]), self._after, group=self._group)

    def _listen(self) -> None:
        """Wait for the last heartbeat of the rank before this one, or for its end."""
        # The last message of a rank that ends without a fault is another.
        heartbeat = torch.tensor([_ALIVE])
        limit = timedelta(seconds=self._silence)
        since = time.monotonic()
        try:
            while heartbeat.item() == _ALIVE:
                since = time.monotonic()
                coming = dist.irecv(heartbeat, self._before, group=self._group)
                groups.begun(coming).wait(limit)
        except RuntimeError:
            self._lose(waited=time.monotonic() - since)

    def _lose(self, waited: float) -> None:
        """End this generation or this process: the rank before it is gone, or silent.

        Args:
            waited: seconds since its last heartbeat.
        """
        if self._elastic is not None:
            self._elastic.lost()
            return
        before = f"{self._topology.describe()}: rank {self._before}"
        # An error well before the time limit is a broken connection.
        if waited > 0.9 * self._silence:
            ending.leave(
                f"{before} has said nothing for {self._silence:g} s: "
                "it is stopped or hangs, or its host is gone; leaving"
            )
        ending.leave_after(f"{before} is gone; leaving")
