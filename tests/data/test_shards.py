"""Shards: what is read, in which order, and what is said of those that are missing, damaged or changed."""

import json
import multiprocessing
import os
import pickle
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data import local, shard_index
from data.base import UnreadableImage, permutation
from data.loader import training_batches
from data.local import LocalFolder, Range
from data.shards import ShardsSource
from recipe.config import Data
from recipe.errors import DataError
from recipe.randomness import bits32, key
from tests.data.tar_shards import write_shards

COUNTS = (5, 1, 9, 4, 7)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path / "train", COUNTS)
    return tmp_path / "train"


def sized(counts, window):
    """A source that knows only how many images there are: all that an order is a function of."""
    source = ShardsSource.__new__(ShardsSource)
    source._starts, source._window = np.cumsum([0, *counts]), window
    source.labels = np.zeros(sum(counts), np.int64)
    return source


def overwrite(path, offset, content):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def rewrite(folder, **changes):
    """Change fields of the first shard's index, and the manifest with it where that says the same."""
    path = folder / "part-0.tar.index"
    index = shard_index.decode_index(path.read_bytes(), "")
    path.write_bytes(shard_index.encode_index(index._replace(**changes)))


def test_images_are_those_that_were_written(tmp_path):
    images = write_shards(tmp_path / "train", COUNTS)
    source = ShardsSource(str(tmp_path / "train"), 10)
    assert [source.encoded(index) for index in range(len(source))] == images
    assert source.labels.tolist() == [index % 2 for index in range(26)]
    assert source.labels.dtype == np.int64
    assert source.classes == ("0", "1")
    assert source.name(6) == f"{tmp_path}/train/part-2.tar/0006.JPG"
    assert source.read(3).shape == (3, 16, 20)


def test_several_images_come_in_the_order_asked_for(folder):
    source = ShardsSource(str(folder), 10)
    asked = [25, 0, 13, 5, 13, 4]
    assert [image.encoded for image in source.open_all(asked)] == [source.encoded(index) for index in asked]


def test_images_are_read_in_the_order_of_their_places(folder, monkeypatch):
    source = ShardsSource(str(folder), 10)
    seen = []
    monkeypatch.setattr(LocalFolder, "_range", lambda self, wanted: seen.append(wanted) or "not now")
    source.open_all([25, 0, 13, 5, 4])
    assert seen == sorted(seen)
    assert len(seen) == 5


@pytest.mark.parametrize("window", [1, 2, 10, 25, 26, 2**31])
def test_an_order_is_a_permutation(window):
    order = sized(COUNTS, window).order(3, 4)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(26))


def test_window_1_leaves_images_as_they_lie_in_shards_of_random_order():
    order = sized(COUNTS, 1).order(3, 4).tolist()
    starts = np.cumsum([0, *COUNTS]).tolist()
    draw = key("order of shards", 3, 4)
    expected = []
    for shard in sorted(range(5), key=lambda shard: bits32(draw, shard)):
        expected += range(starts[shard], starts[shard + 1])
    assert order == expected
    firsts = [sized(COUNTS, 1).order(3, epoch)[0] for epoch in range(30)]
    assert set(firsts) == set(starts[:-1])


def test_each_image_moves_by_less_than_the_window_and_some_by_half_of_it():
    """Half, because those behind move into its place: all keys are ahead by half a window on average."""
    counts, window = [100] * 50, 300
    before, after = sized(counts, 1).order(1, 2), sized(counts, window).order(1, 2)
    place = np.empty(5000, np.int64)
    place[before] = np.arange(5000)
    moved = place[after] - np.arange(5000)
    assert 0.5 * window < np.abs(moved).max() < window


def test_a_window_is_filled_by_integer_keys():
    """The rule in Python's integers; a sort that keeps what is equal in order decides between equal keys."""
    counts, window = [16] * 8, 64
    before = sized(counts, 1).order(5, 6).tolist()
    draw = key("order in window", 5, 6)
    keys = [place * 2**32 + bits32(draw, place) * window for place in range(128)]
    assert sized(counts, window).order(5, 6).tolist() == [
        before[place] for place in sorted(range(128), key=keys.__getitem__)
    ]


def test_of_two_images_at_the_same_place_the_one_before_stays_before(monkeypatch):
    """Of 4096 every second has one of two keys, the others their own: an unstable sort would mix the equal ones."""

    def bits(draw, places):
        return np.where(places % 2 == 0, (2047 - places % 2048) << 21, 0)

    monkeypatch.setattr("data.shards.bits32", bits)
    keys = [place * 2**32 + int(bits(0, np.int64(place))) * 2048 for place in range(4096)]
    assert sized([4096], 2048).order(0, 0).tolist() == sorted(range(4096), key=keys.__getitem__)


def test_a_window_of_all_images_leaves_no_trace_of_the_shards():
    """As of any source; the rank correlation of random orders of 2000 has a standard deviation of 0.022."""
    order = sized([50] * 40, 2000).order(1, 2)
    np.testing.assert_array_equal(order, permutation(1, 2, 2000))
    before = sized([50] * 40, 1).order(1, 2)
    assert abs(np.corrcoef(np.argsort(order), np.argsort(before))[0, 1]) < 5 * 0.022


def test_orders_of_epochs_and_seeds_are_unrelated():
    """Of 2000 in 40 shards, shards' order rules: 40 ranks have a standard deviation of 1 / sqrt(39) = 0.16."""
    orders = [sized([50] * 40, 100).order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    places = np.stack([np.argsort(order) for order in orders])
    assert np.abs(np.corrcoef(places) - np.eye(4)).max() < 4 * 0.16


def test_orders_never_change():
    """Runs must be resumable with later versions. Recorded from the first version."""
    assert zlib.crc32(sized([100] * 100, 1000).order(0, 0).astype("<i8").tobytes()) == 1513898959


def test_the_largest_window_fits_into_the_integers():
    """A window one short of all images, and of 2^31; sorted keys would overflow into a wrong order."""
    for size, window in ((2**20, 2**20 - 1), (2**20, 2**31)):
        order = sized([size // 4] * 4, window).order(0, 0)
        assert np.bincount(order, minlength=size).max() == 1


def test_a_source_can_be_sent_to_another_process(folder):
    source = ShardsSource(str(folder), 10)
    first = source.encoded(0)
    assert pickle.loads(pickle.dumps(source)).encoded(0) == first


def _reads(source, expected, answers):
    answers.put([zlib.crc32(source.encoded(index)) for index in range(len(source))] == expected)


def test_a_fork_reads_what_its_parent_reads(folder):
    source = ShardsSource(str(folder), 10)
    expected = [zlib.crc32(source.encoded(index)) for index in range(len(source))]
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    processes = [context.Process(target=_reads, args=(source, expected, answers)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=30) for _ in processes] == [True] * 3
    for process in processes:
        process.join()


def test_threads_that_close_each_others_files_read_the_right_bytes(folder, monkeypatch):
    source = ShardsSource(str(folder), 10)
    expected = [source.encoded(number) for number in range(26)]
    monkeypatch.setattr(local, "_OPEN_FILES", 1)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(source.encoded, list(range(26)) * 40)) == expected * 40


def test_no_more_than_64_files_stay_open(tmp_path):
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"%03d" % number)
    before = len(os.listdir("/proc/self/fd"))
    folder = LocalFolder(str(tmp_path))
    assert folder.ranges([Range(str(n), 0, 3) for n in range(200)]) == [b"%03d" % n for n in range(200)]
    assert len(os.listdir("/proc/self/fd")) - before == 64
    del folder
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_image_is_found_though_it_would_decode(folder):
    """One bit in the pixels: every decoder would take it."""
    source = ShardsSource(str(folder), 10)
    place = int(source._offsets[2] + source._lengths[2] - 10)
    overwrite(folder / "part-0.tar", place, bytes([source.encoded(2)[-10] ^ 1]))
    reason = f"{folder}/part-0.tar/0002.JPG: not the bytes that the index has the checksum of"
    with pytest.raises(UnreadableImage) as caught:
        source.encoded(2)
    assert str(caught.value) == reason
    opened = source.open_all([3, 2, 1])
    assert str(opened[1]) == reason
    assert [opened[0].encoded, opened[2].encoded] == [source.encoded(3), source.encoded(1)]


def test_a_shard_that_vanishes_shrinks_or_empties_is_named(folder):
    source = ShardsSource(str(folder), 10)
    (folder / "part-0.tar").unlink()
    os.truncate(folder / "part-2.tar", int(source._offsets[8]) + 5)
    os.truncate(folder / "part-3.tar", 0)
    assert [str(answer) for answer in source.open_all([0, 8, 15])] == [
        f"{folder}/part-0.tar/0000.JPG: No such file or directory",
        f"{folder}/part-2.tar/0008.JPG: the file ends before the image does",
        f"{folder}/part-3.tar/0015.JPG: the file ends before the image does",
    ]
    assert len(source.open_all([7])[0].encoded) == source._lengths[7]


def spoil(folder, what):
    if what == "no manifest":
        (folder / "shards.json").unlink()
    elif what == "no index":
        (folder / "part-0.tar.index").unlink()
    elif what == "no shard":
        (folder / "part-0.tar").unlink()
    elif what == "short shard":
        os.truncate(folder / "part-0.tar", 100)
    elif what == "empty shard":
        os.truncate(folder / "part-0.tar", 0)
    elif what == "damaged index":
        os.truncate(folder / "part-0.tar.index", 300)
    elif what == "damaged manifest":
        (folder / "shards.json").write_text('{"format": 1')
    elif what == "manifest of lists":
        (folder / "shards.json").write_text("[1]")
    elif what == "later format":
        (folder / "shards.json").write_text('{"format": 2}')
    elif what == "other shard":
        (folder / "part-0.tar.index").write_bytes((folder / "part-1.tar.index").read_bytes())
        (folder / "part-0.tar").write_bytes((folder / "part-1.tar").read_bytes())
    elif what == "few classes":
        data = json.loads((folder / "shards.json").read_text())
        (folder / "shards.json").write_text(json.dumps({**data, "classes": ["only"]}))
    elif what == "escaping name":
        text = (folder / "shards.json").read_text()
        (folder / "shards.json").write_text(text.replace("part-0.tar", "other/../part-0.tar"))
    elif what.startswith("name with "):
        text = (folder / "shards.json").read_text()
        broken = {"name with NUL": "part\\u0000.tar", "name with half a letter": "part\\ud800.tar"}[what]
        (folder / "shards.json").write_text(text.replace("part-0.tar", broken))
    elif what == "nested manifest":
        (folder / "shards.json").write_text("[" * 200_000)
    elif what == "outside":
        rewrite(folder, lengths=np.array([1, 1, 1, 1, 1 << 40]))
    elif what == "negative":
        rewrite(folder, labels=np.array([-1] * 5))
    elif what == "overlap":
        rewrite(folder, offsets=np.zeros(5, np.int64))
    elif what == "names":
        rewrite(folder, names=b"short")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no manifest", "train/shards.json: No such file or directory; make it"),
        ("no index", "train/part-0.tar.index: No such file or directory; make it"),
        ("no shard", "train/part-0.tar: No such file or directory"),
        ("short shard", "train/part-0.tar: 100 bytes, but its index is of 2"),
        ("empty shard", "train/part-0.tar: 0 bytes, but its index is of 2"),
        ("damaged index", "train/part-0.tar.index: damaged index ("),
        ("damaged manifest", "train/shards.json: damaged manifest ("),
        ("manifest of lists", "train/shards.json: damaged manifest ("),
        ("later format", "train/shards.json: manifest of format 2, but this version reads 1"),
        ("other shard", "train/part-0.tar.index: 1 images in 1"),
        ("few classes", "train/part-0.tar.index: label 1, but shards.json names 1 classes, 0 to 0; name all classes"),
        ("name with NUL", "train/shards.json: damaged manifest ('part\\x00.tar' is no name of a shard)"),
        ("name with half a letter", "train/shards.json: damaged manifest ('part\\ud800.tar' is no name of a shard)"),
        ("nested manifest", "train/shards.json: damaged manifest (lists and objects are nested too deeply)"),
        ("escaping name", "train/shards.json: damaged manifest ('other/../part-0.tar' is no name of a shard)"),
        ("outside", "train/part-0.tar.index: damaged index (images overlap or lie outside the shard)"),
        ("negative", "train/part-0.tar.index: damaged index (label -1)"),
        ("overlap", "train/part-0.tar.index: damaged index (images overlap or lie outside the shard)"),
        ("names", "train/part-0.tar.index: damaged index (names do not add up)"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start_in_one_line(folder, what, message):
    spoil(folder, what)
    with pytest.raises(DataError) as caught:
        ShardsSource(str(folder), 10)
    text = str(caught.value)
    assert text.startswith(f"{folder.parent}/{message}")
    if what != "no shard":
        assert "python -m tools.shards index FOLDER" in text
    assert "\n" not in text


def batches(source, workers, replica=0, replicas=1, first=0):
    """Two epochs of 24 images, in steps of 12."""
    return training_batches(
        source, data=Data(source="shards", workers=workers, bad_images="skip", prefetch=1), image_size=12,
        global_batch=12, micro=3, seed=5, first_step=first, last_step=4, replica=replica, replicas=replicas,
    )  # fmt: skip


@pytest.fixture
def damaged(tmp_path):
    """24 images, of which three have a damaged byte, and the whole of another shard is gone after opening."""
    write_shards(tmp_path / "train", (7, 5, 2, 10))
    source = ShardsSource(str(tmp_path / "train"), 6)
    for index in (1, 8, 23):
        overwrite(source.name(index).rpartition("/")[0], int(source._offsets[index]) + 30, b"\xff\xff\xff")
    (tmp_path / "train/part-2.tar").unlink()
    return source, sorted(set(range(24)) - {1, 8, 23, 12, 13})


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_readable_image_is_seen_once_an_epoch(damaged, workers, replicas):
    source, readable = damaged
    seen = {0: [], 1: []}
    unreadable = 0
    for replica in range(replicas):
        for batch in batches(source, workers, replica, replicas):
            seen[batch.step // 2] += batch.indices[: batch.valid].tolist()
            unreadable += len(batch.unreadable)
    assert sorted(seen[0]) == sorted(seen[1]) == readable
    assert seen[0] != seen[1]
    assert unreadable == 2 * 5


@pytest.mark.parametrize("workers", [0, 3])
def test_a_resumed_run_sees_the_same_bits(damaged, workers):
    def contents(found):
        return [
            (batch.step, batch.number, batch.indices.tolist(), batch.labels.tolist(), batch.images.numpy().tobytes())
            for batch in found
        ]

    whole = contents(batches(damaged[0], 1))
    assert contents(batches(damaged[0], workers, first=1)) == whole[4:]
