"""The loss of training: softmax cross entropy, or binary cross entropies of the classes.

Evaluation reports the cross entropy whatever a run trains by: see engines/base.py.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch.nn import functional as F

from data import mixing
from recipe.images import Data


def summed(
    data: Data,
    logits: torch.Tensor,
    targets: torch.Tensor,
    class_weights: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return the loss of a micro batch, added up over its images.

    Args:
        data: section of the recipe, with the loss and the smoothing.
        logits: float32 or float64 [rows, classes].
        targets: int64 [rows], labels; or of mixed images float32 [rows, classes], shares of the
            classes before smoothing.
        class_weights: [classes], in the dtype of the logits; factors on the cross entropy. None: 1.

    Returns:
        [], in the dtype of the logits.
    """
    if data.loss == "cross_entropy":
        return F.cross_entropy(
            logits,
            targets,
            class_weights,
            reduction="sum",
            label_smoothing=data.label_smoothing,
        )
    classes = logits.shape[1]
    # Each class is a question of its own, so that labels become a row of answers.
    if targets.dim() == 1:
        targets = mixing.mix_targets(targets, None, classes)
    targets = targets.to(logits.dtype)
    smoothed = targets * (1 - data.label_smoothing) + data.label_smoothing / classes
    return _binary(data, logits, smoothed).sum()


def of_guessing(data: Data, classes: int) -> float:
    """Return the loss of logits that are all 0, per image, with one-hot targets.

    Args:
        data: section of the recipe.
        classes: how many there are.
    """
    if data.loss == "cross_entropy":
        return math.log(classes)
    return math.log(2) * (classes if data.bce_reduction == "sum" else 1)


def _binary(data: Data, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the binary cross entropies of the classes, by image: [rows].

    Source: Wightman, Touvron and Jégou, 2110.00476, section 3, and timm's BinaryCrossEntropy.
    """
    # What a mixed image has a part of counts as if it were all there.
    if data.bce_threshold is not None:
        targets = targets.gt(data.bce_threshold).to(targets.dtype)
    losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return losses.sum(1) if data.bce_reduction == "sum" else losses.mean(1)
