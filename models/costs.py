"""Seconds and bytes of each block of a model, measured. shapes.py counts them, balance.py finds where to cut."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from typing import Dict, Iterator, Sequence, Tuple

import torch
from torch import nn

from models.balance import BlockCost
from models.stages import BlockList

_IN_TURN = 3  # micro batches that a measurement sends forward before the first goes backward


def measure(model: BlockList, images: torch.Tensor, repetitions: int = 10) -> Dict[str, BlockCost]:
    """Seconds and bytes of each block, timed alone in training mode on the device where model and images are.

    Passes go as in a pipeline: several micro batches forward, block after block, then all of them backward, so that
    a block finds neither its input nor what it kept in the caches. A drift of the machine's speed meets all blocks; of
    each one's times the least counts, for what others add is never negative. The first pass warms up. Time is
    that of computing gradients, not of adding them to those of other micro batches; a block whose output needs no
    gradient, such as `preprocess`, has no backward pass, and the block behind it computes no gradient of its input.

    The model is left as it was to the bit: gradients, running statistics, draws and training flags.

    Args:
        images: one micro batch, uint8 [micro, 3, H, W].
        repetitions: timed passes, at least 1.
    """
    assert repetitions >= 1, repetitions
    blocks = {name: model.block(name) for name in model.names}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    times = dict.fromkeys(blocks, (math.inf, math.inf))
    sizes = {}
    with _training(model), torch.enable_grad():
        try:
            x = images
            for name, block in blocks.items():
                with _saved_bytes(block) as saved:
                    output = block(x)
                sizes[name] = (sum(saved.values()), _bytes(output), _parameters(block))
                x = _handed_on(output)
            for _ in range(repetitions):
                for name, seconds in _timed(blocks, images).items():
                    times[name] = tuple(map(min, times[name], seconds))
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
    return {name: BlockCost(*times[name], *sizes[name]) for name in blocks}


def median(measured: Sequence[Dict[str, BlockCost]]) -> Dict[str, BlockCost]:
    """Block by block, the median time of what several processes have measured of one model."""

    def middle(name: str) -> BlockCost:
        costs = [each[name] for each in measured]
        forward, backward = (statistics.median(getattr(cost, key) for cost in costs) for key in ("forward", "backward"))
        return costs[0]._replace(forward=forward, backward=backward)

    return {name: middle(name) for name in measured[0]}


def _timed(blocks: Dict[str, nn.Module], images: torch.Tensor) -> Dict[str, Tuple[float, float]]:
    """Seconds of each block's forward and backward pass. `.grad` is not touched, and no hook on it runs."""
    seconds = {name: [0.0, 0.0] for name in blocks}
    passes = []
    for _ in range(_IN_TURN):
        x = images
        for name, block in blocks.items():
            started = _now(x.device)
            output = block(x)
            seconds[name][0] += _now(x.device) - started
            passes.append((name, block, x, output))
            x = _handed_on(output)
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
    """Seconds, when the device has done all that it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _handed_on(output: torch.Tensor) -> torch.Tensor:
    """The next block's input: a graph of its own, that reaches back to here only if there is something to learn."""
    return output.detach().requires_grad_(output.requires_grad)


@contextlib.contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Puts all modules into training mode, and afterwards each as before."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _saved_bytes(block: nn.Module) -> Iterator[Dict[int, int]]:
    """Collect what autograd saves: storage -> bytes; parameters and buffers are left out."""
    sizes: Dict[int, int] = {}
    alive = [*block.parameters(), *block.buffers()]
    own = {_storage(tensor) for tensor in alive}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            alive.append(tensor.detach())  # a storage that is freed may give its place, and so its key, to another one
            sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _storage(tensor: torch.Tensor) -> int:
    """A key that tells storages apart."""
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parameters(block: nn.Module) -> int:
    return sum(parameter.numel() for parameter in block.parameters())
