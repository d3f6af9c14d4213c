"""The loader's benchmark measures the right images, the work of all threads, and checks its files."""

import io
import threading
import time

import pytest
import torch
from PIL import Image

from benchmarks import loader, photographs
from benchmarks.loader_parts import Side, shown
from data.folder import FolderSource
from data.loader import training_batches
from data.transforms import framed
from recipe.config import Data


@pytest.fixture
def folder(tmp_path):
    """24 photographs in three class folders."""
    paths = [tmp_path / f"{number % 3}" / f"{number:02d}.jpg" for number in range(24)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
    photographs._make(paths)
    return tmp_path


def test_parts_are_measured_on_the_images_and_boxes_that_the_reader_shows(folder):
    source, data = FolderSource(str(folder)), Data(workers=0)
    batches = training_batches(
        source, data=data, image_size=40, global_batch=8, micro=8, seed=0, first_step=0, last_step=7
    )
    for step, batch in enumerate(batches):
        images = shown(source, data, 8, 40, step)
        assert [each.index for each in images] == batch.indices.tolist()
        assert {each.epoch for each in images} == {step // 3}
        assert torch.equal(torch.stack([framed(each.image, each.frame) for each in images]), batch.images)


def test_the_work_of_threads_counts_for_the_side_that_they_work_for(monkeypatch):
    monkeypatch.setattr(loader, "_STILL", 1.0)  # so long a busy machine does not keep a thread waiting

    def work(_):
        threading.Thread(target=busy, args=(0.1,)).start()

    def busy(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    seconds = loader._seconds_an_image(Side("", "", work, int, lambda _: 1), 0)
    assert seconds >= 0.1
    # What came before does not count, what is prepared neither.
    assert loader._seconds_an_image(Side("", "", int, lambda turn: busy(0.1) or turn, lambda _: 1), 0) < 0.05


def test_a_file_has_the_highest_quality_of_its_size():
    image = photographs._opened("coffee.png").resize((500, 375))
    sizes = {quality: jpeg_size(image, quality) for quality in range(88, 98)}
    for target, quality in ((sizes[92], 92), (sizes[95] - 1, 94), (10**6, 97), (1000, 88)):
        assert len(photographs._encoded(image, target)) == sizes[quality]


def jpeg_size(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling="4:2:0")
    return file.tell()


def test_photographs_are_like_imagenets(folder):
    """The draws of these 24 are fixed; the mean of all 1,200 is 98 kB."""
    files = sorted(folder.rglob("*.jpg"))
    opened = [Image.open(file) for file in files]
    assert {image.size for image in opened} == {(500, 375), (375, 500)}
    assert all("progressive" not in image.info and image.mode == "RGB" for image in opened)
    assert {tuple(layer[1:3] for layer in image.layer) for image in opened} == {((2, 2), (1, 1), (1, 1))}
    for image in opened:
        image.close()
    assert 90_000 < sum(file.stat().st_size for file in files) / len(files) < 115_000


def test_files_that_are_not_what_was_made_are_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs, "CACHE", tmp_path)
    made = []

    def make(paths):
        made.append(len(paths))
        for path in paths:
            path.write_bytes(path.name.encode())

    for harm in (lambda path: None, lambda path: path.write_bytes(b""), lambda path: path.unlink()):
        paths = photographs._cached("few", 5, make)
        assert photographs._cached("few", 5, make) == paths
        assert [path.read_bytes() for path in paths] == [path.name.encode() for path in paths]
        harm(paths[3])
    photographs._cached("few", 5, make)
    assert made == [5, 5, 5]
