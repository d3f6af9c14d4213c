"""Gradients applied late: the given ones in their order, exchanged beside the next step, and kept over a restart."""

import gc
import threading
import weakref

import pytest
import torch

from engines.delay import _CHUNK, Delay

LENGTH = _CHUNK + 11  # more than is moved at once


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


@pytest.mark.parametrize(("steps", "exchange", "factor"), [(1, doubled, 2), (5, doubled, 2), (2, None, 1)])
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
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.calls, self.at_once, self.most_at_once = [], 0, 0

    def __call__(self, buffer, step, divisor):
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.begun.set()
        assert self.may_end.wait(30), "nobody computed meanwhile"
        self.calls.append((step, divisor.item(), buffer.data_ptr(), torch.equal(buffer, gradient(step))))
        buffer.mul_(2)
        self.at_once -= 1


def test_one_exchange_at_a_time_in_order_for_the_update_of_each_gradient(delay):
    """With 3 steps of delay three gradients may be waiting, in as many further buffers."""
    gate, buffer = Gate(), torch.empty(LENGTH)
    late = delay(buffer, 3, gate)
    applied(late, buffer, range(3))
    gate.may_end.set()
    applied(late, buffer, range(3, 9))
    late.wait()
    assert [(step, by, equal) for step, by, _, equal in gate.calls] == [(step, 2.0**step, True) for step in range(9)]
    places = {place for _, _, place, _ in gate.calls}
    assert len(places) == 3 and buffer.data_ptr() not in places and gate.most_at_once == 1


def test_a_step_is_computed_while_the_gradient_of_the_one_before_is_exchanged(delay):
    gate, buffer = Gate(), torch.empty(LENGTH)
    late = delay(buffer, 1, gate)
    applied(late, buffer, [0])
    assert gate.begun.wait(30)
    assert not gate.calls  # the next step begins amid the exchange
    buffer.copy_(gradient(1))
    gate.may_end.set()
    late.advance(1, divisor(1))
    assert gate.calls[0][0] == 0 and torch.equal(buffer, 2 * gradient(0))


def test_only_what_is_due_is_waited_for(delay):
    """With 2 steps of delay the gradient of the step before may still be under way, and a third is taken."""
    may_end = threading.Event()
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 2, lambda given, step, by: step == 0 or may_end.wait(30) or pytest.fail("waited for"))
    found, due = applied(late, buffer, range(3))[-1]
    may_end.set()
    late.wait()
    assert torch.equal(found, gradient(0)) and due == divisor(0)


def failing(at, waits_for=None):
    """An exchange that fails at update `at`, once an event is set, and the updates it was called for."""
    calls = []

    def exchange(buffer, step, divisor):
        assert waits_for is None or waits_for.wait(30)
        calls.append(step)
        if step == at:
            raise ConnectionError(f"rank 1 is gone at {step}")

    return exchange, calls


@pytest.mark.parametrize("call", ["advance", "state_dict", "wait"])
def test_an_error_of_an_exchange_is_raised_by_the_next_call(delay, call):
    exchange, _ = failing(2)
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 1, exchange)
    applied(late, buffer, range(3))
    for _ in range(2):  # the sum is lost for good
        with pytest.raises(ConnectionError, match="gone at 2"):
            late.advance(3, divisor(3)) if call == "advance" else getattr(late, call)()


def test_an_error_is_raised_as_soon_as_it_is_known_and_nothing_is_exchanged_after_it(delay):
    """Long before the failed gradient would be due; one that was taken meanwhile stays where it is."""
    all_given = threading.Event()
    exchange, calls = failing(1, all_given)
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 4, exchange)
    applied(late, buffer, range(3))
    all_given.set()
    with pytest.raises(ConnectionError):
        late.wait()
    with pytest.raises(ConnectionError):
        late.advance(3, divisor(3))
    late.close()
    assert calls == [0, 1]


@pytest.mark.parametrize(("steps", "saved_after"), [(1, 4), (2, 0), (5, 1), (5, 7)])
def test_gradients_under_way_survive_a_restart(delay, steps, saved_after):
    """Bit for bit, also where fewer gradients than `steps` were taken; the saved one goes on undisturbed."""
    buffer, other = torch.empty(LENGTH), torch.empty(LENGTH)
    late = delay(buffer, steps, doubled)
    applied(late, buffer, range(saved_after))
    saved = late.state_dict()
    assert [entry["divisor"].item() for entry in saved] == [2.0**step for step in range(saved_after)][-steps:]
    expected = applied(late, buffer, range(saved_after, 12))
    loaded = delay(other, steps, doubled)
    applied(loaded, other, range(50, 53))
    loaded.load_state_dict(saved)
    for (found, due), (right, right_due) in zip(applied(loaded, other, range(saved_after, 12)), expected, strict=True):
        assert torch.equal(found.view(torch.int32), right.view(torch.int32)) and due == right_due


def test_the_state_is_of_sums_and_nothing_writes_to_it(delay):
    buffer = torch.empty(LENGTH)
    late = delay(buffer, 2, doubled)
    applied(late, buffer, range(2))
    saved = late.state_dict()
    applied(late, buffer, range(2, 6))
    late.load_state_dict(saved)
    applied(late, buffer, range(2, 6))
    for step, entry in enumerate(saved):
        assert torch.equal(entry["gradient"], 2 * gradient(step)) and entry["divisor"] == divisor(step)
    with pytest.raises(ValueError, match=r"2 gradients are still to be applied, but exchange\.delay is 1"):
        delay(torch.empty(LENGTH), 1, None).load_state_dict(saved)
    with pytest.raises(ValueError, match="do not have the model's 5 elements"):
        delay(torch.empty(5), 2, None).load_state_dict(saved)


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


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("exchange")]


def test_closing_waits_for_the_gradients_that_were_taken_and_ends_the_thread():
    """Other replicas wait for this one's part of an exchange."""
    gate, buffer = Gate(), torch.empty(LENGTH)
    late = Delay(buffer, 3, gate)
    applied(late, buffer, range(3))
    threading.Timer(0.1, gate.may_end.set).start()
    late.close()
    late.close()
    assert [call[0] for call in gate.calls] == [0, 1, 2] and not threads()


def test_a_delay_that_nobody_closes_is_collected_and_its_thread_ends():
    """Although the exchange refers to its owner, as engines/exchange.py does."""

    class Owner:
        def __init__(self):
            self.buffer = torch.empty(LENGTH)
            self.delay = Delay(self.buffer, 1, self.exchange)

        def exchange(self, buffer, step, divisor):
            pass

    owner = Owner()
    applied(owner.delay, owner.buffer, range(3))
    owner.delay.wait()
    reference, running = weakref.ref(owner), threads()
    del owner
    gc.collect()
    assert reference() is None
    for thread in running:
        thread.join(30)
    assert running and not threads()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="exchanges on a CUDA device")
def test_on_cuda_no_thread_is_needed(delay):
    buffer, callers = torch.empty(LENGTH, device="cuda"), []

    def exchange(given, step, divisor):
        callers.append(threading.current_thread())
        given.mul_(2)

    late = delay(buffer, 2, exchange)
    for step in range(5):
        buffer.copy_(gradient(step))
        due = late.advance(step, divisor(step).cuda())
        if step >= 2:
            assert torch.equal(buffer.cpu(), 2 * gradient(step - 2)) and due.item() == 2.0 ** (step - 2)
    assert callers == [threading.main_thread()] * 5
    assert all(entry["gradient"].device.type == "cpu" for entry in late.state_dict())
