"""Seconds and bytes of each block of a model, measured. shapes.py counts them, balance.py finds where to cut."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from typing import Dict, Iterator, Sequence, Tuple

import torch
from torch import nn

from models.balance import BlockCost
from models.base import BlockList

_IN_TURN = 3  # micro batches that a measurement sends forward before the first goes backward


def measure(model: BlockList, images: torch.Tensor, repetitions: int = 10) -> Dict[str, BlockCost]:
    """Seconds and bytes of each block for one micro batch of images, uint8 [micro, 3, H, W], timed in training mode.

    Passes go as in a pipeline: several micro batches forward, block after block, then all of them backward, so that a
    block's input and what it saved are not in the caches. Takes the minimum over repetitions; the first pass warms up.
    Gradients are computed, not added up. Measures a copy: the model keeps its running statistics and training flags.
    """
    model = copy.deepcopy(model).train()
    blocks = {name: model.block(name) for name in model.names}
    times = dict.fromkeys(blocks, (math.inf, math.inf))
    sizes = {}
    with torch.enable_grad():
        x = images
        for name, block in blocks.items():
            with _saved_bytes(block) as saved:
                output = block(x)
            parameters = sum(parameter.numel() for parameter in block.parameters())
            sizes[name] = (sum(saved.values()), output.numel() * output.element_size(), parameters)
            x = output.detach().requires_grad_(output.requires_grad)
        for _ in range(repetitions):
            for name, seconds in _timed(blocks, images).items():
                times[name] = tuple(map(min, times[name], seconds))
    return {name: BlockCost(*times[name], *sizes[name]) for name in blocks}


def median(measured: Sequence[Dict[str, BlockCost]]) -> Dict[str, BlockCost]:
    """Median times of each block over what several processes have measured."""
    found = {}
    for name, cost in measured[0].items():
        forward, backward = (statistics.median(each[name][phase] for each in measured) for phase in (0, 1))
        found[name] = cost._replace(forward=forward, backward=backward)
    return found


def _timed(blocks: Dict[str, nn.Module], images: torch.Tensor) -> Dict[str, Tuple[float, float]]:
    """Seconds of each block's forward and backward pass. No `.grad` is touched."""
    seconds = {name: [0.0, 0.0] for name in blocks}
    passes = []
    for _ in range(_IN_TURN):
        x = images
        for name, block in blocks.items():
            started = _now(x.device)
            output = block(x)
            seconds[name][0] += _now(x.device) - started
            passes.append((name, block, x, output))
            x = output.detach().requires_grad_(output.requires_grad)
    while passes:
        name, block, x, output = passes.pop()
        if output.requires_grad:
            wanted = [tensor for tensor in (x, *block.parameters()) if tensor.requires_grad]
            gradient = output.detach()  # any values of a likely size
            started = _now(x.device)
            torch.autograd.grad(output, wanted, gradient, allow_unused=True)
            seconds[name][1] += _now(x.device) - started
    return {name: (forward / _IN_TURN, backward / _IN_TURN) for name, (forward, backward) in seconds.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _saved_bytes(block: nn.Module) -> Iterator[Dict[int, int]]:
    """Collect what autograd saves: storage -> bytes; parameters and buffers are left out."""
    sizes: Dict[int, int] = {}
    alive = [*block.parameters(), *block.buffers()]
    own = {tensor.untyped_storage()._cdata for tensor in alive}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            alive.append(tensor.detach())  # a storage that is freed may give its place, and so its key, to another
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
