"""Failures while checkpoints are saved, and hostile files; benchmarks/fuzz tries damaged ones."""

import builtins
import copy
import errno
import hashlib
import io
import os
import pickle
import zipfile

import pytest
import torch

from common.errors import CheckpointError
from tests.training.conftest import content, files, manifest, names
from training import checkpoint
from training.manifest import Manifest, encode

FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


def failing_at(patch, operation, number, error):
    """Have the operation raise the error at its call of this number; return the list of its calls.

    Of openings only those of files count that are written.
    """
    owner = builtins if operation == "open" else os
    function = getattr(owner, operation)
    calls = []

    def failing(*arguments, **keywords):
        if operation != "open" or str(arguments[0]).endswith(".tmp"):
            calls.append(operation)
            if len(calls) == number:
                # Not the same one twice: users get its file's name written into it.
                raise copy.copy(error)
        return function(*arguments, **keywords)

    patch.setattr(owner, operation, failing)
    return calls


@pytest.mark.parametrize("error", [FULL_DISK, KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("operation", "number"),
    [("open", 1), ("open", 2), ("fsync", 1), ("fsync", 3), ("replace", 1), ("replace", 2)],
)
def test_a_failure_while_saving_leaves_the_last_one_and_no_partial_file(
    save, newest, monkeypatch, replicas, operation, number, error
):
    """Writing, syncing and renaming, of several files of a checkpoint."""
    checkpoints = save(1)
    number += replicas * (2 if operation == "fsync" else 1)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        calls = failing_at(patch, operation, number, error)
        save(2, checkpoints=checkpoints)
    assert len(calls) == number
    assert files(checkpoints.folder) == names(1, replicas=replicas)
    assert newest() == (1, [])
    save(2, checkpoints=checkpoints)
    assert newest() == (2, [])


def test_content_reaches_the_disk_before_its_name_and_the_manifest_comes_last(
    save, monkeypatch, replicas
):
    """The order that a power cut needs: data of all files; then name and folder entry of each, the
    manifest's last."""
    log = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (log.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (log.append(new.name), replace(old, new)))
    save(1)
    manifest_file, content_file, *others = names(1, replicas=replicas)
    data = log[: 2 + replicas]
    places = log[2 + replicas :]
    assert data == ["fsync"] * (2 + replicas)
    in_order = (content_file, *reversed(others), manifest_file)
    assert places == [each for name in in_order for each in ("fsync", name, "fsync")]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("operation", ["open", "fsync"])
def test_a_full_disk_leaves_the_checkpoint_of_the_same_step(
    save, newest, monkeypatch, replicas, operation, number
):
    """A run whose images have changed may be saved at its last step once more."""
    checkpoints = save(1)
    number += replicas
    before = {file.name: file.read_bytes() for file in checkpoints.folder.iterdir()}
    with monkeypatch.context() as patch, pytest.raises(
        OSError, match=r"No space left on device: '.*step-00000001"
    ):
        failing_at(patch, operation, number, FULL_DISK)
        save(1, checkpoints=checkpoints, scores={1: 0.5})
    assert {file.name: file.read_bytes() for file in checkpoints.folder.iterdir()} == before
    assert newest() == (1, [])


class Hostile:
    """Unpickled by the usual means, it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def as_torch_file(thing, **how):
    buffer = io.BytesIO()
    torch.save(thing, buffer, **how)
    return buffer.getvalue()


def as_old_torch_file(thing):
    return as_torch_file(thing, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("pack", [as_torch_file, as_old_torch_file, pickle.dumps])
def test_a_hostile_file_is_refused_and_its_code_does_not_run(tmp_path, folder, pack):
    """Even with a manifest that vouches for it."""
    proof = tmp_path / "executed"
    data = pack({"format": checkpoint.FORMAT, "engine": Hostile(proof)})
    checkpoints = folder()
    path = checkpoints.save(1, content(1), None)
    path.write_bytes(data)
    manifest(checkpoints, 1).write_bytes(
        encode(Manifest(1, len(data), hashlib.sha256(data).hexdigest(), None))
    )
    for load in (lambda: checkpoints.load_newest(lambda line: None), lambda: checkpoint.load(path)):
        with pytest.raises(CheckpointError, match="damaged, or not a checkpoint of this program"):
            load()
    assert not proof.exists()
    if pack is as_torch_file:
        torch.load(path, weights_only=False)
        assert proof.exists()


def test_a_small_file_cannot_take_much_memory(tmp_path, monkeypatch):
    """A bytearray of 256 MiB, which weights_only grants, and a compressed archive."""
    path = tmp_path / "small.pt"
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was opened"))
    path.write_bytes(b"\x80\x02cbuiltins\nbytearray\nJ\0\0\0\x10\x85R.")
    assert checkpoint.unpickled(path) is None
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(16 << 20))
    assert checkpoint.unpickled(path) is None
