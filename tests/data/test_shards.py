"""Shards: what is read, in which order, and the errors of those that are missing, damaged or
changed."""

import contextlib
import os
import pickle
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from common.errors import DataError
from data import local, shard_index
from data.base import UnreadableImage, permutation
from data.epochs import RunOrder
from data.loader import TrainingBatches
from data.local import LocalFolder, Range
from data.shards import ShardsSource
from recipe.config import Data
from recipe.randomness import bits32, key
from tests.data.tar_shards import pairs, write_shards
from tests.data.test_loader import contents

COUNTS = (5, 1, 9, 4, 7)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The folder of the shards, and their images."""
    folder = tmp_path_factory.mktemp("shards") / "train"
    return folder, write_shards(folder, COUNTS)


@pytest.fixture
def folder(written, tmp_path):
    """A copy to be spoilt."""
    return Path(shutil.copytree(written[0], tmp_path / "train"))


def sized(counts, window):
    """A source that knows only how many images there are: all that an order is a function of."""
    source = ShardsSource.__new__(ShardsSource)
    source._starts = np.cumsum([0, *counts])
    source._window = window
    source.labels = np.zeros(sum(counts), np.int64)
    return source


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def test_images_are_those_that_were_written_in_the_order_asked_for(written, monkeypatch):
    folder, images = written
    source = ShardsSource(str(folder), 10)
    assert pairs(source) == sorted((str(index % 2), image) for index, image in enumerate(images))
    assert source.labels.dtype == np.int64 and source.classes == ("0", "1")
    assert source.name(6) == f"{folder}/part-2.tar/0006.JPG"
    assert source.read(3).shape == (3, 16, 20)
    asked = [25, 0, 13, 5, 13, 4]
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert [image.encoded for image in one.open_all(asked)] == [
            images[index] for index in asked
        ]
    seen = []
    monkeypatch.setattr(
        LocalFolder, "_range", lambda self, wanted: seen.append(wanted) or "not now"
    )
    source.open_all(asked)
    assert len(seen) == 5 and seen == sorted(seen), "in the order of their places"


@pytest.mark.parametrize(
    ("counts", "window"), [*((COUNTS, n) for n in (1, 10, 25, 26, 2**31)), ([16] * 8, 64)], ids=str
)
def test_an_order_sorts_shards_and_then_images_by_integer_keys(counts, window):
    """The rule in Python's integers: a window of all images is any source's order, 1 leaves shards
    as they are.

    Runs must be resumable with later versions: the checksum is recorded from the first one.
    """
    size = sum(counts)
    starts = np.cumsum([0, *counts]).tolist()
    between = key("order of shards", 3, 4)
    within = key("order in window", 3, 4)
    expected = []
    for shard in sorted(range(len(counts)), key=lambda shard: bits32(between, shard)):
        expected += range(starts[shard], starts[shard + 1])
    keys = [place * 2**32 + bits32(within, place) * window for place in range(size)]
    expected = [expected[place] for place in sorted(range(size), key=keys.__getitem__)]
    order = sized(counts, window).order(3, 4)
    assert order.tolist() == (expected if window < size else permutation(3, 4, size).tolist())
    assert zlib.crc32(sized([100] * 100, 1000).order(0, 0).astype("<i8").tobytes()) == 1513898959


def test_threads_that_close_each_others_files_read_the_right_bytes(written, monkeypatch):
    monkeypatch.setattr(local, "_OPEN_FILES", 1)
    source = ShardsSource(str(written[0]), 10)
    expected = written[1]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(source.encoded, list(range(26)) * 40)) == expected * 40


def open_within(folder):
    """How many files below a folder this process has open; threads of other tests may have theirs
    elsewhere."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(target.startswith(f"{folder}/") for target in targets)


def test_no_more_than_64_files_stay_open(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"%03d" % number)
    folder = LocalFolder(str(tmp_path))
    assert folder.ranges([Range(str(n), 0, 3) for n in range(200)]) == [
        b"%03d" % n for n in range(200)
    ]
    assert open_within(tmp_path) == 64
    del folder
    assert open_within(tmp_path) == 0


def test_images_that_are_damaged_or_gone_are_named_and_no_others(folder):
    """One bit in the pixels, which every decoder would take; and shards that vanish, shrink or
    empty."""
    source = ShardsSource(str(folder), 10)
    place = int(source._offsets[18] + source._lengths[18] - 10)
    overwrite(folder / "part-3.tar", place, bytes([source.encoded(18)[-10] ^ 1]))
    whole = [source.encoded(index) for index in (7, 16, 17)]
    (folder / "part-0.tar").unlink()
    os.truncate(folder / "part-2.tar", int(source._offsets[8]) + 5)
    os.truncate(folder / "part-4.tar", 0)
    assert [str(answer) for answer in source.open_all([0, 8, 18, 19])] == [
        f"{folder}/part-0.tar/0000.JPG: No such file or directory",
        f"{folder}/part-2.tar/0008.JPG: the file ends before the image does",
        f"{folder}/part-3.tar/0018.JPG: not the bytes that the index has the checksum of",
        f"{folder}/part-4.tar/0019.JPG: the file ends before the image does",
    ]
    assert [image.encoded for image in source.open_all([7, 16, 17])] == whole


def _index(**changes):
    def spoil(folder):
        path = folder / "part-0.tar.index"
        index = shard_index.decode_index(path.read_bytes(), "")
        path.write_bytes(shard_index.encode_index(index._replace(**changes)))

    return spoil


def _manifest(old, new):
    def spoil(folder):
        path = folder / "shards.json"
        path.write_text(path.read_text().replace(old, new))

    return spoil


def _other_shard(folder):
    for ending in ("tar", "tar.index"):
        (folder / f"part-0.{ending}").write_bytes((folder / f"part-1.{ending}").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "shards.json").unlink(),
            "shards.json: No such file or directory; make it",
        ),
        (
            lambda folder: (folder / "part-0.tar.index").unlink(),
            "part-0.tar.index: No such file or directory; make it",
        ),
        (lambda folder: (folder / "part-0.tar").unlink(), "part-0.tar: No such file or directory"),
        (
            lambda folder: os.truncate(folder / "part-0.tar", 100),
            "part-0.tar: 100 bytes, but its index is of 2",
        ),
        (
            lambda folder: os.truncate(folder / "part-0.tar.index", 300),
            "part-0.tar.index: damaged index (",
        ),
        (_manifest("]", ""), "shards.json: damaged manifest ("),
        (
            _manifest("{", "[" * 200_000),
            "shards.json: damaged manifest (lists and objects are nested too",
        ),
        (
            _manifest('"format": 1', '"format": 2'),
            "shards.json: manifest of format 2, but this version reads 1",
        ),
        (
            _manifest('"0", "1"', '"only"'),
            "part-0.tar.index: label 1, but shards.json names 1 classes; name all",
        ),
        *(
            (_manifest("part-0.tar", name), "shards.json: damaged manifest ('")
            for name in (
                "part\\u0000.tar",
                "part\\ud800.tar",
                ".part.tar",
                "other/../x.tar",
                "part.tgz",
            )
        ),
        (_other_shard, "part-0.tar.index: of another shard than shards.json lists"),
        (
            _index(lengths=np.array([1, 1, 1, 1, 1 << 40])),
            "part-0.tar.index: damaged index (images overlap or lie",
        ),
        (
            _index(lengths=np.array([2**63 - 1, 1, 1, 1, 1])),
            "part-0.tar.index: damaged index (images overlap or lie",
        ),
        (
            _index(lengths=np.array([1, 1, 1, 1, 2**63 - 1])),
            "part-0.tar.index: damaged index (images overlap or lie",
        ),
        (
            _index(offsets=np.zeros(5, np.int64)),
            "part-0.tar.index: damaged index (images overlap or lie outside",
        ),
        (_index(labels=np.array([-1] * 5)), "part-0.tar.index: damaged index (label -1)"),
        (_index(names=b"short"), "part-0.tar.index: damaged index (names do not add up)"),
    ],
)
def test_shards_that_do_not_fit_are_refused_at_the_start_in_one_line(folder, spoil, message):
    spoil(folder)
    with pytest.raises(DataError) as caught:
        ShardsSource(str(folder), 10)
    text = str(caught.value)
    assert text.startswith(f"{folder}/{message}") and "\n" not in text
    assert "python -m tools.shards index FOLDER" in text or message.startswith(
        "part-0.tar: No such"
    )


def test_an_image_that_is_too_long_is_not_requested(folder, monkeypatch):
    """A tar of others may have a file of any length; memory for all of it would be taken."""
    source = ShardsSource(str(folder), 10)
    source._lengths[1] = 2**31 + 1
    requested = []
    read = LocalFolder.ranges

    def ranges(self, wanted):
        requested.extend(wanted)
        return read(self, wanted)

    monkeypatch.setattr(LocalFolder, "ranges", ranges)
    with pytest.raises(
        UnreadableImage, match=r": 2,147,483,649 bytes, above the limit of 2,147,483,648$"
    ):
        source.read(1)
    first, long = source.open_all([0, 1])
    assert first.height and isinstance(long, UnreadableImage)
    assert [one.start for one in requested] == [source._offsets[0]]


def test_every_readable_image_is_seen_once_an_epoch_also_after_a_resume(folder):
    """Two epochs of 26 images, of which three have a damaged byte, and a whole shard is gone."""

    def batches(first=0, workers=2):
        data = Data(source="shards", workers=workers, bad_images="skip", prefetch=1)
        return TrainingBatches(
            RunOrder(source, data, 5, 13), range(first, 4), image_size=12, micro=13
        )

    source = ShardsSource(str(folder), 6)
    for index in (1, 8, 23):
        overwrite(
            source.name(index).rpartition("/")[0], int(source._offsets[index]) + 30, b"\xff\xff\xff"
        )
    (folder / "part-1.tar").unlink()
    found = list(batches())
    for one, other in (found[:2], found[2:]):
        seen = one.indices[: one.valid].tolist() + other.indices[: other.valid].tolist()
        assert sorted(seen) == sorted({*range(26)} - {1, 8, 23, 5})
        assert len(one.unreadable) + len(other.unreadable) == 4
    assert contents(batches(workers=0)) == contents(found)
    assert contents(batches(first=1)) == contents(found)[1:]
