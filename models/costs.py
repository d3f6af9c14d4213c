"""Seconds and bytes of each block of a model, measured; shapes.py counts them instead."""

from __future__ import annotations

import contextlib
import copy
import statistics
import time
from typing import Dict, Iterator, List, NamedTuple, Sequence

import torch
from torch import nn

from models.balance import BlockCost
from models.base import BlockList

_IN_TURN = 3  # micro batches that a measurement sends forward before the first goes backward


class _Seconds(NamedTuple):
    """Times of one block."""

    forward: float
    backward: float


class _Sizes(NamedTuple):
    """Bytes and parameters of one block: see `BlockCost`."""

    saved: int
    output: int
    parameters: int


class _Pass(NamedTuple):
    """A block's forward pass, from which a backward pass can start."""

    name: str
    block: nn.Module
    input: torch.Tensor
    output: torch.Tensor


def measure(model: BlockList, images: torch.Tensor, repetitions: int = 10) -> Dict[str, BlockCost]:
    """Measure seconds and bytes of each block for one micro batch, in training mode.

    Passes go as in a pipeline: several micro batches forward, block after block, then all of them
    backward, so that a block's input and what it saved are not in the caches. Takes the minimum
    over repetitions; the first pass warms up. Gradients are computed, not added up. Measures a
    copy: the model keeps its running statistics and training flags.

    Args:
        model: on the device that is measured.
        images: a micro batch, uint8 [micro, 3, H, W].
        repetitions: of the passes.

    Returns:
        Block's name -> cost, in running order.
    """
    model = copy.deepcopy(model).train()
    blocks = {name: model.block(name) for name in model.names}
    # Whatever the caller has switched off: else nothing would be saved for backward.
    with torch.enable_grad():
        sizes = _measure_sizes(blocks, images)
        rounds = []
        for _ in range(repetitions):
            rounds.append(_measure_seconds(blocks, images))
    # The minimum: others' work on the machine only ever adds time.
    costs = {}
    for name in blocks:
        forward = min(seconds[name].forward for seconds in rounds)
        backward = min(seconds[name].backward for seconds in rounds)
        costs[name] = BlockCost(forward, backward, *sizes[name])
    return costs


def median(measured: Sequence[Dict[str, BlockCost]]) -> Dict[str, BlockCost]:
    """Return each block's cost with its median times over all processes.

    Args:
        measured: what each process has measured.
    """
    medians = {}
    # The median: a process beside which other work runs does not move it.
    for name, cost in measured[0].items():
        forward = statistics.median(costs[name].forward for costs in measured)
        backward = statistics.median(costs[name].backward for costs in measured)
        medians[name] = cost._replace(forward=forward, backward=backward)
    return medians


def _measure_sizes(blocks: Dict[str, nn.Module], images: torch.Tensor) -> Dict[str, _Sizes]:
    """Measure what each block saves and makes in one forward pass, which warms up."""
    sizes = {}
    x = images
    for name, block in blocks.items():
        with saved_bytes(block) as saved:
            output = block(x)
        sizes[name] = _Sizes(
            saved=sum(saved.values()),
            output=output.numel() * output.element_size(),
            parameters=sum(parameter.numel() for parameter in block.parameters()),
        )
        # As a stage would get it: without the graph of the blocks before.
        x = output.detach().requires_grad_(output.requires_grad)
    return sizes


def _measure_seconds(blocks: Dict[str, nn.Module], images: torch.Tensor) -> Dict[str, _Seconds]:
    """Time each block's forward and backward pass. No `.grad` is touched."""
    forward = dict.fromkeys(blocks, 0.0)
    passes = []
    for _ in range(_IN_TURN):
        passes += _time_forward(blocks, images, forward)

    # The last first; what a pass has saved is freed after it.
    backward = dict.fromkeys(blocks, 0.0)
    while passes:
        last = passes.pop()
        backward[last.name] += _time_backward(last)

    seconds = {}
    for name in blocks:
        seconds[name] = _Seconds(
            forward=forward[name] / _IN_TURN,
            backward=backward[name] / _IN_TURN,
        )
    return seconds


def _time_forward(
    blocks: Dict[str, nn.Module],
    images: torch.Tensor,
    seconds: Dict[str, float],
) -> List[_Pass]:
    """Send a micro batch forward, add up each block's `seconds`, and return the passes in order."""
    passes = []
    x = images
    for name, block in blocks.items():
        started = _now(x.device)
        output = block(x)
        seconds[name] += _now(x.device) - started
        passes.append(_Pass(name, block, x, output))
        # Each block has an input of its own, where its backward pass ends.
        x = output.detach().requires_grad_(output.requires_grad)
    return passes


def _time_backward(forward: _Pass) -> float:
    """Return seconds of a block's backward pass after its `forward` one."""
    # Preprocessing has nothing to train and no gradient.
    if not forward.output.requires_grad:
        return 0.0
    inputs = [forward.input, *forward.block.parameters()]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradient = forward.output.detach()  # any values of a likely size
    started = _now(forward.input.device)
    torch.autograd.grad(forward.output, wanted, gradient, allow_unused=True)
    return _now(forward.input.device) - started


def _now(device: torch.device) -> float:
    """Return seconds on a clock when `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def saved_bytes(block: nn.Module) -> Iterator[Dict[int, int]]:
    """Collect what autograd saves within: storage -> bytes.

    Args:
        block: whose parameters and buffers are left out.
    """
    # By storage, because views of one tensor, saved twice, take its memory once.
    sizes: Dict[int, int] = {}
    alive = [*block.parameters(), *block.buffers()]
    own_storages = {tensor.untyped_storage()._cdata for tensor in alive}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        """Count the storage of a saved `tensor`."""
        storage = tensor.untyped_storage()
        if storage._cdata not in own_storages:
            # A storage that is freed may give its place, and so its key, to another.
            alive.append(tensor.detach())
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        """Return the saved `tensor` as it is."""
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield sizes
