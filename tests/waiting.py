"""Waiting in tests for what other processes do."""

import time


def wait_until(condition, seconds=120):
    """Waits until condition() holds; its first true value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
