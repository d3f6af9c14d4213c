"""Scores of an evaluation: exact counts over any division into batches. The engine's own part is its test's."""

import numpy as np
import pytest
import torch

from data.batches import MicroBatch
from engines.base import Counts
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.errors import DataError
from training.evaluation import Scores, evaluate


class Ranker:
    """Stands in for an engine: an image's first pixel is the rank of its label, its loss is a quarter of that."""

    topology, device = Topology(), torch.device("cpu")
    processes = Processes(topology, device)

    def __init__(self):
        self.batches = 0

    def evaluate_step(self, batch):
        self.batches += 1
        if batch is None:
            return Counts(0, *torch.zeros(3))
        ranks = batch.images[: batch.valid, 0, 0, 0].long()
        return Counts(batch.valid, ranks.double().sum() / 4, (ranks < 1).sum(), (ranks < 5).sum())


def batches(ranks, size, unreadable=()):
    """Images of these ranks in batches of `size`, without those whose position is in `unreadable`."""
    for number, start in enumerate(range(0, len(ranks), size)):
        positions = range(start, min(start + size, len(ranks)))
        read = [ranks[i] for i in positions if i not in unreadable]
        images = torch.zeros(size, 3, 1, 1, dtype=torch.uint8)
        images[: len(read)] = torch.tensor(read, dtype=torch.uint8)[:, None, None, None]
        messages = tuple(f"{i}.jpg: empty" for i in positions if i in unreadable)
        yield MicroBatch(images, torch.zeros(size, dtype=torch.int64), None, len(read), number, 0, messages)


@pytest.mark.parametrize("size", [1, 7, 359, 360, 500])
def test_every_readable_image_counts_once_whatever_the_batch_size(size):
    """Batches are padded with images of rank 0, each of which would be a hit. Sums of quarters are exact.

    The engine is given every batch: other stages of a pipeline wait for one without images.
    """
    ranks, unreadable, ranker = np.random.default_rng(0).integers(0, 10, 360), (1, 8, 9), Ranker()
    read = np.delete(ranks, unreadable)
    scores = evaluate(ranker, batches(ranks.tolist(), size, unreadable))
    top1, top5 = ((read < best).sum() / 357 for best in (1, 5))
    assert scores == Scores(top1, top5, read.sum() / 4 / 357, images=357, unreadable=3)
    assert ranker.batches == -(-360 // size)


def test_no_image_at_all_is_an_error_that_names_the_first_that_cannot_be_read():
    """Also where images do not enter: the engine is called as often."""
    with pytest.raises(DataError, match=r"^no validation image can be read; the first: 0\.jpg: empty$"):
        evaluate(Ranker(), [*batches([0, 9], 1, unreadable=(0, 1)), None])
