"""What is to happen if something else takes too long."""

import contextlib
import threading
from typing import Any, Callable, Iterator


@contextlib.contextmanager
def after(seconds: float, call: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call a function in a thread of its own if the block within lasts so long.

    The thread has ended when the block is left: one that is still on its way as the interpreter
    ends may abort the process.

    Args:
        seconds: from now.
        call: the function.
        arguments: of the function.
    """
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
