"""JSON from untrusted files, whose size and depth are bounded, and JSON that every reader takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Union

from common.files import open_regular

# A manifest of 100,000 shards takes 20 MB; as Python's objects JSON takes 20 times its bytes.
MOST_BYTES = 64 << 20


def parse_json(text: Union[str, bytes]) -> Any:
    """Parse `text` as JSON. Raises ValueError if it is invalid, longer than MOST_BYTES, or nested
    too deeply.
    """
    # Before it is parsed: Python's objects take many times the memory of their text.
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text):,} bytes of JSON, more than {MOST_BYTES:,}")
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def read_json(path: Path) -> Any:
    """Parse the file at `path`, of which no more than MOST_BYTES are read.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: see `parse_json`.
    """
    with open_regular(path) as stream:
        return parse_json(stream.read(MOST_BYTES + 1))


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for each float that is not finite.

    Args:
        value: of dicts, lists, tuples and what JSON has.
        options: of json.dumps.
    """
    return json.dumps(_valid(value), allow_nan=False, **options)


def _valid(value: Any) -> Any:
    """Return a value with None in the place of each float that is not finite."""
    if isinstance(value, dict):
        return {key: _valid(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_valid(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
