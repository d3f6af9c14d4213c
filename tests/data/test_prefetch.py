"""Prefetching: the same batches in the same order, never more than its depth ahead, and how long a
step waited."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch

from data import prefetch
from data.batches import MicroBatch
from data.prefetch import Prefetcher
from tests.waiting import wait_until

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a CUDA device")


def batch(number, rows=2, size=4):
    images = torch.full((rows, 3, size, size), number % 256, dtype=torch.uint8).to(
        memory_format=torch.channels_last
    )
    images[0, 0, 0, 1] = 7
    return MicroBatch(
        images,
        torch.full((rows,), number),
        torch.arange(rows),
        valid=rows,
        number=number,
        step=0,
        unreadable=(),
    )


def large(number):
    return batch(number, rows=64, size=224)


def torn(number):
    if number == 5:
        raise ValueError("torn")
    return batch(number)


def batches(count=1000, make=batch, taken=None):
    """Batches, whose numbers are appended to `taken`, and "closed" in the end."""
    taken = [] if taken is None else taken
    try:
        for number in range(count):
            made = make(number)
            taken.append(number)
            yield made
    finally:
        taken.append("closed")


def settled(taken):
    """How many batches are taken once no more are."""
    before = -1
    while len(taken) != before:
        before = len(taken)
        time.sleep(0.1)
    return before


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.parametrize("depth", [0, 3])
def test_every_batch_comes_once_in_order_and_no_more_than_the_depth_ahead(depth):
    """A thread holds one more until there is room; without depth there is none, and nothing is
    taken unasked."""
    taken = []
    received = []
    ahead = Prefetcher(batches(20, taken=taken), CPU, depth)
    for number in range(2):
        assert settled(taken) == (number + depth + 1 if depth else number)
        assert len(threads()) == (1 if depth else 0)
        received.append(next(ahead))
    received += ahead
    assert [one.number for one in received] == list(range(20))
    assert all(torch.equal(one.images, batch(number).images) for number, one in enumerate(received))
    assert next(ahead, None) is None, "an end stays an end"
    ahead.close()
    assert not threads() and taken[-1] == "closed"


@pytest.mark.parametrize("depth", [0, 3])
def test_a_failure_is_raised_where_its_batch_is_missed_and_keeps_nothing_alive(depth):
    """Neither the iterator nor what it reads, which may be worker processes; with no help of the
    garbage collector."""
    failing = batches(make=torn)
    received = []
    ahead = Prefetcher(failing, CPU, depth)
    alive = weakref.ref(failing), weakref.ref(ahead)
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            for one in ahead:
                received.append(one.number)
            received.append("no error")
        assert received == [0, 1, 2, 3, 4] and next(ahead, None) is None
        del ahead, failing
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("given_up", ["closed", "forgotten"])
def test_the_thread_ends_and_closes_its_source_when_given_up(given_up):
    taken = []
    held = batches(taken=taken)  # or else it would be closed with the last reference
    ahead = Prefetcher(held, CPU, 2)
    next(ahead)
    if given_up == "closed":
        ahead.close()
        assert next(ahead, None) is None
    else:
        del ahead
    assert not threads() and taken.count("closed") == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_closing_says_whether_the_thread_has_ended_and_a_slow_one_ends_later(depth, monkeypatch):
    """Even where nobody makes room in its queue any more."""
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.0)
    taken = []
    come = threading.Event()

    def slow(number):
        come.wait()
        return batch(number)

    held = batches(make=slow, taken=taken)
    ahead = Prefetcher(held, CPU, depth)
    try:
        assert not ahead.close() and next(ahead, None) is None
    finally:
        come.set()
    assert wait_until(lambda: not threads()) and taken == [0, "closed"]
    assert ahead.close()


@pytest.mark.parametrize(("depth", "expected"), [(0, 3.0), (2, 0.0)])
def test_waiting_for_images_is_measured_but_not_for_the_first(depth, expected, monkeypatch):
    """By a clock that loading and computing advance; batches that are there already are not waited
    for."""
    now = [0.0]
    taken = []
    monkeypatch.setattr(prefetch.time, "perf_counter", lambda: now[0])

    def load(number):
        now[0] += {0: 16.0, 2: 1.0, 4: 2.0}.get(number, 0.0)
        return batch(number)

    ahead = Prefetcher(batches(6, load, taken), CPU, depth)
    for _ in range(6):
        if depth:
            settled(taken)
        next(ahead)
        now[0] += 100
    assert ahead.waited() == expected
    ahead.close()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("depth", [0, 3])
def test_on_cuda_every_batch_arrives_whole_while_the_device_is_busy(depth):
    """Memory that another stream still reads must not be written: a batch is summed long after the
    next was copied."""
    ahead = Prefetcher(batches(40, large), CUDA, depth)
    busy = torch.rand(4096, 4096, device=CUDA)
    sums = []
    for one in ahead:
        assert one.images.is_cuda and one.images.is_contiguous()
        assert one.labels.is_pinned() and one.indices.is_pinned()
        busy @ busy
        sums.append(one.images.long().sum())
        del one
    assert torch.stack(sums).tolist() == [
        large(number).images.long().sum().item() for number in range(40)
    ]
    ahead.close()


@pytest.mark.gpu
@needs_gpu
def test_on_cuda_waiting_counts_only_while_the_device_has_nothing_to_do():
    """The host waits 0.2 seconds for each of 4 batches; a device with more work than that before
    each does not."""
    matrix = torch.rand(8192, 8192, device=CUDA)

    def late(number):
        time.sleep(0.2 if number else 0.0)
        return batch(number)

    def spent(work):
        ahead = Prefetcher(batches(5, late), CUDA, 0)
        start = time.perf_counter()
        for _ in ahead:
            for _ in range(work):
                matrix @ matrix
        torch.cuda.synchronize()
        return ahead.waited(), time.perf_counter() - start

    spent(1)
    assert 0.6 <= spent(0)[0] <= 1.0
    one = spent(10)[1] / 50  # at most
    waited, _ = spent(int(0.5 / one) + 10)
    assert waited < 0.2
