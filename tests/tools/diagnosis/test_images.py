"""Reading is distinguished from decoding, and the disk is timed with files that were in no cache."""

import itertools
import mmap
import os
import time

import pytest
import torch
from PIL import Image

from data.decode import decode
from data.digits import DigitsSource
from data.folder import FolderSource
from data.loader import NotLeftOut
from data.sources import open_source
from recipe import loading
from recipe.errors import DataError
from tests.conftest import QUICKSTART
from tools.diagnosis import images

SECONDS = 0.1


@pytest.fixture(autouse=True)
def _short_repetitions(monkeypatch):
    monkeypatch.setattr(images, "_REPETITION", 0.03)


@pytest.fixture
def photos(tmp_path):
    """Six JPEG files of two classes, of noise, so that each has some kilobytes."""
    torch.manual_seed(0)
    for number in range(6):
        path = tmp_path / "train" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(torch.randint(0, 256, (64, 80, 3), dtype=torch.uint8).numpy()).save(path)
    return tmp_path


def read(folder, *overrides):
    place = ("data.source=folder", f"data.root={folder}", "model.classes=2", "model.image_size=32")
    recipe = loading.load(QUICKSTART, [*place, *overrides])
    return images.read(recipe, open_source(recipe.data, 2, "train"), 0, 1, SECONDS)


@pytest.fixture
def slow_decoding(monkeypatch):
    """Each image takes 10 ms to decode, of which no region is left out."""
    monkeypatch.setattr("data.decode.decode", lambda *arguments: time.sleep(0.01) or decode(*arguments))
    monkeypatch.setattr("data.jpeg.region", lambda *_: None)
    monkeypatch.setattr("data.jpeg.scaled", lambda *_: None)


def test_images_in_memory_have_no_bytes():
    threads = torch.get_num_threads()
    found = images.read(loading.load(QUICKSTART), DigitsSource("train"), 0, 1, SECONDS)
    assert torch.get_num_threads() == threads
    assert found.per_core.low > 0 and found.per_core.repetitions >= 3
    assert found.tried > 3 and found.unreadable == 0
    assert (found.bytes, found.cached_bytes_per_second, found.share_of_bytes) == (None, None, None)


@pytest.mark.parametrize("slow", ["disk", "decoding"])
def test_a_slow_disk_is_distinguished_from_slow_decoding(photos, monkeypatch, request, slow):
    """10 ms for each image: less than 100 images a second, more than half of it reading or less."""
    if slow == "disk":
        encoded = FolderSource.encoded
        monkeypatch.setattr(FolderSource, "encoded", lambda *arguments: time.sleep(0.01) or encoded(*arguments))
    else:
        request.getfixturevalue("slow_decoding")
    found = read(photos)
    sizes = [path.stat().st_size for path in photos.rglob("*.jpg")]
    assert min(sizes) <= found.bytes <= max(sizes)
    assert found.per_core.high < 100 and (1 > found.share_of_bytes > 0.5) == (slow == "disk")


def test_the_time_of_an_image_that_cannot_be_read_counts_no_more_than_itself():
    """Every other one, after 10 ms; the others take nearly nothing."""
    load = {0: lambda: time.sleep(0.01) or 0, 1: lambda: 1}
    rates = images._rates(lambda index: load[index](), itertools.cycle((0, 1)), 0.0, 0.02)
    assert len(rates) > 3 and sorted(rates)[1] > 1000


def test_files_are_dropped_from_the_cache_before_the_disk_is_timed(photos):
    path = photos / "large"
    path.write_bytes(b"x" * 10 * mmap.PAGESIZE)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        assert images._resident(stream.fileno()) == 1.0  # just written
        if not images._forgotten(str(path)):
            pytest.skip("a file system in memory")
        assert images._resident(stream.fileno()) == 0.0
        stream.read(10)
        assert images._resident(stream.fileno()) > 0.0


def test_files_that_cannot_or_may_not_be_dropped_are_no_measure_of_the_disk(photos, monkeypatch):
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    assert read(photos).disk_bytes_per_second is None
    monkeypatch.setattr(os, "geteuid", lambda: -1)  # the files are another's, and so is their cache
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("dropped"))
    found = read(photos)
    assert found.disk_bytes_per_second is None and found.cached_bytes_per_second.low > 0


def test_the_file_that_holds_an_image(tmp_path):
    shard = tmp_path / "000.tar"
    shard.write_text("")
    assert images._file(f"{shard}/some/image.jpg") == images._file(str(shard)) == str(shard)
    assert images._file("https://host/shards/000.tar/image.jpg") is None


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_files_that_cannot_be_read_are_refused_or_counted_and_no_part_of_the_rates(photos, slow_decoding, content):
    """Four of six; each of the other two takes 10 ms, and these four nearly nothing. Then all six."""
    first, second, *others = photos.rglob("*.jpg")
    for path in others:
        path.write_bytes(content)
    found = read(photos, "data.bad_images=skip")
    assert (found.tried, found.unreadable) == (6, 4)
    assert found.per_core.high < 100 and 0 < found.share_of_bytes < 1
    if not content:  # files are read whatever they hold
        assert found.bytes == pytest.approx((first.stat().st_size + second.stat().st_size) / 2, rel=0.2)
    with pytest.raises(NotLeftOut, match=r"\.jpg"):
        read(photos)
    for path in (first, second):
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"\.jpg: .*; of 6 images that were tried none can be read; mend"):
        read(photos, "data.bad_images=skip")
