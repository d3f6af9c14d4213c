"""What disks and strangers do to checkpoints: failures while saving, hostile files, and any other file."""

import errno
import io
import os
import pickle
import warnings
import zipfile

import pytest
import torch

from recipe.errors import CheckpointError
from tests.training.conftest import content, files, manifest, names, states
from training import checkpoint
from training.checkpoint import CheckpointFolder
from training.manifest import Manifest, written


class Disk:
    """Lets the n-th call of one of the operations that saving consists of fail; write is one of them."""

    def __init__(self, monkeypatch, operation, number, error):
        self.calls = 0
        self._number, self._error = number, error
        if operation == "write":
            monkeypatch.setattr("builtins.open", self._opening(open))
        else:
            monkeypatch.setattr(os, operation, self._failing(getattr(os, operation)))

    def _failing(self, function):
        def call(*arguments):
            self.calls += 1
            if self.calls == self._number:
                raise self._error
            return function(*arguments)

        return call

    def _opening(self, function):
        def call(path, mode="r", *arguments, **keywords):
            if str(path).endswith(".tmp"):
                self._failing(lambda: None)()
            return function(path, mode, *arguments, **keywords)

        return call


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("operation", "number"), [("write", 1), ("write", 2), ("fsync", 1), ("fsync", 3), ("replace", 1), ("replace", 2)]
)
def test_a_failure_while_saving_leaves_the_last_one_and_no_partial_file(
    save, newest, monkeypatch, replicas, operation, number, error
):
    """Writing, syncing (file, folder, manifest, folder) and renaming, of the last two files of a checkpoint."""
    checkpoints = save(1)
    number += replicas * (2 if operation == "fsync" else 1)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        disk = Disk(patch, operation, number, error)
        save(2, checkpoints=checkpoints)
    assert disk.calls == number
    assert files(checkpoints.folder) == names(1, replicas=replicas)
    assert newest() == (1, [])
    save(2, checkpoints=checkpoints)
    assert newest() == (2, [])


def test_replicas_that_cannot_be_asked_leave_the_last_one(save, newest, replicas):
    def lost():
        yield from states(2, 1)
        raise RuntimeError("replica 1 is gone")

    checkpoints = save(1)
    with pytest.raises(RuntimeError, match="replica 1 is gone"):
        checkpoints.save(2, content(2), None, lost())
    assert files(checkpoints.folder) == names(1, replicas=replicas) and newest() == (1, [])


def test_content_reaches_the_disk_before_its_name_and_the_manifest_comes_last(save, monkeypatch, replicas):
    """The order that a power cut needs: data, name, folder entry; first the files, then the manifest."""
    log = []
    for operation in ("fsync", "replace"):
        real = getattr(os, operation)
        monkeypatch.setattr(
            os, operation, lambda *given, name=operation, real=real: (log.append((name, given)), real(*given))
        )
    save(1)
    assert [operation for operation, _ in log] == ["fsync", "replace", "fsync"] * (replicas + 2)
    content_last, *others = names(1, replicas=replicas)[1:]
    renamed = [given[1].name for operation, given in log if operation == "replace"]
    assert renamed == [*others, content_last, names(1)[0]]


def test_a_disk_that_is_really_full_leaves_the_last_one(small_disk, replicas):
    """128 KiB hold one checkpoint of 65 KiB (and 3 replicas of 9 KiB), and not two."""
    checkpoints = CheckpointFolder(small_disk("128k") / "checkpoints", 2, False)
    large = {"engine": {}, "progression": {"step": 1}, "weights": torch.zeros(16_000)}
    checkpoints.save(1, large, None, states(1, replicas))
    with pytest.raises(OSError) as caught:
        checkpoints.save(2, large, None, states(2, replicas))
    assert caught.value.errno == errno.ENOSPC
    assert files(checkpoints.folder) == names(1, replicas=replicas)
    assert checkpoints.load_newest(pytest.fail, with_replicas=True)["progression"]["step"] == 1


class _Hostile:
    """Unpickled by the usual means, it makes a folder."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def _as_torch_file(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def _as_old_torch_file(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


@pytest.mark.parametrize("pack", [_as_torch_file, _as_old_torch_file, pickle.dumps])
def test_a_hostile_file_is_refused_and_its_code_does_not_run(tmp_path, folder, pack):
    """Even with a manifest that vouches for it. That the code would run is shown first, without the guard."""
    proof = tmp_path / "executed"
    data = pack({"format": checkpoint.FORMAT, "engine": _Hostile(proof)})
    if pack is pickle.dumps:
        pickle.loads(data)
    else:
        torch.load(io.BytesIO(data), weights_only=False)
    proof.rmdir()

    checkpoints = folder()
    path = checkpoints.save(1, content(1), None)
    path.write_bytes(data)
    digest, size = checkpoint._digest(io.BytesIO(data))
    manifest(checkpoints, 1).write_bytes(written(Manifest(1, size, digest, None)))
    with pytest.raises(CheckpointError, match="damaged, or not a checkpoint of this program"):
        checkpoints.load_newest(lambda line: None)
    with pytest.raises(CheckpointError, match="damaged, or not a checkpoint of this program"):
        checkpoint.load(path)
    assert not proof.exists()


def _deflated(value):
    """As torch packs it, then compressed."""
    whole, packed = zipfile.ZipFile(io.BytesIO(_as_torch_file(value))), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    return packed.getvalue()


def _bytearray(length):
    """A pickle that asks for so many bytes, which weights_only grants."""
    return b"\x80\x02cbuiltins\nbytearray\nJ" + length.to_bytes(4, "little") + b"\x85R."


def _bytearray_in_archive(length):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", _bytearray(length))
        archive.writestr("archive/version", "3\n")
    return packed.getvalue()


@pytest.mark.parametrize(
    ("make", "size"), [(_deflated, 16 << 20), (_bytearray, 256 << 20), (_bytearray_in_archive, 256 << 20)]
)
def test_a_small_file_cannot_take_much_memory(tmp_path, monkeypatch, make, size):
    """torch would open both in archives: shown first, with the little that is enough to tell."""
    refused_by_old_torch = make is _bytearray_in_archive and not hasattr(torch.serialization, "add_safe_globals")
    if make is not _bytearray and not refused_by_old_torch:  # an old file goes on behind its first pickle
        assert len(torch.load(io.BytesIO(make([1, 2] if make is _deflated else 2)), weights_only=True)) == 2
    path = tmp_path / "small.pt"
    path.write_bytes(make(torch.zeros(size, dtype=torch.uint8) if make is _deflated else size))
    assert path.stat().st_size < 1 << 20
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was opened"))
    assert checkpoint.unpickled(path) is None


def test_any_other_file_is_refused_in_one_line(tmp_path):
    """torch answers random bytes and foreign files with nearly every exception there is, and with warnings."""
    path = tmp_path / "file.pt"
    generator = torch.Generator().manual_seed(0)
    whole = _as_torch_file({"format": checkpoint.FORMAT, "x": torch.arange(9)})
    old = _as_old_torch_file({"format": checkpoint.FORMAT, "x": torch.arange(9)})
    samples = [b"", b"PK\x05\x06" + bytes(18), pickle.dumps({"format": 1}, protocol=4), _as_torch_file([1, 2])]
    samples += [_as_torch_file({"weights": 1}), _as_torch_file({"format": 0}), b"\x80\x02" + whole]
    samples += [data[:length] for data in (whole, old) for length in range(0, len(data), 41)]
    for prefix in (b"", b"\x80\x02"):
        samples += [prefix + torch.randint(0, 256, (60,), generator=generator).numpy().tobytes() for _ in range(200)]
        samples += [prefix + bytes([byte]) * 40 for byte in range(256)]
    for data in samples:
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value), data


def test_a_foreign_file_is_refused_without_torchs_warnings(tmp_path):
    """Newer ones warn of pickle protocols other than 2, which would be a second line beside ours."""
    path = tmp_path / "file.pt"
    path.write_bytes(pickle.dumps({"format": 1}, protocol=4))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        with pytest.raises(CheckpointError):
            checkpoint.load(path)
    assert given == []


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.pt: cannot be read: No such file or directory"):
        checkpoint.load(tmp_path / "nothing.pt")
