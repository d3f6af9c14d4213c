"""Progress of work that takes long: a live line on a terminal, a plain line every ten seconds elsewhere.

So no command is silent. On a terminal the line is replaced as the work goes on, what is printed
meanwhile appears above it, and it is gone once the work is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import (
    IO,
    TYPE_CHECKING,
    Callable,
    ContextManager,
    Iterable,
    Iterator,
    Optional,
    TypeVar,
)

from common.text import duration

if TYPE_CHECKING:
    from rich.progress import Progress

EVERY = 10.0  # seconds between plain lines
_REFRESHED = 0.2  # seconds between two states of a live line
_BAR = 30  # characters

Item = TypeVar("Item")

# What a live line has in the place of sys.stdout, and the stream that it stands for.
_live: Optional[IO[str]] = None
_plain: Optional[IO[str]] = None


@contextlib.contextmanager
def lines(
    text: Callable[[], str],
    share: Optional[Callable[[], float]] = None,
    *,
    elsewhere: bool = True,
) -> Iterator[None]:
    """Show how far a block is while it runs.

    The first of a run's ranks does; the others are as far, and their lines would be the same.

    Within another such block, on a terminal, only the outer one is shown.

    Args:
        text: returns how far it is, without times; called in another thread.
        share: returns what is done, from 0 to 1; called in another thread. None: that is not known.
        elsewhere: also where there is no terminal, by lines; not for work that prints lines itself.
    """
    if os.environ.get("RANK", "0") != "0":
        shown: ContextManager[None] = contextlib.nullcontext()
    elif _on_terminal():
        shown = contextlib.nullcontext() if _live is not None else _live_line(text, share)
    elif elsewhere:
        shown = _plain_lines(text)
    else:
        shown = contextlib.nullcontext()
    with shown:
        yield


def counted(items: Iterable[Item], total: int, noun: str) -> Iterator[Item]:
    """Yield the items, and show how many of them are done.

    Args:
        items: to be yielded.
        total: number of items.
        noun: for them, with a verb where that reads better.
    """
    done = 0
    with lines(lambda: f"{done:,} of {total:,} {noun}", lambda: done / max(total, 1)):
        for item in items:
            yield item
            done += 1


def _on_terminal() -> bool:
    """Return whether stdout is a terminal that this process has to itself."""
    is_able = os.environ.get("TERM", "dumb") != "dumb"
    return is_able and sys.stdout is not None and sys.stdout.isatty()


@contextlib.contextmanager
def _repeated(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call a function every so many seconds while the block runs."""
    # A thread: the block may be one long call into a library.
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _plain_lines(text: Callable[[], str]) -> Iterator[None]:
    """Print a line every ten seconds: see `lines`."""
    began = time.monotonic()

    def tell() -> None:
        print(f"{text()} ({duration(time.monotonic() - began)})", flush=True)

    with _repeated(tell, EVERY):
        yield


@contextlib.contextmanager
def _live_line(text: Callable[[], str], share: Optional[Callable[[], float]]) -> Iterator[None]:
    """Keep one line of the terminal up to date: see `lines`."""
    global _live, _plain
    display = _display(known=share is not None)
    task = display.add_task("", total=1.0 if share else None)

    def update() -> None:
        completed = share() if share else None
        display.update(task, description=text(), completed=completed, refresh=True)

    _plain = sys.stdout
    with display:
        # A process that is killed could not show it again.
        display.console.show_cursor(True)
        _live = sys.stdout
        try:
            update()
            with _repeated(update, _REFRESHED):
                yield
        finally:
            _live = None


def _display(known: bool) -> Progress:
    """Return rich's display of a task. `known`: how much there is to do."""
    # Late: where there is no terminal it is not needed.
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    described = TextColumn("{task.description}", markup=False)
    if known:
        columns = [
            described,
            BarColumn(bar_width=_BAR),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        ]
    else:
        columns = [SpinnerColumn(), described, TimeElapsedColumn()]
    # Refreshed by our own thread, with the newest numbers.
    return Progress(*columns, auto_refresh=False, transient=True)


def _print_plainly() -> None:
    """Let a process that was forked beside a live line print without it.

    The thread that keeps the line, and perhaps holds its lock, is not there.
    """
    global _live
    if _live is not None and sys.stdout is _live and _plain is not None:
        sys.stdout = _plain
    _live = None


os.register_at_fork(after_in_child=_print_plainly)
