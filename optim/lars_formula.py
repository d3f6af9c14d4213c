"""The formula of LARS for one tensor, from which every other form of it is checked.

`LARS.step` makes updates by it. The fast forms update a whole model in few passes over the memory:
lars_update.py in plain torch, kernels/update.cpp in C++, kernels/lars.py in Triton. Tests compare
plain torch with this formula in float64 to a few roundings of float32, and with it in float32 to
the bit where the norms are exact. They compare C++ with plain torch to the bit, but for the order of
sums within a tensor and float32's 1 - mu, and Triton to a bit of a float32
(tests/optim/test_lars_formula.py, test_lars_update.py).
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from optim.norms import clamped, norm


class Hyperparameters(NamedTuple):
    """Settings of LARS for a tensor. `weight_decay` has no effect where `adapt` is False."""

    trust: str = "gradient"
    nesterov: bool = False
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust_coefficient: float = 0.001
    eps: float = 0.0
    adapt: bool = True


class Updated(NamedTuple):
    """A tensor after an update.

    weight, momentum: the new values, in the dtype of the given ones.
    ratio: the trust ratio, float64 []; None without one.
    """

    weight: torch.Tensor
    momentum: torch.Tensor
    ratio: Optional[torch.Tensor]


def updated(
    weight: torch.Tensor,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    lr: float,
    settings: Hyperparameters,
) -> Updated:
    """Return a weight and its momentum after an update by LARS. The arguments are not changed.

    See `optim.lars.LARS` for the formulas and their sources.

    Args:
        weight: float32 or float64; the arithmetic is that of the dtype.
        momentum: of the same dtype and shape.
        gradient: of the same dtype and shape.
        lr: the learning rate.
        settings: of the optimizer for this tensor.
    """
    if settings.trust == "gradient":
        return _updated_by_gradient(weight, momentum, gradient, lr, settings)
    return _updated_by_momentum(weight, momentum, gradient, lr, settings)


def _updated_by_gradient(
    w: torch.Tensor,
    m: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    settings: Hyperparameters,
) -> Updated:
    """Make an update in the published form, with the learning rate inside the momentum."""
    mu = settings.momentum
    decay = settings.weight_decay
    ratio = None
    if settings.adapt:
        weight_norm = norm(w)
        gradient_norm = norm(g)
        # A weight that starts at 0 would never move at a ratio of 0, and 0 / 0 is NaN: both take
        # the plain rate, as in the published code.
        positive = (weight_norm > 0) & (gradient_norm > 0)
        below = gradient_norm + settings.eps + decay * weight_norm
        ratio = torch.where(positive, settings.trust_coefficient * weight_norm / below, 1.0)
        step = (g + decay * w) * clamped(lr * ratio, w.dtype)
    else:
        step = g * lr
    # The rate is inside the momentum: a change of the rate reaches the steps only gradually.
    m = mu * m + step
    subtracted = mu * m + step if settings.nesterov else m
    return Updated(w - subtracted, m, ratio)


def _updated_by_momentum(
    w: torch.Tensor,
    m: torch.Tensor,
    g: torch.Tensor,
    lr: float,
    settings: Hyperparameters,
) -> Updated:
    """Make an update in the second form, whose momentum is an average of gradients."""
    mu = settings.momentum
    eta = settings.trust_coefficient
    m = (mu * m).add(g, alpha=1 - mu)  # rounded once where the processor multiplies and adds in one
    if not settings.adapt:
        # Plain momentum is a sum of gradients, the average is 1 - mu times as long.
        return Updated(w - m * (lr / (1 - mu)), m, None)
    # Weight decay joins the direction, not the average: the average stays one of gradients alone.
    u = m + settings.weight_decay * w
    weight_norm = norm(w)
    direction_norm = norm(u)
    positive = (weight_norm > 0) & (direction_norm > 0)
    ratio = torch.where(positive, eta * weight_norm / (direction_norm + settings.eps), eta)
    # The rate is outside the average, so its change acts at once.
    return Updated(w - u * clamped(lr * ratio, w.dtype), m, ratio)
