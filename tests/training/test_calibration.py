"""The expected calibration error against its equation, bin by bin."""

import numpy as np
import pytest
import torch

from training.calibration import BINS, Calibration


def reference(confidence, hits):
    """Equation 5 of Guo et al.: the sum over bins of |B| / n * |accuracy(B) - confidence(B)|."""
    total = 0.0
    for number in range(BINS):
        inside = (confidence > number / BINS) & (confidence <= (number + 1) / BINS)
        if inside.any():
            gap = abs(hits[inside].mean() - confidence[inside].mean())
            total += inside.sum() / len(confidence) * gap
    return total


def test_error_of_random_predictions_is_the_equation_whatever_the_batches():
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.1, 1, 1000)
    # at the edges, which belong to the bins below
    confidence[:BINS] = np.arange(1, BINS + 1) / BINS
    hits = generator.random(1000) < confidence**2
    for size in (1, 64, 1000):
        calibration = Calibration()
        for start in range(0, 1000, size):
            part = slice(start, start + size)
            calibration.count(torch.from_numpy(confidence[part]), torch.from_numpy(hits[part]))
        # Sums of 1,000 float64 numbers below 1.
        assert calibration.error() == pytest.approx(reference(confidence, hits), rel=1e-12)


def test_sure_and_right_is_without_error_and_sure_and_wrong_all_of_it():
    for hit, error in ((True, 0), (False, 1)):
        calibration = Calibration()
        calibration.count(torch.ones(3, dtype=torch.float64), torch.tensor([hit] * 3))
        assert calibration.error() == error
