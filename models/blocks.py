"""What our kernels, for GPUs and for CPUs, ask of timm's blocks and of their convolutions."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from timm.layers.activations import Sigmoid
from timm.models._efficientnet_blocks import SqueezeExcite
from torch import nn

from models.stochastic import DropPath


def kept(block: nn.Module, x: torch.Tensor) -> Optional[torch.Tensor]:
    """Return what each image's branch is multiplied by, [N]; None where none is dropped."""
    return block.drop_path.current(x) if isinstance(block.drop_path, DropPath) else None


def squeezes(block: nn.Module) -> bool:
    """Return whether a block goes from its normalisation to squeeze and excitation, with SiLU and sigmoid."""
    se = block.se
    if type(se) is not SqueezeExcite or type(block.aa) is not nn.Identity:
        return False
    return type(se.act1) is nn.SiLU and type(se.gate) in (Sigmoid, nn.Sigmoid)


def geometry(size: Sequence[int], kernel: int, stride: int, pads_same: bool) -> Tuple[List[int], List[int]]:
    """Return lines and columns of a convolution's output, and of the padding before its input.

    Args: size: lines and columns of the input. pads_same: padded as TensorFlow does, else by half the kernel.
    """
    out = [-(-side // stride) for side in size]
    if not pads_same:
        return out, [kernel // 2] * 2
    # The total is the least; its odd one goes to the end.
    totals = [max((made - 1) * stride + kernel - side, 0) for made, side in zip(out, size)]
    return out, [total // 2 for total in totals]
