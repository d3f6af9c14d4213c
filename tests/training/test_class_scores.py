"""Precision, recall and F1 against their definitions, counted image by image."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from training import class_scores

CLASSES = 6
GENERATOR = np.random.default_rng(5)
LABELS = GENERATOR.integers(0, 4, 200)  # classes 4 and 5 have no images
# 5 is never guessed
GUESSES = np.where(GENERATOR.random(200) < 0.5, LABELS, GENERATOR.integers(1, 5, 200))


def confusion(labels, guesses):
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for label, guess in zip(labels, guesses):
        counts[label, guess] += 1
    return counts


def expected(label):
    """Return precision, recall and F1 of a class as fractions; quotients of zeros are 0."""
    hits = sum(1 for pair in zip(LABELS, GUESSES) if pair == (label, label))
    images = int((label == LABELS).sum())
    guesses = int((label == GUESSES).sum())
    precision = Fraction(hits, guesses) if guesses else Fraction(0)
    recall = Fraction(hits, images) if images else Fraction(0)
    total = precision + recall
    return precision, recall, 2 * precision * recall / total if total else Fraction(0)


def test_scores_of_each_class_are_their_definitions():
    found = class_scores.by_class(confusion(LABELS, GUESSES))
    for label in range(CLASSES):
        scores = [float(field[label]) for field in found[:3]]
        assert scores == pytest.approx([float(value) for value in expected(label)], rel=1e-15)
    assert found.present.tolist() == [True] * 5 + [False]


def test_means_are_over_classes_that_have_images_or_guesses():
    """As scikit-learn averages: class 4 has no images, but guesses, and counts with zeros; class 5
    does not count."""
    found = class_scores.macro(confusion(LABELS, GUESSES))
    rows = [expected(label) for label in range(5)]
    means = [float(sum(column) / 5) for column in zip(*rows)]
    assert list(found) == pytest.approx(means, rel=1e-15)


def test_perfect_guesses_of_some_classes_score_one():
    assert tuple(class_scores.macro(confusion([1, 2, 2], [1, 2, 2]))) == (1, 1, 1)
