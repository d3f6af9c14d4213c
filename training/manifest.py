"""Manifests of checkpoints: step, score, size and SHA-256 of each file, and a checksum of its own.

A manifest is one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple, Optional, Tuple

_CHECKSUM = "checksum"  # key of the SHA-256 of all others; files of older programs have none


class File(NamedTuple):
    """Length and checksum of a file.

    sha256: in hexadecimal digits.
    """

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """Facts about a checkpoint.

    step: steps done.
    bytes, sha256: length and checksum of its file, see `File`.
    top1: share in [0, 1]; None if it was not scored.
    replicas: a file for each replica that has a state of its own.
    only_best: whether it was saved for its score alone, between the checkpoints that were due.
    validation_set: how often the run had gone on with other validation images; only scores of one
        set can be compared.
    """

    step: int
    bytes: int
    sha256: str
    top1: Optional[float]
    replicas: Tuple[File, ...] = ()
    only_best: bool = False
    validation_set: int = 0


def encode(manifest: Manifest) -> bytes:
    """Return the content of a manifest's file."""
    fields = manifest._asdict()
    # Fields that older programs do not know are left out where they say nothing.
    for name in ("replicas", "only_best", "validation_set"):
        if not fields[name]:
            del fields[name]
    # Last: it covers all fields that are written.
    fields[_CHECKSUM] = _checksum(fields)
    return (json.dumps(fields) + "\n").encode()


def decode(content: bytes, step: int) -> Manifest:
    """Return the manifest in a file's content.

    Args:
        content: of the file.
        step: of the checkpoint that the manifest must belong to.

    Raises:
        ValueError: it is damaged, or belongs to another step.
    """
    # Nothing is trusted: a disk that loses bits damages this file like any other.
    try:
        manifest = _checked(json.loads(content.decode()))
    except (TypeError, AttributeError, RecursionError):  # not the keys, or types, of a manifest
        raise ValueError("it is no manifest of a checkpoint") from None
    if manifest.step != step:
        raise ValueError(f"it is that of step {manifest.step}")
    return manifest


def _checked(fields: Any) -> Manifest:
    """Return the manifest in parsed JSON; raise ValueError, TypeError or AttributeError if none."""
    # A flipped bit in a score would choose another checkpoint as the best.
    if _CHECKSUM in fields and fields.pop(_CHECKSUM) != _checksum(fields):
        raise ValueError("it does not match its own checksum")
    replicas = tuple(File(*file) for file in fields.pop("replicas", ()))
    manifest = Manifest(**fields, replicas=replicas)
    if not (manifest.top1 is None or 0 <= manifest.top1 <= 1):
        raise ValueError(f"its top1 is {manifest.top1}")
    return manifest


def _checksum(fields: dict) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
