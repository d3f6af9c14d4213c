"""Reading is distinguished from decoding, and the disk is timed with files that were in no
cache."""

import mmap
import os
import time

import pytest
import torch
from PIL import Image

from common.errors import DataError
from data.decode import decode
from data.digits import DigitsSource
from data.folder import FolderSource
from data.loader import NotLeftOut
from data.sources import open_source
from recipe import loading
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


def slowed(monkeypatch, what):
    """Reading ("disk") or decoding an image, of which no region is left out, takes 10 ms."""
    encoded = FolderSource.encoded
    if what == "disk":
        monkeypatch.setattr(
            FolderSource, "encoded", lambda *arguments: time.sleep(0.01) or encoded(*arguments)
        )
        return
    monkeypatch.setattr(
        "data.decode.decode",
        lambda *arguments, **keywords: time.sleep(0.01) or decode(*arguments, **keywords),
    )
    for name in ("region", "scaled"):
        monkeypatch.setattr(f"data.jpeg.{name}", lambda *_: None)


def test_images_in_memory_have_no_bytes():
    threads = torch.get_num_threads()
    found = images.read(loading.load(QUICKSTART), DigitsSource("train"), 0, 1, SECONDS)
    assert torch.get_num_threads() == threads
    assert found.per_core.low > 0 and found.per_core.repetitions >= 3
    assert found.tried > 3 and found.unreadable == 0
    assert (found.bytes, found.cached_bytes_per_second, found.share_of_bytes) == (None, None, None)


@pytest.mark.clock
@pytest.mark.parametrize("slow", ["disk", "decoding"])
def test_a_slow_disk_is_distinguished_from_slow_decoding(photos, monkeypatch, slow):
    """10 ms for each image: less than 100 images a second, more than half of it reading or less."""
    slowed(monkeypatch, slow)
    found = read(photos)
    sizes = [path.stat().st_size for path in photos.rglob("*.jpg")]
    assert min(sizes) <= found.bytes <= max(sizes)
    assert found.per_core.high < 100 and (1 > found.share_of_bytes > 0.5) == (slow == "disk")


def test_the_disk_is_timed_with_files_of_the_user_that_were_dropped_from_the_cache(
    photos, monkeypatch
):
    path = photos / "large"
    path.write_bytes(b"x" * 10 * mmap.PAGESIZE)
    assert images._file(f"{path}/some/image.jpg") == images._file(str(path)) == str(path)
    assert images._file("https://host/shards/000.tar/image.jpg") is None
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        assert images._share_in_memory(stream.fileno()) == 1.0  # just written
        if images._drop_from_cache(str(path)):  # but for a file system in memory
            assert images._share_in_memory(stream.fileno()) == 0.0
            stream.read(10)
            assert images._share_in_memory(stream.fileno()) > 0.0
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    assert read(photos).disk_bytes_per_second is None
    monkeypatch.setattr(os, "geteuid", lambda: -1)  # the files are another's, and so is their cache
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("dropped"))
    found = read(photos)
    assert found.disk_bytes_per_second is None and found.cached_bytes_per_second.low > 0


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_files_that_cannot_be_read_are_refused_or_counted_and_no_part_of_the_rates(
    photos, monkeypatch, content
):
    """Four of six; each of the other two takes 10 ms, and these four nearly nothing.

    Then all six.
    """
    slowed(monkeypatch, "decoding")
    first, second, *others = photos.rglob("*.jpg")
    for path in others:
        path.write_bytes(content)
    found = read(photos, "data.bad_images=skip")
    assert (found.tried, found.unreadable) == (6, 4)
    assert found.per_core.high < 100 and 0 < found.share_of_bytes < 1
    if not content:  # files are read whatever they hold
        assert found.bytes == pytest.approx(
            (first.stat().st_size + second.stat().st_size) / 2, rel=0.2
        )
    with pytest.raises(NotLeftOut, match=r"\.jpg"):
        read(photos)
    for path in (first, second):
        path.write_bytes(content)
    with pytest.raises(
        DataError, match=r"\.jpg: .*; of 6 images that were tried none can be read; mend"
    ):
        read(photos, "data.bad_images=skip")
