"""Replicas as threads, which pass messages through queues: hundreds of exchanges take seconds.

For what adds and selects. That the messages also pass by gloo is for a few tests with ranks.
"""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from parallel import sparse, sparse_exchange

SECONDS = 120  # for a message to come


class Threads:
    """What `parallel/sparse.py` and `parallel/sparse_exchange.py` use of torch.distributed, among threads."""

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

    def all_gather(self, messages, message, group):
        for rank in range(self.size):
            self.send(message, group, rank, ("gather", group))
        for rank, row in enumerate(messages.view(self.size, -1)):
            self.recv(row, group, rank, ("gather", group))

    def all_reduce(self, tensor, group):
        rows = tensor.new_empty(self.size, *tensor.shape)
        self.all_gather(rows, tensor, group)
        tensor.copy_(rows[0])
        for row in rows[1:]:
            tensor.add_(row)


def run(size, function, *arguments):
    """What function(rank, size, *arguments) returns on each of so many replicas, as tests.world.run does it."""
    threads = Threads(size)

    def on_rank(rank):
        threads.this.rank = rank
        return function(rank, size, *arguments)

    names = [(sparse, "distributed", threads), (sparse_exchange, "distributed", threads)]
    names.append((sparse, "all_gather", threads.all_gather))
    before = [(module, name, getattr(module, name)) for module, name, _ in names]
    try:
        for place in names:
            setattr(*place)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(on_rank, range(size)))
    finally:
        for place in before:
            setattr(*place)
