"""The user's cache of what was measured on this machine: files by kind, named by all that their content depends on."""

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
    """The file of earlier measurements. Args: key: all that they depend on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return user_cache() / f"{kind}-{digest[:32]}.json"


def programs() -> List[object]:
    """Versions of torch, cuDNN and Triton, and a digest of our kernels' files."""
    triton = [found.version for found in metadata.distributions(name="triton")]
    kernels = b"".join(file.read_bytes() for file in sorted(Path(patching.__file__).parent.glob("*.py")))
    return [torch.__version__, torch.backends.cudnn.version(), triton, hashlib.sha256(kernels).hexdigest()]


def write(file: Path, content: Any) -> None:
    """Write a file whole, or not at all where there is no room: the next run measures again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, shared=True) as temporary:
            temporary.write_text(json_text(content, indent=1) + "\n")
