"""The loader: who gets which images, with any number of workers and replicas, and what bad images
do."""

import functools
import itertools
import multiprocessing
import subprocess
import sys
import threading
import zlib
from multiprocessing import forkserver

import numpy as np
import pytest
import torch

from data import loader, prefetch
from data.base import Source, UnreadableImage, permutation
from data.batches import Request
from data.epochs import RunOrder
from data.loader import EvaluationBatches, TrainingBatches
from data.reader import Reader
from data.transforms import Evaluation, Training
from data.workers import Loader
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from recipe.randomness import bits32, key
from tests.waiting import wait_until
from tests.world import fork_server

SIZE = 16
GLOBAL = 12
MICRO = 3


class Tinted(Source):
    """Images that differ; some of them cannot be read."""

    def __init__(self, count=50, unreadable=()):
        self.labels = np.arange(count, dtype=np.int64) % 2
        self._unreadable = unreadable

    def name(self, index):
        return f"tinted/{index}"

    def read(self, index):
        if index in self._unreadable:
            raise UnreadableImage(f"{self.name(index)}: faded")
        image = torch.arange(3 * 20 * 30, dtype=torch.int64).reshape(3, 20, 30) * (index + 1)
        return (image % 256).to(torch.uint8)


def train(
    source=None, *, workers=0, first=0, last=9, bad_images="error", augment="none", **options
):
    data = Data(source="digits", workers=workers, bad_images=bad_images, augment=augment)
    order = RunOrder(source or Tinted(), data, 7, GLOBAL)
    return TrainingBatches(
        order, range(first, last), **{"micro": MICRO, "image_size": SIZE, **options}
    )


def evaluation(source=None, workers=0, **options):
    data = Data(source="digits", workers=workers)
    return EvaluationBatches(source or Tinted(), data=data, image_size=SIZE, batch=8, **options)


def content(batch):
    """Everything in a micro batch, comparable; images come last."""
    tensors = [each.numpy().tobytes() for each in (batch.labels, batch.indices, batch.images)]
    return (batch.step, batch.number, batch.valid, batch.unreadable, *tensors)


def contents(batches):
    return [content(batch) for batch in batches]


def prefetches():
    return any(thread.name == "prefetch" for thread in threading.enumerate())


def children_are_gone():
    return wait_until(lambda: not multiprocessing.active_children())


def test_an_order_sorts_the_images_by_their_random_bits_and_never_changes():
    """From Python integers, one image at a time.

    Resumed runs need the order of older versions, hence the checksum.
    """
    for size in (1, 4097):
        bits = [bits32(key("order", 3, 4), index) for index in range(size)]
        order = permutation(3, 4, size)
        assert order.dtype == np.int64 and order.tolist() == sorted(
            range(size), key=bits.__getitem__
        )
    assert zlib.crc32(permutation(0, 0, 10_000).astype("<i8").tobytes()) == 1203338718


def test_each_micro_batch_holds_the_next_images_of_the_order():
    """The rule, written out: 50 images make 4 steps of 12, and 2 are left over."""
    source = Tinted()
    batches = train(source, last=9)
    assert not prefetches(), "two threads that compute would hinder each other"
    batches = list(batches)
    assert [(batch.step, batch.number) for batch in batches] == [
        (s, n) for s in range(9) for n in range(4)
    ]
    for batch in batches:
        epoch, step = divmod(batch.step, 4)
        start = step * GLOBAL + batch.number * MICRO
        assert batch.indices.tolist() == permutation(7, epoch, 50)[start : start + MICRO].tolist()
        assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (MICRO, 3, SIZE, SIZE))
        assert (batch.labels.dtype, batch.indices.dtype) == (torch.int64, torch.int64)
        assert (batch.valid, batch.unreadable) == (MICRO, ())
        assert batch.labels.tolist() == source.labels[batch.indices.numpy()].tolist()
        for image, index in zip(batch.images, batch.indices.tolist()):
            assert torch.equal(image, Training(Data(), 7)(source.open(index), SIZE, epoch, index))


@pytest.mark.parametrize(("workers", "replicas"), [(0, 4), (1, 1), (2, 2)])
def test_workers_and_replicas_do_not_change_what_is_in_a_micro_batch(workers, replicas):
    """Replicas' shares are contiguous ranges of a step, so sorting by (step, number) joins them."""
    state = torch.random.get_rng_state()
    options = {"augment": "randaugment", "last": 6}
    expected = contents(train(**options))
    own = [
        range(replica * 4 // replicas, (replica + 1) * 4 // replicas) for replica in range(replicas)
    ]
    shares = [contents(train(workers=workers, share=each, **options)) for each in own]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {len(share) for share in shares} == {len(expected) // replicas}
    for numbers, share in zip(own, shares):
        assert [number for _, number, *_ in share[: len(numbers)]] == list(numbers)
    assert sorted(itertools.chain(*shares)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_changes_between_two_steps_whatever_was_loaded_ahead(workers):
    """4 micro batches a step, two epochs; each time in the midst of what workers prepare, who stay
    the same."""
    expected = contents(train(last=6))
    batches = train(workers=workers, share=range(1, 3), last=6)
    found = contents(itertools.islice(batches, 2 * 2))
    before = {child.pid for child in multiprocessing.active_children()}
    for step, share, count in ((2, range(0, 4), 1), (3, range(2, 4), 2), (5, range(3, 4), 1)):
        batches.set_share(step, share)
        found += contents(itertools.islice(batches, count * len(share)))
    assert {child.pid for child in multiprocessing.active_children()} == before
    owners = {
        0: range(1, 3),
        1: range(1, 3),
        2: range(4),
        3: range(2, 4),
        4: range(2, 4),
        5: range(3, 4),
    }
    assert (
        found == [each for each in expected if each[1] in owners[each[0]]]
        and next(batches, None) is None
    )
    assert batches.waited() >= 0
    batches.close()


def test_a_share_changes_while_a_worker_takes_longer_than_is_waited_for(monkeypatch):
    """The thread that waits for it keeps the loader, whose iterator two threads would spoil for
    each other."""
    begun = []
    slow = threading.Event()

    def load(self):
        begun.append(self)
        for request in self.sampler:
            if len(begun) == 1 and request.step == 1:
                slow.wait()
            yield self.dataset[request]

    monkeypatch.setattr(Loader, "__iter__", load)
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.0)
    batches = train(workers=2, last=3)
    try:
        found = contents(itertools.islice(batches, 4))
        batches.set_share(1, range(1, 3))
        found += contents(batches)
    finally:
        slow.set()
    expected = contents(train(last=3))
    assert found == [each for each in expected if each[0] == 0 or each[1] in (1, 2)]
    assert len(begun) == 3 and begun[0] is not begun[1]
    assert wait_until(lambda: not prefetches())


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_images_of_its_size_also_after_a_resume(workers):
    """Four steps an epoch: two epochs of 12 pixels, one of 20, one of 16.

    Workers load over their ends.
    """
    sizes = {"image_sizes": [[0, 12], [2, 20], [3, 16]]}
    recipe = Recipe.model_validate({"run": {"epochs": 4}, "schedule": {"peak": 1.0}, "data": sizes})
    image_size = functools.partial(training_image_size, recipe)
    batches = list(train(workers=workers, last=16, image_size=image_size))
    assert [batch.images.shape[-1] for batch in batches] == [12] * 32 + [20] * 16 + [16] * 16
    resumed = train(workers=workers, first=10, last=16, image_size=image_size)
    assert contents(resumed) == [content(batch) for batch in batches if batch.step >= 10]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_a_run_with_one_line(workers):
    bad = permutation(7, 0, 50)[16].item()
    received = []
    with pytest.raises(UnreadableImage, match=f"^tinted/{bad}: faded; .* data.bad_images=skip$"):
        received.extend(batch.number for batch in train(Tinted(unreadable=[bad]), workers=workers))
    assert received == [0, 1, 2, 3, 0], "what comes before it is delivered"
    assert children_are_gone()


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_leave_the_good_ones_in_front_and_are_listed(workers):
    """Of four micro batches the first lacks one image, the second two, the third all."""
    order = permutation(7, 0, 50).tolist()
    bad = [order[0], order[3], order[4], *order[6:9]]
    batches = list(train(Tinted(unreadable=bad), workers=workers, bad_images="skip", last=1))
    for number, (batch, whole) in enumerate(zip(batches, train(last=1))):
        good = [index for index in order[MICRO * number : MICRO * (number + 1)] if index not in bad]
        padding = [-1] * (MICRO - len(good))
        assert (batch.valid, batch.indices.tolist()) == (len(good), good + padding)
        assert batch.labels.tolist() == [index % 2 for index in good] + [0] * len(padding)
        assert torch.equal(batch.images[: len(good)], whole.images[MICRO - len(good) :])
        assert not batch.images[len(good) :].any()
    assert batches[1].unreadable == (f"tinted/{order[3]}: faded", f"tinted/{order[4]}: faded")


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order_as_often_as_asked(workers):
    source = Tinted()
    batches = evaluation(source, workers=workers)
    assert len(batches) == 7
    assert next(iter(batches)).indices[0] == 0  # broken off
    found = list(batches)
    children = set(multiprocessing.active_children())
    assert contents(batches) == contents(found)
    assert set(multiprocessing.active_children()) == children, "the same workers"
    assert [index for batch in found for index in batch.indices.tolist()] == [*range(50), *[-1] * 6]
    images = torch.cat([batch.images for batch in found])
    for index in range(50):
        assert torch.equal(images[index], Evaluation(Data())(source.open(index), SIZE, 0, index))
    assert found[-1].valid == 2 and found[-1].labels.tolist() == [0, 1] + [0] * 6
    assert not images[50:].any()
    batches.close()
    assert children_are_gone()


@pytest.mark.parametrize("replicas", [2, 3, 10])
def test_replicas_share_the_evaluation(replicas):
    """Seven micro batches: with ten replicas some get none, and each image is still shown once."""
    shares = [evaluation(replica=replica, replicas=replicas) for replica in range(replicas)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(itertools.chain(*map(contents, shares))) == contents(evaluation())


def test_workers_outlive_the_signals_of_terminals_and_schedulers_and_end_with_the_iterator():
    """A command sends them, because from the training process itself SIGTERM must work."""
    batches = train(workers=2, last=30)
    received = [content(next(batches))]
    assert prefetches()
    workers = [str(child.pid) for child in multiprocessing.active_children()]
    for name in ("-INT", "-TERM"):
        subprocess.run(["kill", name, *workers], check=True)
    received += contents(batches)
    assert received == contents(train(last=30))

    batches = train(workers=2, last=1000)
    next(batches)
    worker, _ = multiprocessing.active_children()
    worker.terminate()
    # The thread that prefetches may be the one that learns of the end; until it has, the exit code
    # here is None.
    assert wait_until(lambda: worker.exitcode is not None) and worker.exitcode == 0
    with pytest.raises(RuntimeError, match=r"worker .*exited unexpectedly"):
        list(batches)
    batches.close()
    assert children_are_gone()


@pytest.mark.parametrize(
    ("workers", "fault", "expected"),
    [
        (2, ConnectionResetError(104, "Connection reset by peer"), RuntimeError),
        (2, EOFError(), RuntimeError),
        (
            2,
            FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0."),
            FileNotFoundError,
        ),
        (0, ConnectionResetError(104, "Connection reset by peer"), ConnectionResetError),
        (
            2,
            RuntimeError("unable to write to shared memory: No space left on device (28)"),
            OSError,
        ),
        (2, RuntimeError("unable to allocate shared memory"), RuntimeError),
    ],
)
def test_a_worker_that_ends_while_it_passes_images_on_is_reported_as_such(
    monkeypatch, workers, fault, expected
):
    """The error of the training process depends on the moment: torch itself reports the end only
    between two."""

    def load(self):
        yield from ()
        raise fault

    monkeypatch.setattr(Loader, "__iter__", load)
    with pytest.raises(expected) as raised:
        list(train(workers=workers, last=60))
    assert (raised.value is fault) == (type(fault) is expected)
    said = "--shm-size" if expected is OSError else "exited unexpectedly"
    assert raised.value is fault or said in str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
def test_workers_are_copies_of_this_process_whatever_the_default_is():
    """Python 3.14 has another default, and so have processes of a fork server: there each worker
    would load torch."""
    default = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        reader = Reader(Tinted(), MICRO, Training(Data(source="digits"), 7))
        made = loader._loader(reader, [], Data(source="digits", workers=1), torch.device("cpu"))
        assert made.multiprocessing_context.get_start_method() == "fork"
    finally:
        multiprocessing.set_start_method(default, force=True)


def test_workers_beside_cuda_are_no_copies_of_this_process_and_read_the_same():
    """A copy would have locks that CUDA's threads hold.

    Its workers come from a server that has loaded torch.

    The loader would start one with signals withheld, and later tests would have processes of it:
    there is one already.
    """
    fork_server()
    reader = Reader(Tinted(), MICRO, Training(Data(source="digits"), 7))
    requests = [Request(0, 0, 0, SIZE, [4, 5, 6])]
    data = Data(source="digits", workers=1)
    for device, way in (("cpu", multiprocessing.get_start_method()), ("cuda", "forkserver")):
        made = loader._loader(reader, requests, data, torch.device(device))
        assert made.multiprocessing_context.get_start_method() == way
        (batch,) = made
        assert torch.equal(batch.images, reader[requests[0]].images)
    assert forkserver._forkserver._preload_modules == [Loader.__module__]
