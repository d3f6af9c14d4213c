"""Put our layers for CPUs in the place of a model's; what they need is loaded then."""

from __future__ import annotations

from typing import List

import torch
from torch import nn

from models.base import BlockList


def patch(model: BlockList) -> List[str]:
    """Turn layers of a model into ours, which have the same parameters.

    Activations become channels-last, weights stay as they are. `library.fault` says whether the
    functions are there. A model stays as it is if none of its layers fits, or if it has a group
    normalisation of torch's, which loses digits of channels-last activations: see
    `models.normalization`.

    Args:
        model: float32 on a CPU; is changed.

    Returns:
        Names of the layers that were turned.
    """
    from models.native import block, layers

    # Blocks last: they take layers that are ours already.
    norms = [layers.NativeGroupNormAct, layers.NativeProxyNormAct]
    blocks = [block.NativeSeparable, block.NativeInverted, block.NativeHead]
    kinds = [layers.Pointwise, layers.GroupConv2d, *norms, *blocks]
    for module in model.modules():
        torchs = isinstance(module, nn.GroupNorm) and not isinstance(module, tuple(norms))
        if torchs and not any(norm.replaces(module) for norm in norms):
            return []
    replaced = []
    for kind in kinds:
        for name, module in model.named_modules():
            if kind.replaces(module):
                module.__class__ = kind
                replaced.append(name)
    if replaced:
        model.block("preprocess").memory_format = torch.channels_last
    return replaced
