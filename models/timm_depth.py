"""Stochastic depth of timm's models, whose layers a pass may call several times."""

from __future__ import annotations

import collections
import contextlib
import functools
from typing import Any, Dict, Mapping, Sequence

import torch
from timm.layers import drop as timm_drop
from torch import nn

from models import timm_creation
from models.meta import without_memory
from models.stochastic import Draws, DropPath, DropPaths
from recipe import network
from recipe.settled import image_size


def layer(rate: float, name: str, draws: Draws, calls: int) -> nn.Module:
    """Return a layer of stochastic depth in the place of timm's.

    Args:
        rate: probability that an image's branch is dropped.
        name: of timm's layer.
        draws: of the model.
        calls: of the layer in a pass; see `calls`.
    """
    if calls > 1:
        return DropPaths(rate, name, draws, calls)
    return DropPath(rate, name, draws)


def calls(section: network.Timm) -> Mapping[str, int]:
    """Return how often a pass of a section's model calls each layer of stochastic depth.

    Args:
        section: of the model; counting it takes a pass on a device without memory, once.

    Returns:
        By timm's name of the layer; those that no pass calls are missing.
    """
    return _calls(section.model_dump_json())


@functools.lru_cache(maxsize=None)
def _calls(text: str) -> Dict[str, int]:
    """Return `calls` of the section that is this JSON."""
    section = network.Timm.model_validate_json(text)
    found: Dict[str, int] = collections.Counter()

    def count(name: str, *_: Any) -> None:
        """Count a call of the layer `name`."""
        found[name] += 1

    # Some models draw from torch's generator on the way, which nobody else shall notice.
    with torch.random.fork_rng(devices=[]), without_memory():
        model = timm_creation.create(section)
        for name, module in model.named_modules():
            if isinstance(module, timm_drop.DropPath):
                module.register_forward_hook(functools.partial(count, name))
        pixels = image_size(section)
        # A model that does not take this size is refused where it is cut or counted.
        with contextlib.suppress(Exception), torch.no_grad():
            model(torch.zeros(timm_creation.TRACED_IMAGES, 3, pixels, pixels))
    return found


def begin_passes(block: nn.Module) -> None:
    """Let each pass of a `block` begin with the first call of its layers of stochastic depth."""
    # A pass may have been broken off, by memory that ran out for instance.
    layers = [module for module in block.modules() if isinstance(module, DropPaths)]
    if layers:
        block.register_forward_pre_hook(functools.partial(_begin, layers))


def _begin(layers: Sequence[DropPaths], *_: Any) -> None:
    """Begin a pass in each of the layers: a hook before the pass of a block."""
    for each in layers:
        each.begin()
