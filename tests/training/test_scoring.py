"""Scores, tables and pictures of a classifier whose answers are known image by image."""

import csv
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import ConfigError, DataError
from data.batches import MicroBatch
from engines.base import scored
from models.efficientnet import build
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from tests.conftest import QUICKSTART, TINY
from training.scoring import (
    Scores,
    accuracy,
    class_rows,
    engine_with,
    evaluate,
    quality,
    score,
    write_class_table,
)
from training.weights import StoredWeights

CLASSES = ("cat", "dog", "eel", "fox", "gnu", "hen", "ibex")
LABELS, TAKEN_FOR = np.random.default_rng(0).integers(0, 7, (2, 60))


class Answers:
    """Stands in for an engine: an image's first pixel is the class that it is taken for, the next
    ones follow it."""

    topology = Topology()
    device = torch.device("cpu")
    processes = Processes(topology, device)

    def __init__(self):
        self.batches = 0

    def predict_step(self, batch):
        self.batches += 1
        answers = batch.images[: batch.valid, 0, 0, 0].long()
        return -((torch.arange(7) - answers[:, None]) % 7).float()

    def evaluate_step(self, batch):
        return scored(self.predict_step(batch), batch.labels[: batch.valid])


def batches(size, unreadable=()):
    """All images in batches of `size`, padded with images that would be hits."""
    for number, start in enumerate(range(0, 60, size)):
        positions = range(start, min(start + size, 60))
        read = [i for i in positions if i not in unreadable]
        images = torch.zeros(size, 3, 1, 1, dtype=torch.uint8)
        labels = torch.zeros(size, dtype=torch.int64)
        images[: len(read), 0, 0, 0] = torch.tensor(TAKEN_FOR[read])
        labels[: len(read)] = torch.tensor(LABELS[read])
        messages = tuple(f"{i}.jpg: empty" for i in positions if i in unreadable)
        yield MicroBatch(
            images, labels, None, valid=len(read), number=number, step=0, unreadable=messages
        )


@pytest.mark.parametrize("size", [1, 7, 59, 100])
@pytest.mark.parametrize("unreadable", [(), (1, 8, 9)])
def test_every_readable_image_counts_once_whatever_the_batch_size(size, unreadable):
    """Losses are rounded to multiples of 2**-24.

    The engine is given every batch: other stages of a pipeline wait.
    """
    labels = np.delete(LABELS, unreadable)
    taken_for = np.delete(TAKEN_FOR, unreadable)
    ranks = (labels - taken_for) % 7
    losses = ranks + np.log(np.exp(-np.arange(7)).sum())
    report = score(Answers(), batches(size, unreadable), 7)
    engine = Answers()
    expected = np.zeros((7, 7), dtype=int)
    np.add.at(expected, (labels, taken_for), 1)
    assert report.confusion.tolist() == expected.tolist()
    assert (report.top1, report.top5) == ((ranks < 1).mean(), (ranks < 5).mean())
    assert report.loss == pytest.approx(losses.mean(), abs=2**-25)
    scores = evaluate(engine, batches(size, unreadable))
    assert scores == Scores(report.top1, report.top5, report.loss, len(labels), len(unreadable))
    assert (report.images, report.unreadable, engine.batches) == (
        len(labels),
        len(unreadable),
        -(-60 // size),
    )


def test_a_batch_touches_its_own_cells_alone():
    """Of 21,841 classes all cells are 3.8 GB: once, and not for every batch."""
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, torch.Tensor) and result.numel() == 49:
                sizes.append(function._schema.name)
            return result

    with Sizes():
        score(Answers(), batches(1), 7)
    assert sizes.count("aten::zeros") == 1 and set(sizes) <= {
        "aten::zeros",
        "aten::index_add_",
        "aten::view",
    }


def test_no_readable_image_at_all_is_an_error_that_names_the_first():
    """Also where images do not enter: the engine is called as often."""
    engine = Answers()
    engine.evaluate_step = lambda batch: scored(
        torch.zeros(0, 7), torch.zeros(0, dtype=torch.int64)
    )
    none = [*batches(30, unreadable=range(60)), None]
    for call in (lambda: evaluate(engine, none), lambda: score(engine, none[:-1], 7)):
        with pytest.raises(
            DataError, match=r"no (validation )?image can be read; the first: 0\.jpg: empty$"
        ):
            call()


def test_top5_is_printed_where_it_says_something():
    assert (
        accuracy(0.5, 1.0, 5) == "top1 50.00%"
        and accuracy(0.5, 0.975, 6) == "top1 50.00%  top5 97.50%"
    )


def test_the_table_has_the_worst_class_first_and_names_that_are_no_formulas(tmp_path):
    """A class without images comes last."""
    report = score(Answers(), batches(8, unreadable=np.flatnonzero(LABELS == 6)), 7)
    rows = class_rows(report, ("=1+1", "-2", "@sum", "+3", *CLASSES[4:]))
    shares = [row["top1"] for row in rows[:-1]]
    assert shares == sorted(shares) and rows[-1]["class"] == "ibex"
    row = next(row for row in rows if row["class"] == "@sum")
    wrong = np.bincount(TAKEN_FOR[LABELS == 2], minlength=7)
    right = wrong[2]
    wrong[2] = 0
    assert (row["images"], row["top1"]) == ((LABELS == 2).sum(), right / (LABELS == 2).sum())
    assert (row["times"], row["taken_for"]) == (
        wrong.max(),
        ("=1+1", "-2", "@sum", "+3", *CLASSES[4:])[wrong.argmax()],
    )
    write_class_table(tmp_path / "classes.csv", rows)
    with open(tmp_path / "classes.csv", newline="") as stream:
        *_, last = found = list(csv.DictReader(stream))
    # Images of others are taken for it: none of these guesses is right.
    shares = {"top1": "", "precision": "0.0", "f1": "0.0"}
    assert last == {"class": "ibex", "images": "0", **shares, "taken_for": "", "times": "0"}
    assert {each["class"] for each in found} == {"'=1+1", "'-2", "'@sum", "'+3", *CLASSES[4:]}


INTERLEAVED = (
    "parallel.stages=2",
    "parallel.schedule=interleaved",
    "batch.global=36",
    "batch.micro=4",
)


def test_weights_of_a_pipeline_that_one_replica_could_not_train_are_scored():
    """Nine micro batches: three a replica of three, but two stages take an even number of one."""
    recipe = loading.load(QUICKSTART, [*TINY, "run.device=cpu", *INTERLEAVED])
    divide(recipe, 3)
    with pytest.raises(ConfigError, match="interleaved"):
        divide(recipe, 1)
    model = build(recipe.model, seed=1).eval()
    stored = StoredWeights(Path("w.pt"), model.state_dict())
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with closing(engine_with(stored, recipe)) as engine:
        batch = MicroBatch(
            images,
            torch.zeros(2, dtype=torch.int64),
            None,
            valid=2,
            number=0,
            step=0,
            unreadable=(),
        )
        assert engine.predict_step(batch).shape == (2, recipe.model.classes)


@pytest.mark.parametrize(
    ("error", "words"), [(0.023, "2.3%"), (float("nan"), "unknown"), (None, "unknown")]
)
def test_a_calibration_error_without_probabilities_is_unknown(error, words):
    """As of weights that diverged."""
    scores = Scores(
        1.0, 1.0, 0.1, 4, 0, calibration_error=error, confusion=torch.eye(2, dtype=torch.int64)
    )
    line = f"macro: precision 100.0%  recall 100.0%  F1 100.0%; calibration error {words}"
    assert quality(scores) == line
