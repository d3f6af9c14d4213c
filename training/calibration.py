"""How far a classifier's probabilities can be trusted: the expected calibration error.

Guo et al., On Calibration of Modern Neural Networks (arXiv:1706.04599), equation 5.
"""

from __future__ import annotations

import torch

BINS = 15  # as many as in the paper


class Calibration:
    """Sums of confidence and of hits, by bins of confidence.

    The confidence of a prediction is the probability of the predicted class. Of the bins, all of
    one width, bin number m holds the confidences in (m / BINS, (m + 1) / BINS].
    """

    def __init__(self) -> None:
        self._images = torch.zeros(BINS, dtype=torch.int64)
        self._hits = torch.zeros(BINS, dtype=torch.int64)
        self._confidence = torch.zeros(BINS, dtype=torch.float64)

    def count(self, confidence: torch.Tensor, hits: torch.Tensor) -> None:
        """Add images.

        Args:
            confidence: float64 [images], in (0, 1].
            hits: bool [images], whether the predicted class is the label.
        """
        edges = torch.arange(1, BINS, dtype=torch.float64) / BINS
        # By default an edge belongs to the bin below it, as the paper has it.
        bins = torch.bucketize(confidence, edges)
        self._images += torch.bincount(bins, minlength=BINS)
        self._hits += torch.bincount(bins[hits], minlength=BINS)
        self._confidence += torch.bincount(bins, weights=confidence, minlength=BINS)

    def error(self) -> float:
        """Return the mean over all images of |share of hits - mean confidence| of their bin."""
        # Each bin counts with its share of the images, by which its two means are divided as well.
        gaps = (self._hits - self._confidence).abs()
        return float(gaps.sum() / self._images.sum())
