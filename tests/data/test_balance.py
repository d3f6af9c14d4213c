"""Balanced classes: what an epoch shows, with which draws, and the weights of the loss."""

import collections
import itertools

import numpy as np
import pytest

from data.balance import class_weights, parts_of, sampled
from data.epochs import Epoch, RunOrder
from data.loader import TrainingBatches
from recipe.config import Data
from tests.data.test_loader import GLOBAL, MICRO, SIZE, Tinted, contents

COUNTS = (50, 3, 0, 7, 1)  # one class has no images
LABELS = np.random.default_rng(5).permutation(np.repeat(np.arange(5), COUNTS))


def epoch_of(number, seed=7, places=61):
    return sampled(LABELS, places, seed, number)


@pytest.mark.parametrize("number", range(5))
def test_an_epoch_has_as_many_images_equally_many_of_each_class(number):
    epoch = epoch_of(number)
    assert len(epoch.images) == len(LABELS) == 61
    # 61 images, four classes: the one that is left over goes to the class with the most images.
    assert np.bincount(LABELS[epoch.images], minlength=5).tolist() == [16, 15, 0, 15, 15]


@pytest.mark.parametrize("number", range(5))
def test_all_images_of_a_class_come_before_one_comes_again(number):
    epoch = epoch_of(number)
    times = collections.Counter(epoch.images.tolist())
    for label, images in enumerate(COUNTS):
        shown = sorted(times[image] for image in np.flatnonzero(label == LABELS).tolist())
        part = sum(shown)
        # Written out: `part` images are dealt in turn.
        dealt = (
            [part // images + (place < part % images) for place in range(images)] if images else []
        )
        assert shown == sorted(dealt)
    for image, shown in times.items():
        assert sorted(epoch.visits[epoch.images == image].tolist()) == list(range(shown))
    assert epoch.visits.max() < epoch.most_visits == 15


def test_the_order_depends_on_seed_and_epoch_alone_and_is_mixed():
    orders = [
        tuple(epoch_of(number, seed).images.tolist()) for number in range(20) for seed in (7, 8)
    ]
    assert len(set(orders)) == 40
    assert orders[0] == tuple(epoch_of(0).images.tolist())
    # Classes do not come in blocks: of 60 neighbours 45 would differ if they were independent, with
    # a standard deviation of 3.4; 4 would in blocks.
    changes = [np.count_nonzero(np.diff(LABELS[list(order)])) for order in orders]
    assert 40 < np.mean(changes) < 50


def test_images_of_a_frequent_class_come_equally_often_in_the_long_run():
    """16 of 50 images in each of 2,000 epochs: 640 times each, with a standard deviation of 21.

    Of 50 such numbers the largest is beyond five of them once in 35,000 sets.
    """
    times = np.zeros(len(LABELS), dtype=int)
    for number in range(2000):
        times += np.bincount(epoch_of(number).images, minlength=len(LABELS))
    assert np.abs(times[LABELS == 0] - 640).max() < 105


@pytest.mark.parametrize("repeats", [1, 3])
def test_no_image_gets_the_same_draws_twice(repeats):
    data = Data(source="digits", balance="sampling", repeats=repeats)
    source = Tinted()
    source.labels = LABELS[:50]
    shown = []
    for number in range(4):
        epoch = Epoch(source, data, 7, number, rows=50)
        shown += [epoch.shown(first, 10, row) for first in range(0, 50, 10) for row in range(10)]
    assert len(set(shown)) == len(shown)
    assert any(
        first.image == second.image for first, second in itertools.combinations(shown[:50], 2)
    )


@pytest.mark.parametrize("counts", [(1,), (5, 5), (1, 1000), (0, 3, 4, 0), (3, 1, 2, 1, 3)])
def test_parts_are_equal_and_what_is_left_over_goes_to_frequent_classes(counts):
    parts = parts_of(np.array(counts), sum(counts))
    assert parts.sum() == sum(counts)
    present = [part for part, images in zip(parts, counts) if images]
    assert max(present) - min(present) <= 1
    assert [part for part, images in zip(parts, counts) if not images] == [0] * counts.count(0)
    larger = [images for part, images in zip(parts, counts) if images and part == max(present)]
    smaller = [images for part, images in zip(parts, counts) if images and part < max(present)]
    assert not smaller or min(larger) >= max(smaller)


def train(*, workers=0, first=0, last=8, repeats=1, **options):
    data = Data(
        source="digits", workers=workers, balance="sampling", random_erasing=0.5, repeats=repeats
    )
    source = Tinted()
    source.labels = LABELS[:50]
    order = RunOrder(source, data, 7, GLOBAL)
    return TrainingBatches(
        order, range(first, last), **{"micro": MICRO, "image_size": SIZE, **options}
    )


@pytest.mark.parametrize("repeats", [1, 2, 3, 5])
def test_what_the_steps_of_an_epoch_show_is_balanced(repeats):
    """48 of 50 rows are in a step; of a repeated image all copies count."""
    labels = LABELS[:50]
    for _, batches in itertools.groupby(
        train(repeats=repeats, last=12), key=lambda batch: batch.step // 4
    ):
        indices = [index for batch in batches for index in batch.indices.tolist()]
        shown = np.bincount(labels[indices], minlength=5)
        assert shown.sum() == 48
        # Places of classes differ by one at most, each is shown so many times, and the last one may
        # be cut off.
        present = shown[np.unique(labels)]
        assert present.max() - present.min() < 2 * repeats, shown


@pytest.mark.parametrize("places", [1, 4, 30, 200])
def test_fewer_and_more_places_than_images_are_balanced(places):
    epoch = epoch_of(0, places=places)
    assert len(epoch.images) == places
    shown = np.bincount(LABELS[epoch.images], minlength=5)
    assert shown[2] == 0 and np.ptp(shown[[0, 1, 3, 4]]) <= 1
    assert epoch.visits.max() < epoch.most_visits


@pytest.mark.parametrize(
    ("workers", "replicas", "repeats"),
    [
        (2, 1, 2),
        (0, 4, 1),
        (0, 4, 2),
        (1, 2, 1),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in ((2, 1, 1), (1, 2, 2))),
    ],
)
def test_workers_replicas_and_resumes_do_not_change_a_micro_batch(workers, replicas, repeats):
    expected = contents(train(repeats=repeats))
    shares = [
        range(replica * 4 // replicas, (replica + 1) * 4 // replicas) for replica in range(replicas)
    ]
    parts = [contents(train(workers=workers, share=share, repeats=repeats)) for share in shares]
    assert sorted(itertools.chain(*parts)) == expected
    assert contents(train(workers=workers, first=5, repeats=repeats)) == expected[5 * 4 :]


def test_weights_make_classes_count_equally():
    weights = class_weights(np.array(COUNTS))
    # scikit-learn's "balanced": images / (classes x images of the class), of the classes that there
    # are.
    np.testing.assert_allclose(weights, [61 / 200, 61 / 12, 0, 61 / 28, 61 / 4], rtol=1e-15)
    of_images = weights[LABELS]
    np.testing.assert_allclose(of_images.mean(), 1, rtol=1e-14)
    by_class = np.bincount(LABELS, weights=of_images, minlength=5)
    np.testing.assert_allclose(by_class[[0, 1, 3, 4]], 61 / 4, rtol=1e-14)
