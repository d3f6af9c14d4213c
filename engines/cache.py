"""The user's cache of measurements on this machine.

There are files of several kinds, named by all that their content depends on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any, List

import torch

from common.files import replacing, user_cache
from common.json_io import json_text
from models.kernels import patching


def place(kind: str, *key: object) -> Path:
    """Return the file of earlier measurements.

    Args:
        kind: of measurement.
        key: everything that they depend on, as JSON can write it.
    """
    # The key itself would be too long for the name of a file.
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return user_cache() / f"{kind}-{digest[:32]}.json"


def programs() -> List[object]:
    """Return the versions of torch, cuDNN and Triton, and a digest of our kernels' files."""
    triton = [package.version for package in metadata.distributions(name="triton")]
    # Our kernels by their text: they are changed without a new version.
    sources = hashlib.sha256()
    for file in sorted(Path(patching.__file__).parent.rglob("*")):
        if file.suffix in (".py", ".cu", ".h"):
            sources.update(file.read_bytes())
    return [torch.__version__, torch.backends.cudnn.version(), triton, sources.hexdigest()]


def write(file: Path, content: Any) -> None:
    """Write a file whole, or not at all where there is no room: the next run measures again.

    Args:
        file: of `place`.
        content: as JSON can write it.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, shared=True) as temporary:
            temporary.write_text(json_text(content, indent=1) + "\n")
