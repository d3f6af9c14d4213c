"""Overrides as people type them.

A key that is text must have the text as it was typed, or be refused.
"""

import os
import random
from pathlib import Path
from typing import List

from benchmarks import QUICKSTART
from recipe import batch, loading

_TEXT_KEYS = ("run.name", "run.output", "data.root", "data.train_folder")
_PIECES = (
    " #1",
    ": ",
    ":",
    "[x]",
    "{a}",
    "@x",
    "%x",
    "*x",
    "&x",
    "!x",
    "|",
    ">",
    "- ",
    "? ",
    ", ",
    "'",
    '"',
    "\\",
    "/photos",
    "a",
    "Ä",
    " ",
    "  ",
    "\t",
    "=",
    "~",
    "null",
    "true",
    "1e5",
    "010",
    "0x1",
    "\u2028",
    "\ufeff",
    "\U0001f600",
    "#",
    "$HOME",
)


def seeds(folder: Path) -> List[bytes]:
    """Return overrides that are taken.

    Args:
        folder: to work in, which is not needed.
    """
    return [
        b"batch.global=768",
        b"run.steps=10",
        b"data.crop_area=[0.05, 1.0]",
        b"schedule.peak=1e-3",
        b"run.name=a",
        b"model.init_from=runs/a",
        b"optimizer.name=sgd",
        b"data.image_sizes=[[0, 16]]",
        b"model.mean=[0.5, 0.5, 0.5]",
        b"data.root=/photos #1",
        b"run.output=runs/a: b",
        b"data.root=[x]",
    ]


def random_override(draws: random.Random) -> bytes:
    """Return an override of a key that is text.

    Args:
        draws: for all that is random.
    """
    value = "".join(draws.choice(_PIECES) for _ in range(draws.randrange(1, 6)))
    key = draws.choice(_TEXT_KEYS)
    return f"{key}={value}".encode()


def read(data: bytes, folder: Path) -> None:
    """Read an override into the quickstart's recipe.

    Args:
        data: the override, which may be damaged.
        folder: to work in, which is not needed.

    Raises:
        AssertionError: the recipe changes as it is written and read again, or a text is not as it
            was typed.
        UserError: the override is refused.
    """
    text = data.decode(errors="surrogateescape")
    name, _, value = text.partition("=")
    recipe = loading.load(QUICKSTART, [*_needed(name), text])
    assert loading.loads(loading.dump(recipe), "again") == recipe
    batch.divide(recipe, 1)
    # Null unsets a key, and quotes around the whole are removed: docs/recipes.md.
    if name in _TEXT_KEYS and value != "null" and not _is_quoted(value):
        section, key = name.split(".")
        text_read = str(getattr(getattr(recipe, section), key))
        # A leading ~ is the home folder.
        assert text_read in (value, os.path.expanduser(value)), f"{text!r} gives {text_read!r}"


def _needed(name: str) -> List[str]:
    """Return the overrides without which a recipe has no such key: folders belong to one source."""
    if name.startswith(("data.r", "data.train_f")):
        return ["data.source=folder"]
    return []


def _is_quoted(value: str) -> bool:
    """Return whether quotes stand around a value."""
    return len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
