"""Write JSON that every reader takes: it has no NaN and no infinity, which Python's own writer would let through."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any, **options: Any) -> str:
    """Return `value` as JSON, with null for each float that is not finite. Args: options: of json.dumps."""
    return json.dumps(_valid(value), allow_nan=False, **options)


def _valid(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _valid(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_valid(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
