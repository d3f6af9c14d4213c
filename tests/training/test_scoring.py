"""Tables and pictures of a classifier whose answers are known image by image."""

import csv

import numpy as np
import pytest
import torch

from data.batches import MicroBatch
from recipe.errors import DataError
from training.scoring import class_rows, score, write_class_table

CLASSES = ("cat", "dog", "eel")
LABELS = [0, 0, 0, 0, 1, 1, 1, 2]
TAKEN_FOR = [0, 0, 1, 2, 1, 1, 0, 0]


class Answers:
    """Stands in for an engine: an image's first pixel is the class that it is taken for."""

    def predict_step(self, batch):
        answers = batch.images[: batch.valid, 0, 0, 0].long()
        return torch.nn.functional.one_hot(answers, len(CLASSES)).float() * 2


def batches(size, unreadable=()):
    positions = [i for i in range(len(LABELS)) if i not in unreadable]
    messages = tuple(f"{i}.jpg: empty" for i in unreadable)
    for number, start in enumerate(range(0, max(len(positions), 1), size)):
        part = positions[start : start + size]
        images = torch.zeros(size, 3, 1, 1, dtype=torch.uint8)
        labels = torch.zeros(size, dtype=torch.int64)
        for row, i in enumerate(part):
            images[row], labels[row] = TAKEN_FOR[i], LABELS[i]
        yield MicroBatch(images, labels, None, len(part), number, 0, messages if number == 0 else ())


@pytest.mark.parametrize("size", [1, 3, 20])
def test_every_image_is_counted_once_in_its_row_and_column(size):
    report = score(Answers(), batches(size), len(CLASSES))
    expected = np.zeros((3, 3), dtype=int)
    np.add.at(expected, (LABELS, TAKEN_FOR), 1)
    assert report.confusion.tolist() == expected.tolist()
    assert (report.images, report.top1, report.top5, report.unreadable) == (8, 4 / 8, 1.0, 0)
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]]).double()
    losses = -logits.log_softmax(1)[:, 0]  # of an image that is classified rightly, and of one that is not
    assert report.loss == pytest.approx(losses.mean().item(), abs=2**-25)  # each is rounded to 2**-24


def test_unreadable_images_are_left_out_and_counted():
    report = score(Answers(), batches(3, unreadable=(0, 7)), len(CLASSES))
    assert (report.images, report.unreadable) == (6, 2)
    assert report.confusion.sum() == 6
    with pytest.raises(DataError, match=r"no image can be read; the first: 0\.jpg: empty"):
        score(Answers(), batches(8, unreadable=tuple(range(8))), len(CLASSES))


def test_the_table_has_the_worst_class_first_and_the_class_that_it_was_taken_for():
    rows = class_rows(score(Answers(), batches(8), len(CLASSES)), CLASSES)
    assert rows == [
        {"class": "eel", "images": 1, "top1": 0.0, "taken_for": "cat", "times": 1},
        {"class": "cat", "images": 4, "top1": 0.5, "taken_for": "dog", "times": 1},
        {"class": "dog", "images": 3, "top1": 2 / 3, "taken_for": "cat", "times": 1},
    ]
    rows = class_rows(score(Answers(), batches(8, unreadable=(7,)), len(CLASSES)), CLASSES)
    assert rows[-1] == {"class": "eel", "images": 0, "top1": None, "taken_for": "", "times": 0}


def test_names_cannot_be_formulas_of_a_spreadsheet(tmp_path):
    rows = class_rows(score(Answers(), batches(8, unreadable=(7,)), len(CLASSES)), ("=1+1", "-2", "@sum"))
    write_class_table(tmp_path / "classes.csv", rows)
    with open(tmp_path / "classes.csv", newline="") as stream:
        first, *_, last = csv.DictReader(stream)
    assert first == {"class": "'=1+1", "images": "4", "top1": "0.5", "taken_for": "'-2", "times": "1"}
    assert last == {"class": "'@sum", "images": "0", "top1": "", "taken_for": "", "times": "0"}
