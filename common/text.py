"""Words of messages: counted nouns, lists that are cut short, and names of any characters."""

from __future__ import annotations

import unicodedata
from typing import Sequence

_NAMED = 5  # of many names, in a line


def count(number: float, noun: str, plural: str = "") -> str:
    """Return a number with its noun, as `2 replicas`, `1 replica` and `1.5 epochs`.

    Args:
        number: what is counted; up to six digits of a float are shown.
        noun: in the singular.
        plural: where it is not the noun with an s.
    """
    digits = f"{number:.6g}" if isinstance(number, float) else number
    if number == 1:
        return f"{digits} {noun}"
    return f"{digits} {plural or noun + 's'}"


def either(names: Sequence[str]) -> str:
    """Return `a, b or c`: all of some names, of which one is meant."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def listed(names: Sequence[str]) -> str:
    """Return `a, b, c, d, e and 7 more`: the first of some names, and how many there are besides."""
    more = len(names) - _NAMED
    first = ", ".join(names[:_NAMED])
    return f"{first} and {more:,} more" if more > 0 else first


def duration(seconds: float) -> str:
    """Return `seconds` as H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def printable(text: str) -> str:
    """Return `text` with escapes such as \\x1b for what cannot be printed or encoded, or is no
    UTF-8.
    """
    return "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    """Return a character, or the escape that stands for it."""
    # A no-break space, say, is not printable to Python, but harmless.
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if "\udc80" <= character <= "\udcff":  # how os.fsdecode keeps a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
