"""Replicas as threads, which pass messages through queues: hundreds of exchanges take seconds.

For what adds and selects. That the messages also pass by gloo is for a few tests with ranks.
"""

import contextlib
import functools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from parallel import bruck, local_steps, owners, quantized, reduce, sparse, sparse_exchange

SECONDS = 120  # for a message to come


class Threads:
    """What the exchanges use of torch.distributed, among threads. this.launched: collectives of
    this thread so far.

    One thread computes at a time, until it waits for a message: torch's operators let go of
    Python's lock, for which twelve threads that compute would fight, for ten times as long as their
    operators take.
    """

    def __init__(self, size):
        self.size = size
        self._boxes = {}
        self.this = threading.local()
        self.turn = threading.Lock()

    def _box(self, *key):
        """The messages of a sender, receiver and tag: one queue, even if both ask for it at
        once."""
        return self._boxes.setdefault(key, queue.SimpleQueue())

    def _received(self, box):
        """The next message of a box; the others compute while this thread waits for it."""
        with contextlib.suppress(queue.Empty):
            return box.get_nowait()
        self.turn.release()
        try:
            return box.get(timeout=SECONDS)
        finally:
            self.turn.acquire()

    def get_world_size(self, group):
        return self.size

    def get_rank(self, group):
        return self.this.rank

    def send(self, message, group, group_dst, tag=0):
        self._box(self.this.rank, group_dst, tag).put(message.clone())
        return SimpleNamespace(wait=lambda: None)

    isend = send

    def irecv(self, message, group, group_src, tag=0):
        box = self._box(group_src, self.this.rank, tag)
        return SimpleNamespace(wait=lambda: message.copy_(self._received(box)))

    def recv(self, *arguments, **keywords):
        self.irecv(*arguments, **keywords).wait()

    def _collective(self, name, messages, group, end, async_op):
        """Sends one of `messages` to each rank; on waiting calls end(those of all ranks, in their
        order)."""
        self.this.launched.append(name)
        tag = (name, group)
        own = self.this.rank
        for rank, message in enumerate(messages):
            self.send(message, group, rank, tag)

        def wait():
            end([self._received(self._box(rank, own, tag)) for rank in range(self.size)])

        return SimpleNamespace(wait=wait) if async_op else wait()

    def all_gather(self, output, own, group, async_op=False):
        def fill(rows):
            output.copy_(torch.cat(rows).view_as(output))

        return self._collective("all_gather", [own] * self.size, group, fill, async_op)

    def all_to_all_single(
        self,
        output,
        own,
        output_split_sizes=None,
        input_split_sizes=None,
        group=None,
        async_op=False,
    ):
        messages = own.split(input_split_sizes or len(own) // self.size)
        return self._collective(
            "all_to_all", messages, group, lambda rows: output.copy_(torch.cat(rows)), async_op
        )

    def all_reduce(self, tensor, group, async_op=False):
        def add(rows):
            tensor.copy_(functools.reduce(torch.add, rows))

        return self._collective("all_reduce", [tensor] * self.size, group, add, async_op)


def run(size, function, *arguments):
    """What function(rank, size, *arguments) returns on each of so many replicas, as tests.world.run
    does it."""
    threads = Threads(size)

    def on_rank(rank):
        threads.this.rank = rank
        threads.this.launched = []
        with threads.turn:
            return function(rank, size, *arguments)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(size) as pool:
        for module in (bruck, local_steps, owners, quantized, reduce, sparse, sparse_exchange):
            patch.setattr(module, "distributed", threads)
        for module in (quantized, reduce, sparse):
            patch.setattr(module, "all_gather", threads.all_gather)
        return list(pool.map(on_rank, range(size)))
