"""The loader's benchmark measures the right images, the work of all threads, and checks its
files."""

import shutil
import threading
import time

import pytest
from PIL import Image

from benchmarks import drawn_photographs, loader
from benchmarks.loader import Side
from data.folder import FolderSource
from recipe.config import Data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 photographs in three class folders."""
    folder = tmp_path_factory.mktemp("photographs")
    paths = [folder / f"{number % 3}" / f"{number:02d}.jpg" for number in range(24)]
    drawn_photographs.make(paths)
    return folder


def test_files_are_decoded_that_the_reader_shows(folder, monkeypatch):
    monkeypatch.setattr(loader, "MICRO", 8)
    data = Data(root=str(folder.parent), train_folder=folder.name, workers=0)
    source = FolderSource(str(folder))
    for step, batch in zip(range(4), loader.our_batches(data, 40, 8, 8)):
        files = [source.encoded(index) for index in batch.indices.tolist()]
        assert loader.encoded(source, step) == files and len(files) == 8


@pytest.mark.clock
def test_the_work_of_threads_counts_for_the_side_that_they_work_for(monkeypatch):
    # so long a busy machine does not keep a thread waiting
    monkeypatch.setattr(loader, "_STILL", 1.0)

    def work(_):
        threading.Thread(target=busy, args=(0.1,)).start()

    def busy(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    assert loader.MICRO * loader.seconds_an_image(Side(work), 0) >= 0.1
    # What came before does not count, what is prepared neither.
    side = Side(int, lambda turn: busy(0.1) or turn)
    assert loader.MICRO * loader.seconds_an_image(side, 0) < 0.05


def test_photographs_are_like_imagenets(folder):
    """The draws of these 24 are fixed; the mean of all 1,200 is 98 kB.

    The quality is the highest for a size.
    """
    files = sorted(folder.rglob("*.jpg"))
    opened = [Image.open(file) for file in files]
    assert {image.size for image in opened} == {(500, 375), (375, 500)}
    assert all("progressive" not in image.info and image.mode == "RGB" for image in opened)
    assert {tuple(layer[1:3] for layer in image.layer) for image in opened} == {
        ((2, 2), (1, 1), (1, 1))
    }
    for image in opened:
        image.close()
    assert 90_000 < sum(file.stat().st_size for file in files) / len(files) < 115_000
    image = drawn_photographs._opened("coffee.png").resize((500, 375))
    sizes = {quality: len(drawn_photographs._jpeg(image, quality)) for quality in range(88, 98)}
    for target, quality in ((sizes[92], 92), (sizes[95] - 1, 94), (10**6, 97), (1000, 88)):
        assert len(drawn_photographs._encoded(image, target)) == sizes[quality]


def test_files_are_made_once_for_each_version(tmp_path, monkeypatch):
    made = []
    make = drawn_photographs.make
    monkeypatch.setattr(drawn_photographs, "FOLDER", tmp_path / "few")
    monkeypatch.setattr(drawn_photographs, "COUNT", 5)
    monkeypatch.setattr(
        drawn_photographs, "make", lambda paths: made.append(len(paths)) or make(paths)
    )
    for version in (1, 1, 2):
        monkeypatch.setattr(drawn_photographs, "_VERSION", version)
        assert len(drawn_photographs.photographs()) == 5
    assert made == [5, 5]
    shutil.rmtree(tmp_path / "few")
    assert len(drawn_photographs.photographs()) == 5 and made == [5, 5, 5]
