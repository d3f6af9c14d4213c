"""Repeated augmentation: which image is shown when, with which draws, and that nothing else changes
it."""

import collections
import itertools

import pytest
import torch

from data.base import permutation
from data.epochs import RunOrder, repeated
from data.loader import TrainingBatches
from data.transforms import Training
from recipe.config import Data
from tests.data.test_loader import GLOBAL, MICRO, SIZE, Tinted, contents

REPEATS = 3


def train(*, repeats=REPEATS, workers=0, first=0, last=8, **options):
    data = Data(source="digits", workers=workers, repeats=repeats, random_erasing=0.5)
    order = RunOrder(Tinted(), data, 7, GLOBAL)
    return TrainingBatches(
        order, range(first, last), **{"micro": MICRO, "image_size": SIZE, **options}
    )


@pytest.mark.parametrize("size", [1, 5, 12, 13])
@pytest.mark.parametrize("repeats", [1, 2, 3, 7])
def test_a_step_takes_the_next_repetitions_and_sorts_them_by_copy(size, repeats):
    """Written out: an epoch's order with each image repeated, cut into steps, each sorted stably by
    the copy."""
    everything = [(place, copy) for place in range(60) for copy in range(repeats)]
    for first in range(0, 60 - size, size):
        step = sorted(everything[first : first + size], key=lambda each: each[1])
        assert [repeated(first, size, repeats, row) for row in range(size)] == step
    with pytest.raises(AssertionError):
        repeated(0, size, repeats, size)


def test_each_image_is_shown_so_many_times_in_a_step_with_other_draws():
    """12 rows are 4 images three times, in other micro batches of 3 or at other draws. 50 images
    make 4 steps."""
    source = Tinted()
    for step, batches in itertools.groupby(train(), key=lambda batch: batch.step):
        batches = list(batches)
        epoch, within = divmod(step, 4)
        expected = permutation(7, epoch, 50)[within * 4 : within * 4 + 4].tolist()
        indices = torch.cat([batch.indices for batch in batches]).tolist()
        assert collections.Counter(indices) == dict.fromkeys(expected, REPEATS)
        for batch in batches:
            assert len(set(batch.indices.tolist())) == MICRO, "no image is mixed with itself"
        images = torch.cat([batch.images for batch in batches])
        assert len({image.numpy().tobytes() for image in images}) == GLOBAL
        for row, (image, index) in enumerate(zip(images, indices)):
            transform = Training(Data(random_erasing=0.5), 7)
            assert torch.equal(
                image, transform(source.open(index), SIZE, epoch * REPEATS + row // 4, index)
            )


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (0, 4), (1, 2)])
def test_workers_replicas_and_resumes_do_not_change_a_micro_batch(workers, replicas):
    expected = contents(train())
    shares = [
        range(replica * 4 // replicas, (replica + 1) * 4 // replicas) for replica in range(replicas)
    ]
    found = itertools.chain(*(contents(train(workers=workers, share=share)) for share in shares))
    assert sorted(found) == expected
    assert contents(train(workers=workers, first=5)) == expected[5 * 4 :]


def test_one_showing_is_what_it_was():
    assert contents(train(repeats=1)) != contents(train())
    for batch in train(repeats=1):
        epoch, within = divmod(batch.step, 4)
        start = within * GLOBAL + batch.number * MICRO
        assert batch.indices.tolist() == permutation(7, epoch, 50)[start : start + MICRO].tolist()
