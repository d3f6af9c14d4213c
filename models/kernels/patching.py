"""Which layers of a model are computed by our Triton kernels. The kernels' files are loaded when they are needed."""

from __future__ import annotations

import importlib.util
from typing import Callable, Dict, List, NamedTuple, Sequence

from torch import nn

KERNELS = ("group_norm", "group_conv")


class Kernel(NamedTuple):
    """What replaces layers: whether it takes a module, and the fused layer in its place, with the same Parameters."""

    replaces: Callable[[nn.Module], bool]
    of: Callable[[nn.Module], nn.Module]


def available() -> bool:
    """Whether Triton is installed; it is not for macOS, Windows and Python 3.8."""
    return importlib.util.find_spec("triton") is not None


def patch(model: nn.Module, kernels: Sequence[str] = KERNELS) -> List[str]:
    """Puts fused layers in the place of those that the kernels replace, in `model` itself; returns the layers' names.

    Parameters are the same objects under the same names, so nothing that holds them or their names need know.

    Args:
        kernels: among KERNELS.

    Raises:
        ImportError: Triton is missing, or cannot be loaded.
    """
    loaded = [_load(name) for name in kernels]
    found: Dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        kernel = next((kernel for kernel in loaded if kernel.replaces(module)), None)
        if kernel is not None:
            assert name, "a model that is itself such a layer has no place in which to put another"
            found[name] = kernel.of(module)
    for name, fused in found.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, fused)
    return list(found)


def _load(name: str) -> Kernel:
    if name == "group_norm":
        from models.kernels import group_norm

        return Kernel(group_norm.replaces, group_norm.FusedGroupNormAct.of)
    assert name == "group_conv", name
    from models.kernels import group_conv

    return Kernel(group_conv.replaces, group_conv.FusedGroupConv2d.of)
