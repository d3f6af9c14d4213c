"""Worker processes: quiet when their parent is gone, and without a GPU."""

import itertools
import os
import sys

import pytest

from data import workers


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
@pytest.mark.parametrize(("others", "quiet"), [(0, True), (5, True), (10**6, False)])
def test_a_broken_connection_is_quiet_once_the_parent_is_gone(monkeypatch, error, others, quiet):
    """It may break a moment before: then `others` more answers still name the parent."""
    told, answers = [], itertools.chain(itertools.repeat(7, others), itertools.repeat(1))
    monkeypatch.setattr(sys, "excepthook", lambda kind, *rest: told.append(kind))
    monkeypatch.setattr(os, "getppid", lambda: next(answers))
    workers._say_nothing_when_orphaned(7)
    sys.excepthook(error, error(), None)
    assert told == ([] if quiet else [error])
    sys.excepthook(ValueError, ValueError(), None)
    assert told[-1] is ValueError


def test_a_worker_sees_no_gpu(monkeypatch):
    """Decoders that can use one would each take hundreds of megabytes of its memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(workers, "obey_only_the_parent", lambda worker: None)
    workers.begin_work(0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_a_queue_to_a_killed_worker_tells_nothing(capfd):
    """Nobody reads it any more; without this the thread that feeds it prints a traceback, if it is about to write."""
    queue = workers._quiet_context().Queue()
    queue._reader.close()
    queue.put("for a worker that is gone")
    queue.close()
    queue.join_thread()
    assert capfd.readouterr().err == ""
