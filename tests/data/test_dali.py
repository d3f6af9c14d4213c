"""Micro batches by DALI: the other reader's images in the same places, and its pixels but for
rounding."""

import contextlib
import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from common.errors import DataError
from data.batches import Request
from data.dali import DaliLoader
from data.encoded import EncodedSource
from data.epochs import RunOrder
from data.loader import TrainingBatches
from data.reader import Reader
from data.transforms import Evaluation, Training
from recipe.config import Data
from tests.data.test_decode import encoded, file_of, photograph
from tests.data.test_loader import content, contents
from tests.waiting import wait_until

# Found, not imported: that takes seconds in each process that collects tests.
pytestmark = pytest.mark.skipif(
    not find_spec("nvidia") or not find_spec("nvidia.dali"), reason="needs DALI"
)

CPU = torch.device("cpu")
SIZE = 48
BAD = {5: "damaged", 17: "truncated"}
ODD = {2: "stray", 3: "cmyk", 8: "png", 9: "rotated"}


def file(number, kind="plain", height=150, width=200):
    """A picture as a file of some kind."""
    image = photograph(height, width, "CMYK" if kind == "cmyk" else "RGB", number)
    if kind == "png":
        return encoded(image, "PNG")
    data = file_of(image, orientation=6 if kind == "rotated" else 1, quality=90)
    if kind == "stray":  # libjpeg skips what lies between segments, DALI's parser does not
        return data[:2] + b"lost" + data[2:]
    if kind == "damaged":  # without quantization tables
        return data.replace(b"\xff\xdb", b"\xff\xed")
    return data[: len(data) // 2] if kind == "truncated" else data


class Album(EncodedSource):
    """Pictures as files of several kinds."""

    def __init__(self, count=30, kinds=(), **size):
        self.labels = np.arange(count, dtype=np.int64) % 2
        self._files = [
            file(number, dict(kinds).get(number, "plain"), **size) for number in range(count)
        ]

    def name(self, index):
        return f"album/{index}"

    def encoded(self, index):
        return self._files[index]


class Exact(Training):
    """Every box decoded at its own size, as DALI decodes it."""

    def frame(self, image, size, showing, index):
        return super().frame(image, size, showing, index)._replace(exact=True)


def section(reader="dali", **options):
    return Data(**{"source": "folder", "reader": reader, "workers": 2, "prefetch": 2, **options})


def requests(count, size=SIZE):
    """Four images each."""
    return [
        Request(0, 0, start // 4, size, list(range(start, min(start + 4, count))))
        for start in range(0, count, 4)
    ]


def by_dali(source, transform, size=SIZE, device=CPU):
    loader = DaliLoader(Reader(source, 4, transform), requests(len(source), size), 2, device)
    return torch.cat([batch.images[: batch.valid] for batch in loader])


def by_torch(source, transform, size=SIZE):
    loaded = map(Reader(source, 4, transform).__getitem__, requests(len(source), size))
    return torch.cat([batch.images[: batch.valid] for batch in loaded])


def differences(one, other):
    return (one.cpu().int() - other.cpu().int()).abs()


def train(source, *, first=0, last=4, image_size=SIZE, **options):
    order = RunOrder(source, section(**options), 7, 12)
    batches = TrainingBatches(order, range(first, last), image_size=image_size, micro=3)
    with contextlib.closing(batches):
        return list(batches)


@pytest.fixture(scope="module")
def album():
    return Album()


@pytest.fixture(scope="module")
def mixed():
    return Album(kinds={**ODD, **BAD})


@pytest.mark.parametrize("size", [pytest.param(380, marks=pytest.mark.slow), 160, 24])
def test_crops_are_those_of_the_other_reader_but_for_rounding(album, size):
    """DALI rounds once, torch after each direction, with weights of 8 to 15 bits: never two levels
    apart.

    Where torch leaves out what lies beyond the edge of the box, DALI repeats the edge. Of the
    weights of an outermost pixel of a picture made smaller an eighth lies there, of a corner's 15 /
    64: 61 of 255 levels, and one for rounding.
    """
    expected = by_torch(album, Exact(section(), 3), size)
    found = differences(by_dali(album, Exact(section(), 3), size), expected)
    assert found[:, :, 1:-1, 1:-1].max() <= 1
    assert found.max() <= 62
    assert found.float().mean() < 0.3
    assert differences(expected.roll(1, 3), expected).float().mean() > 1, (
        "a pixel beside its place would be seen"
    )


@pytest.mark.parametrize(
    "shape", [{}, {"height": 200, "width": 150}, {"height": 20, "width": 500}], ids=str
)
def test_centres_are_those_of_the_other_reader_but_for_rounding(shape):
    """The square is cut out of the resized box, so its edges are not the box's."""
    source = Album(4, **shape)
    found = differences(
        by_dali(source, Evaluation(Data()), 64), by_torch(source, Evaluation(Data()), 64)
    )
    assert found.max() <= 1


def test_training_gets_the_images_that_the_other_reader_gives(mixed):
    """Over two epochs, whose last images fill no step; resumed, with another number of threads, to
    the bit.

    Bad images make DALI fail. Many boxes are decoded at half their size by the other reader; pixels
    of another image would be some 80 levels away.
    """
    expected = train(mixed, reader="torch", workers=0, bad_images="skip")
    actual = train(mixed, bad_images="skip")
    assert [content(batch)[:-1] for batch in actual] == [content(batch)[:-1] for batch in expected]
    assert sum(len(batch.unreadable) for batch in actual) > 1
    for one, other in zip(actual, expected):
        assert one.valid == 0 or differences(one.images, other.images).float().mean() < 6
        assert not one.images[one.valid :].any()
    assert contents(train(mixed, first=1, bad_images="skip", workers=5)) == contents(actual[4:])


def test_images_that_dali_refuses_are_made_by_the_other_reader_to_the_bit(mixed, album):
    """And those beside them keep their pixels."""
    transform = Training(section(), 3)
    request = Request(0, 0, 0, SIZE, list(range(30)))
    plain = by_dali(album, transform)
    (loaded,) = DaliLoader(Reader(mixed, 30, transform), [request], 2, CPU)
    expected = Reader(mixed, 30, transform)[request]
    assert (
        loaded.unreadable == expected.unreadable
        and loaded.indices.tolist() == expected.indices.tolist()
    )
    for row, index in enumerate(loaded.indices[: loaded.valid].tolist()):
        assert torch.equal(
            loaded.images[row], expected.images[row] if index in ODD else plain[index]
        ), index


def test_operations_are_done_to_dalis_pixels(album):
    transform = Training(section(augment="randaugment"), 7)
    for before, after in zip(
        train(album, last=1), train(album, last=1, augment="randaugment", workers=0)
    ):
        for row, index in enumerate(before.indices.tolist()):
            assert torch.equal(after.images[row], transform.finish(before.images[row], 0, index))


def test_images_may_change_their_size_from_epoch_to_epoch(album):
    """Two steps an epoch."""
    changing = train(album, image_size={0: 32, 1: 48}.__getitem__, workers=4)
    assert contents(changing) == contents(
        train(album, last=2, image_size=32) + train(album, first=2, image_size=48)
    )


def test_closing_early_leaves_no_threads_behind(album):
    """A pipeline kept would keep its threads."""

    def threads():
        return len(os.listdir("/proc/self/task"))  # those of libraries with them

    before = threads()
    loading = iter(DaliLoader(Reader(album, 4, Training(section(), 3)), requests(30), 3, CPU))
    next(loading)
    assert threads() > before
    loading.close()
    wait_until(lambda: threads() <= before)  # one that has ended is listed a moment longer


def test_without_dali_the_error_names_the_package_and_the_other_reader(album, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(DataError, match=r"install nvidia-dali.*or set data.reader=torch"):
        train(album)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="decodes on a CUDA device")
@pytest.mark.parametrize(
    "transform", [Exact(section(), 3), Evaluation(Data())], ids=["training", "evaluation"]
)
def test_a_gpu_makes_about_the_same_pixels(mixed, transform):
    """nvJPEG repeats colours where libjpeg-turbo interpolates them. A missed flip is far more."""
    images = by_dali(mixed, transform, device=torch.device("cuda"))
    expected = by_torch(mixed, transform)
    assert images.is_cuda and images.is_contiguous()
    found = differences(images, expected).float().mean()
    assert found < 2
    assert differences(images.flip(3), expected).float().mean() > 5 * found
