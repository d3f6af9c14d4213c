"""Put our layers for CPUs in the place of a model's; what they need is loaded then."""

from __future__ import annotations

from typing import List, Protocol, Type

import torch
from torch import nn

from models.base import BlockList
from models.preprocess import Preprocess


class _Replacement(Protocol):
    """A class that may become that of a layer."""

    @staticmethod
    def replaces(module: nn.Module) -> bool:
        """Return whether it may become that of the `module`."""


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
    # Loaded only where a model is patched.
    from models.native import block, layers

    # Blocks last: they take layers that are ours already.
    norms: List[Type[layers.NativeGroupNormAct]] = [
        layers.NativeGroupNormAct,
        layers.NativeProxyNormAct,
    ]
    blocks = [block.NativeSeparable, block.NativeInverted, block.NativeHead]
    kinds: List[Type[_Replacement]] = [layers.Pointwise, layers.GroupConv2d, *norms, *blocks]
    # Nothing is changed before this is known: a model is either left alone or patched whole.
    for module in model.modules():
        torchs = isinstance(module, nn.GroupNorm) and not isinstance(module, tuple(norms))
        if torchs and not any(norm.replaces(module) for norm in norms):
            return []
    replaced = []
    for kind in kinds:
        for name, module in model.named_modules():
            if kind.replaces(module):
                # The class alone changes: parameters, hooks and references to the layer stay.
                module.__class__ = kind
                replaced.append(name)
    # The first layers then make channels-last activations, and all others go on with that.
    if replaced:
        preprocess = model.block("preprocess")
        assert isinstance(preprocess, Preprocess)  # see Family.build
        preprocess.memory_format = torch.channels_last
    return replaced
