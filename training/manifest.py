"""Manifests of checkpoints: what is known of one without opening it. No other file is read or written here."""

from __future__ import annotations

import hashlib
import json
from typing import NamedTuple, Optional, Tuple

_CHECKSUM = "checksum"  # key of the SHA-256 of all others; files of older programs have none


class File(NamedTuple):
    """What a file must be to count. sha256: hexadecimal digits."""

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What is known of a checkpoint without opening it.

    top1: share in [0, 1], None if it was not evaluated. replicas: the files of what belongs to one replica, by its
    number; none where replicas differ in nothing.
    """

    step: int
    bytes: int
    sha256: str
    top1: Optional[float]
    replicas: Tuple[File, ...] = ()


def written(manifest: Manifest) -> bytes:
    """The content of a manifest's file."""
    # Without an empty list of replicas, which older programs do not know.
    found = {key: value for key, value in manifest._asdict().items() if key != "replicas" or value}
    return (json.dumps({**found, _CHECKSUM: _digest(found)}) + "\n").encode()


def parsed(content: bytes, step: int) -> Manifest:
    """The manifest in a file's content, which must be that of `step`. Raises ValueError: damaged."""
    try:
        found = json.loads(content.decode())
        if _CHECKSUM in found and found.pop(_CHECKSUM) != _digest(found):
            raise ValueError("it does not match its own checksum")
        manifest = Manifest(**{**found, "replicas": tuple(File(*file) for file in found.get("replicas", ()))})
        if not (manifest.top1 is None or manifest.top1 >= 0):
            raise ValueError(f"its top1 is {manifest.top1}")
    except (TypeError, AttributeError, RecursionError):  # not the keys, or not the types, of a manifest
        raise ValueError("it is no manifest of a checkpoint") from None
    if manifest.step != step:
        raise ValueError(f"it is that of step {manifest.step}")
    return manifest


def _digest(found: dict) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
