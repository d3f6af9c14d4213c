"""What each block of a model costs, measured or counted. Where to cut it is in balance.py."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from typing import Callable, Dict, Iterator, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call

from models.balance import BlockCost
from models.stages import BlockList

# Of backward in forward passes, in multiply-adds: the gradient of the input and that of the weights cost one each.
_BACKWARD = 2
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


def count(model: BlockList, image_size: int, micro: int) -> Dict[str, BlockCost]:
    """Multiply-adds and bytes of each block in training mode, without computing: shapes run on the meta device.

    The same for every machine, wherever the model is. Convolutions and linear layers count; what a normalisation or an
    activation costs does not, so that a measured balance is another one. Bytes are those of the model's dtype.

    Args:
        image_size: height and width of the images in pixels.
        micro: images of a micro batch.
    """
    costs = {}
    x = torch.empty(micro, 3, image_size, image_size, dtype=torch.uint8, device="meta")
    with _training(model), torch.enable_grad(), _counting(model) as counts:
        for name in model.names:
            block = model.block(name)
            state = {key: _on_meta(tensor) for key, tensor in (*block.named_parameters(), *block.named_buffers())}
            with _saved_bytes(block, state) as saved:
                output = functional_call(block, state, (x,))
            backward = _BACKWARD * counts[name] if output.requires_grad else 0
            costs[name] = BlockCost(counts[name], backward, sum(saved.values()), _bytes(output), _parameters(block))
            x = _handed_on(output)
    return costs


def multiply_adds(model: BlockList, image_size: int) -> Dict[str, int]:
    """Multiply-adds of one image's forward pass by block: convolutions and linear layers, the rest is small.

    Runs one image through the model in evaluation mode, on the meta device if the model lives there.
    """
    device = next(model.parameters()).device
    with _training(model, False), torch.no_grad(), _counting(model) as counts:
        model(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device))
    return counts


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
def _training(model: nn.Module, mode: bool = True) -> Iterator[None]:
    """Within it all modules are in training mode (or none is); afterwards each as before."""
    before = [(module, module.training) for module in model.modules()]
    model.train(mode)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _saved_bytes(block: nn.Module, state: Optional[Dict[str, torch.Tensor]] = None) -> Iterator[Dict[int, int]]:
    """Collects what autograd saves within it: storage -> bytes; parameters and buffers, or `state`, are left out."""
    sizes: Dict[int, int] = {}
    alive = list(state.values() if state else (*block.parameters(), *block.buffers()))
    own = {_storage(tensor) for tensor in alive}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if _storage(tensor) not in own:
            alive.append(tensor.detach())  # a storage that is freed may give its place, and so its key, to another one
            sizes[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def _storage(tensor: torch.Tensor) -> int:
    """Tells storages apart, also on the meta device, where all have the address 0."""
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _counting(model: BlockList) -> Iterator[Dict[str, int]]:
    """Counts the multiply-adds of what is run within it, by block: of convolutions and linear layers."""
    counts = dict.fromkeys(model.names, 0)

    def hook_for(name: str) -> Callable:
        def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            per_output = module.weight[0].numel() if isinstance(module, nn.Conv2d) else module.in_features
            counts[name] += output.numel() * per_output

        return hook

    handles = [
        module.register_forward_hook(hook_for(name))
        for name in model.names
        for module in model.block(name).modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _parameters(block: nn.Module) -> int:
    return sum(parameter.numel() for parameter in block.parameters())
