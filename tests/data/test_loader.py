"""The loader: who gets which images, with any number of workers and replicas, and what bad images do."""

import functools
import itertools
import multiprocessing
import subprocess
import sys
import threading
import time
import zlib

import numpy as np
import pytest
import torch

from data.base import Source, UnreadableImage, permutation
from data.batches import MicroBatch
from data.loader import EvaluationBatches, training_batches
from data.transforms import Evaluation, Training
from data.workers import WorkerReader
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from recipe.randomness import bits32, key
from tests.conftest import ROOT

SIZE = 16
GLOBAL = 12
MICRO = 3


class Tinted(Source):
    """Images that differ; some of them cannot be read."""

    def __init__(self, count=50, unreadable=()):
        self.classes = ("even", "odd")
        self.labels = np.arange(count, dtype=np.int64) % 2
        self._unreadable = unreadable

    def name(self, index):
        return f"tinted/{index}"

    def read(self, index):
        if index in self._unreadable:
            raise UnreadableImage(f"{self.name(index)}: faded")
        image = torch.arange(3 * 20 * 30, dtype=torch.int64).reshape(3, 20, 30) * (index + 1)
        return (image % 256).to(torch.uint8)


def section(workers=0, **options):
    return Data(source="digits", workers=workers, **options)


def train(source=None, *, workers=0, first=0, last=9, bad_images="error", augment="none", **options):
    options = {"global_batch": GLOBAL, "micro": MICRO, "seed": 7, "image_size": SIZE, **options}
    data = section(workers, bad_images=bad_images, augment=augment)
    return training_batches(source or Tinted(), data=data, first_step=first, last_step=last, **options)


def evaluation(source=None, *, workers=0, bad_images="error", **options):
    data = section(workers, bad_images=bad_images)
    return EvaluationBatches(source or Tinted(), data=data, image_size=SIZE, **{"batch": 8, **options})


def content(batch):
    """Everything in a micro batch, comparable."""
    return (
        batch.step, batch.number, batch.valid, batch.unreadable,
        batch.labels.tolist(), batch.indices.tolist(), batch.images.numpy().tobytes(),
    )  # fmt: skip


def contents(batches):
    return [content(batch) for batch in batches]


def prefetches():
    return any(thread.name == "prefetch" for thread in threading.enumerate())


def children_are_gone(patience=60.0):
    deadline = time.monotonic() + patience
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not multiprocessing.active_children()


@pytest.mark.parametrize("size", [1, 2, 50, 4097])
def test_an_order_sorts_the_images_by_their_random_bits(size):
    """The same from Python integers, one image at a time."""
    draw = key("order", 3, 4)
    bits = [bits32(draw, index) for index in range(size)]
    order = permutation(3, 4, size)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(size), key=bits.__getitem__)


def test_orders_never_change_and_have_no_equal_keys():
    """Resumed runs need the order of older versions, hence the recorded checksum. Of 300,000 independent draws ten
    pairs would agree, and a sort could put those in either order."""
    assert zlib.crc32(permutation(0, 0, 10_000).astype("<i8").tobytes()) == 1203338718
    assert len(np.unique(bits32(key("order", 0, 0), np.arange(300_000)))) == 300_000


def test_each_micro_batch_holds_the_next_images_of_the_order():
    """The rule, written out: 50 images make 4 steps of 12, and 2 are left over."""
    source = Tinted()
    batches = train(source, last=9)
    assert not prefetches(), "two threads that compute would hinder each other"
    batches = list(batches)
    assert [(batch.step, batch.number) for batch in batches] == [(s, n) for s in range(9) for n in range(4)]
    for batch in batches:
        epoch, step = divmod(batch.step, 4)
        start = step * GLOBAL + batch.number * MICRO
        assert isinstance(batch, MicroBatch)
        assert batch.indices.tolist() == permutation(7, epoch, 50)[start : start + MICRO].tolist()
        assert (batch.images.dtype, batch.images.shape) == (torch.uint8, (MICRO, 3, SIZE, SIZE))
        assert (batch.labels.dtype, batch.indices.dtype) == (torch.int64, torch.int64)
        assert (batch.valid, batch.unreadable) == (MICRO, ())
        assert batch.labels.tolist() == source.labels[batch.indices.numpy()].tolist()
        for image, index in zip(batch.images, batch.indices.tolist()):
            assert torch.equal(image, Training(section(), 7)(source.open(index), SIZE, epoch, index))


@pytest.mark.parametrize(("workers", "replicas"), [(0, 4), (1, 1), (2, 2)])
def test_workers_and_replicas_do_not_change_what_is_in_a_micro_batch(workers, replicas):
    """Replicas' shares are contiguous ranges of a step, so sorting by (step, number) joins them."""
    expected = contents(train(last=6))
    shares = [contents(train(last=6, workers=workers, replica=r, replicas=replicas)) for r in range(replicas)]
    assert {len(share) for share in shares} == {len(expected) // replicas}
    for replica, share in enumerate(shares):
        numbers = [number for _, number, *_ in share[: 4 // replicas]]
        assert numbers == list(range(replica * 4 // replicas, (replica + 1) * 4 // replicas))
    assert sorted(itertools.chain(*shares)) == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_has_images_of_its_size_also_after_a_resume(workers):
    """Four steps an epoch: two epochs of 12 pixels, one of 20, one of 16. Workers load over their ends."""
    sizes = {"image_sizes": [[0, 12], [2, 20], [3, 16]]}
    recipe = Recipe.model_validate({"run": {"epochs": 4}, "schedule": {"peak": 1.0}, "data": sizes})
    image_size = functools.partial(training_image_size, recipe)
    source = Tinted()
    batches = list(train(source, workers=workers, last=16, image_size=image_size))
    assert [(batch.step, batch.number) for batch in batches] == [(s, n) for s in range(16) for n in range(4)]
    for batch in batches:
        epoch = batch.step // 4
        size = (12, 12, 20, 16)[epoch]
        assert batch.images.shape == (MICRO, 3, size, size)
        for image, index in zip(batch.images, batch.indices.tolist()):
            assert torch.equal(image, Training(section(), 7)(source.open(index), size, epoch, index))
    resumed = train(workers=workers, first=10, last=16, image_size=image_size)
    assert contents(resumed) == [content(batch) for batch in batches if batch.step >= 10]


def test_operations_are_the_same_in_workers_and_leave_the_global_generator_alone():
    state = torch.random.get_rng_state()
    plain, *augmented = (
        contents(train(augment=augment, workers=workers, last=4))
        for augment, workers in (("none", 0), ("randaugment", 0), ("randaugment", 2))
    )
    contents(evaluation())
    contents(evaluation(workers=1))
    assert augmented[0] == augmented[1] != plain
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_a_run_with_one_line(workers):
    bad = permutation(7, 0, 50)[16].item()
    batches = train(Tinted(unreadable=[bad]), workers=workers)
    received = []
    with pytest.raises(UnreadableImage) as caught:
        received.extend(batch.number for batch in batches)
    assert received == [0, 1, 2, 3, 0], "what comes before it is delivered"
    assert str(caught.value) == (
        f"tinted/{bad}: faded; mend or remove the file, or leave such images out with data.bad_images=skip"
    )
    assert children_are_gone()


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_images_leave_the_good_ones_in_front_and_are_listed(workers):
    """The first, and two in a row: the second micro batch keeps its last row only."""
    order = permutation(7, 0, 50).tolist()
    source = Tinted(unreadable=[order[0], order[3], order[4], *order[6:9]])
    first, second, third, fourth = list(train(source, workers=workers, bad_images="skip", last=1))
    whole = list(train(last=1))
    assert (first.valid, second.valid, third.valid, fourth.valid) == (2, 1, 0, 3)
    assert first.indices.tolist() == [order[1], order[2], -1]
    assert second.indices.tolist() == [order[5], -1, -1]
    assert first.labels.tolist() == [order[1] % 2, order[2] % 2, 0]
    assert torch.equal(first.images[:2], whole[0].images[1:])
    assert torch.equal(second.images[:1], whole[1].images[2:])
    assert not first.images[2:].any() and not second.images[1:].any() and not third.images.any()
    assert second.unreadable == (f"tinted/{order[3]}: faded", f"tinted/{order[4]}: faded")
    assert content(fourth) == content(whole[3])


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_shows_every_image_once_in_order_as_often_as_asked(workers):
    source = Tinted()
    batches = evaluation(source, workers=workers)
    assert len(batches) == 7
    passes, children = [], []
    for _ in range(2):
        passes.append(list(batches))
        children.append({child.pid for child in multiprocessing.active_children()})
    assert contents(passes[0]) == contents(passes[1])
    assert children[0] == children[1], "the same workers"
    rows = [(index, row) for b in passes[0] for index, row in zip(b.indices[: b.valid].tolist(), b.images)]
    assert [index for index, _ in rows] == list(range(50))
    for index, row in rows:
        assert torch.equal(row, Evaluation(0.875)(source.open(index), SIZE, 0, index))
    last = passes[0][-1]
    assert (last.valid, last.images.shape) == (2, (8, 3, SIZE, SIZE))
    assert last.indices.tolist() == [48, 49] + [-1] * 6
    assert last.labels.tolist() == [0, 1] + [0] * 6
    assert not last.images[2:].any()
    batches.close()
    assert children_are_gone()


@pytest.mark.parametrize("replicas", [1, 2, 3, 10])
def test_replicas_share_the_evaluation(replicas):
    """Seven micro batches: with ten replicas some get none, and each image is still shown once."""
    shares = [evaluation(replica=replica, replicas=replicas) for replica in range(replicas)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert list(itertools.chain(*map(contents, shares))) == contents(evaluation())


def test_unreadable_images_of_an_evaluation_stop_it_or_are_left_out():
    source = Tinted(unreadable=[3])
    with pytest.raises(UnreadableImage, match=r"^tinted/3: faded; mend or remove the file"):
        list(evaluation(source))
    first = next(iter(evaluation(source, bad_images="skip")))
    assert first.valid == 7 and first.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, -1]
    assert first.unreadable == ("tinted/3: faded",)


def test_an_evaluation_that_was_broken_off_starts_again_from_the_first_image():
    batches = evaluation(workers=2)
    for _ in range(3):
        assert next(iter(batches)).indices[0] == 0
    assert contents(batches) == contents(evaluation())


def test_a_program_that_ends_amid_its_batches_ends_quietly():
    """Neither closed nor finished, as when the training process fails. A thread that is amid torch's code when the
    interpreter is taken down would abort the process."""
    program = """
import itertools, torch
from data.batches import MicroBatch
from data.loader import training_batches
from data.prefetch import Prefetcher
from data.digits import DigitsSource
from recipe.config import Data
def products():
    for number in itertools.count():
        yield MicroBatch(torch.rand(300, 300) @ torch.rand(300, 300), None, None, 1, number, 0, ())
batches = training_batches(DigitsSource("train"), data=Data(workers=2), image_size=16, global_batch=12,
                           micro=3, seed=0, first_step=0, last_step=1000)
computed = Prefetcher(products(), torch.device("cpu"), 3)  # last: workers that are forked beside its thread may hang
next(batches), next(computed)
raise SystemExit(3)
"""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")


def test_workers_outlive_the_signals_of_terminals_and_schedulers_and_end_with_the_iterator():
    """Such signals reach every process of a job, and the training process wants to finish its step. A command
    sends them, because from the training process itself SIGTERM must work."""
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
    # The thread that prefetches may be the one that learns of the end; until it has, the exit code here is None.
    end = time.monotonic() + 30
    while worker.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    assert worker.exitcode == 0
    with pytest.raises(RuntimeError, match=r"worker .*exited unexpectedly"):
        list(batches)
    batches.close()
    assert children_are_gone()


@pytest.mark.parametrize(
    ("workers", "fault", "expected"),
    [
        (2, ConnectionResetError(104, "Connection reset by peer"), RuntimeError),
        (2, EOFError(), RuntimeError),
        (2, FileNotFoundError(2, "No such file or directory"), RuntimeError),
        (2, FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0."), FileNotFoundError),
        (0, ConnectionResetError(104, "Connection reset by peer"), ConnectionResetError),
    ],
)
def test_a_worker_that_ends_while_it_passes_images_on_is_reported_as_such(monkeypatch, workers, fault, expected):
    """The error of the training process depends on the moment: torch itself reports the end only between two."""

    def load(self, requests):
        raise fault
        yield

    monkeypatch.setattr(WorkerReader, "load", load)
    with pytest.raises(expected) as raised:
        list(train(workers=workers, last=60))
    assert (raised.value is not fault) == (expected is RuntimeError)
    assert expected is not RuntimeError or "exited unexpectedly" in str(raised.value)
