"""Work, parameters and bytes of each device, by stage; and the widest model that fits. Needs no torch."""

from __future__ import annotations

import functools
from typing import Container, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from common.errors import ConfigError
from models import balance, shapes
from models.shapes import BlockShape
from recipe.batch import divide, training_image_sizes
from recipe.checks import bound_to_cut
from recipe.config import Model, Recipe
from recipe.division import Batch
from recipe.ipu import options, rules
from tools.planning.machine import Machine

_Whole = TypeVar("_Whole", Recipe, Machine)
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_BACKWARD = 2  # of backward in forward passes: the gradients of input and weights cost one each
_GRADIENT = 4  # bytes: gradients of micro batches add up in float32
_TILES = 1472  # of an IPU, Mk2 and Bow alike
_GRID = 0.05  # of the width multipliers that are tried, up to 64


class StageWork(NamedTuple):
    """The blocks of a device. multiply_adds: of one image, forward, backward and recomputed."""

    names: List[str]
    multiply_adds: int
    parameters: int
    layers: int


class Workload(NamedTuple):
    """A recipe's model on the devices of one replica. cut: its origin. gradient_bytes: of one value, as exchanged."""

    image_size: int
    shapes: Dict[str, BlockShape]
    stages: List[StageWork]
    cut: str
    recomputed: FrozenSet[str]
    gradient_bytes: int = _GRADIENT

    @property
    def parameters(self) -> int:
        return sum(shape.parameters for shape in self.shapes.values())

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one image's forward pass."""
        return sum(shape.multiply_adds for shape in self.shapes.values())

    @property
    def imbalance(self) -> float:
        """Share by which the slowest stage takes longer than the mean of all: 0 for an even cut."""
        work = [stage.multiply_adds for stage in self.stages]
        return max(work) * len(work) / sum(work) - 1


def of(recipe: Recipe, image_size: Optional[int] = None) -> Workload:
    """The workload of a recipe at an image size (the largest of training), cut as it says or by multiply-adds.

    Raises ConfigError: cut points that the model does not have, or more stages than blocks.
    """
    size, parallel = image_size or max(training_image_sizes(recipe)), recipe.parallel
    found = shapes.blocks(recipe.model, size)
    able, again = sum(shape.parameters > 0 for shape in found.values()), recomputed(recipe, list(found))
    if parallel.parts > able:
        raise ConfigError(f"parallel.stages: {parallel.parts} parts are more than the {able} blocks with parameters")
    cuts, origin = _cuts(recipe, size)
    try:
        divided = balance.split_names(list(found), cuts)
    except ValueError as error:
        raise ConfigError(f"parallel.split: {error}") from None
    stages = []
    for stage in range(parallel.stages):
        # A device has every `stages`-th part, where there are more parts than devices.
        names = [name for part in divided[stage :: parallel.stages] for name in part]
        passes = sum(found[name].multiply_adds * (1 + _BACKWARD + (name in again)) for name in names)
        parameters, layers = (sum(getattr(found[name], key) for name in names) for key in ("parameters", "layers"))
        stages.append(StageWork(names, passes, parameters, layers))
    return Workload(size, found, stages, origin, again)


def changed(whole: _Whole, section: str, **keys: object) -> _Whole:
    """A recipe or machine with other values of some keys of a section."""
    return whole.model_copy(update={section: getattr(whole, section).model_copy(update=keys)})


def recomputed(recipe: Recipe, names: List[str], wanted: Optional[bool] = None) -> FrozenSet[str]:
    """The blocks that are computed again; `wanted` takes the place of the recipe's own answer."""
    chosen = recipe.parallel.recompute if wanted is None else wanted
    if isinstance(chosen, list):
        return frozenset(chosen)
    kept = set(recipe.ipu.keep_activations) if recipe.run.device == "ipu" else set()
    return frozenset(name for name in names if name not in kept) if chosen else frozenset()


def _compute_type(recipe: Recipe, device: str) -> str:
    """Type of activations on a device of that kind."""
    return "float32" if recipe.precision.compute == "auto" and device == "cpu" else rules.compute_dtype(recipe)


def state_bytes(recipe: Recipe, device: str) -> int:
    """Bytes of a parameter: weight, the optimizer's slots, gradient, working copy, float32 scratch and averages."""
    kind = _compute_type(recipe, device)
    weights, compute = _SIZES[recipe.precision.weights], _SIZES[kind]
    slots = [weights if slot.half else 4 for slot in recipe.optimizer.slots.values()]
    total = weights + sum(slots) + _GRADIENT
    if device == "ipu":  # averages are the host's, and PopART steps in place
        return total
    copied = kind != recipe.precision.weights
    scratch = 0
    if recipe.optimizer.scratch and (device != "cpu" or copied or compute != 4):  # else it steps in place
        scratch = 4 * (len(slots) + (not (copied and compute == 4)))  # a float32 working copy serves for the weights
    averages = 4 * sum(decay is not None for decay in (recipe.average.step_decay, recipe.average.epoch_decay))
    return total + compute * copied + scratch + averages


def _cuts(recipe: Recipe, size: int) -> tuple:
    """Names of the blocks that open parts after the first, and where they come from."""
    parallel = recipe.parallel
    if parallel.parts == 1:
        return [], "one stage"
    if isinstance(parallel.split, list):
        return parallel.split, "as the recipe says"
    costs = shapes.costs(recipe.model, size, micro=1, itemsize=1)
    batch = divide(recipe)
    cuts = balance.balance(costs, parallel.parts, in_flight=[batch.accumulation] * parallel.parts).cuts
    counted = parallel.split == "counted" or recipe.run.device == "ipu" or bound_to_cut(recipe, batch.replicas)
    return cuts, f"balanced by multiply-adds{'' if counted else '; the run measures its blocks instead'}"


class Widest(NamedTuple):
    """The largest width multiplier that fits on `stages` devices; None: none does."""

    stages: int
    width: Optional[float]
    parameters: int
    bytes: int


def available(recipe: Recipe, machine: Machine, batch: Batch) -> float:
    """Bytes of a device, without those of an IPU's tiles that only move data."""
    moving = machine.device == "ipu" and recipe.run.device == "ipu" and options.overlaps(recipe, batch)
    return machine.memory.value * (1 - recipe.ipu.io_tiles / _TILES * moving)


def by_stage(
    recipe: Recipe, device: str, batch: Batch, work: Workload, wanted: Optional[bool] = None
) -> List[Tuple[int, int]]:
    """Bytes of each device of a replica: parameters and what belongs to them; activations of micro batches in flight.

    Args: device: its kind. wanted: as for `recomputed`.
    """
    again = recomputed(recipe, list(work.shapes), wanted)
    each, state = _SIZES[_compute_type(recipe, device)] * batch.micro, state_bytes(recipe, device)
    found = []
    for stage, count in zip(work.stages, in_flight(recipe, device, batch, len(work.stages))):
        *_, (parameters, kept, once) = elements(stage.names, work.shapes, again, device)
        found.append((state * parameters, each * (count * kept + once)))
    return found


def in_flight(recipe: Recipe, device: str, batch: Batch, stages: int) -> List[int]:
    """Micro batches of which each stage keeps activations at once.

    An IPU's pipeline has a forward and a backward pass of each stage in turn, so stage s of K keeps 2 (K - 1 - s) + 1.
    Elsewhere a device that has several parts is taken to keep as many of all as of its first.
    """
    parallel = recipe.parallel
    if stages == 1 or parallel.schedule == "sharded":
        return [1] * stages
    if device == "ipu":
        return [2 * (stages - 1 - stage) + 1 for stage in range(stages)]
    return parallel.model_copy(update={"stages": stages}).in_flight(batch.accumulation)[:stages]


def widest(recipe: Recipe, machine: Machine, batch: Batch, stages: int) -> Widest:
    """The widest model whose stages fit, cut where memory is most even: GPipe, 1811.06965, table 1."""
    limit, found = available(recipe, machine, batch), Widest(stages, None, 0, 0)
    low, high = 0, round(64 / _GRID) + 1
    while high - low > 1:
        middle = (low + high) // 2
        model = recipe.model.model_copy(update={"width": middle * _GRID})
        size, parameters = _smallest(recipe, machine.device, batch, model, stages)
        if size <= limit:
            low, found = middle, Widest(stages, middle * _GRID, parameters, size)
        else:
            high = middle
    return found


def _smallest(recipe: Recipe, device: str, batch: Batch, model: Model, stages: int) -> Tuple[int, int]:
    """Bytes of the fullest device under the best cut for memory, and the model's parameters."""
    found = shapes.blocks(model, max(training_image_sizes(recipe)))
    names, held = list(found), in_flight(recipe, device, batch, stages)
    each, state = _SIZES[_compute_type(recipe, device)] * batch.micro, state_bytes(recipe, device)
    parts = [list(elements(names[at:], found, recomputed(recipe, names), device)) for at in range(len(names))]

    @functools.lru_cache(maxsize=None)
    def fullest(stage: int, start: int) -> int:
        """Least bytes of the fullest of the stages from `stage` on, whose first block is `start`."""
        later = stages - stage - 1
        sizes = [state * parameters + each * (held[stage] * kept + once) for parameters, kept, once in parts[start]]
        if later == 0:
            return sizes[-1]
        ends = range(start + 1, len(names) - later + 1)
        return min(max(size, fullest(stage + 1, end)) for size, end in zip(sizes, ends))

    return fullest(0, 0), parts[0][-1][0]


def elements(
    names: Sequence[str], found: Dict[str, BlockShape], again: Container[str], device: str
) -> Iterator[Tuple[int, int, int]]:
    """After each of consecutive blocks: parameters, and elements an image kept of each micro batch in flight and once.

    Of recomputed blocks only inputs are kept in flight. IPUs recompute a stage as a whole, others a block at a time.
    """
    inputs = dict(zip(found, [0, *(shape.output for shape in found.values())]))
    whole, recomputes = device == "ipu", False
    parameters = kept = once = 0
    for name in names:
        shape = found[name]
        parameters += shape.parameters
        if name not in again:
            kept += shape.saved
        else:
            kept += 0 if whole and recomputes else inputs[name]
            once = once + shape.saved if whole else max(once, shape.saved)
            recomputes = True
        yield parameters, kept, once
