"""Replicas as threads, which pass messages through queues: hundreds of exchanges take seconds.

For what adds and selects. That the messages also pass by gloo is for a few tests with ranks.
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

from parallel import bruck, local_steps, owners, reduce, sparse, sparse_exchange

SECONDS = 120  # for a message to come


class Threads:
    """What the exchanges use of torch.distributed, among threads. this.launched: collectives of this thread so far."""

    def __init__(self, size):
        self.size = size
        self._boxes = {}
        self.this = threading.local()

    def _box(self, *key):
        """The messages of a sender, receiver and tag: one queue, even if both ask for it at once."""
        return self._boxes.setdefault(key, queue.SimpleQueue())

    def get_world_size(self, group):
        return self.size

    def get_rank(self, group):
        return self.this.rank

    def send(self, message, group, group_dst, tag=0):
        self._box(self.this.rank, group_dst, tag).put(message.clone())

    def recv(self, message, group, group_src, tag=0):
        message.copy_(self._box(group_src, self.this.rank, tag).get(timeout=SECONDS))

    def isend(self, *arguments, **keywords):
        self.send(*arguments, **keywords)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, *arguments, **keywords):
        return SimpleNamespace(wait=lambda: self.recv(*arguments, **keywords))

    def _collective(self, name, messages, group, end, async_op):
        """Sends one of `messages` to each rank; on waiting calls end(those of all ranks, in their order)."""
        self.this.launched.append(name)
        for rank, message in enumerate(messages):
            self.send(message, group, rank, (name, group))

        def wait():
            tag, own = (name, group), self.this.rank
            end([self._box(rank, own, tag).get(timeout=SECONDS) for rank in range(self.size)])

        return SimpleNamespace(wait=wait) if async_op else wait()

    def all_gather(self, output, own, group, async_op=False):
        return self._collective("all_gather", [own] * self.size, group, _filling(output), async_op)

    def all_to_all_single(self, output, own, output_sizes=None, sizes=None, group=None, async_op=False):
        parts = own.view(self.size, -1) if sizes is None else own.split(sizes)
        end = _filling(output) if sizes is None else lambda rows: output.copy_(torch.cat(rows))
        return self._collective("all_to_all", parts, group, end, async_op)

    def all_reduce(self, tensor, group, async_op=False):
        def add(rows):
            tensor.copy_(rows[0])
            for row in rows[1:]:
                tensor.add_(row)

        return self._collective("all_reduce", [tensor] * self.size, group, add, async_op)


def _filling(output):
    return lambda rows: output.copy_(torch.stack(rows).view_as(output))


def run(size, function, *arguments):
    """What function(rank, size, *arguments) returns on each of so many replicas, as tests.world.run does it."""
    threads = Threads(size)

    def on_rank(rank):
        threads.this.rank, threads.this.launched = rank, []
        return function(rank, size, *arguments)

    modules = (bruck, local_steps, owners, reduce, sparse, sparse_exchange)
    names = [(module, "distributed", threads) for module in modules]
    names += [(module, "all_gather", threads.all_gather) for module in (reduce, sparse)]
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    try:
        for place in names:
            setattr(*place)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(on_rank, range(size)))
    finally:
        for place in before:
            setattr(*place)
