"""Put our Triton kernels in the place of a model's layers; loads the kernels' files when they are needed."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Dict, List, Sequence

from torch import nn

# Files here with `replaces`, whether the kernel takes a module, and `fuse`, the layer in its place.
KERNELS = ("group_norm", "group_conv")


def available() -> bool:
    """Whether Triton is installed; it is not for macOS, Windows and Python 3.8."""
    return importlib.util.find_spec("triton") is not None


def patch(model: nn.Module, kernels: Sequence[str] = KERNELS) -> List[str]:
    """Replace layers of `model` by fused ones with the same parameters; return their names.

    Raises ImportError: Triton is missing, or cannot be loaded.
    """
    loaded = [_load(name) for name in kernels]
    found: Dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kernel = next((kernel for kernel in loaded if kernel.replaces(module)), None)
        if kernel is not None:
            assert name, "a model that is itself such a layer has no place in which to put another"
            found[name] = kernel.fuse(module)
    for name, fused in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, fused)
    return list(found)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")
