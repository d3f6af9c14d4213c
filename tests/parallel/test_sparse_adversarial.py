"""gTop-k with gradients that are chosen to break it: nothing is lost, and all replicas get the same bits.

Replicas are threads, which pass messages through queues: hundreds of cases take seconds.
"""

import functools
import queue
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from parallel import sparse
from parallel.sparse_exchange import Rules, SparseExchange
from tests.tensors import assert_bitwise_equal

REPLICAS, STEPS, LENGTH = 12, 2, 300
SECONDS = 120  # for a message to come

# Gradients of a replica: `shared` is the same on all of them, `own` is not.
KINDS = {
    "identical": lambda rank, shared, own: shared,
    "disjoint": lambda rank, shared, own: torch.where(torch.arange(LENGTH) % REPLICAS == rank, own, 0.0),
    "opposite": lambda rank, shared, own: shared if rank % 2 else -shared,
    "one against all": lambda rank, shared, own: shared if rank else own - (REPLICAS - 1) * shared,
    "zeros": lambda rank, shared, own: torch.zeros(LENGTH),
    "fewer than k": lambda rank, shared, own: torch.where(torch.arange(LENGTH) == 5 * rank, 1.0, 0.0),
    "one alone": lambda rank, shared, own: own if rank == 7 else torch.zeros(LENGTH),
    "ties": lambda rank, shared, own: 3 * own.sign(),
}
CASES = [
    (kind, pattern, wire, count, seed)
    for kind in KINDS
    for pattern in ("tree", "butterfly")
    for wire in (torch.float32, torch.float16)
    for count in (1, 31, LENGTH - 1)
    for seed in range(4)
]


class Threads:
    """What `parallel/sparse.py` uses of torch.distributed, among threads."""

    def __init__(self):
        self._boxes = defaultdict(queue.SimpleQueue)  # of each sender, receiver and tag
        self.this = threading.local()

    def get_world_size(self, group):
        return REPLICAS

    def get_rank(self, group):
        return self.this.rank

    def send(self, message, group, group_dst, tag=0):
        self._boxes[self.this.rank, group_dst, tag].put(message.clone())

    def recv(self, message, group, group_src, tag=0):
        message.copy_(self._boxes[group_src, self.this.rank, tag].get(timeout=SECONDS))

    def isend(self, *arguments, **keywords):
        self.send(*arguments, **keywords)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, *arguments, **keywords):
        return SimpleNamespace(wait=lambda: self.recv(*arguments, **keywords))


@functools.lru_cache(maxsize=None)
def drawn(number, seed, step):
    """float32 [LENGTH]: whole numbers, of which float32 holds all sums exactly."""
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + step)
    return (torch.randn(LENGTH, generator=generator) * torch.logspace(0, 2, LENGTH)).round()


def gradient(rank, kind, seed, step):
    return KINDS[kind](rank, drawn(REPLICAS, seed, step), drawn(rank, seed, step))


def exchanged(threads, rank):
    """Of each of CASES: the updates of all steps, and what this replica keeps."""
    threads.this.rank = rank
    found = []
    for kind, pattern, wire, count, seed in CASES:
        rules = Rules(pattern, wire, lambda step, count=count: count / LENGTH)
        exchange = SparseExchange(rules, LENGTH, [LENGTH], 0, (), object(), None, torch.device("cpu"))
        updates = [gradient(rank, kind, seed, step).clone() for step in range(STEPS)]
        for step, buffer in enumerate(updates):
            exchange(buffer, step, torch.tensor(1.0))
        found.append((torch.stack(updates), exchange.residual))
    return found


@pytest.fixture
def replicas(monkeypatch):
    """What each replica found."""
    threads = Threads()
    monkeypatch.setattr(sparse, "distributed", threads)
    with ThreadPoolExecutor(REPLICAS) as pool:
        return list(pool.map(lambda rank: exchanged(threads, rank), range(REPLICAS)))


def test_twelve_replicas_lose_no_gradient_and_agree_on_every_bit_in_384_cases(replicas):
    """sum(gradients) = sum of updates + sum(residuals), exactly."""
    assert len(CASES) == 384
    for case, *found in zip(CASES, *replicas):
        kind, _, _, count, seed = case
        updates, _ = found[0]
        for others, _ in found:
            assert_bitwise_equal(others, updates)
        given = [gradient(rank, kind, seed, step).double() for rank in range(REPLICAS) for step in range(STEPS)]
        kept = sum(residual.double() for _, residual in found)
        assert torch.equal(updates.double().sum(0) + kept, sum(given)), case
        assert (updates != 0).sum(1).max() <= count, case
