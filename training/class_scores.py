"""Precision, recall and F1 by class, from a confusion matrix."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ClassScores(NamedTuple):
    """Scores of each class, float64 [classes], in [0, 1].

    With tp images of a class that are taken for it, fp images of others that are taken for it, and
    fn images of it that are taken for others: precision is tp / (tp + fp), recall tp / (tp + fn),
    and F1, their harmonic mean, 2 tp / (2 tp + fp + fn). A quotient of zeros is 0.

    present: bool [classes], whether the class has images or an image was taken for it.
    """

    precision: torch.Tensor
    recall: torch.Tensor
    f1: torch.Tensor
    present: torch.Tensor


class MacroScores(NamedTuple):
    """Means over classes, in which a rare class counts as much as a frequent one."""

    macro_precision: float
    macro_recall: float
    macro_f1: float


def by_class(confusion: torch.Tensor) -> ClassScores:
    """Return the scores of each class.

    Args:
        confusion: int64 [classes, classes]; rows are labels, columns predictions.
    """
    # Whole numbers are summed before they are converted: a copy of all cells may be gigabytes.
    hits = confusion.diagonal().double()
    images = confusion.sum(1).double()
    predictions = confusion.sum(0).double()
    return ClassScores(
        precision=_quotient(hits, predictions),
        recall=_quotient(hits, images),
        f1=_quotient(2 * hits, images + predictions),
        present=images + predictions > 0,
    )


def macro(confusion: torch.Tensor) -> MacroScores:
    """Return the means over the classes that are present, as scikit-learn averages them.

    Args:
        confusion: see `by_class`; of one image at least.
    """
    scores = by_class(confusion)
    return MacroScores(
        macro_precision=float(scores.precision[scores.present].mean()),
        macro_recall=float(scores.recall[scores.present].mean()),
        macro_f1=float(scores.f1[scores.present].mean()),
    )


def _quotient(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return numerator / denominator, with 0 where both are 0."""
    # Counts are whole numbers: a 1 in the place of 0 changes no other quotient.
    return numerator / denominator.clamp(min=1)
