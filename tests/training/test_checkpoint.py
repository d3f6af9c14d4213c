"""Checkpoints survive what disks, crashes and strangers do to them."""

import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import warnings
import zipfile

import pytest
import torch

from recipe.errors import CheckpointError
from training import checkpoint
from training.checkpoint import CheckpointFolder
from training.manifest import File, Manifest, parsed, written


def content(step):
    """Something like a checkpoint: half-precision bits, counters, text."""
    generator = torch.Generator().manual_seed(step)
    weights = torch.randn(1000, generator=generator).to(torch.float16)
    return {"engine": {"weights": {"w": weights}}, "progression": {"step": step, "loss": 0.1 * step, "scores": {}}}


def same(loaded, step):
    expected = content(step)
    return (
        loaded["progression"] == expected["progression"]
        and loaded["engine"]["weights"]["w"].dtype == torch.float16
        and torch.equal(loaded["engine"]["weights"]["w"], expected["engine"]["weights"]["w"])
    )


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def pair(*steps):
    return sorted(f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "pt"))


def manifest(checkpoints, step):
    """Where it lies."""
    return checkpoints.path(step).with_suffix(".json")


@pytest.fixture
def folder(tmp_path):
    """folder(keep_last=2, keep_best=False): the run's checkpoint folder, as a new process would open it."""
    return lambda keep_last=2, keep_best=False: CheckpointFolder(tmp_path / "checkpoints", keep_last, keep_best)


@pytest.fixture
def warnings_given():
    return []


def test_what_is_saved_is_loaded_bit_for_bit(folder, warnings_given):
    path = folder().save(7, content(7), top1=0.5)
    assert path.name == "step-00000007.pt"
    assert same(folder().load_newest(warnings_given.append), 7)
    assert same(checkpoint.load(path), 7)
    assert warnings_given == []


def test_nothing_is_loaded_where_nothing_was_saved(folder, warnings_given):
    assert folder().load_newest(warnings_given.append) is None


def test_the_manifest_tells_step_size_checksum_and_score(folder):
    """The checksum is that of the sha256sum command."""
    path = folder().save(3, content(3), top1=0.25)
    manifest = json.loads(path.with_suffix(".json").read_text())
    digest = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout.split()[0]
    about_itself = manifest.pop("checksum")
    assert about_itself == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    assert manifest == {"step": 3, "bytes": path.stat().st_size, "sha256": digest, "top1": 0.25}
    assert folder().manifests() == [Manifest(**manifest)]


def test_the_newest_by_step_is_loaded_not_by_time(folder, warnings_given):
    """Files may be copied in any order."""
    checkpoints = folder(keep_last=3)
    for step in (1000, 5, 30):
        checkpoints.save(step, content(step), None)
    assert same(checkpoints.load_newest(warnings_given.append), 1000)
    assert [manifest.step for manifest in checkpoints.manifests()] == [5, 30, 1000]


def test_the_last_ones_are_kept(folder):
    checkpoints = folder(keep_last=3)
    for step in range(1, 8):
        checkpoints.save(step, content(step), None)
    assert files(checkpoints.folder) == pair(5, 6, 7)


def test_the_best_one_is_kept_and_a_tie_goes_to_the_later(folder):
    checkpoints = folder(keep_last=2, keep_best=True)
    for step, top1 in enumerate([0.1, 0.7, None, 0.7, 0.2, None, 0.3], start=1):
        checkpoints.save(step, content(step), top1)
    assert files(checkpoints.folder) == pair(4, 6, 7)


def test_without_keep_best_the_best_one_goes(folder):
    checkpoints = folder(keep_last=2, keep_best=False)
    for step, top1 in enumerate([0.9, 0.1, 0.1], start=1):
        checkpoints.save(step, content(step), top1)
    assert files(checkpoints.folder) == pair(2, 3)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def bit_flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def emptied(path):
    path.write_bytes(b"")


def foreign(path):
    path.write_bytes(b"not a checkpoint at all" * 100)


def unreadable(path):
    path.unlink()
    path.mkdir()


DAMAGES = [truncated, bit_flipped, emptied, foreign, unreadable]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(folder, warnings_given, damage):
    for step in (1, 2):
        folder().save(step, content(step), None)
    damage(folder().path(2))
    assert same(folder().load_newest(warnings_given.append), 1)
    assert len(warnings_given) == 1
    assert str(folder().path(2)) in warnings_given[0]
    assert "\n" not in warnings_given[0]


def test_if_all_are_damaged_it_says_so_and_touches_nothing(folder, warnings_given):
    for step in (1, 2):
        folder().save(step, content(step), None)
        truncated(folder().path(step))
    before = {path: path.read_bytes() for path in folder().folder.iterdir()}
    with pytest.raises(CheckpointError) as caught:
        folder().load_newest(warnings_given.append)
    assert str(folder().path(2)) in str(caught.value)
    assert "restore one" in str(caught.value) and "\n" not in str(caught.value)
    assert len(warnings_given) == 2
    assert {path: path.read_bytes() for path in folder().folder.iterdir()} == before


def test_a_file_without_manifest_counts_for_nothing_and_is_named(folder, warnings_given):
    """So a crash between the two leaves the one before; with none before, the run begins anew."""
    for step in (1, 2):
        folder().save(step, content(step), None)
    manifest(folder(), 2).unlink()
    assert same(folder().load_newest(warnings_given.append), 1)
    assert [found.step for found in folder().manifests()] == [1]
    folder().path(1).unlink()
    manifest(folder(), 1).unlink()
    assert folder().load_newest(warnings_given.append) is None
    assert (
        warnings_given == [f"{folder().path(2)}: has no manifest, as if its writing was cut off; it does not count"] * 2
    )


def test_a_manifest_of_another_file_is_no_match(folder, warnings_given):
    for step in (1, 2, 3):
        folder(keep_last=3).save(step, content(step), None)
    os.replace(manifest(folder(), 1), manifest(folder(), 3))
    assert same(folder().load_newest(warnings_given.append), 2)
    assert "step-00000003.json: damaged: it is that of step 1" in warnings_given[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_damage_and_named(folder, warnings_given, damage):
    for step in (1, 2):
        folder().save(step, content(step), None)
    damage(manifest(folder(), 2))
    assert same(folder().load_newest(warnings_given.append), 1)
    assert len(warnings_given) == 1 and warnings_given[0].startswith(f"{manifest(folder(), 2)}: ")
    assert warnings_given[0].endswith("; trying the one before") and "\n" not in warnings_given[0]


@pytest.mark.parametrize("damage", [*DAMAGES, os.unlink])
def test_with_all_manifests_damaged_or_gone_it_says_so_and_touches_nothing(folder, warnings_given, damage):
    for step in (1, 2):
        folder().save(step, content(step), None)
        damage(manifest(folder(), step))
    before = files(folder().folder)
    with pytest.raises(CheckpointError, match=r"no older checkpoint is whole either: restore one [^\n]*$"):
        folder().load_newest(warnings_given.append)
    assert len(warnings_given) == 2 and files(folder().folder) == before


def test_a_missing_file_beside_its_manifest_is_damage(folder, warnings_given):
    """Also of one that is not looked at because a newer one is whole: to remove it later ends no run."""
    for step in (1, 2, 3):
        folder(keep_last=3).save(step, content(step), None)
    folder().path(3).unlink()
    folder().path(1).unlink()
    resumed = folder()
    assert same(resumed.load_newest(warnings_given.append), 2)
    assert warnings_given[0].startswith(f"{folder().path(3)}: cannot be read: No such file")
    resumed.save(4, content(4), None)
    assert not manifest(folder(), 1).exists()


def test_every_wrong_bit_of_a_manifest_is_reported():
    """Also those in the checksum and in its name."""
    expected = Manifest(1234, 56_789, "0123456789abcdef" * 4, 0.7512, (File(55, "f" * 64), File(66, "0" * 64)))
    data = written(expected)
    assert parsed(data, 1234) == expected
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            parsed(bytes(flipped), 1234)


def test_manifests_of_before_have_no_checksum_and_are_read(folder, warnings_given):
    folder().save(5, content(5), 0.25)
    found = json.loads(manifest(folder(), 5).read_text())
    del found["checksum"]
    manifest(folder(), 5).write_text(json.dumps(found) + "\n")
    assert same(folder().load_newest(warnings_given.append), 5)
    assert [each.top1 for each in folder().manifests()] == [0.25] and warnings_given == []


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "7", '{"step": 1}', "[" * 200_000, '{"step":1,"bytes":2,"sha256":"","top1":"high"}',
     '{"step":1,"bytes":2,"sha256":"","top1":NaN}', '{"step":1,"bytes":2,"sha256":"","top1":null,"replicas":7}',
     '{"step":1,"bytes":2,"sha256":"","top1":null,"replicas":[[1]]}'],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parsed(text.encode(), 1)


def test_damaged_checkpoints_do_not_push_out_whole_ones(folder, warnings_given):
    """1 is whole, 8 and 9 are damaged: what is saved next, at 2, must be kept, and 1 as its predecessor."""
    checkpoints = folder(keep_last=3)
    for step in (1, 8, 9):
        checkpoints.save(step, content(step), 0.1 * step)
    for step in (8, 9):
        bit_flipped(checkpoints.path(step))
    resumed = folder(keep_last=2, keep_best=True)
    assert same(resumed.load_newest(warnings_given.append), 1)
    resumed.save(2, content(2), None)
    assert {*pair(1, 2)} <= {*files(resumed.folder)}
    assert same(folder().load_newest(warnings_given.append), 2)


def test_a_damaged_checkpoint_that_is_written_again_counts_again(folder, warnings_given):
    checkpoints = folder()
    for step in (1, 2):
        checkpoints.save(step, content(step), None)
    truncated(checkpoints.path(2))
    resumed = folder()
    resumed.load_newest(warnings_given.append)
    for step in (2, 3):
        resumed.save(step, content(step), None)
    assert files(resumed.folder) == pair(2, 3)


class _Disk:
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
            stream = function(path, mode, *arguments, **keywords)
            if str(path).endswith(".tmp"):
                whole = stream.write
                stream = _Stream(stream)
                stream.write = self._failing(lambda data: whole(data))
            return stream

        return call


class _Stream:
    """A file object whose methods can be replaced."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("operation", "number"), [("write", 1), ("write", 2), ("fsync", 1), ("fsync", 3), ("replace", 1), ("replace", 2)]
)
def test_a_failure_while_saving_leaves_the_last_one_and_no_partial_file(
    folder, warnings_given, monkeypatch, operation, number, error
):
    """Writing, syncing (file, folder, manifest, folder) and renaming, each of the file and of its manifest."""
    checkpoints = folder()
    checkpoints.save(1, content(1), None)
    with monkeypatch.context() as patch, pytest.raises(type(error)):
        disk = _Disk(patch, operation, number, error)
        checkpoints.save(2, content(2), None)
    assert disk.calls == number
    assert files(checkpoints.folder) == pair(1)
    assert same(folder().load_newest(warnings_given.append), 1)
    checkpoints.save(2, content(2), None)
    assert same(folder().load_newest(warnings_given.append), 2)
    assert warnings_given == []


def test_content_reaches_the_disk_before_its_name_and_the_manifest_comes_last(folder, monkeypatch):
    """The order that a power cut needs: data, name, folder entry; first the file, then the manifest."""
    log = []
    for operation in ("fsync", "replace"):
        real = getattr(os, operation)
        monkeypatch.setattr(
            os,
            operation,
            lambda *arguments, operation=operation, real=real: (log.append((operation, arguments)), real(*arguments)),
        )
    folder().save(1, content(1), None)
    assert [operation for operation, _ in log] == ["fsync", "replace", "fsync"] * 2
    assert [str(arguments[1]).rpartition(".")[2] for operation, arguments in log if operation == "replace"] == [
        "pt",
        "json",
    ]


def test_what_a_killed_process_left_half_written_is_removed_by_the_next_save(folder):
    checkpoints = folder()
    checkpoints.save(1, content(1), None)
    leftover = checkpoints.path(2).with_name("step-00000002.pt.tmp")
    leftover.write_bytes(b"half")
    checkpoints.save(3, content(3), None)
    assert files(checkpoints.folder) == pair(1, 3)


def test_files_of_others_are_left_alone(folder):
    """A copy that somebody put aside in the folder is not ours to remove."""
    checkpoints = folder()
    checkpoints.save(1, content(1), None)
    aside = checkpoints.folder / "step-00000001-before-the-change.pt"
    aside.write_bytes(b"mine")
    for step in (2, 3, 4):
        checkpoints.save(step, content(step), None)
    assert files(checkpoints.folder) == sorted([*pair(3, 4), aside.name])


def test_a_disk_that_is_really_full_leaves_the_last_one(small_disk, warnings_given):
    """64 KiB hold one checkpoint of 40 KiB and not two."""
    checkpoints = CheckpointFolder(small_disk("64k") / "checkpoints", 2, False)
    large = {"engine": {}, "progression": {"step": 1}, "weights": torch.zeros(10_000)}
    checkpoints.save(1, large, None)
    with pytest.raises(OSError) as caught:
        checkpoints.save(2, large, None)
    assert caught.value.errno == errno.ENOSPC
    assert files(checkpoints.folder) == pair(1)
    assert checkpoints.load_newest(warnings_given.append)["progression"]["step"] == 1


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
