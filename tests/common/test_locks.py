"""A block that one process is in at a time, unless locks do not work or somebody takes too long."""

import errno
import fcntl
import threading
import time

from common import locks


def test_one_waits_for_the_other_and_the_file_is_gone(tmp_path):
    file = tmp_path / "a.lock"
    order = []

    def second():
        with locks.alone(file, 10.0):
            order.append("second")

    with locks.alone(file, 10.0):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"] and not file.exists()


def test_nobody_waits_longer_than_agreed_or_for_a_lock_that_does_not_work(tmp_path, monkeypatch):
    file = tmp_path / "a.lock"
    with open(file, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        with locks.alone(file, 0.1):
            assert 0.1 <= time.monotonic() - began < 5

    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with locks.alone(file, 60.0), locks.alone(tmp_path / "no folder" / "a.lock", 60.0):
        assert time.monotonic() - began < 30
