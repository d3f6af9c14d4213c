"""Tables and pictures of a classifier whose answers are known image by image."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from data.batches import MicroBatch
from recipe.errors import DataError
from training.scoring import class_rows, draw_confusion, score, write_class_table

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
    right, wrong = (-torch.tensor([logit, 0.0, 2.0 - logit]).double().log_softmax(0)[0].item() for logit in (2.0, 0.0))
    assert report.loss == pytest.approx((4 * right + 4 * wrong) / 8, abs=2**-25)  # each is rounded to 2**-24


def test_unreadable_images_are_left_out_and_counted():
    report = score(Answers(), batches(3, unreadable=(0, 7)), len(CLASSES))
    assert (report.images, report.unreadable) == (6, 2)
    assert report.confusion.sum() == 6
    with pytest.raises(DataError, match=r"no image can be read; the first: 0\.jpg: empty"):
        score(Answers(), batches(8, unreadable=tuple(range(8))), len(CLASSES))


def table(tmp_path, rows):
    """The rows as a reader of the file gets them."""
    write_class_table(tmp_path / "classes.csv", rows)
    with open(tmp_path / "classes.csv", newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_table_has_the_worst_class_first_and_the_class_that_it_was_taken_for(tmp_path):
    rows = class_rows(score(Answers(), batches(8), len(CLASSES)), CLASSES)
    assert rows == [
        {"class": "eel", "images": 1, "top1": 0.0, "taken_for": "cat", "times": 1},
        {"class": "cat", "images": 4, "top1": 0.5, "taken_for": "dog", "times": 1},
        {"class": "dog", "images": 3, "top1": 2 / 3, "taken_for": "cat", "times": 1},
    ]
    rows = class_rows(score(Answers(), batches(8, unreadable=(7,)), len(CLASSES)), CLASSES)
    assert rows[-1] == {"class": "eel", "images": 0, "top1": None, "taken_for": "", "times": 0}
    read = table(tmp_path, rows)
    assert read[0] == {"class": "cat", "images": "4", "top1": "0.5", "taken_for": "dog", "times": "1"}
    assert read[-1]["top1"] == ""


def test_names_cannot_be_formulas_of_a_spreadsheet(tmp_path):
    read = table(tmp_path, class_rows(score(Answers(), batches(3), len(CLASSES)), ("=1+1", "-2", "@sum")))
    assert {row["class"] for row in read} == {"'=1+1", "'-2", "'@sum"}
    assert {row["taken_for"] for row in read} <= {"", "'=1+1", "'-2", "'@sum"} and read[0]["taken_for"]


def test_the_picture_is_darker_where_more_images_went(tmp_path):
    """The dark share of the matrix is the share of cells that hold images; ticks and edges take the two percent."""
    report = score(Answers(), batches(8), len(CLASSES))
    pictures = {}
    for name, confusion in (("all", report.confusion), ("none", torch.zeros_like(report.confusion))):
        draw_confusion(tmp_path / f"{name}.png", report._replace(confusion=confusion), CLASSES, "title")
        pictures[name] = np.asarray(Image.open(tmp_path / f"{name}.png").convert("L")).astype(int)
    assert pictures["all"].shape == pictures["none"].shape
    darker = pictures["none"] - pictures["all"] > 20
    filled = (report.confusion > 0).sum().item() / 9
    rows, columns = np.where(darker)
    area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    assert darker.sum() / area == pytest.approx(filled, abs=0.02)
