"""Put our layers for CPUs in the place of a model's; loads what they need when they are asked for."""

from __future__ import annotations

from typing import List

import torch

from models.stages import BlockList


def patch(model: BlockList) -> List[str]:
    """Turn layers of `model`, float32 on a CPU, into ours, which have the same parameters; return their names.

    Activations become channels-last, weights stay as they are. `library.fault` says whether the functions are there.
    """
    from models.native import block, layers

    # Blocks last: they take layers that are ours already.
    kinds = (
        layers.Pointwise,
        layers.GroupConv2d,
        layers.NativeGroupNormAct,
        layers.NativeProxyNormAct,
        block.NativeSeparable,
        block.NativeInverted,
        block.NativeHead,
    )
    replaced = []
    for kind in kinds:
        for name, module in model.named_modules():
            if kind.replaces(module):
                module.__class__ = kind
                replaced.append(name)
    model.block("preprocess").memory_format = torch.channels_last
    return replaced
