"""Normalisation layers with their activation, in the shape that timm's blocks ask for."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class GroupNormAct(nn.GroupNorm):
    """Group normalisation over [N, C, H, W], scale and bias per channel, then SiLU (in place) or nothing.

    Statistics are float32 also for half-precision input: torch's kernels accumulate them so on CPU and
    CUDA, which tests/models/test_normalization.py holds them to. Not for channels-last input on the CPU: there
    the variance is a difference of squares, which loses its digits where the mean is large.

    Source: Wu and He, 1803.08494. The G16 recipe uses 4 groups and eps 1e-3.
    """

    def __init__(self, channels: int, groups: int, eps: float, apply_act: bool = True):
        """Args: channels: a multiple of `groups`; eps: added to the variance."""
        super().__init__(groups, channels, eps=eps)
        self.apply_act = apply_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)
        return F.silu(x, inplace=True) if self.apply_act else x
