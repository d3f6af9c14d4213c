"""Overrides as people type them: a key that is text must have the text as it was typed, or be refused."""

import os
import random
from pathlib import Path
from typing import List

from benchmarks import QUICKSTART
from recipe import batch, loading

_TEXT_KEYS = ("run.name", "run.output", "data.root", "data.train_folder")
_PIECES = (
    " #1", ": ", ":", "[x]", "{a}", "@x", "%x", "*x", "&x", "!x", "|", ">", "- ", "? ", ", ", "'", '"', "\\", "/photos",
    "a", "Ä", " ", "  ", "\t", "=", "~", "null", "true", "1e5", "010", "0x1", "\u2028", "\ufeff", "\U0001f600", "#",
    "$HOME",
)  # fmt: skip


def seeds(folder: Path) -> List[bytes]:
    return [
        b"batch.global=768", b"run.steps=10", b"data.crop_area=[0.05, 1.0]", b"schedule.peak=1e-3", b"run.name=a",
        b"model.init_from=runs/a", b"optimizer.name=sgd", b"data.image_sizes=[[0, 16]]", b"model.mean=[0.5, 0.5, 0.5]",
        b"data.root=/photos #1", b"run.output=runs/a: b", b"data.root=[x]",
    ]  # fmt: skip


def random_override(draws: random.Random) -> bytes:
    """Return an override of a key that is text."""
    value = "".join(draws.choice(_PIECES) for _ in range(draws.randrange(1, 6)))
    return f"{draws.choice(_TEXT_KEYS)}={value}".encode()


def read(data: bytes, folder: Path) -> None:
    """Raise AssertionError where a recipe changes as it is written and read again, or a text is not as it was typed."""
    text = data.decode(errors="surrogateescape")
    name, _, value = text.partition("=")
    of_folder = ["data.source=folder"] if name.startswith("data.r") or name.startswith("data.train_f") else []
    recipe = loading.load(QUICKSTART, [*of_folder, text])
    assert loading.loads(loading.dump(recipe), "again") == recipe
    batch.divide(recipe, 1)
    # Quotes around the whole are removed, null unsets, and a leading ~ is the home folder: docs/recipes.md.
    if name in _TEXT_KEYS and value != "null" and not (len(value) > 1 and value[0] == value[-1] and value[0] in "'\""):
        section, key = name.split(".")
        found = str(getattr(getattr(recipe, section), key))
        assert found in (value, os.path.expanduser(value)), f"{text!r} gives {found!r}"
