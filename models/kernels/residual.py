"""A block's residual addition and stochastic depth, in the kernels of its last normalisation.

Forward moves two tensors like the block's output less where nothing is dropped and four less where images are; backward
two less where images are dropped: there the normalisation's kernels scale its gradient.
"""

from __future__ import annotations

import copy
from typing import Optional

import torch
from timm.models._efficientnet_blocks import DepthwiseSeparableConv, InvertedResidual
from torch import nn

from models.kernels.group_norm import FusedGroupNormAct
from models.stochastic import DropPath

_NORMS = {DepthwiseSeparableConv: "bn2", InvertedResidual: "bn3"}  # block -> its last layer before the addition


def replaces(module: nn.Module) -> bool:
    """Whether `fuse` takes the module: timm's block with a residual branch that ends in a FusedGroupNormAct."""
    if type(module) not in _NORMS or not module.has_skip:
        return False
    plain = module.conv_s2d is None and type(module.drop_path) in (nn.Identity, DropPath)
    return plain and type(getattr(module, _NORMS[type(module)])) is FusedGroupNormAct


def fuse(block: nn.Module) -> nn.Module:
    """The block with the same layers under the same names."""
    assert replaces(block), f"no kernels for {type(block).__name__}"
    block = copy.copy(block)
    block.__class__ = _Inverted if isinstance(block, InvertedResidual) else _Separable
    return block


class _Separable(DepthwiseSeparableConv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv_pw(self.se(self.aa(self.bn1(self.conv_dw(x)))))
        return self.bn2.added(inner, _kept(self, x), x)


class _Inverted(InvertedResidual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv_dw(self.bn1(self.conv_pw(x)))
        inner = self.conv_pwl(self.se(self.aa(self.bn2(inner))))
        return self.bn3.added(inner, _kept(self, x), x)


def _kept(block: nn.Module, x: torch.Tensor) -> Optional[torch.Tensor]:
    """What each image's branch is multiplied by, [N]."""
    return block.drop_path.current(x) if isinstance(block.drop_path, DropPath) else None
