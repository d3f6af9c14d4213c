"""Work, parameters and bytes of each device: a recipe's blocks by stage. Needs no torch."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, Optional

from models import balance, shapes
from models.shapes import BlockShape
from recipe import ipu
from recipe.batch import divide, training_image_sizes
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.errors import ConfigError

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_BACKWARD = 2  # of backward in forward passes: the gradients of input and weights cost one each
_GRADIENT = 4  # bytes: gradients of micro batches add up in float32


class StageWork(NamedTuple):
    """The blocks that one device computes. multiply_adds: of one image, forward, backward and recomputed."""

    names: List[str]
    multiply_adds: int
    parameters: int
    layers: int


class Workload(NamedTuple):
    """A recipe's model on the devices of one replica.

    cut: its origin in words. recomputed: blocks. gradient_bytes: of one value, as exchanged.
    """

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
    """The workload of a recipe, cut at its own cut points, else where multiply-adds are balanced.

    Args:
        image_size: of the training images; None: the largest that the recipe trains with.

    Raises:
        ConfigError: cut points that the model does not have, or more stages than blocks.
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


def recomputed(recipe: Recipe, names: List[str], wanted: Optional[bool] = None) -> FrozenSet[str]:
    """The blocks that are computed again; `wanted` takes the place of the recipe's own answer."""
    chosen = recipe.parallel.recompute if wanted is None else wanted
    if isinstance(chosen, list):
        return frozenset(chosen)
    kept = set(recipe.ipu.keep_activations) if recipe.run.device == "ipu" else set()
    return frozenset(name for name in names if name not in kept) if chosen else frozenset()


def _compute_type(recipe: Recipe, device: str) -> str:
    """Type of activations on a device of that kind."""
    return "float32" if recipe.precision.compute == "auto" and device == "cpu" else ipu.compute_dtype(recipe)


def compute_bytes(recipe: Recipe, device: str) -> int:
    """Bytes of an activation on a device of that kind."""
    return _SIZES[_compute_type(recipe, device)]


def state_bytes(recipe: Recipe, device: str) -> int:
    """Bytes of a parameter: weight, the optimizer's slots, gradient, working copy, float32 scratch and averages."""
    weights, compute = _SIZES[recipe.precision.weights], compute_bytes(recipe, device)
    slots = [weights if slot.half else 4 for slot in recipe.optimizer.slots.values()]
    total = weights + sum(slots) + _GRADIENT
    if device == "ipu":  # averages are the host's, and PopART steps in place
        return total
    copied = _compute_type(recipe, device) != recipe.precision.weights
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
