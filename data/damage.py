"""Lines about files that libjpeg calls damaged, but decodes.

Each file is named once, and only the first of many.
"""

import sys
import threading
from typing import Iterable, Set

_MOST_NAMED = 20

_lock = threading.Lock()
_known: Set[str] = set()


def report(messages: Iterable[str]) -> None:
    """Print a line on stderr for each message that this process has not had: for the first 20.

    Args:
        messages: each names a file and its fault.
    """
    for message in messages:
        # Several loaders report, each from a thread of its own.
        with _lock:
            if message in _known or len(_known) > _MOST_NAMED:
                continue
            _known.add(message)
            named = len(_known)
        if named <= _MOST_NAMED:
            line = f"{message}; it is used as it is"
        else:
            line = f"there are more such files, which are not named: {_MOST_NAMED} were"
        print(line, file=sys.stderr, flush=True)
