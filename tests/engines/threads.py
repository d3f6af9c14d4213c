"""Ranks that are threads of this process, for decisions that they make together: a meeting costs
microseconds."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from parallel.processes import Processes
from parallel.topology import Topology


class Member(Processes):
    """One of the ranks; for `gather` and the methods that are made of it."""

    def __init__(self, topology, values, barrier):
        super().__init__(Topology(), torch.device("cpu"))
        self.topology = topology
        self._values = values
        self._barrier = barrier

    def gather(self, value):
        self._values[self.topology.rank] = copy.deepcopy(value)
        self._barrier.wait(60)
        found = list(self._values)
        self._barrier.wait(60)
        return found

    def _broadcast(self, value):
        return self.gather(value)[0]


def run(size, stages, function, present=None):
    """What function(processes) returns on each of so many ranks, in their order.

    Threads are named by their rank.

    present: how many of the ranks, from the first on, there are; those that do not differ need not
    all compute.
    """
    present = present or size
    values = [None] * present
    barrier = threading.Barrier(present)

    def on_rank(rank):
        threading.current_thread().name = str(rank)
        try:
            return function(Member(Topology(size // stages, stages, rank, rank), values, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(present) as pool:
        return list(pool.map(on_rank, range(present)))


def rank():
    """Rank of the calling thread."""
    return int(threading.current_thread().name)
