"""Faults of the machine that torch reports in words of its own, in the words of this program."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional


class _Fault(NamedTuple):
    """A fault of the machine.

    pattern: in torch's error.
    text: for the user.
    remedy: for the user.
    """

    pattern: str
    text: str
    remedy: str


_FAULTS = (
    _Fault(
        pattern="out of memory|can't allocate memory",
        text="out of memory",
        remedy="lower batch.micro, batch.evaluation or model.image_size",
    ),
    _Fault(
        pattern=r"DataLoader worker (\(pid|exited)",
        text="a process that loads images was killed, perhaps as memory ran out",
        remedy="lower data.workers or data.prefetch",
    ),
)


def in_words(error: RuntimeError) -> Optional[str]:
    """Return the fault and the remedy that an error stands for; None if it is no such fault.

    Args:
        error: of torch, which has few classes of them: they are known by their words.
    """
    message = str(error)
    for fault in _FAULTS:
        if re.search(fault.pattern, message):
            return f"{fault.text}; {fault.remedy}"
    return None
