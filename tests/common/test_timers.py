"""What is called if something takes too long, and its thread, which is gone afterwards."""

import threading

import pytest

from common import timers


def timers_of(call):
    """Threads that live and wait to call this function: others of the process come and go."""
    living = threading.enumerate()
    return [
        thread
        for thread in living
        if isinstance(thread, threading.Timer) and thread.function == call
    ]


def test_it_is_called_if_the_block_lasts_so_long_and_its_thread_has_ended_with_the_block():
    called = threading.Event()
    with timers.after(0.01, called.set):
        assert called.wait(10.0)
    assert not timers_of(called.set)


@pytest.mark.parametrize("fault", [None, KeyError("of the block")], ids=str)
def test_it_is_not_called_after_the_block_and_no_thread_is_left(fault):
    """However the block is left."""
    called = threading.Event()
    try:
        with timers.after(60.0, called.set):
            assert len(timers_of(called.set)) == 1
            if fault is not None:
                raise fault
    except KeyError as error:
        assert error is fault
    assert not called.is_set()
    assert not timers_of(called.set)


def test_a_call_that_has_begun_is_waited_for():
    """It may be within a library when the interpreter ends."""
    begun = threading.Event()
    go_on = threading.Event()
    done = []

    def call(word):
        begun.set()
        go_on.wait(10.0)
        done.append(word)

    with timers.after(0.0, call, "word"):
        assert begun.wait(10.0)
        threading.Timer(0.05, go_on.set).start()
    assert done == ["word"]
