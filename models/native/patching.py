"""Put our layers for CPUs in the place of a model's; loads what they need when they are asked for."""

from __future__ import annotations

from typing import List

import torch
from torch import nn

from models.base import BlockList


def patch(model: BlockList) -> List[str]:
    """Turn layers of `model`, float32 on a CPU, into ours, which have the same parameters; return their names.

    Activations become channels-last, weights stay as they are. `library.fault` says whether the functions are there.
    A model stays as it is if none of its layers fits, or if it has a group normalisation of torch's, which loses digits
    of channels-last activations: see `models.normalization`.
    """
    from models.native import block, layers

    norms = (layers.NativeGroupNormAct, layers.NativeProxyNormAct)
    # Blocks last: they take layers that are ours already.
    kinds = (
        *(layers.Pointwise, layers.GroupConv2d, *norms),
        *(block.NativeSeparable, block.NativeInverted, block.NativeHead),
    )
    torchs = [
        module for module in model.modules() if isinstance(module, nn.GroupNorm) and not isinstance(module, norms)
    ]
    if not all(any(norm.replaces(module) for norm in norms) for module in torchs):
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
