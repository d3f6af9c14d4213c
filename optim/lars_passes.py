"""LARS in two passes over the memory: sums over rows, and the step. Plain torch, run as it is or compiled.

Tensors of elements are [rows, ROW], what is the same for a row [rows, 1]; arithmetic is float32. A scale [] on the
gradients undoes loss scale and accumulation. See LARS for the formulas.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch

from optim.rounding import lower, random_bits, rounded, upper

Sums = Tuple[torch.Tensor, ...]


def gradient_sums(gradient: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> Sums:
    """Sums over each row of g^2 and w^2, and 0 or, where a gradient is not finite, NaN; [rows] each."""
    g, w = gradient * scale, weight.float()
    return (g * g).sum(1), (w * w).sum(1), (g - g).sum(1)


def momentum_sums(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    momentum: torch.Tensor,
    decay: torch.Tensor,
    scale: torch.Tensor,
    mu: float,
) -> Sums:
    """Those of `gradient_sums`, and the sums of u^2, u = mu m + (1 - mu) g + decay w."""
    g, w = gradient * scale, weight.float()
    u = _averaged(g, momentum, mu) + decay * w
    return (g * g).sum(1), (w * w).sum(1), (g - g).sum(1), (u * u).sum(1)


def gradient_step(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    momentum: torch.Tensor,
    working: Optional[torch.Tensor],
    rate: torch.Tensor,
    decay: torch.Tensor,
    bit_rows: Optional[torch.Tensor],
    scale: torch.Tensor,
    mu: float,
    draws: Optional[tuple],
    keep: Optional[torch.Tensor],
) -> torch.Tensor:
    """m = mu m + rate (g + decay w);  w = w - m, written into weight, momentum and working.

    Args:
        working: the module's parameters, where they are not the weights themselves.
        rate: learning rate times trust ratio.
        bit_rows, draws: for stochastic rounding: rows of a RoundingBits, and its lanes and its draw. Without them, what
            is stored is rounded to nearest.
        keep: bool [], where False nothing changes; None: True.

    Returns:
        Sums over each row of squares of what was subtracted, [rows].
    """
    w = weight.float()
    new = momentum.float() * mu + (gradient * scale + decay * w) * rate
    _store((weight, working, w - new), (momentum, None, new), bit_rows, draws, keep)
    return (new * new).sum(1)


def momentum_step(
    gradient, weight, momentum, working, rate, decay, bit_rows, scale, mu: float, draws, keep
) -> torch.Tensor:
    """m = mu m + (1 - mu) g;  w = w - rate (m + decay w); else as `gradient_step`."""
    w = weight.float()
    new = _averaged(gradient * scale, momentum, mu)
    subtracted = (new + decay * w) * rate
    _store((weight, working, w - subtracted), (momentum, None, new), bit_rows, draws, keep)
    return (subtracted * subtracted).sum(1)


def _averaged(g: torch.Tensor, momentum: torch.Tensor, mu: float) -> torch.Tensor:
    return momentum.float() * mu + g * (1 - mu)


def _store(weights: tuple, momenta: tuple, bit_rows, draws: Optional[tuple], keep: Optional[torch.Tensor]) -> None:
    """Rounds and stores. Args: weights, momenta: state, its copy (or None), and the new value of both."""
    words = None if draws is None else random_bits(bit_rows, *draws)
    for (state, copy, value), chosen in zip((weights, momenta), (upper, lower)):
        if words is not None and state.dtype == torch.float16:
            value = rounded(value, chosen(words))
        else:
            value = value.to(state.dtype)
        for target in (state, copy):
            if target is not None:
                target.copy_(value if keep is None else torch.where(keep, value.to(target.dtype), target))
