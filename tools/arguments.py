"""Kinds of arguments that several commands take."""

import argparse
from typing import Any, Callable


def within(least: float, most: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return a type for argparse: numbers from `least` to `most`.

    Args:
        least: the smallest number that is accepted.
        most: the largest one.
        kind: makes a number of a text, or raises ValueError.
    """

    def convert(text: str) -> Any:
        """Return `text` as a number of that kind. Raises ArgumentTypeError."""
        try:
            value = kind(text)
            # NaN is within no limits.
            if least <= value <= most:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:,g} to {most:,g}")

    return convert


whole = within(1, 10**9)
