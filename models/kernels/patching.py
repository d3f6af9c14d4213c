"""Put our Triton kernels in the place of a model's layers; loads the kernels' files when they are needed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import List, Sequence

import torch
from torch import nn

# Files here with `replaces`, whether the kernel takes a module, and `fuse`, the layer in its place.
# Squeeze comes first: it takes a normalisation that group_norm would take alone; block takes those that were taken.
KERNELS = ("squeeze", "group_norm", "block", "group_conv")


def available() -> bool:
    """Whether Triton is installed, for NVIDIA's GPUs; it is not for macOS, Windows and Python 3.8."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None


def patch(model: nn.Module, kernels: Sequence[str] = KERNELS) -> List[str]:
    """Replace layers of `model` by fused ones with the same parameters; return their names.

    Raises ImportError: Triton is missing, cannot be loaded, or is for other GPUs.
    """
    if torch.version.hip:
        raise ImportError("our kernels are for NVIDIA's GPUs, this PyTorch is for ROCm")
    replaced = []
    for kernel in [importlib.import_module(f"{__package__}.{name}") for name in kernels]:
        for name, module in list(model.named_modules()):
            if kernel.replaces(module):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, kernel.fuse(module))
                replaced.append(name)
    return replaced
