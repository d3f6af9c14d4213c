"""Micro batches by DALI: the same images as of the other reader, in the same places, and its pixels as nearly as
resampling rounds."""

import contextlib
import functools
import io
import itertools
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.batches import Request
from data.dali import DaliReader
from data.encoded import EncodedSource
from data.loader import training_batches
from data.reader import Reader
from data.transforms import Evaluation, Training, operated
from recipe.config import Data
from recipe.errors import DataError
from tests.data.test_loader import content, contents

pytest.importorskip("nvidia.dali")

CPU = torch.device("cpu")
SIZE = 48
GLOBAL = 12
ROTATED = 6  # of EXIF
BAD = {5: "damaged", 17: "truncated"}
ODD = {2: "stray", 3: "cmyk", 8: "png", 9: "rotated"}


def file(picture, kind="plain"):
    """A picture, uint8 [height, width, 3], as a file of some kind."""
    image = Image.fromarray(picture)
    options = {"format": "PNG"} if kind == "png" else {"format": "JPEG", "quality": 90}
    if kind == "rotated":
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = ROTATED
    stream = io.BytesIO()
    (image.convert("CMYK") if kind == "cmyk" else image).save(stream, **options)
    encoded = stream.getvalue()
    if kind == "stray":  # libjpeg skips what lies between segments, DALI's parser does not
        return encoded[:2] + b"lost" + encoded[2:]
    if kind == "damaged":  # without the quantization tables; their segments are made something of other programs
        return encoded.replace(b"\xff\xdb", b"\xff\xed")
    return encoded[: len(encoded) // 2] if kind == "truncated" else encoded


@functools.lru_cache(maxsize=None)
def picture(number, height=150, width=200):
    """Looks like a photograph to a filter: detail of every size, the less the smaller; and an edge."""
    draw = np.random.default_rng(number)
    levels = np.full((height, width, 3), 128.0)
    for coarse in (4, 8, 16, 32, 64):
        noise = Image.fromarray(draw.integers(0, 256, (coarse, coarse, 3), dtype=np.uint8))
        levels += (np.asarray(noise.resize((width, height), Image.BICUBIC), float) - 128) * 3 / coarse**0.75
    levels[height // 3 :, width // 2 + number % 9 :] *= 0.5
    return levels.clip(0, 255).astype(np.uint8)


class Album(EncodedSource):
    """Pictures as files of several kinds."""

    def __init__(self, count=30, kinds=None, **size):
        self.classes = ("even", "odd")
        self.labels = np.arange(count, dtype=np.int64) % 2
        kinds = kinds or {}
        self._files = [file(picture(number, **size), kinds.get(number, "plain")) for number in range(count)]

    def name(self, index):
        return f"album/{index}"

    def encoded(self, index):
        return self._files[index]


class Exact(Training):
    """Every box decoded at its own size, as DALI decodes it."""

    def frame(self, image, size, epoch, index):
        return super().frame(image, size, epoch, index)._replace(exact=True)


def section(reader="dali", **options):
    return Data(**{"source": "folder", "reader": reader, "workers": 2, "prefetch": 2, **options})


def requests(count, rows, size=SIZE, epoch=0):
    return [
        Request(0, epoch, number, size, list(range(number * rows, min((number + 1) * rows, count))))
        for number in range(-(-count // rows))
    ]


def by_dali(source, transform, rows=4, size=SIZE, threads=2, device=CPU):
    loaded = list(DaliReader(source, rows, transform, threads, device).load(requests(len(source), rows, size)))
    return torch.cat([batch.images[: len(batch.indices)] for batch in loaded])


def by_torch(source, transform, rows=4, size=SIZE):
    reader = Reader(source, rows, transform)
    loaded = [reader[request] for request in requests(len(source), rows, size)]
    return torch.cat([batch.images[: len(batch.indices)] for batch in loaded])


def differences(one, other):
    return (one.cpu().int() - other.cpu().int()).abs()


def train(source, *, first=0, last=4, micro=3, image_size=SIZE, **options):
    batches = training_batches(
        source, data=section(**options), image_size=image_size, global_batch=GLOBAL, micro=micro, seed=7,
        first_step=first, last_step=last,
    )  # fmt: skip
    with contextlib.closing(batches):
        return list(batches)


def places(batch):
    """Which images are where."""
    return (*content(batch)[:-1], batch.images.shape)


@pytest.fixture(scope="module")
def album():
    return Album()


@pytest.fixture(scope="module")
def mixed():
    """An album with files of all kinds, bad ones among them."""
    return Album(kinds={**ODD, **BAD})


@pytest.mark.parametrize("size", [*(pytest.param(size, marks=pytest.mark.slow) for size in (380, 64)), 160, 24])
def test_crops_are_those_of_the_other_reader_but_for_rounding(album, size):
    """DALI rounds once, torch after each direction, with weights of 8 to 15 bits: never two levels apart. Images a
    pixel beside their place would be seen.

    Where torch leaves out what lies beyond the edge of the box, DALI repeats the edge. Of the weights of an outermost
    pixel of a picture made smaller an eighth lies there, of a corner's 15 / 64: 61 of 255 levels, and one for rounding.
    """
    expected = by_torch(album, Exact(section(), 3), size=size)
    found = differences(by_dali(album, Exact(section(), 3), size=size), expected)
    assert found[:, :, 1:-1, 1:-1].max() <= 1
    assert found.max() <= 62
    assert found.float().mean() < 0.3
    assert differences(expected.roll(1, 3), expected).float().mean() > 1


@pytest.mark.parametrize("shape", [{}, {"height": 200, "width": 150}, {"height": 20, "width": 500}], ids=str)
@pytest.mark.parametrize("size", [pytest.param(160, marks=pytest.mark.slow), 64])
def test_centres_are_those_of_the_other_reader_but_for_rounding(shape, size):
    """The square is cut out of the resized box, so its edges are not the box's."""
    source = Album(6, **shape)
    found = differences(by_dali(source, Evaluation(0.875), size=size), by_torch(source, Evaluation(0.875), size=size))
    assert found.max() <= 1


@pytest.mark.parametrize(("micro", "album_of"), [(1, "mixed"), (3, "mixed"), (12, "album")])
def test_training_gets_the_images_that_the_other_reader_gives(micro, album_of, request):
    """Over two epochs, whose last images fill no step. Many boxes are decoded at half their size by the other reader;
    pixels of another image would be some 80 levels away."""
    source = request.getfixturevalue(album_of)
    expected = train(source, micro=micro, reader="torch", workers=0, bad_images="skip")
    actual = train(source, micro=micro, bad_images="skip")
    assert [places(batch) for batch in actual] == [places(batch) for batch in expected]
    assert (sum(len(batch.unreadable) for batch in actual) > 1) == (album_of == "mixed")
    for one, other in zip(actual, expected):
        assert one.valid == 0 or differences(one.images, other.images).float().mean() < 6
        assert not one.images[one.valid :].any()


def test_pixels_depend_neither_on_where_a_run_began_nor_on_the_number_of_threads(mixed):
    """Both decide which images are decoded together, and one of them makes DALI fail."""
    whole = train(mixed, bad_images="skip")
    resumed = train(mixed, first=1, bad_images="skip", workers=5)
    assert contents(resumed) == contents(whole[4:])


def test_images_that_dali_refuses_are_made_by_the_other_reader_to_the_bit(mixed, album):
    """And those beside them keep their pixels."""
    transform = Training(section(), 3)
    (loaded,) = DaliReader(mixed, 30, transform, 2, CPU).load(requests(30, 30))
    expected = Reader(mixed, 30, transform)[requests(30, 30)[0]]
    assert loaded[1:] == expected[1:]
    plain = by_dali(album, transform, rows=30)
    for row, index in enumerate(loaded.indices):
        assert torch.equal(loaded.images[row], expected.images[row] if index in ODD else plain[index]), index


def test_operations_are_done_to_dalis_pixels(album):
    plain = train(album, last=2)
    operations = train(album, last=2, augment="randaugment", workers=0)
    data = section(augment="randaugment")
    for before, after in zip(plain, operations):
        for row, index in enumerate(before.indices.tolist()):
            assert torch.equal(after.images[row], operated(before.images[row], data, 7, 0, index))


def test_images_may_change_their_size_from_epoch_to_epoch(album):
    """Two steps an epoch. What is decoded together does not end where an epoch does."""
    sizes = {0: 32, 1: 48}
    changing = train(album, image_size=sizes.__getitem__, workers=4)
    expected = train(album, last=2, image_size=32) + train(album, first=2, image_size=48)
    assert contents(changing) == contents(expected)


def test_closing_early_leaves_neither_threads_nor_memory_behind(album):
    """A pipeline kept would keep its threads. Of memory the C library keeps some of the first times."""
    reader = DaliReader(album, 4, Training(section(), 3), 3, CPU)

    def begin_and_close():
        loading = reader.load(itertools.cycle(requests(30, 4, size=200)))
        for _ in range(5):
            next(loading)
        assert threads() > before
        loading.close()

    def threads():
        return len(os.listdir("/proc/self/task"))  # those of libraries with them

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = threads()
    for _ in range(5):
        begin_and_close()
    taken = resident()
    for _ in range(10):
        begin_and_close()
    end = time.monotonic() + 60
    while threads() > before and time.monotonic() < end:  # one that has ended is listed a moment longer
        time.sleep(0.01)
    assert threads() <= before
    # The images of one run are 12 x 200 x 200 x 3 bytes; two runs are always under way.
    assert resident() - taken < 10 * 12 * 200 * 200 * 3


def test_without_dali_the_error_names_the_package_and_the_other_reader(album, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(DataError, match=r"install nvidia-dali.*or set data.reader=torch"):
        DaliReader(album, 4, Training(section(), 3), 1, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="decodes on a CUDA device")
@pytest.mark.parametrize("transform", [Exact(section(), 3), Evaluation(0.875)], ids=["training", "evaluation"])
def test_a_gpu_makes_about_the_same_pixels(mixed, transform):
    """nvJPEG repeats colours where libjpeg-turbo interpolates them. A missed flip is far more."""
    images = by_dali(mixed, transform, device=torch.device("cuda"))
    expected = by_torch(mixed, transform)
    assert images.is_cuda and images.is_contiguous()
    found = differences(images, expected).float().mean()
    assert found < 2
    assert differences(images.flip(3), expected).float().mean() > 5 * found
