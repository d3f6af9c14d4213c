"""Dropout and stochastic depth, whose draws are a function of (seed, step, micro batch, block name)."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch
from torch import nn

from recipe.randomness import bits32, key


class Draws:
    """The seed and the current micro batch, which the random layers of one model share."""

    def __init__(self, seed: int):
        self.seed, self.step, self.micro_batch = seed, 0, 0

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        """`count` values, 0 with probability `rate` and else 1 / (1 - rate), in `like`'s dtype and device."""
        # Drawn on the host: a few numbers are cheaper there than ten kernel launches on a device.
        draw = key("model", self.seed, self.step, self.micro_batch, name)
        kept = bits32(draw, np.arange(count, dtype=np.uint64)) >= int(rate * 2**32)
        mask = torch.from_numpy(kept.astype(np.float32) / (1 - rate))
        return mask.to(like.device, like.dtype, non_blocking=True)


class _Dropping(nn.Module):
    """A layer that drops a share `rate` in training, by `per_row` draws for each row; `name` is part of their key.

    `mask`, [N x per_row], is drawn ahead for the next pass: compiled code would take the numbers of step and micro
    batch for constants, and be compiled anew for each. None: the pass draws by itself.
    """

    def __init__(self, rate: float, name: str, draws: Draws, per_row: int = 1):
        super().__init__()
        self.rate, self.name, self.draws, self.per_row = rate, name, draws, per_row
        self.mask: Optional[torch.Tensor] = None

    def draw(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """The mask of a pass of so many rows, in `like`'s dtype and device."""
        return self.draws.keep_mask(self.name, self.rate, rows * self.per_row, like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.mask  # first: compiled, layers of all rates are then one program
        if mask is None:
            if not (self.training and self.rate):
                return x
            mask = self.draw(len(x), x)
        return x * mask.view(len(x), self.per_row, *[1] * (x.dim() - 2))


class Dropout(_Dropping):
    """Zeroes single activations. Input and output: [N, per_row]. Source: Srivastava et al., JMLR 15 (2014)."""


class DropPath(_Dropping):
    """Zeroes a residual branch per image. Input and output: [N, C, H, W]. Source: Huang et al., 1603.09382."""


RANDOM_LAYERS = (Dropout, DropPath)
