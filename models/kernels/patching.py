"""Put our Triton kernels in the place of a model's layers; their files are loaded then."""

from __future__ import annotations

import importlib
import importlib.util
from typing import List, Sequence

import torch
from torch import nn

# Files here with `replaces`, whether the kernel takes a module, and `fuse`, the layer in its place.
# Squeeze comes first, as group_norm would take its normalisations alone. Block comes after both: it
# takes blocks whose normalisations they have replaced.
KERNELS = ("squeeze", "group_norm", "block", "group_conv")
# The same with the group convolutions of `cuda/`.
CUDA_KERNELS = ("squeeze", "group_norm", "block", "cuda.group_conv")


def available() -> bool:
    """Return whether Triton is installed, for NVIDIA's GPUs; macOS and Windows have none."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def patch(model: nn.Module, kernels: Sequence[str] = KERNELS) -> List[str]:
    """Replace layers of a model by fused ones with the same parameters.

    Args:
        model: is changed.
        kernels: names in KERNELS or CUDA_KERNELS, in their order.

    Returns:
        Names of the layers that were replaced.

    Raises:
        ImportError: Triton is missing, cannot be loaded, or is for other GPUs.
    """
    if torch.version.hip:
        raise ImportError("our kernels are for NVIDIA's GPUs, this PyTorch is for ROCm")
    files = [importlib.import_module(f"{__package__}.{name}") for name in kernels]
    replaced = []
    for file in files:
        # A list, as modules are replaced on the way.
        for name, module in list(model.named_modules()):
            if file.replaces(module):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, file.fuse(module))
                replaced.append(name)
    return replaced
