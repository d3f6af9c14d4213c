"""Lines of commands that take long: what they do and how far they are, every ten seconds.

So no command is silent.
"""

import contextlib
import threading
import time
from typing import Callable, Iterable, Iterator, TypeVar

from training.monitor import duration

EVERY = 10.0  # seconds

Item = TypeVar("Item")


@contextlib.contextmanager
def lines(text: Callable[[], str]) -> Iterator[None]:
    """Print a line each ten seconds while the block runs.

    Args:
        text: returns the line, without the time that has passed; called in another thread.
    """
    # A thread: the block may be one long call into a library.
    done = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        while not done.wait(EVERY):
            print(f"{text()} ({duration(time.monotonic() - began)})", flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def counted(items: Iterable[Item], total: int, noun: str) -> Iterator[Item]:
    """Yield the items, and print how many of them are done, a line each ten seconds.

    Args:
        items: to be yielded.
        total: number of items.
        noun: for them in the line, with a verb where that reads better.
    """
    done = 0
    with lines(lambda: f"{done:,} of {total:,} {noun}"):
        for item in items:
            yield item
            done += 1
