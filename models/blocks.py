"""Properties of timm's blocks and convolutions that our kernels, for GPUs and CPUs, depend on."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import torch
from timm.layers.activations import Sigmoid
from timm.models._efficientnet_blocks import SqueezeExcite
from torch import nn

from models.stochastic import DropPath


def kept(block: nn.Module, x: torch.Tensor) -> Optional[torch.Tensor]:
    """Return what each image's branch of `block` is multiplied by, [N]; None where none is dropped.

    Args:
        block: timm's.
        x: its input, [N, C, H, W].
    """
    # timm's own stochastic depth, and the identity where there is none, draw no masks of ours.
    return block.drop_path.current(x) if isinstance(block.drop_path, DropPath) else None


def squeezes(block: nn.Module) -> bool:
    """Return whether `block` goes from its normalisation to timm's squeeze and excitation.

    Args:
        block: timm's.
    """
    # Types, not isinstance: a subclass may compute something else than our kernels do.
    se = block.se
    return (
        type(se) is SqueezeExcite
        and type(se.act1) is nn.SiLU
        and type(se.gate) in (Sigmoid, nn.Sigmoid)
        and type(block.aa) is nn.Identity
    )


def geometry(
    size: Sequence[int],
    kernel: int,
    stride: int,
    pads_same: bool,
) -> Tuple[List[int], List[int]]:
    """Return the geometry of a convolution.

    Args:
        size: lines and columns of the input.
        kernel: lines, and columns, of the kernel.
        stride: of lines and columns.
        pads_same: padded as TensorFlow does, else by half the kernel.

    Returns:
        Lines and columns of the output, and of the padding before the input.
    """
    out_size = [-(-side // stride) for side in size]
    if not pads_same:
        return out_size, [kernel // 2] * 2
    padding = []
    for side, out_side in zip(size, out_size):
        # The total is the least that the output needs; its odd one goes to the end.
        total = max((out_side - 1) * stride + kernel - side, 0)
        padding.append(total // 2)
    return out_size, padding
