"""The losses of training against timm's and torch's, in float64."""

import math

import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

from engines.losses import of_guessing, summed
from recipe.config import Data

ROWS = 6
CLASSES = 5


def logits_and_labels():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(ROWS, CLASSES, dtype=torch.float64, generator=generator) * 4
    return logits.requires_grad_(), torch.randint(0, CLASSES, (ROWS,), generator=generator)


def gradient(loss, logits):
    (found,) = torch.autograd.grad(loss, logits)
    return found


@pytest.mark.parametrize("threshold", [None, 0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_binary_cross_entropy_is_timms(smoothing, reduction, threshold):
    """Of labels, loss and gradient: timm takes the mean over images, which are added up here.

    Ten float64 operations: 1e-13.
    """
    data = Data(
        loss="bce", bce_threshold=threshold, bce_reduction=reduction, label_smoothing=smoothing
    )
    theirs = BinaryCrossEntropy(
        smoothing, target_threshold=threshold, sum_classes=reduction == "sum"
    )
    logits, labels = logits_and_labels()
    ours = summed(data, logits, labels)
    expected = theirs(logits, labels) * ROWS
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        gradient(ours, logits), gradient(expected, logits), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("threshold", [None, 0.2])
def test_shares_of_mixed_images_are_smoothed_before_the_threshold(threshold):
    """timm smooths as it mixes: a share of 0.15 of a class is below 0.2 by itself."""
    data = Data(loss="bce", bce_threshold=threshold, label_smoothing=0.1)
    logits, labels = logits_and_labels()
    shares = (
        0.85 * F.one_hot(labels, CLASSES).double()
        + 0.15 * F.one_hot(labels.roll(1), CLASSES).double()
    )
    # As in timm.data.mixup.one_hot.
    off = 0.1 / CLASSES
    on = 0.9 + 0.1 / CLASSES
    theirs = 0.85 * torch.full_like(shares, off).scatter(1, labels[:, None], on)
    theirs = theirs + 0.15 * torch.full_like(shares, off).scatter(1, labels.roll(1)[:, None], on)
    expected = BinaryCrossEntropy(0.1, target_threshold=threshold)(logits, theirs) * ROWS
    torch.testing.assert_close(summed(data, logits, shares), expected, rtol=1e-13, atol=0)


def test_cross_entropy_is_torchs():
    logits, labels = logits_and_labels()
    expected = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    assert torch.equal(summed(Data(label_smoothing=0.1), logits, labels), expected)


@pytest.mark.parametrize(
    "keys", [{}, {"loss": "bce"}, {"loss": "bce", "bce_reduction": "sum"}], ids=str
)
def test_guessing_has_the_loss_of_equal_logits(keys):
    data = Data(**keys)
    logits = torch.zeros(ROWS, CLASSES, dtype=torch.float64)
    labels = torch.arange(ROWS) % CLASSES
    assert summed(data, logits, labels).item() / ROWS == pytest.approx(of_guessing(data, CLASSES))
    assert of_guessing(Data(), CLASSES) == math.log(CLASSES)


def test_a_micro_batch_without_images_has_no_loss():
    empty = torch.zeros(0, CLASSES, dtype=torch.float64)
    assert summed(Data(loss="bce"), empty, torch.zeros(0, dtype=torch.int64)) == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_class_weights_are_factors_on_the_classes_of_the_target(mixed, smoothing):
    """Written out: - sum over classes of weight x target x log softmax, added up over images, not
    divided by weights.

    Float64, some ten operations: 1e-13.
    """
    logits, labels = logits_and_labels()
    weights = torch.tensor([0.0, 0.25, 1.0, 3.0, 7.0], dtype=torch.float64)
    shares = F.one_hot(labels, CLASSES).double()
    if mixed:
        shares = 0.7 * shares + 0.3 * shares.roll(1, dims=0)
    targets = shares * (1 - smoothing) + smoothing / CLASSES
    expected = -(weights * targets * logits.log_softmax(1)).sum()
    data = Data(balance="loss", label_smoothing=smoothing)
    found = summed(data, logits, shares if mixed else labels, weights)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        gradient(found, logits), gradient(expected, logits), rtol=1e-12, atol=1e-14
    )
