"""Checkpoints: written so that a crash at any moment leaves the last good one, read only if whole.

A checkpoint is `step-00001234.pt` (loaded with weights_only) and, renamed into place after it, its manifest
`step-00001234.json`: step, score, size and SHA-256, also of `step-00001234.replica-0003.pt`, the state of a replica. A
file without a manifest was cut off and does not count; a manifest that cannot be read, or does not match, is damage.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple, Union

import torch

from common.errors import CheckpointError
from common.files import write
from training.unpickling import reading, unpickled

FORMAT = 1
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})\.(pt|json)")
_REPLICA_NAME = re.compile(r"step-([0-9]{8,})\.replica-([0-9]{4,})\.pt")
_REPLICA_FORMAT = "replica_format"  # not the key of a checkpoint: a replica's file holds no weights
_CHECKSUM = "checksum"  # key of the SHA-256 of all others; files of older programs have none


class File(NamedTuple):
    """Length and SHA-256 in hexadecimal digits."""

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """Facts about a checkpoint. top1: share in [0, 1], None if it was not scored. replicas: their files, if any."""

    step: int
    bytes: int
    sha256: str
    top1: Optional[float]
    replicas: Tuple[File, ...] = ()


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep_last: int, keep_best: bool):
        self.folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._damaged: Set[int] = set()
        self._reported: Set[int] = set()  # checkpoints that are known to be no good: each is told of once

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def replica_path(self, step: int, replica: int) -> Path:
        return self.folder / f"step-{step:08d}.replica-{replica:04d}.pt"

    def save(
        self,
        step: int,
        content: dict,
        top1: Optional[float],
        replica_states: Iterable[dict] = (),
        warn: Callable[[str], None] = functools.partial(print, flush=True),
    ) -> Path:
        """Write `content` and the state of each replica durably, then remove what need not be kept; return its path.
        Each state is written before the next is generated, so that only one need be in memory.

        Args: warn: called for each checkpoint that turns out to be damaged; it is kept, and not compared with others.

        Raises OSError: the disk is full or fails; older checkpoints are untouched and no partial file is left.
        """
        self.folder.mkdir(exist_ok=True)  # without its parents: the run folder may have been unmounted
        replicas: List[File] = []
        with contextlib.ExitStack() as undo:  # what is written counts for nothing, and takes room on a full disk
            for state in replica_states:
                path = self.replica_path(step, len(replicas))
                replicas.append(_write(path, {_REPLICA_FORMAT: FORMAT, "state": state}))
                undo.callback(path.unlink)
                del state  # or it would stay in memory while the next one is made
            whole = _write(self.path(step), {"format": FORMAT, **content})
            undo.callback(self.path(step).unlink)
            write(self._manifest_path(step), written(Manifest(step, *whole, top1, tuple(replicas))), durable=True)
            undo.pop_all()
        self._damaged.discard(step)
        self._reported.discard(step)
        self._prune(warn)
        return self.path(step)

    def load_newest(self, warn: Callable[[str], None], with_replicas: bool = False) -> Optional[dict]:
        """Return the content of the newest whole checkpoint, or None if there never was one.

        Args: warn: called for each newer one that is passed over: damaged, or without a manifest. with_replicas:
        whether the files of its replicas must be whole, too; weights can be had without them.

        Raises CheckpointError: there are checkpoints, but none is whole, or the folder cannot be listed.
        """
        damaged, cut_off = [], []
        for step in reversed(self._steps()):
            path = self.path(step)
            try:
                manifest = self.manifest(step)
                if manifest is None:
                    cut_off.append(self._cut_off(step))
                    self._reported.add(step)
                    warn(f"{cut_off[-1]}; it does not count")
                    continue
                content = load(path, manifest)
                for replica, file in enumerate(manifest.replicas if with_replicas else ()):
                    _compare(self.replica_path(step, replica), file)
                return content
            except CheckpointError as error:
                damaged.append(str(error))
                self._damaged.add(step)
                self._reported.add(step)
                warn(f"{error}; trying the one before")
        if damaged or len(cut_off) > 1:  # one may be the first of the run, and its writing cut off
            raise CheckpointError(
                f"{[*damaged, *cut_off][0]}; no older checkpoint is whole either: restore one with all files of its "
                f"number into {self.folder}, or delete that folder to start from the beginning"
            )
        return None

    def load_best(self, warn: Callable[[str], None]) -> Optional[dict]:
        """Return the content of the whole checkpoint with the highest top-1 (of equals the newest), None if none has.

        Args: warn: called for each better one that is damaged, and for each whose top-1 cannot be read.

        Raises CheckpointError: one that is damaged may have had a score, and no whole one has.
        """
        faults: List[str] = []

        def note(line: str) -> None:
            faults.append(line)
            warn(line)

        for manifest in _best_first(self.manifests(note)):
            try:
                return load(self.path(manifest.step), manifest)
            except CheckpointError as error:
                note(f"{error}; trying the next best")
        if faults:
            remedy = "no other checkpoint is scored and whole: restore it, or leave out --best"
            raise CheckpointError(f"{faults[0].rsplit('; ', 1)[0]}; {remedy}")
        return None

    def manifests(self, warn: Callable[[str], None]) -> List[Manifest]:
        """Return all whole manifests, the oldest first.

        Args: warn: called for each checkpoint whose manifest is missing or damaged.
        """
        found, faults = self._examined()
        for fault in faults.values():
            warn(fault)
        return found

    def replica_count(self, step: int) -> int:
        """Number of replicas with a file of their own in the checkpoint of a step, which `load_newest` has read."""
        return len(self.manifest(step).replicas)

    def replica_state(self, step: int, replica: int) -> dict:
        """Return that replica's state as it was saved, on the CPU; `load_newest` has compared its checksum.
        Raises CheckpointError: the file cannot be read, or was not written by this program."""
        return _checked(self.replica_path(step, replica), _REPLICA_FORMAT)["state"]

    def _steps(self) -> List[int]:
        """Steps that have a checkpoint or a manifest, ascending."""
        with reading(self.folder):
            names = os.listdir(self.folder) if self.folder.exists() else ()
        return sorted({int(found.group(1)) for found in map(_NAME.fullmatch, names) if found})

    def _manifest_path(self, step: int) -> Path:
        return self.path(step).with_suffix(".json")

    def manifest(self, step: int) -> Optional[Manifest]:
        """Return the manifest of a step, None where there is none.
        Raises CheckpointError: it is damaged, or cannot be read."""
        path = self._manifest_path(step)
        try:
            with reading(path):
                return parsed(path.read_bytes(), step) if path.exists() else None
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged: {error}") from None

    def _examined(self) -> Tuple[List[Manifest], Dict[int, str]]:
        """All whole manifests, the oldest first, and by step what is wrong with the others."""
        found = []
        faults = {}
        for step in self._steps():
            try:
                manifest = self.manifest(step)
                fault = self._cut_off(step)
            except CheckpointError as error:
                manifest = None
                fault = str(error)
            if manifest is not None:
                found.append(manifest)
            else:
                faults[step] = f"{fault}; its score is unknown, and it is passed over"
        return found, faults

    def _cut_off(self, step: int) -> str:
        return f"{self.path(step)}: has no manifest, as if its writing was cut off"

    def _prune(self, warn: Callable[[str], None]) -> None:
        for leftover in self.folder.glob("step-*.tmp"):  # of a process that was killed while it wrote
            leftover.unlink()
        whole, faults = self._examined()
        for step in faults.keys() - self._reported:
            warn(faults[step])
        self._reported.update(faults)
        manifests = [manifest for manifest in whole if manifest.step not in self._damaged]
        best = _best_first(manifests)[:1] if self._keep_best else []
        kept = {manifest.step for manifest in (*manifests[-self._keep_last :], *best)}
        for manifest in manifests:
            if manifest.step not in kept:
                self._manifest_path(manifest.step).unlink()
                self.path(manifest.step).unlink(missing_ok=True)
        for path in self.folder.glob("step-*.replica-*.pt"):  # those that no manifest lists
            name = _REPLICA_NAME.fullmatch(path.name)
            with contextlib.suppress(CheckpointError):  # a manifest that is damaged may list it
                manifest = self.manifest(int(name.group(1))) if name else None
                if name and (manifest is None or int(name.group(2)) >= len(manifest.replicas)):
                    path.unlink()


def _best_first(manifests: List[Manifest]) -> List[Manifest]:
    """Those that were scored, by falling top-1; of equals the newest first."""
    scored = [manifest for manifest in manifests if manifest.top1 is not None]
    return sorted(scored, key=lambda manifest: (manifest.top1, manifest.step), reverse=True)


def load(path: Path, manifest: Optional[Manifest] = None) -> dict:
    """Return the content of a checkpoint file, on the CPU; never runs code from it.
    Raises CheckpointError: unreadable, truncated, altered, or not written by this program."""
    if manifest is not None:
        _compare(path, File(manifest.bytes, manifest.sha256))
    return _checked(path, "format")


def load_named(path: Path, warn: Callable[[str], None]) -> dict:
    """As `load`, of a file that was named by itself: compared with its manifest where that lies beside it.

    Args: warn: called where there is a manifest that cannot be read, so that nothing is compared.
    """
    name = _NAME.fullmatch(path.name)
    manifest = None
    if name:
        try:
            manifest = CheckpointFolder(path.parent, keep_last=2, keep_best=True).manifest(int(name.group(1)))
        except CheckpointError as error:
            warn(f"{error}; {path.name} is not compared with its checksum")
    return load(path, manifest)


def _checked(path: Path, key: str) -> dict:
    content = unpickled(path)
    if not isinstance(content, dict) or content.get(key) != FORMAT:
        raise CheckpointError(f"{path}: damaged, or not a checkpoint of this program in this version")
    return content


def _compare(path: Path, expected: File) -> None:
    digest, size = hashlib.sha256(), 0
    with reading(path), open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
            size += len(chunk)
    if File(size, digest.hexdigest()) != expected:
        raise CheckpointError(f"{path}: damaged: {size} bytes do not match the manifest's checksum")


def _sha256(content: Union[bytes, memoryview]) -> str:
    return hashlib.sha256(content).hexdigest()


def _write(path: Path, content: dict) -> File:
    buffer = io.BytesIO()  # not straight to the file: torch.save hides the reason when a write fails
    torch.save(content, buffer)
    write(path, buffer.getbuffer(), durable=True)
    return File(buffer.tell(), _sha256(buffer.getbuffer()))


def written(manifest: Manifest) -> bytes:
    # Without an empty list of replicas, which older programs do not know.
    found = {key: value for key, value in manifest._asdict().items() if key != "replicas" or value}
    return (json.dumps({**found, _CHECKSUM: _sha256(json.dumps(found, sort_keys=True).encode())}) + "\n").encode()


def parsed(content: bytes, step: int) -> Manifest:
    """The manifest in a file's content, which must be that of `step`. Raises ValueError: damaged."""
    try:
        found = json.loads(content.decode())
        if _CHECKSUM in found and found.pop(_CHECKSUM) != _sha256(json.dumps(found, sort_keys=True).encode()):
            raise ValueError("it does not match its own checksum")
        manifest = Manifest(**{**found, "replicas": tuple(File(*file) for file in found.get("replicas", ()))})
        if not (manifest.top1 is None or 0 <= manifest.top1 <= 1):
            raise ValueError(f"its top1 is {manifest.top1}")
    except (TypeError, AttributeError, RecursionError):  # not the keys, or not the types, of a manifest
        raise ValueError("it is no manifest of a checkpoint") from None
    if manifest.step != step:
        raise ValueError(f"it is that of step {manifest.step}")
    return manifest
