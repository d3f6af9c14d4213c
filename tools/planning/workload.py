"""Work, parameters and bytes of each device, by stage; and the widest model that fits.

Needs no torch.
"""

from __future__ import annotations

import functools
import math
from typing import (
    Container,
    Dict,
    FrozenSet,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from common.errors import ConfigError
from models import balance, shapes
from models.shapes import BlockShape
from recipe.batch import divide, training_image_sizes
from recipe.checks import bound_to_cut
from recipe.config import Model, Parallel, Recipe
from recipe.division import Batch
from recipe.ipu import optimizers, options, rules
from tools.planning.machine import Machine

_Whole = TypeVar("_Whole", Recipe, Machine)
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SIZES_OF_IPU = {"torch.float": 4, "torch.half": 2}  # by PopTorch's names
_BACKWARD = 2  # of backward in forward passes: the gradients of input and weights cost one each
_GRADIENT = 4  # bytes: gradients of micro batches add up in float32
_FLOAT32 = 4  # bytes
_TILES = 1472  # of an IPU, Mk2 and Bow alike
_GRID = 0.05  # between the width multipliers that are tried
_WIDEST = 64  # of them


class StageWork(NamedTuple):
    """The blocks of a device.

    names: of the blocks, in their order.
    parameters: of all of them.
    multiply_adds: of one image, forward, backward and recomputed.
    layers: parameters of which replicas that compress updates send a sketch.
    """

    names: List[str]
    multiply_adds: int
    parameters: int
    layers: int


class Workload(NamedTuple):
    """A recipe's model on the devices of one replica.

    image_size: pixels a side.
    shapes: of all blocks, by name.
    stages: work of each device.
    cut: how it was cut into stages.
    recomputed: names of the blocks whose activations are computed again.
    gradient_bytes: of one value, as exchanged.
    """

    image_size: int
    shapes: Dict[str, BlockShape]
    stages: List[StageWork]
    cut: str
    recomputed: FrozenSet[str]
    gradient_bytes: int = _GRADIENT

    @property
    def parameters(self) -> int:
        """Return the parameters of the model."""
        return sum(shape.parameters for shape in self.shapes.values())

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of one image's forward pass."""
        return sum(shape.multiply_adds for shape in self.shapes.values())

    @property
    def imbalance(self) -> float:
        """Return by which share the slowest stage takes longer than the mean: 0 if cut evenly."""
        work = [stage.multiply_adds for stage in self.stages]
        if not sum(work):
            return 0.0
        return max(work) * len(work) / sum(work) - 1


def of(recipe: Recipe, image_size: Optional[int] = None) -> Workload:
    """Return the workload of a recipe, cut as it says or by multiply-adds.

    Args:
        recipe: of the run.
        image_size: pixels a side; None: the largest of training.

    Raises:
        ConfigError: cut points that the model does not have, or more stages than blocks.
    """
    size = image_size or max(training_image_sizes(recipe))
    stage_count = recipe.parallel.stages
    blocks = shapes.blocks(recipe.model, size)
    _check_parts(recipe.parallel.parts, blocks)
    cuts, origin = _cuts(recipe, size)
    try:
        parts = balance.split_names(list(blocks), cuts)
    except ValueError as error:
        raise ConfigError(f"parallel.split: {error}") from None
    again = recomputed(recipe, list(blocks))
    stages = []
    for stage in range(stage_count):
        # A device has every `stages`-th part, where there are more parts than devices.
        names = [name for part in parts[stage::stage_count] for name in part]
        stages.append(_stage_work(names, blocks, again))
    return Workload(size, blocks, stages, origin, again)


def _check_parts(parts: int, blocks: Dict[str, BlockShape]) -> None:
    """Refuse more parts than blocks with parameters. Raises ConfigError."""
    trained = sum(shape.parameters > 0 for shape in blocks.values())
    # No part is without parameters: see models/balance.py.
    if parts > trained:
        raise ConfigError(
            f"parallel.stages: {parts} parts are more than the {trained} blocks with parameters"
        )


def _stage_work(
    names: List[str],
    blocks: Dict[str, BlockShape],
    again: Container[str],
) -> StageWork:
    """Add up the blocks of a stage. again: the recomputed ones."""
    multiply_adds = 0
    for name in names:
        # A recomputed block has one more forward pass.
        passes = 1 + _BACKWARD + (name in again)
        multiply_adds += passes * blocks[name].multiply_adds
    return StageWork(
        names=names,
        multiply_adds=multiply_adds,
        parameters=sum(blocks[name].parameters for name in names),
        layers=sum(blocks[name].layers for name in names),
    )


def changed(whole: _Whole, section: str, **keys: object) -> _Whole:
    """Return a recipe or machine with other values of some keys of a section.

    Args:
        whole: the recipe or machine.
        section: its name.
        keys: of the section, with their values.
    """
    update = getattr(whole, section).model_copy(update=keys)
    return whole.model_copy(update={section: update})


def recomputed(
    recipe: Recipe,
    names: Sequence[str],
    wanted: Optional[bool] = None,
) -> FrozenSet[str]:
    """Return the blocks that are computed again in the backward pass.

    Args:
        recipe: of the run.
        names: of all blocks.
        wanted: whether all are; None: those that the recipe says.
    """
    chosen = recipe.parallel.recompute if wanted is None else wanted
    if isinstance(chosen, list):
        return frozenset(chosen)
    if not chosen:
        return frozenset()
    kept = recipe.ipu.keep_activations if recipe.run.device == "ipu" else ()
    return frozenset(names).difference(kept)


def _compute_type(recipe: Recipe, device: str) -> str:
    """Return the type of activations on a device of that kind."""
    if recipe.precision.compute == "auto" and device == "cpu":
        return "float32"
    return rules.compute_dtype(recipe)


def state_bytes(recipe: Recipe, device: str) -> int:
    """Return the bytes of a parameter and of all that belongs to it.

    These are the weight, the optimizer's slots, the gradient, the working copy, float32 scratch
    memory and averages.

    Args:
        recipe: of the run.
        device: kind of the device.
    """
    kind = _compute_type(recipe, device)
    weights = _SIZES[recipe.precision.weights]
    compute = _SIZES[kind]
    total = weights + _GRADIENT
    if device == "ipu":  # averages are the host's, and PopART steps in place
        return total + _slot_bytes_of_ipu(recipe)
    total += _slot_bytes(recipe)
    # The module's parameters are a copy where their type is not that of the weights.
    copied = kind != recipe.precision.weights
    if copied:
        total += compute
    # A CPU steps in place where everything is float32.
    if recipe.optimizer.scratch and (device != "cpu" or copied or compute != _FLOAT32):
        total += _FLOAT32 * len(recipe.optimizer.slots)
        if not (copied and compute == _FLOAT32):  # else the working copy serves for the weights
            total += _FLOAT32
    for decay in (recipe.average.step_decay, recipe.average.epoch_decay):
        if decay is not None:
            total += _FLOAT32
    return total


def _slot_bytes(recipe: Recipe) -> int:
    """Return the bytes of the optimizer's slots for a parameter."""
    weights = _SIZES[recipe.precision.weights]
    return sum(weights if slot.half else _FLOAT32 for slot in recipe.optimizer.slots.values())


def _slot_bytes_of_ipu(recipe: Recipe) -> int:
    """Return the bytes of the optimizer's state for a parameter on an IPU."""
    # A recipe for GPUs may be planned on a pod, with an optimizer that has no form there.
    try:
        form = optimizers.optimizer(recipe)
    except ConfigError:
        return _slot_bytes(recipe)
    return sum(_SIZES_OF_IPU[kind.path] for kind in form.state)


def _cuts(recipe: Recipe, size: int) -> Tuple[List[str], str]:
    """Return the blocks that open parts after the first, and where the cut comes from."""
    parallel = recipe.parallel
    if parallel.parts == 1:
        return [], "one stage"
    if isinstance(parallel.split, list):
        return parallel.split, "as the recipe says"
    costs = shapes.costs(recipe.model, size, micro=1, itemsize=1)
    batch = divide(recipe)
    # Memory is no limit here, so these numbers only break ties.
    in_flight = [batch.accumulation] * parallel.parts
    cuts = balance.balance(costs, parallel.parts, in_flight=in_flight).cuts
    counted = parallel.split == "counted" or recipe.run.device == "ipu"
    if counted or bound_to_cut(recipe, batch.replicas):
        return cuts, "balanced by multiply-adds"
    return cuts, "balanced by multiply-adds; the run measures its blocks instead"


class Widest(NamedTuple):
    """The widest model that fits on some devices.

    stages: how many devices these are.
    width: its multiplier; None: no width fits.
    parameters: of that model.
    bytes: of the fullest device.
    """

    stages: int
    width: Optional[float]
    parameters: int
    bytes: int


def available(recipe: Recipe, machine: Machine, batch: Batch) -> float:
    """Return the bytes of a device, without those of an IPU's tiles that only move data.

    Args:
        recipe: of the run.
        machine: that trains it.
        batch: of the recipe.
    """
    memory = machine.memory.value
    # A recipe for GPUs may be planned on a pod: it has no tiles for input.
    on_ipus = machine.device == "ipu" and recipe.run.device == "ipu"
    if on_ipus and options.overlaps(recipe, batch):
        return memory * (1 - recipe.ipu.io_tiles / _TILES)
    return memory


class Held(NamedTuple):
    """Contents of a device's memory for some consecutive blocks.

    kept: elements an image that are kept of each micro batch in flight.
    once: elements an image that are there for one micro batch, while blocks are recomputed.
    """

    parameters: int
    kept: int
    once: int


class _Sizes(NamedTuple):
    """Bytes in a device's memory.

    parameter: of a parameter and all that belongs to it.
    element: of one element an image, for a whole micro batch.
    """

    parameter: int
    element: int

    def state(self, held: Held) -> int:
        """Return the bytes of the parameters that are `held`, and of all that belongs to them."""
        return self.parameter * held.parameters

    def activations(self, held: Held, in_flight: int) -> int:
        """Return the bytes of activations that are `held` with micro batches `in_flight`."""
        return self.element * (in_flight * held.kept + held.once)


def _sizes(recipe: Recipe, device: str, micro: int) -> _Sizes:
    """Return the bytes in the memory of a device of that kind."""
    element = _SIZES[_compute_type(recipe, device)] * micro
    return _Sizes(state_bytes(recipe, device), element)


class StageBytes(NamedTuple):
    """Bytes of a stage.

    state: of parameters and all that belongs to them.
    activations: of the micro batches in flight.
    """

    state: int
    activations: int


def by_stage(
    recipe: Recipe,
    device: str,
    batch: Batch,
    work: Workload,
    wanted: Optional[bool] = None,
) -> List[StageBytes]:
    """Return the bytes of each device of a replica.

    Args:
        recipe: of the run.
        device: its kind.
        batch: of the recipe.
        work: of the recipe.
        wanted: as for `recomputed`.
    """
    again = recomputed(recipe, list(work.shapes), wanted)
    sizes = _sizes(recipe, device, batch.micro)
    counts = in_flight(recipe.parallel, device, batch.accumulation, len(work.stages))
    stages = []
    for stage, count in zip(work.stages, counts):
        # The last one is that of the whole stage.
        *_, held = elements(stage.names, work.shapes, again, device)
        stages.append(StageBytes(sizes.state(held), sizes.activations(held, count)))
    return stages


def in_flight(parallel: Parallel, device: str, accumulation: int, stages: int) -> List[int]:
    """Return the micro batches of which each stage keeps activations at once.

    An IPU's pipeline has a forward and a backward pass of each stage in turn, so stage s of K keeps
    2 (K - 1 - s) + 1. Elsewhere a device that has several parts is taken to keep as many of all as
    of its first.

    Args:
        parallel: section of the recipe.
        device: its kind.
        accumulation: micro batches of a step.
        stages: of the model, which need not be the recipe's.
    """
    if stages == 1 or parallel.schedule == "sharded":
        return [1] * stages
    if device == "ipu":
        return [2 * (stages - 1 - stage) + 1 for stage in range(stages)]
    cut = parallel.model_copy(update={"stages": stages})
    return cut.in_flight(accumulation)[:stages]


def widest(recipe: Recipe, machine: Machine, batch: Batch, stages: int) -> Widest:
    """Find the widest model whose stages fit, cut where memory is most even.

    Source: GPipe, 1811.06965, table 1.

    Args:
        recipe: whose model is widened.
        machine: that trains it.
        batch: of the recipe.
        stages: devices of a replica.
    """
    limit = available(recipe, machine, batch)
    best = Widest(stages, width=None, parameters=0, bytes=0)
    # Bisection over multiples of the grid: the lower one fits, or is 0; the higher one does not.
    low = 0
    high = round(_WIDEST / _GRID) + 1
    while high - low > 1:
        middle = (low + high) // 2
        model = recipe.model.model_copy(update={"width": middle * _GRID})
        size, parameters = _smallest(recipe, machine.device, batch, model, stages)
        if size <= limit:
            low = middle
            best = Widest(stages, middle * _GRID, parameters, size)
        else:
            high = middle
    return best


def _smallest(
    recipe: Recipe,
    device: str,
    batch: Batch,
    model: Model,
    stages: int,
) -> Tuple[int, int]:
    """Return the bytes of the fullest device under the best cut, and the model's parameters.

    Args:
        recipe: with other keys than those of the model.
        device: kind of the devices.
        batch: of the recipe.
        model: section of a wider or narrower model.
        stages: devices of a replica.
    """
    blocks = shapes.blocks(model, max(training_image_sizes(recipe)))
    names = list(blocks)
    again = recomputed(recipe, names)
    sizes = _sizes(recipe, device, batch.micro)
    counts = in_flight(recipe.parallel, device, batch.accumulation, stages)

    # Of most blocks no stage begins with them: one stage begins with the first block only.
    @functools.lru_cache(maxsize=None)
    def span(start: int) -> List[Held]:
        """Return what a stage that begins with `start` holds, for each block that it may end with."""
        return list(elements(names[start:], blocks, again, device))

    # Remembered: many cuts of the first stages leave the same blocks to the later ones.
    @functools.lru_cache(maxsize=None)
    def fullest(stage: int, start: int) -> int:
        """Return the least bytes of the fullest stage from `stage` on, which begins at `start`."""
        totals = (
            sizes.state(held) + sizes.activations(held, counts[stage]) for held in span(start)
        )
        later = stages - stage - 1
        if later == 0:
            return max(totals)
        # Each later stage has a block at least.
        ends = range(start + 1, len(names) - later + 1)
        least = math.inf
        for end, total in zip(ends, totals):
            # With every further block this stage is as full at least: no later end is better.
            if total >= least:
                break
            least = min(least, max(total, fullest(stage + 1, end)))
        assert least < math.inf, "there are fewer blocks than stages"
        return int(least)

    # The whole model is the span from the first block to the last.
    return fullest(0, 0), span(0)[-1].parameters


def elements(
    names: Sequence[str],
    blocks: Dict[str, BlockShape],
    again: Container[str],
    device: str,
) -> Iterator[Held]:
    """Yield what a device holds after each of consecutive blocks.

    Of recomputed blocks only inputs are kept in flight. IPUs recompute a stage as a whole, others a
    block at a time.

    Args:
        names: of the consecutive blocks.
        blocks: of the model.
        again: names of the blocks that are recomputed.
        device: its kind.
    """
    # A block's input is the output of the block before it; the images come from the host.
    outputs = [shape.output for shape in blocks.values()]
    inputs = dict(zip(blocks, [0, *outputs]))
    parameters = 0
    kept = 0
    once = 0
    in_recomputation = False
    for name in names:
        shape = blocks[name]
        parameters += shape.parameters
        if name not in again:
            kept += shape.saved
        elif device == "ipu":
            # Only the input of the first recomputed block is kept: the others follow from it.
            if not in_recomputation:
                kept += inputs[name]
            once += shape.saved
            in_recomputation = True
        else:
            kept += inputs[name]
            once = max(once, shape.saved)
        yield Held(parameters, kept, once)
