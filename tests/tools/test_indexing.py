"""tools.shards index: every member of a tar is read by webdataset's rule for keys, or counted, or
the shard refused."""

import io
import json
import random
import tarfile
import time

import pytest

from benchmarks.fuzz import names
from common import progress
from common.errors import DataError
from data.shards import ShardsSource
from tests.data.tar_shards import jpeg, run, tar_bytes, write_tar
from tools import imagenet, shards
from tools.indexing import LeftOut, Part, split


def labelled(place):
    """Label of each image by its name."""
    source = ShardsSource(str(place), 1)
    return {
        source._names[index].decode(): label for index, label in enumerate(source.labels.tolist())
    }


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a.jpg", ("a", "", "jpg")),
        ("a.v2.JPG", ("a", "v2", "jpg")),
        ("v1.0/a.b.c.cls", ("v1.0/a", "b.c", "cls")),
        ("./a.png", ("./a", "", "png")),
        ("a.", ("a", "", "")),
        ("a", None),
        (".hidden.jpg", None),
        ("v1.0/._a.jpg", None),
    ],
)
def test_the_key_ends_at_the_first_dot_of_the_name_and_the_last_extension_is_the_kind(name, part):
    assert split(name) == (part and Part(*part))


def test_images_whose_names_have_dots_are_read_with_their_labels(tmp_path, capsys):
    """As webdataset 1.0 reads them: of one key, each image with the label of its own name, else
    that of the key."""
    files = [
        ("img_0.jpg", jpeg(0)), ("img_0.cls", b"0"), ("img_1.v2.jpg", jpeg(1)), ("img_1.v2.cls", b"1"),
        ("cat.0.jpg", jpeg(2)), ("cat.0.cls", b"2"), ("cat.1.jpg", jpeg(3)), ("cat.1.cls", b"3"),
        ("b.left.png", jpeg(4)), ("b.cls", b"4"), ("c.jpg", jpeg(5)), ("c.label.cls", b"5"),
    ]  # fmt: skip
    write_tar(tmp_path / "0.tar", files)
    code, data, _ = run(capsys, "index", tmp_path)
    assert (code, data["images"], data["classes"], data["left_out"]) == (0, 6, 6, {})
    expected = {
        "img_0.jpg": 0,
        "img_1.v2.jpg": 1,
        "cat.0.jpg": 2,
        "cat.1.jpg": 3,
        "b.left.png": 4,
        "c.jpg": 5,
    }
    assert labelled(tmp_path) == expected


def test_what_is_packed_of_names_with_dots_is_indexed_again(tmp_path, capsys):
    for number, name in enumerate(
        ("a/img_1.v2.jpg", "a/img_1.v3.jpg", "b/x.y.z.jpeg", "b/1.0.png")
    ):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number))
    assert (
        run(capsys, "pack", tmp_path / "images", tmp_path / "s", "--workers", 1)[1]["images"] == 4
    )
    before = labelled(tmp_path / "s")
    assert run(capsys, "index", tmp_path / "s")[1]["images"] == 4
    assert labelled(tmp_path / "s") == before and sorted(before.values()) == [0, 0, 1, 1]


def test_members_that_are_neither_image_nor_label_are_named_and_counted(tmp_path, capsys):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        folder = tarfile.TarInfo("v1.0")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name in (
            "v1.0/a.jpg",
            "v1.0/a.cls",
            "v1.0/a.json",
            "v1.0/b.json",
            "._a.jpg",
            "README",
            "__meta__/x.jpg",
            "b.gif",
        ):
            content = {"jpg": jpeg(0), "cls": b"0"}.get(name.rpartition(".")[2], b"x")
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    for shard in ("0.tar", "1.tar"):
        (tmp_path / shard).write_bytes(stream.getvalue())
    assert shards.main(["index", str(tmp_path), "--json"]) == 0
    *lines, _, text = capsys.readouterr().out.splitlines()
    assert json.loads(text)["left_out"] == {
        "files .json": 4,
        "files .gif": 2,
        "files without an extension": 2,
        "folders, which hold nothing themselves": 2,
        "hidden files": 2,
        "metadata (__NAME__)": 2,
    }
    assert f"{tmp_path}: left out files .json: 4; the first: {tmp_path}/0.tar/v1.0/a.json" in lines
    assert labelled(tmp_path)["v1.0/a.jpg"] == 0


IMAGE = ("a.jpg", jpeg(0))
LABEL = ("a.cls", b"1")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (
            tar_bytes([IMAGE, LABEL, ("a.seg.png", b"x")]),
            "'a' has a second image, 'a.seg.png', for one label",
        ),
        (
            tar_bytes([("a.left.jpg", b"x"), ("a.right.jpg", b"x"), LABEL]),
            "'a' has a second image, 'a.right.jpg'",
        ),
        (
            tar_bytes([IMAGE, LABEL, ("a.v2.cls", b"1")]),
            "'a' has a second label; keys must differ, or each label",
        ),
        (tar_bytes([IMAGE, ("a.v1.cls", b"1"), ("a.v2.cls", b"1")]), "'a' has a second label"),
        (tar_bytes([("b.v2.jpg", b"x")]), "'b.v2' has no b.v2.cls, its label"),
        (
            tar_bytes([IMAGE, ("b.jpg", b"x"), ("c.jpg", b"x"), LABEL]),
            "'b' has no b.cls, its label; add it or leave the",
        ),
        (
            tar_bytes([IMAGE, ("b.jpg", b"x"), ("c.jpg", b"x"), LABEL]),
            "other out (1 more such key in this shard)",
        ),
        (tar_bytes([("a.webp", b"x"), LABEL]), "'a' has no image (.jpg, .jpeg, .png)"),
        (
            tar_bytes([IMAGE, LABEL]) * 2,
            "bytes behind the end of the archive, which nobody reads; it may be two archives",
        ),
    ],
)
def test_images_and_labels_that_do_not_pair_are_refused_and_counted(
    tmp_path, capsys, content, fault
):
    (tmp_path / "x.tar").write_bytes(content)
    code, _, (error,) = run(capsys, "index", tmp_path)
    assert code == 2 and error.startswith(f"{tmp_path}/x.tar: ") and fault in error


def test_of_random_names_each_member_is_read_or_counted_or_the_shard_refused(tmp_path):
    """Counted by tarfile, with labels found by webdataset's expression for keys."""
    taken = 0
    for number in range(60):
        try:
            names.read(names.random_tar(random.Random(number)), tmp_path)
            taken += 1
        except DataError:
            pass
    assert taken > 20


def test_only_the_most_frequent_kinds_get_a_line_each():
    left_out = LeftOut()
    for number in range(25):
        left_out.add(f"files .{number}", f"x.{number}", number + 1)
    lines = left_out.lines("shards")
    assert lines[0] == "shards: left out files .24: 25; the first: x.24"
    assert lines[20:] == ["shards: left out files of 5 other kinds: 15"]


def test_members_of_imagenets_archives_that_are_no_images_are_counted(tmp_path):
    inner = tar_bytes(
        [
            ("n01440764_1.JPEG", jpeg(0)),
            ("._n01440764_1.JPEG", b"x"),
            ("n01440764_2.v2.JPEG", jpeg(1)),
        ]
    )
    write_tar(tmp_path / "train.tar", [("n01440764.tar", inner)])
    source = imagenet.training(str(tmp_path / "train.tar"))
    assert len(source) == 2
    place = f"{tmp_path}/train.tar"
    assert source.notes == (
        f"{place}: left out hidden files: 1; the first: {place}/n01440764.tar/._n01440764_1.JPEG",
    )


def test_a_command_that_takes_long_says_every_ten_seconds_how_far_it_is(
    tmp_path, capsys, monkeypatch
):
    """Ten seconds are a hundredth of one here."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    write_tar(tmp_path / "0.tar", [IMAGE, LABEL])
    original = shards.scan

    def slow(*arguments, **keywords):
        found = original(*arguments, **keywords)
        time.sleep(0.1)
        return found

    monkeypatch.setattr(shards, "scan", slow)
    assert shards.main(["index", str(tmp_path)]) == 0
    assert "indexing: 0.00 of 0.00 GB are read (0:00:00)" in capsys.readouterr().out.splitlines()
    assert list(progress.counted((time.sleep(0.05) for _ in range(3)), 3, "batches")) == [None] * 3
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(" batches")[0] for line in lines} >= {"1 of 3", "2 of 3"}


def test_packing_says_how_many_images_are_done(tmp_path, capsys, monkeypatch):
    """Also while the first shard is being written."""
    monkeypatch.setattr(progress, "EVERY", 0.01)
    for number in range(30):
        path = tmp_path / "images/a" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(number, (600, 600)))
    assert (
        shards.main(["pack", str(tmp_path / "images"), str(tmp_path / "s"), "--workers", "1"]) == 0
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("packing: ")]
    assert any(0 < int(line.split()[1]) <= 30 and " of 30 images (" in line for line in lines)
