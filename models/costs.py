"""What each block of a model costs, measured or counted, and where to cut it so that its stages cost the same."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from typing import Callable, Container, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call

from models.stages import BlockList

# Of backward in forward passes, in multiply-adds: the gradient of the input and that of the weights cost one each.
_BACKWARD = 2
_IN_TURN = 3  # micro batches that a measurement sends forward before the first goes backward


class BlockCost(NamedTuple):
    """What one block costs.

    forward, backward: of one micro batch, in seconds where measured, in multiply-adds where counted. Whoever compares
        blocks needs the ratio only.
    saved: bytes that autograd keeps of one micro batch for the block's backward pass, its input among them where it
        is needed. Parameters and buffers, which are there anyway, do not count.
    output: bytes of the block's output for one micro batch.
    parameters: their number.
    """

    forward: float
    backward: float
    saved: int
    output: int
    parameters: int


class Cut(NamedTuple):
    """Where a model is cut, and what follows from it, per stage.

    cuts: the names of the blocks that open the stages after the first, as `models.stages.split_names` takes them.
    seconds: of one micro batch, forward and backward; multiply-adds where the costs were counted.
    bytes: activations in flight and state of the parameters.
    memory: what `balance` was told a device has, in bytes.
    """

    cuts: List[str]
    seconds: List[float]
    bytes: List[int]
    memory: Optional[int] = None

    @property
    def imbalance(self) -> float:
        """By which share the slowest stage takes longer than the mean of all: 0 for an even cut."""
        mean = math.fsum(self.seconds) / len(self.seconds)
        return max(self.seconds) / mean - 1 if mean else 0.0

    @property
    def fits(self) -> bool:
        """Whether each stage's bytes are within the memory of a device."""
        return self.memory is None or max(self.bytes) <= self.memory

    def describe(self, origin: str = "measured") -> str:
        """One line for the terminal. Args: origin: of the costs, "measured" or "counted"."""
        total = math.fsum(self.seconds) or 1.0
        shares = _listed([f"{100 * seconds / total:.0f} %" for seconds in self.seconds])
        stages = f"stages take {shares} of the time" if self.cuts else "one stage takes all of the time"
        line = (
            f"split [{', '.join(self.cuts)}] ({origin}): {stages}, {100 * self.imbalance:.1f} % from even; "
            f"memory {_listed([_megabytes(size) for size in self.bytes])} MB"
        )
        return line if self.fits else f"{line}: no cut fits into {_megabytes(self.memory)} MB, this one needs least"


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


def balance(
    costs: Dict[str, BlockCost],
    stages: int,
    *,
    in_flight: Sequence[int],
    recompute: Container[str] = frozenset(),
    bytes_per_parameter: float = 12,
    memory: Optional[int] = None,
    phases: bool = False,
) -> Cut:
    """The cut into `stages` whose slowest stage is the fastest, among those that fit into the devices' memory.

    Exact, by dynamic programming over the blocks. Of cuts that are equally fast, the one whose largest stage needs
    least memory is taken; where no cut fits, that which needs least, and then the fastest of these: see `Cut.fits`.
    A stage without parameters would have nothing to learn and is not made, so no cut comes right after `preprocess`.

    A stage's memory is counted as bytes_per_parameter x parameters + in_flight x saved bytes. Of a block that is
    recomputed only the input is kept in flight (that of the first block, the images, is not counted); while it is
    recomputed its saved bytes are there once, and one block is recomputed at a time.

    Args:
        costs: block's name -> cost, in running order.
        stages: of one replica, over all devices: where devices compute several stages each, all of them.
        in_flight: per stage, the micro batches whose activations it holds at once: with GPipe's schedule all of a
            step, with 1F1B `stages` - stage.
        recompute: names of the blocks whose activations are computed a second time in the backward pass: their
            forward pass is paid twice.
        bytes_per_parameter: weight, gradient and slots of the optimizer.
        memory: bytes of one device.
        phases: whether all forward passes come before all backward passes, as GPipe has it. A step then takes as
            long as the slowest forward and the slowest backward phase: from the cut above, borders are moved as
            long as the sum of the two falls. That is not exact, but never worse.

    Raises:
        ValueError: more stages than blocks with parameters.

    Source: of the schedules, Huang et al., 1811.06965 (GPipe) and Narayanan et al., 1806.03377 (1F1B).
    """
    assert stages >= 1 and len(in_flight) == stages, f"{len(in_flight)} counts in flight for {stages} stages"
    names, values = list(costs), list(costs.values())
    able = sum(cost.parameters > 0 for cost in values)
    if stages > able:
        raise ValueError(f"{stages} stages are more than the {able} blocks that have parameters")
    again = [name in recompute for name in names]
    inputs = [0, *(cost.output for cost in values)]
    seconds = [cost.forward * (1 + twice) + cost.backward for cost, twice in zip(values, again)]
    kept = [inputs[block] if twice else cost.saved for block, (cost, twice) in enumerate(zip(values, again))]
    transient = [cost.saved if twice else 0 for cost, twice in zip(values, again)]
    parameters = [cost.parameters for cost in values]
    # A stage as (its number, its first block, the block behind its last) -> seconds, bytes.
    every = {}
    for start in range(len(values)):
        for end in range(start + 1, len(values) + 1):
            part = slice(start, end)
            if any(parameters[part]):
                state = round(bytes_per_parameter * sum(parameters[part])) + max(transient[part])
                for stage in range(stages):
                    size = in_flight[stage] * sum(kept[part]) + state
                    every[stage, start, end] = (math.fsum(seconds[part]), size)
    fitting = {part: cost for part, cost in every.items() if memory is None or cost[1] <= memory}
    edges = _best_edges(fitting, stages, len(values), order=(0, 1)) or _best_edges(every, stages, len(values), (1, 0))
    if phases:
        forward = [cost.forward for cost in values]
        backward = [whole - cost.forward for whole, cost in zip(seconds, values)]
        allowed = fitting if all(part in fitting for part in zip(range(stages), edges, edges[1:])) else every
        edges = _moved(edges, forward, backward, allowed)
    slowness, sizes = zip(*(every[part] for part in zip(range(stages), edges, edges[1:])))
    return Cut([names[edge] for edge in edges[1:-1]], list(slowness), list(sizes), memory)


def multiply_adds(model: BlockList, image_size: int) -> Dict[str, int]:
    """Multiply-adds of one image's forward pass by block: convolutions and linear layers, the rest is small.

    Runs one image through the model in evaluation mode, on the meta device if the model lives there.
    """
    device = next(model.parameters()).device
    with _training(model, False), torch.no_grad(), _counting(model) as counts:
        model(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=device))
    return counts


_Part = Tuple[int, int, int]


def _best_edges(
    parts: Dict[_Part, Tuple[float, int]], stages: int, blocks: int, order: Tuple[int, int]
) -> Optional[List[int]]:
    """The edges 0, ..., `blocks` of consecutive `parts` whose largest cost of kind order[0] is the least.

    Among these, the largest of kind order[1] is the least. In two rounds: the best beginning of a cut by both kinds
    need not be the beginning of the best cut, as a later stage may be slower anyway. None if there is no way.
    """
    for kind in order:
        # (stages made, block behind them) -> (largest cost up to there, edges so far)
        best: Dict[Tuple[int, int], Tuple[float, List[int]]] = {(0, 0): (-math.inf, [0])}
        for (stage, start, end), cost in sorted(parts.items()):
            if (stage, start) in best:
                largest, edges = best[stage, start]
                found = (max(largest, cost[kind]), [*edges, end])
                best[stage + 1, end] = min(best.get((stage + 1, end), found), found)
        if (stages, blocks) not in best:
            return None
        limit, edges = best[stages, blocks]
        parts = {part: cost for part, cost in parts.items() if cost[kind] <= limit}
    return edges


def _moved(edges: List[int], forward: Sequence[float], backward: Sequence[float], allowed: Container) -> List[int]:
    """`edges` after all moves of one by one or two blocks that lower max(forward) + max(backward) over the stages."""

    def slowness(edges: Sequence[int]) -> float:
        stages = [slice(start, end) for start, end in zip(edges, edges[1:])]
        return sum(max(math.fsum(phase[stage]) for stage in stages) for phase in (forward, backward))

    while True:
        moves = [
            [*edges[:place], edges[place] + step, *edges[place + 1 :]]
            for place in range(1, len(edges) - 1)
            for step in (-2, -1, 1, 2)
        ]
        moves = [moved for moved in moves if all(part in allowed for part in zip(itertools.count(), moved, moved[1:]))]
        best = min([edges, *moves], key=slowness)
        if slowness(best) >= slowness(edges):
            return edges
        edges = best


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


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f}" if size >= 1e7 else f"{size / 1e6:.1f}"


def _listed(items: List[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))
