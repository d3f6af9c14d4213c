"""Checkpoints: written so that a crash at any moment leaves the last good one, read only if whole.

A checkpoint is `step-00001234.pt`, loaded with weights_only, and `step-00001234.replica-0003.pt`
for each replica that has a state of its own. Its manifest `step-00001234.json`
(`training/manifest.py`) is renamed into place after them. A file without a manifest was cut off and
does not count; a manifest that cannot be read, or does not match the files, is damage.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import re
from pathlib import Path
from typing import Callable, Dict, Iterable, List, Optional, Set, Tuple, Union

import torch

from common.errors import CheckpointError
from common.files import replacing, sync, writing
from training.manifest import File, Manifest, decode, encode
from training.mirror import Mirror
from training.unpickling import reading, unpickled

FORMAT = 1
_FORMAT_KEY = "format"
_REPLICA_FORMAT_KEY = "replica_format"  # another key, as a replica's file holds no weights
# At least eight digits, and more only where a step has more: each step has one name.
_NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,})\.(pt|json)")
_REPLICA_NAME = re.compile(r"step-([0-9]{8,})\.replica-([0-9]{4,})\.pt")
_CHUNK = 1 << 20  # bytes that are read at a time for a checksum


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        keep_last: int,
        keep_best: bool,
        mirror: Optional[Mirror] = None,
    ):
        """
        Args:
            folder: of the checkpoints; the first that is saved makes it.
            keep_last: number of checkpoints that are kept, the newest; those that were saved for
                their score alone do not count.
            keep_best: whether the one with the highest top-1 is kept, too.
            mirror: of the run folder, to which each new checkpoint is sent.
        """
        self.folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._mirror = mirror
        self._damaged: Set[int] = set()  # steps whose files are damaged
        self._reported: Set[int] = set()  # damaged or cut off; the user hears of each step once

    def path(self, step: int) -> Path:
        """Return the file of the checkpoint of `step`."""
        return self.folder / f"step-{step:08d}.pt"

    def replica_path(self, step: int, replica: int) -> Path:
        """Return the file of a `replica` in the checkpoint of `step`."""
        return self.folder / f"step-{step:08d}.replica-{replica:04d}.pt"

    def save(
        self,
        step: int,
        content: dict,
        top1: Optional[float],
        replica_states: Iterable[dict] = (),
        warn: Callable[[str], None] = functools.partial(print, flush=True),
        only_best: bool = False,
        validation_set: int = 0,
    ) -> Path:
        """Write a checkpoint durably, then remove older ones that need not be kept.

        Args:
            step: steps done.
            content: `recipe` (YAML), `engine` (`Engine.state_dict`), `progression` and `classes`.
                On loading `training.resuming` checks recipe, images and classes, the engine the
                names and shapes of its tensors.
            top1: share in [0, 1]; None if it was not scored.
            replica_states: the state of each replica. Each is written before the next is generated,
                so that only one need be in memory.
            warn: called for each checkpoint that turns out to be damaged; it is kept, and not
                compared with others.
            only_best: whether it is saved for its score alone, and goes once another is better.
            validation_set: see `Manifest`.

        Returns:
            The checkpoint's file.

        Raises:
            OSError: the disk is full or fails; older checkpoints are untouched, and no partial file
                is left.
        """
        self.folder.mkdir(exist_ok=True)  # no parents: the run folder may have been unmounted
        path = self.path(step)
        replicas: List[File] = []
        # No file takes its place before all are on the disk: the step may have a checkpoint already,
        # whose manifest has the checksums of its own files.
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as places:

            def place(path: Path) -> Path:
                """Return a path to write a file to, which takes the place of `path` at the end."""
                # Files that no manifest lists take room on a full disk: a failure removes them.
                if not path.exists():
                    undo.callback(path.unlink, missing_ok=True)
                return places.enter_context(replacing(path, durable=True))

            # The first is the last to take its place: a manifest counts only once its files are there.
            manifest_file = place(self._manifest_path(step))
            for state in replica_states:
                replica_file = place(self.replica_path(step, len(replicas)))
                replica = {_REPLICA_FORMAT_KEY: FORMAT, "state": state}
                replicas.append(_write(replica_file, replica))
                del state, replica  # or they would stay in memory while the next one is made
            file = _write(place(path), {_FORMAT_KEY: FORMAT, **content})
            manifest = Manifest(
                step,
                *file,
                top1=top1,
                replicas=tuple(replicas),
                only_best=only_best,
                validation_set=validation_set,
            )
            _write_bytes(manifest_file, encode(manifest))
            places.close()
            undo.pop_all()
        # It may have taken the place of a damaged one.
        self._damaged.discard(step)
        self._reported.discard(step)
        # Of what is being sent nothing may be removed.
        if self._mirror is not None:
            self._mirror.wait()
        self._prune(warn)
        if self._mirror is not None:
            self._mirror.send()
        return path

    def load_newest(
        self,
        warn: Callable[[str], None],
        with_replicas: bool = False,
    ) -> Optional[dict]:
        """Return the content of the newest whole checkpoint, or None if there never was one.

        A single one that was cut off as it was written counts as none: training/resuming.py refuses
        to begin anew where metrics tell of a checkpoint.

        Args:
            warn: called for each newer one that is passed over: damaged, or without a manifest.
            with_replicas: whether the files of its replicas must be whole, too; weights can be had
                without them.

        Raises:
            CheckpointError: there are checkpoints, but none is whole; or the folder cannot be
                listed.
        """
        # Both are counted: a single one that is cut off may be the first of the run, which then
        # begins again.
        damaged: List[str] = []
        cut_off: List[str] = []
        for step in reversed(self._steps()):
            try:
                manifest = self.manifest(step)
                if manifest is not None:
                    return self._load_whole(manifest, with_replicas)
                cut_off.append(self._cut_off(step))
                warn(f"{cut_off[-1]}; it does not count")
            except CheckpointError as error:
                damaged.append(str(error))
                self._damaged.add(step)
                warn(f"{error}; trying the one before")
            self._reported.add(step)
        # To begin again would cost a run of days: that is left to the user.
        if damaged or len(cut_off) > 1:
            fault = (damaged + cut_off)[0]
            raise CheckpointError(
                f"{fault}; no older checkpoint is whole either: restore one with all files of its "
                f"number into {self.folder}, or delete that folder to start from the beginning"
            )
        return None

    def load_best(self, warn: Callable[[str], None]) -> Optional[dict]:
        """Return the content of the whole checkpoint with the highest top-1, of equals the newest.

        Args:
            warn: called for each better one that is damaged, and for each whose top-1 cannot be
                read.

        Returns:
            The content, or None if no checkpoint was scored.

        Raises:
            CheckpointError: one that is damaged may have had a score, and no whole one has.
        """
        faults: List[str] = []

        def note(fault: str) -> None:
            """Remember a `fault`, and warn of it."""
            faults.append(fault)
            warn(fault)

        # A damaged one may have been the best. So it is named, and counts if nothing else is whole.
        for manifest in _best_first(self.manifests(note)):
            try:
                return load(self.path(manifest.step), manifest)
            except CheckpointError as error:
                note(f"{error}; trying the next best")
        if faults:
            fault, _, _ = faults[0].rpartition("; ")
            remedy = "no other checkpoint is scored and whole: restore it, or leave out --best"
            raise CheckpointError(f"{fault}; {remedy}")
        return None

    def manifests(self, warn: Callable[[str], None]) -> List[Manifest]:
        """Return all whole manifests, the oldest first.

        Args:
            warn: called for each checkpoint whose manifest is missing or damaged.
        """
        whole, faults = self._examine()
        for fault in faults.values():
            warn(fault)
        return whole

    def manifest(self, step: int) -> Optional[Manifest]:
        """Return the manifest of a `step`, None where there is none.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
        """
        return _read_manifest(self._manifest_path(step), step)

    def replica_count(self, step: int) -> int:
        """Return how many replicas have a file in the checkpoint of `step`, which is whole."""
        manifest = self.manifest(step)
        assert manifest is not None
        return len(manifest.replicas)

    def replica_state(self, step: int, replica: int) -> dict:
        """Return the state of a `replica` as it was saved at `step`, on the CPU.

        Its checksum is not compared: `load_newest` does that.

        Raises:
            CheckpointError: the file cannot be read, or was not written by this program.
        """
        return _load(self.replica_path(step, replica), _REPLICA_FORMAT_KEY)["state"]

    def _load_whole(self, manifest: Manifest, with_replicas: bool) -> dict:
        """Return the content; raise CheckpointError unless the files match `manifest`."""
        content = load(self.path(manifest.step), manifest)
        # Compared, not loaded: all of them together may not fit into memory.
        if with_replicas:
            for replica, file in enumerate(manifest.replicas):
                _compare(self.replica_path(manifest.step, replica), file)
        return content

    def _steps(self) -> List[int]:
        """Return the steps that have a checkpoint or a manifest, ascending."""
        # Of both kinds of files: either may be there without the other, which is a fault to report.
        with reading(self.folder):
            names = os.listdir(self.folder) if self.folder.exists() else []
        matches = map(_NAME.fullmatch, names)
        return sorted({int(match.group(1)) for match in matches if match})

    def _manifest_path(self, step: int) -> Path:
        """Return the file of the manifest of a step."""
        return self.path(step).with_suffix(".json")

    def _examine(self) -> Tuple[List[Manifest], Dict[int, str]]:
        """Return all whole manifests, the oldest first, and by step the faults of the others."""
        # By manifests only: comparing all files would read gigabytes at each save.
        whole: List[Manifest] = []
        faults: Dict[int, str] = {}
        for step in self._steps():
            fault = self._cut_off(step)
            manifest = None
            try:
                manifest = self.manifest(step)
            except CheckpointError as error:
                fault = str(error)
            if manifest is not None:
                whole.append(manifest)
            else:
                faults[step] = f"{fault}; its score is unknown, and it is passed over"
        return whole, faults

    def _cut_off(self, step: int) -> str:
        """Return the fault of a checkpoint without a manifest."""
        return f"{self.path(step)}: has no manifest, as if its writing was cut off"

    def _prune(self, warn: Callable[[str], None]) -> None:
        """Remove checkpoints that need not be kept, and files that belong to none."""
        for leftover in self.folder.glob("step-*.tmp"):  # of a process that was killed as it wrote
            leftover.unlink()
        whole, faults = self._examine()
        for step in sorted(faults.keys() - self._reported):
            warn(faults[step])
        self._reported.update(faults)
        # Damaged checkpoints push out no whole ones, and are kept: their files may be restored.
        manifests = [manifest for manifest in whole if manifest.step not in self._damaged]
        steps = self._kept_steps(manifests)
        # A manifest goes before its files, so that none is left that promises what is gone.
        for manifest in manifests:
            if manifest.step not in steps:
                self._manifest_path(manifest.step).unlink()
                self.path(manifest.step).unlink(missing_ok=True)
        for path in self.folder.glob("step-*.replica-*.pt"):
            if self._is_unlisted(path):
                path.unlink()

    def _kept_steps(self, manifests: List[Manifest]) -> Set[int]:
        """Return the steps of the newest of these checkpoints, and of the best one."""
        # A best one that was saved between them costs none of the newest.
        due = [manifest for manifest in manifests if not manifest.only_best]
        steps = {manifest.step for manifest in due[-self._keep_last :]}
        best_first = _best_first(manifests)
        if self._keep_best and best_first:
            steps.add(best_first[0].step)
        return steps

    def _is_unlisted(self, path: Path) -> bool:
        """Return whether a replica's file is in no manifest; a damaged manifest may list it."""
        # Left by a save that failed, or by a checkpoint that was removed.
        name = _REPLICA_NAME.fullmatch(path.name)
        if name is None:
            return False  # a user's own file
        step, replica = map(int, name.groups())
        try:
            manifest = self.manifest(step)
        except CheckpointError:
            return False
        return manifest is None or replica >= len(manifest.replicas)


def load(path: Path, manifest: Optional[Manifest] = None) -> dict:
    """Return the content of a checkpoint file, on the CPU; never runs code from it.

    Args:
        path: of the file.
        manifest: what the file must match; None compares nothing.

    Raises:
        CheckpointError: unreadable, truncated, altered, or not written by this program.
    """
    if manifest is not None:
        _compare(path, File(manifest.bytes, manifest.sha256))
    return _load(path, _FORMAT_KEY)


def load_named(path: Path, warn: Callable[[str], None]) -> dict:
    """Load a file that the user named, and compare it with its manifest where that lies beside it.

    Args:
        path: of the file, see `load`.
        warn: called where there is a manifest that cannot be read, so that nothing is compared.
    """
    manifest = None
    name = _NAME.fullmatch(path.name)
    # Under another name there is no manifest that would belong to it.
    if name:
        try:
            manifest = _read_manifest(path.with_suffix(".json"), int(name.group(1)))
        except CheckpointError as error:
            warn(f"{error}; {path.name} is not compared with its checksum")
    return load(path, manifest)


def _best_first(manifests: List[Manifest]) -> List[Manifest]:
    """Return the manifests that have a score, by falling top-1; of equals the newest first.

    Those with scores of other validation images, with which the run began, come behind.
    """

    def goodness(manifest: Manifest) -> Tuple[int, float, int]:
        assert manifest.top1 is not None, "only scored ones are compared"
        # Of equals the newest: it has seen more.
        return manifest.validation_set, manifest.top1, manifest.step

    scored = [manifest for manifest in manifests if manifest.top1 is not None]
    return sorted(scored, key=goodness, reverse=True)


def _read_manifest(path: Path, step: int) -> Optional[Manifest]:
    """Return the manifest in a file, None without the file; raises CheckpointError for damage."""
    try:
        with reading(path):
            return decode(path.read_bytes(), step) if path.exists() else None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged: {error}") from None


def _load(path: Path, format_key: str) -> dict:
    """Return a file's content; raise CheckpointError unless it has our format at `format_key`."""
    content = unpickled(path)
    if not isinstance(content, dict) or content.get(format_key) != FORMAT:
        fault = "damaged, or not a checkpoint of this program in this version"
        raise CheckpointError(f"{path}: {fault}")
    return content


def _compare(path: Path, expected: File) -> None:
    """Raise CheckpointError unless a file has the `expected` length and checksum."""
    # Before torch sees the file: its reader says little about damage, and may miss it.
    digest = hashlib.sha256()
    size = 0
    with reading(path), open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
            size += len(chunk)
    if File(size, digest.hexdigest()) != expected:
        fault = f"damaged: {size} bytes do not match the manifest's checksum"
        raise CheckpointError(f"{path}: {fault}")


def _write(path: Path, content: dict) -> File:
    """Write a file, wait until it is on the disk, and return its length and checksum."""
    # Not straight to the file: torch.save hides the reason when a write fails.
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getbuffer()
    _write_bytes(path, data)
    return File(len(data), hashlib.sha256(data).hexdigest())


def _write_bytes(path: Path, data: Union[bytes, memoryview]) -> None:
    """Write a file, and wait until it is on the disk."""
    with writing(path):
        with open(path, "wb") as stream:
            stream.write(data)
        sync(path)
