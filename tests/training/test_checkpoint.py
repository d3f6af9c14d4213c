"""Checkpoints are whole or passed over, with files of replicas or without."""

import hashlib
import json
import os
import subprocess

import pytest

from common.errors import CheckpointError
from tests.training.conftest import content, files, manifest, names, states
from training import checkpoint
from training.manifest import File, Manifest, decode, encode


def test_what_is_saved_is_loaded_bit_for_bit_the_newest_by_step(save, newest, replicas):
    """Files may be copied in any order."""
    assert newest() == (None, [])
    checkpoints = save(1000, 5, 30)
    assert files(checkpoints.folder) == names(5, 30, 1000, replicas=replicas)
    assert checkpoints.path(5).name == "step-00000005.pt"
    assert newest() == (1000, [])
    assert [manifest.step for manifest in checkpoints.manifests(warn=pytest.fail)] == [5, 30, 1000]
    assert checkpoint.load(checkpoints.path(5))["progression"]["step"] == 5


def test_the_manifest_has_step_score_and_the_sizes_and_checksums_of_all_files(
    save, folder, replicas
):
    """The checksums are those of sha256sum.

    Older programs know no list of replicas, so none is empty.
    """
    checkpoints = save(3, scores={3: 0.25})
    paths = [
        checkpoints.path(3),
        *(checkpoints.replica_path(3, number) for number in range(replicas)),
    ]
    sums = subprocess.run(["sha256sum", *paths], capture_output=True, text=True, check=True).stdout
    (size, digest), *others = (
        [path.stat().st_size, line.split()[0]] for path, line in zip(paths, sums.splitlines())
    )
    found = json.loads(manifest(checkpoints, 3).read_text())
    checksum = found.pop("checksum")
    assert checksum == hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    expected = {"step": 3, "bytes": size, "sha256": digest, "top1": 0.25}
    assert found == ({**expected, "replicas": others} if replicas else expected)
    manifest(checkpoints, 3).write_text(json.dumps(found) + "\n")  # as older programs wrote it
    files_of_replicas = tuple(File(*other) for other in others)
    assert folder().manifests(warn=pytest.fail) == [
        Manifest(**expected, replicas=files_of_replicas)
    ]


@pytest.mark.parametrize(
    ("scores", "keep_last", "keep_best", "kept"),
    [
        ([None] * 7, 3, True, (5, 6, 7)),
        ([0.1, 0.7, None, 0.7, 0.2, None, 0.3], 2, True, (4, 6, 7)),  # a tie goes to the later
        ([0.9, 0.1, 0.1], 2, False, (2, 3)),
    ],
)
def test_the_last_and_the_best_are_kept(save, replicas, scores, keep_last, keep_best, kept):
    scores = dict(enumerate(scores, start=1))
    checkpoints = save(*scores, scores=scores, keep_last=keep_last, keep_best=keep_best)
    assert files(checkpoints.folder) == names(*kept, replicas=replicas)


def test_one_that_is_saved_for_its_score_alone_pushes_out_none_of_the_newest(folder, replicas):
    """It goes once another is better; older programs, which do not know the field, meet it there
    alone."""
    checkpoints = folder(keep_last=2, keep_best=True)
    kept = []
    for step, top1 in enumerate([0.1, 0.2, 0.3, None, None, 0.2, 0.4], start=1):
        of_replicas = states(step, replicas)
        checkpoints.save(step, content(step), top1, of_replicas, only_best=step in (2, 3, 7))
        kept.append([manifest.step for manifest in checkpoints.manifests(warn=pytest.fail)])
    assert kept == [[1], [1, 2], [1, 3], [1, 3, 4], [3, 4, 5], [3, 5, 6], [5, 6, 7]]
    assert files(checkpoints.folder) == names(5, 6, 7, replicas=replicas)
    fields = [json.loads(manifest(checkpoints, step).read_text()) for step in (6, 7)]
    assert [each.get("only_best") for each in fields] == [None, True]


def test_scores_of_other_validation_images_come_behind_those_of_the_newest(folder, replicas):
    """The best one of before goes once there is a score of the new images.

    Older programs know no number of sets.
    """
    checkpoints = folder(keep_last=1, keep_best=True)
    kept = []
    for step, (top1, number) in enumerate(
        [(0.9, 0), (0.8, 0), (None, 1), (0.2, 1), (0.1, 1)], start=1
    ):
        checkpoints.save(step, content(step), top1, states(step, replicas), validation_set=number)
        kept.append([manifest.step for manifest in checkpoints.manifests(warn=pytest.fail)])
    assert kept == [[1], [1, 2], [1, 3], [4], [4, 5]]
    assert checkpoints.load_best(pytest.fail)["progression"]["step"] == 4
    assert [manifest.validation_set for manifest in checkpoints.manifests(warn=pytest.fail)] == [
        1,
        1,
    ]
    assert "validation_set" not in json.loads(encode(Manifest(1, 2, "3", 0.5)))


def bit_flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def unreadable(path):
    path.unlink()
    path.mkdir()


def parts(checkpoints, step, replicas):
    """The files of a checkpoint: its own, its manifest, the last replica's."""
    own = [checkpoints.path(step), manifest(checkpoints, step)]
    return [*own, *(checkpoints.replica_path(step, number) for number in {replicas - 1} - {-1})]


@pytest.mark.parametrize(
    "damage",
    [lambda path: os.truncate(path, path.stat().st_size - 100), bit_flipped, unreadable, os.unlink],
)
@pytest.mark.parametrize("number", range(3))
def test_a_checkpoint_with_a_damaged_file_is_passed_over_and_the_file_named(
    save, newest, replicas, damage, number
):
    """A manifest that is missing is no damage: its writing was cut off.

    Without a whole one nothing is touched.
    """
    checkpoints = save(1, 2)
    number %= len(parts(checkpoints, 2, replicas))
    path = parts(checkpoints, 2, replicas)[number]
    damage(path)
    step, (line,) = newest()
    assert step == 1
    cut_off = damage is os.unlink and path.suffix == ".json"
    assert line.startswith(f"{checkpoints.path(2)}: has no manifest" if cut_off else f"{path}: ")
    damage(parts(checkpoints, 1, replicas)[number])
    before = files(checkpoints.folder)
    with pytest.raises(
        CheckpointError, match=r"no older checkpoint is whole either: restore one with all files of"
    ):
        newest()
    assert files(checkpoints.folder) == before


def test_a_first_checkpoint_that_was_cut_off_is_none_and_a_second_one_is_a_fault(save, folder):
    """The first of a run, which begins again; but a run of days must not."""
    checkpoints = save(1, 2)
    manifest(checkpoints, 2).unlink()
    checkpoints.path(1).unlink()
    manifest(checkpoints, 1).unlink()
    said = []
    assert folder().load_newest(said.append) is None
    assert len(said) == 1 and said[0].endswith("it does not count")
    save(3, checkpoints=checkpoints)
    manifest(checkpoints, 3).unlink()
    with pytest.raises(
        CheckpointError,
        match=rf"{checkpoints.path(3)}: has no manifest.*; no older checkpoint is whole",
    ):
        folder().load_newest(said.append)


def test_weights_can_be_had_without_the_files_of_replicas(folder):
    checkpoints = folder()
    checkpoints.save(1, content(1), None, states(1, 2))
    bit_flipped(checkpoints.replica_path(1, 1))
    assert checkpoints.load_newest(pytest.fail)["progression"]["step"] == 1


@pytest.mark.parametrize("chunk", [7, 1 << 20])
def test_a_file_of_another_length_is_named_with_it(folder, monkeypatch, chunk):
    """However many pieces it is read in."""
    monkeypatch.setattr(checkpoint, "_CHUNK", chunk)
    checkpoints = folder()
    path = checkpoints.save(1, content(1), None)
    size = path.stat().st_size - 100
    os.truncate(path, size)
    line = f"^{path}: damaged: {size} bytes do not match the manifest's checksum$"
    with pytest.raises(CheckpointError, match=line):
        checkpoint.load(path, checkpoints.manifest(1))


def test_a_named_file_is_compared_with_the_manifest_that_lies_beside_it(folder, tmp_path):
    """Under another name there is none; where it cannot be read, a line says that nothing was
    compared."""
    checkpoints = folder()
    path = checkpoints.save(1, content(1), None)
    assert checkpoint.load_named(path, pytest.fail)["progression"]["step"] == 1
    other = path.rename(tmp_path / "mine.pt")
    assert checkpoint.load_named(other, pytest.fail)["progression"]["step"] == 1
    other.rename(path)
    beside = manifest(checkpoints, 1)
    whole = beside.read_bytes()
    beside.write_text("{}")
    said = []
    assert checkpoint.load_named(path, said.append)["progression"]["step"] == 1
    (line,) = said
    assert line.startswith(f"{beside}: damaged: ") and line.endswith(
        f"; {path.name} is not compared with its checksum"
    )
    # torch would load the file with these bytes at its end: only the checksum tells.
    beside.write_bytes(whole)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="do not match the manifest's checksum"):
        checkpoint.load_named(path, pytest.fail)


def test_the_best_is_that_of_the_highest_score_and_of_equal_ones_the_newest(save):
    """Where it is damaged the next best one is; without a score none is the best."""
    checkpoints = save(1, 2, 3, 4, scores={1: 0.7, 2: 0.9, 3: 0.9})
    said = []
    assert checkpoints.load_best(said.append)["progression"]["step"] == 3 and not said
    bit_flipped(checkpoints.path(3))
    assert checkpoints.load_best(said.append)["progression"]["step"] == 2
    assert [(line.split(":")[0], line[-20:]) for line in said] == [
        (str(checkpoints.path(3)), "trying the next best")
    ]
    assert save(5, scores={}, keep_last=1).load_best(said.append) is None


@pytest.mark.parametrize("load", ["best", "newest"])
def test_no_wrong_bit_in_the_best_manifest_passes_without_a_line(folder, load):
    """One bit of each byte in turn: the next best is taken, and one line names the file and what is
    wrong."""
    checkpoints = folder()
    for step in (1, 2):
        checkpoints.save(step, content(step), top1=0.5 + 0.1 * step)
    path = manifest(checkpoints, 2)
    data = path.read_bytes()
    read = getattr(checkpoints, f"load_{load}")
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        said = []
        assert read(said.append)["progression"]["step"] == 1
        assert len(said) == 1 and said[0].startswith(f"{path}: damaged: ") and "\n" not in said[0]


def test_a_best_checkpoint_without_its_manifest_or_without_another_is_no_silent_matter(save):
    """Its score is unknown; where no other has a score, there is no best one to take."""
    checkpoints = save(1, 2, scores={1: 0.7, 2: 0.8})
    said = []
    manifest(checkpoints, 2).unlink()
    assert checkpoints.load_best(said.append)["progression"]["step"] == 1
    assert [line.partition(": ")[0] for line in said] == [str(checkpoints.path(2))]
    manifest(checkpoints, 1).write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"001\.json: damaged: .* no other checkpoint is scored and whole"
    ):
        checkpoints.load_best(said.append)


def test_saving_names_a_damaged_manifest_once_and_keeps_its_checkpoint(save, folder):
    """The best checkpoint's: until it is restored, another one counts as the best."""
    checkpoints = save(1, 2, scores={1: 0.9, 2: 0.5}, keep_best=True)
    path = manifest(checkpoints, 1)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"0.9", b"0.1"))
    resumed = folder(keep_best=True)
    said = []
    for step in (3, 4, 5):
        resumed.save(step, content(step), None, warn=said.append)
    assert said == [
        f"{path}: damaged: it does not match its own checksum; its score is unknown, and it is passed over"
    ]
    path.write_bytes(whole)
    assert [each.step for each in resumed.manifests(pytest.fail)] == [1, 2, 4, 5]


def test_each_damaged_checkpoint_is_reported_once_and_again_if_it_was_written_anew(folder):
    checkpoints = folder(keep_last=3)
    for step in (1, 2):
        checkpoints.save(step, content(step), None)
    path = manifest(checkpoints, 2)
    path.write_text("{}")
    said = []
    assert checkpoints.load_newest(said.append)["progression"]["step"] == 1
    checkpoints.save(3, content(3), None, warn=said.append)
    assert len(said) == 1 and said[0].startswith(f"{path}: damaged: ")
    checkpoints.save(2, content(2), None, warn=pytest.fail)
    path.write_text("{}")
    checkpoints.save(4, content(4), None, warn=said.append)
    assert len(said) == 2 and said[1].startswith(f"{path}: damaged: ")


def test_files_of_replicas_whose_manifest_is_damaged_are_kept_and_a_removed_file_stops_nothing(
    folder,
):
    checkpoints = folder(keep_last=1)
    for step in (1, 2):
        checkpoints.save(step, content(step), None, states(step, 2))
    manifest(checkpoints, 2).write_text("{}")
    said = []
    checkpoints.save(3, content(3), None, warn=said.append)
    assert len(said) == 1 and checkpoints.replica_path(2, 1).exists()
    checkpoints.path(3).unlink()  # by hand; its manifest is there
    checkpoints.save(4, content(4), None)
    assert not manifest(checkpoints, 3).exists()


def test_every_wrong_bit_of_a_manifest_is_reported():
    """Also those in the checksum and in its name, and the manifest of another step."""
    expected = Manifest(
        1234, 56_789, "0123456789abcdef" * 4, 0.7512, (File(55, "f" * 64), File(66, "0" * 64))
    )
    data = encode(expected)
    assert decode(data, 1234) == expected
    with pytest.raises(ValueError, match="it is that of step 1234"):
        decode(data, 1235)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decode(bytes(flipped), 1234)


def test_what_is_no_manifest_is_refused():
    begun = '{"step":1,"bytes":2,"sha256":"","top1":'
    for text in (
        "",
        "[]",
        "7",
        '{"step": 1}',
        "[" * 200_000,
        begun + "NaN}",
        begun + 'null,"replicas":[[1]]}',
    ):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            decode(text.encode(), 1)


def test_damaged_checkpoints_push_out_no_whole_ones_and_are_kept_until_they_are_written_again(
    save, newest, folder
):
    """1 is whole, 8 and 9 are damaged: what is saved next, at 2, must be kept, and 1 as its
    predecessor."""
    checkpoints = save(1, 8, 9, scores={8: 0.8, 9: 0.9})
    bit_flipped(checkpoints.path(8))
    (
        checkpoints.replica_path(9, 1) if checkpoints.replica_count(9) else checkpoints.path(9)
    ).unlink()
    resumed = folder(keep_best=True)
    assert newest(resumed)[0] == 1
    save(2, checkpoints=resumed)
    assert {*names(1, 2), *names(8)} <= {*files(resumed.folder)} and manifest(resumed, 9).exists()
    assert newest()[0] == 2
    save(9, 10, checkpoints=resumed)
    assert {path.name for path in resumed.folder.glob("*.json")} == {
        f"step-{step:08d}.json" for step in (8, 9, 10)
    }
    assert newest() == (10, [])


def test_strays_are_removed_by_the_next_save_and_files_of_others_left_alone(save, replicas):
    """Of a process that was killed while it wrote or removed a checkpoint; of one with more
    replicas; a user's own."""
    checkpoints = save(1)
    for name in (
        "2.replica-0000.pt",
        "2.replica-0001.pt.tmp",
        "0.replica-0002.pt",
        "2.pt.tmp",
        "1.replica-0003.pt",
    ):
        (checkpoints.folder / f"step-0000000{name}").write_bytes(b"half")
    aside = [
        f"step-0000000{name}"
        for name in ("2.replica-0001-mine.pt", "2.replica-0001.txt", "1-before.pt")
    ]
    for name in aside:
        (checkpoints.folder / name).write_bytes(b"mine")
    save(3, checkpoints=checkpoints)
    assert files(checkpoints.folder) == sorted([*names(1, 3, replicas=replicas), *aside])
