"""Read JSON from untrusted files: size and depth are bounded, and every fault is a ValueError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Union

from recipe.files import open_regular

MOST_BYTES = 64 << 20  # a manifest of 100,000 shards takes 20 MB; as Python's objects JSON takes 20 times its bytes


def parse_json(text: Union[str, bytes]) -> Any:
    """Parse JSON. Raises ValueError for text that is invalid, longer than MOST_BYTES, or nested too deeply."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text):,} bytes of JSON, more than {MOST_BYTES:,}")
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Parse a file, of which no more than MOST_BYTES are read. Raises OSError, and ValueError as `parse_json` does."""
    with open_regular(path) as stream:
        return parse_json(stream.read(MOST_BYTES + 1))
