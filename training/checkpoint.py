"""Checkpoints: written so that a crash at any moment leaves the last good one, read only if whole.

A checkpoint is `step-00001234.pt` (loaded with weights_only) and, renamed into place after it,
`step-00001234.json`: its step, size, SHA-256 and scores. Without a matching manifest a file counts for nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import warnings
from pathlib import Path
from typing import IO, Callable, List, NamedTuple, Optional, Set, Tuple

import torch

from recipe.errors import CheckpointError

FORMAT = 1


class Manifest(NamedTuple):
    """What is known of a checkpoint without opening it. top1: share in [0, 1], None if it was not evaluated."""

    step: int
    bytes: int
    sha256: str
    top1: Optional[float]


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool):
        self.folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._damaged: Set[int] = set()

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def save(self, step: int, content: dict, top1: Optional[float]) -> Path:
        """Writes `content` durably, then removes what need not be kept.

        Raises:
            OSError: the disk is full or fails; older checkpoints are untouched and no partial file is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(step)
        buffer = io.BytesIO()  # not straight to the file: torch.save hides the reason when a write fails
        torch.save({"format": FORMAT, **content}, buffer)
        with replacing(path) as stream:
            stream.write(buffer.getbuffer())
        manifest = Manifest(step, buffer.tell(), hashlib.sha256(buffer.getbuffer()).hexdigest(), top1)
        try:
            with replacing(path.with_suffix(".json")) as stream:
                stream.write((json.dumps(manifest._asdict()) + "\n").encode())
        except BaseException:
            path.unlink()  # it would count for nothing, and on a full disk its room is needed
            raise
        self._damaged.discard(step)
        self._prune()
        return path

    def load_newest(self, warn: Callable[[str], None]) -> Optional[dict]:
        """The content of the newest checkpoint that is whole, or None if there never was one.

        Args:
            warn: told of each damaged checkpoint that is passed over.

        Raises:
            CheckpointError: there are checkpoints, but none is whole.
        """
        damaged = []
        for path in sorted(self.folder.glob("step-*.pt"), reverse=True):
            manifest = _read_manifest(path)
            if manifest is None:
                continue  # its writing was cut off before it counted
            try:
                content = load(path, manifest)
            except CheckpointError as error:
                damaged.append(str(error))
                self._damaged.add(manifest.step)
                warn(str(error))
                continue
            return content
        if damaged:
            raise CheckpointError(
                f"{damaged[0]}; no older checkpoint is whole either: restore one with its .json into {self.folder}, "
                "or delete that folder to start from the beginning"
            )
        return None

    def manifests(self) -> List[Manifest]:
        """Of all checkpoints that count, the oldest first."""
        found = [_read_manifest(path) for path in sorted(self.folder.glob("step-*.pt"))]
        return [manifest for manifest in found if manifest is not None]

    def _prune(self) -> None:
        for leftover in self.folder.glob("step-*.tmp"):  # of a process that was killed while it wrote
            leftover.unlink()
        manifests = [manifest for manifest in self.manifests() if manifest.step not in self._damaged]
        kept = {manifest.step for manifest in manifests[-self._keep_last :]}
        scored = [manifest for manifest in manifests if manifest.top1 is not None]
        if self._keep_best and scored:
            kept.add(max(scored, key=lambda manifest: (manifest.top1, manifest.step)).step)
        for manifest in manifests:
            if manifest.step not in kept:
                self.path(manifest.step).with_suffix(".json").unlink()
                self.path(manifest.step).unlink()


def load(path: Path, manifest: Optional[Manifest] = None) -> dict:
    """The content of a checkpoint file, on the CPU; never runs code from it.

    Raises:
        CheckpointError: unreadable, truncated, altered, or not written by this program.
    """
    try:
        with open(path, "rb") as stream:
            if manifest is not None:
                digest, size = _digest(stream)
                if (digest, size) != (manifest.sha256, manifest.bytes):
                    raise CheckpointError(f"{path}: damaged: {size} bytes do not match the manifest's checksum")
                stream.seek(0)
            content = _unpacked(stream)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: damaged, or not a checkpoint of this program in this version")
    return content


def unpickled(path: Path) -> object:
    """What torch.save wrote into a file, by whatever program; None if it is no such file, or could run code.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            return _unpacked(stream)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _unpacked(stream: IO[bytes]) -> object:
    """What torch.save wrote; None for anything else, and for what could run code when it is loaded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of pickle protocols that are not ours
            return torch.load(stream, map_location="cpu", weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception:  # torch raises nearly everything about files that are not its own
        return None


@contextlib.contextmanager
def replacing(path: Path):
    """A binary stream whose content takes the place of `path` once it is complete and on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(stream) -> Tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    for chunk in iter(lambda: stream.read(1 << 20), b""):
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size


def _read_manifest(path: Path) -> Optional[Manifest]:
    try:
        return Manifest(**json.loads(path.with_suffix(".json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
