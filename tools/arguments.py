"""Kinds of arguments that several commands take."""

import argparse
from typing import Any, Callable


def within(least: float, most: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Return a type for argparse: numbers from `least` to `most`."""

    def convert(text: str) -> Any:
        try:
            value = kind(text)
            if least <= value <= most:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:,g} to {most:,g}")

    return convert


whole = within(1, 10**9)
