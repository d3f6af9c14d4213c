"""Gradients applied late: the given ones in their order, exchanged beside the next step."""

import gc
import threading
import weakref

import pytest
import torch

from engines.delay import Delay

LENGTH = 11


def gradient(step):
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(step))


def divisor(step):
    return torch.tensor(float(2**step))


def doubled(buffer, step, divisor):
    buffer.mul_(2)


@pytest.fixture
def delay():
    """delay(buffer, steps, exchange): closed at the end of the test."""
    made = []

    def create(*arguments):
        made.append(Delay(*arguments))
        return made[-1]

    yield create
    for each in made:
        each.close()


def applied(delay, buffer, steps):
    """(gradient, divisor) that come out when those of `steps` go in."""
    outcome = []
    for step in steps:
        buffer.copy_(gradient(step))
        given = divisor(step)
        due = delay.advance(step, given)
        outcome.append((buffer.clone(), None if due is None else due.clone()))
        for scale in (given, due):  # as if a loss scale were changed in place
            if scale is not None:
                scale.zero_()
    return outcome


@pytest.mark.parametrize(
    ("steps", "exchange", "factor"), [(1, doubled, 2), (5, doubled, 2), (2, None, 1)]
)
def test_a_gradient_comes_out_so_many_steps_later(delay, steps, exchange, factor):
    buffer = torch.empty(LENGTH)
    outcome = applied(delay(buffer, steps, exchange), buffer, range(8))
    for found, due in outcome[:steps]:
        assert due is None and not found.any()
    for step, (found, due) in enumerate(outcome[steps:]):
        assert torch.equal(found, factor * gradient(step))
        assert due == divisor(step) and due.dtype == torch.float32


class Gate:
    """An exchange that records its calls, shows when it has begun, and ends when it may."""

    def __init__(self):
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.calls = []
        self.at_once = 0
        self.most_at_once = 0

    def __call__(self, buffer, step, divisor):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.set()
        assert self.may_end.wait(30), "nobody computed meanwhile"
        self.calls.append((step, divisor.item(), torch.equal(buffer, gradient(step))))
        self.at_once -= 1


def test_one_exchange_at_a_time_in_order_beside_the_next_steps(delay):
    """With 3 steps of delay three gradients may be waiting."""
    gate = Gate()
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 3, gate)
    applied(late, buffer, range(3))
    assert gate.begun.wait(30) and not gate.calls  # the next step begins amid the exchange
    gate.may_end.set()
    applied(late, buffer, range(3, 9))
    late.wait()
    assert gate.calls == [(step, 2.0**step, True) for step in range(9)] and gate.most_at_once == 1


def test_an_error_is_raised_as_soon_as_it_is_known_and_nothing_is_exchanged_after_it(delay):
    """Long before the failed gradient would be due; and again, for the sum is lost for good."""
    all_given = threading.Event()
    calls = []

    def exchange(buffer, step, divisor):
        assert all_given.wait(30)
        calls.append(step)
        if step == 1:
            raise ConnectionError("rank 1 is gone")

    buffer = torch.empty(LENGTH)
    late = delay(buffer, 4, exchange)
    applied(late, buffer, range(3))
    all_given.set()
    for call in (late.wait, lambda: late.advance(3, divisor(3)), late.wait):
        with pytest.raises(ConnectionError, match="rank 1 is gone"):
            call()
    late.close()
    assert calls == [0, 1]


def test_the_thread_uses_as_many_of_torch_s_threads_as_the_main_one(delay):
    """A new thread would begin with those of the moment when it was started."""
    found = []
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 1, lambda *_: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    try:
        for number in (1, 3, 2):
            torch.set_num_threads(number)
            applied(late, buffer, [0])
            late.wait()
    finally:
        torch.set_num_threads(before)
    assert found == [1, 3, 2]


def test_closing_waits_for_the_gradients_that_were_taken_and_ends_the_thread():
    """Other replicas wait for this one's part of an exchange.

    A delay that nobody closes is collected, and so is its owner, to whom the exchange refers as in
    engines/exchange.py.
    """
    gate = Gate()
    buffer = torch.empty(LENGTH)
    late = Delay(buffer, 3, gate)
    applied(late, buffer, range(3))
    threading.Timer(0.1, gate.may_end.set).start()
    late.close()
    assert [call[0] for call in gate.calls] == [0, 1, 2] and not threads()
    gate.delay = Delay(buffer, 3, gate)
    applied(gate.delay, buffer, range(3))
    gate.delay.wait()
    reference = weakref.ref(gate)
    running = threads()
    del gate, late
    gc.collect()
    assert reference() is None
    for thread in running:
        thread.join(30)
    assert running and not threads()


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("exchange")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="exchanges on a CUDA device")
def test_on_cuda_no_thread_is_needed(delay):
    buffer = torch.empty(LENGTH, device="cuda")
    callers = []
    late = delay(
        buffer, 2, lambda given, *_: callers.append(threading.current_thread()) or given.mul_(2)
    )
    for step in range(5):
        buffer.copy_(gradient(step))
        due = late.advance(step, divisor(step).cuda())
        if step >= 2:
            assert torch.equal(buffer.cpu(), 2 * gradient(step - 2)) and due.item() == 2.0 ** (
                step - 2
            )
    assert callers == [threading.main_thread()] * 5
