"""A plan of a recipe on a machine as numbers, from which text and picture are made."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional

from recipe.batch import lengths, planned, training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.errors import UserError
from tools.planning import memory, scaling, workload
from tools.planning.machine import Machine
from tools.planning.memory import StageBytes, Widest
from tools.planning.scaling import Row
from tools.planning.workload import Workload

STAGES = (1, 2, 4, 8)  # for which the widest model is found, as GPipe's paper does
FILE_BYTES = 115_400  # of an average training image of ImageNet: 147.9 GB of 1,281,167 files


class Memory(NamedTuple):
    """Bytes of each stage's device as the recipe has it, without and with recomputation of all blocks; `available`."""

    recipe: List[StageBytes]
    plain: List[StageBytes]
    recomputed: List[StageBytes]
    available: float

    @property
    def fits(self) -> bool:
        return max(stage.total for stage in self.recipe) <= self.available


class Input(NamedTuple):
    """Input of all replicas: bytes a second from files (None: not from files) and to devices, and cores to decode."""

    images_per_second: float
    file_bytes_per_second: Optional[float]
    device_bytes_per_second: float
    cores: Optional[float]
    cores_there: float


class Summary(NamedTuple):
    """A plan. own: the step on the replicas that the recipe, or the launcher, names. hours: of each of `rows`.

    widest_1f1b: as `widest`, under that schedule; empty where the recipe's is no other, and on IPUs.
    """

    recipe: Recipe
    machine: Machine
    batch: Batch
    workload: Workload
    memory: Memory
    widest: List[Widest]
    widest_1f1b: List[Widest]
    methods: Dict[str, float]
    input: Input
    own: Row
    rows: List[Row]
    hours: List[Optional[float]]
    own_hours: Optional[float]


def make(recipe: Recipe, machine: Machine) -> Summary:
    """The plan of `recipe` on `machine`. Takes well below a second. Raises ConfigError for an impossible recipe."""
    batch = planned(recipe)
    by_size = {size: workload.of(recipe, size) for size in training_image_sizes(recipe)}
    work = by_size[max(by_size)]
    rows = scaling.table(recipe, machine, work)
    own = scaling.predict(recipe, machine, batch.replicas, work)
    return Summary(
        recipe,
        machine,
        batch,
        work,
        _memory(recipe, machine, batch, work),
        _widest(recipe, machine, batch),
        _widest_1f1b(recipe, machine, batch),
        scaling.methods(recipe, machine, batch.replicas, work),
        _input(recipe, machine, own, work),
        own,
        rows,
        [_hours(recipe, machine, row, by_size) for row in rows],
        _hours(recipe, machine, own, by_size),
    )


def _widest(recipe: Recipe, machine: Machine, batch: Batch) -> List[Widest]:
    return [memory.widest(recipe, machine, batch, stages) for stages in STAGES]


def _widest_1f1b(recipe: Recipe, machine: Machine, batch: Batch) -> List[Widest]:
    if machine.device == "ipu" or recipe.parallel.schedule != "gpipe":
        return []
    parallel = recipe.parallel.model_copy(update={"schedule": "1f1b"})
    return _widest(recipe.model_copy(update={"parallel": parallel}), machine, batch)


def _memory(recipe: Recipe, machine: Machine, batch: Batch, work: Workload) -> Memory:
    def with_(wanted: Optional[bool]) -> List[StageBytes]:
        again = workload.recomputed(recipe, list(work.shapes), wanted)
        return memory.by_stage(recipe, machine.device, batch, work, again)

    return Memory(with_(None), with_(False), with_(True), memory.available(recipe, machine, batch))


def _input(recipe: Recipe, machine: Machine, own: Row, work: Workload) -> Input:
    rate, files = own.images_per_second, recipe.data.files
    return Input(
        rate,
        rate * FILE_BYTES if files else None,
        rate * 3 * work.image_size**2,
        rate / machine.decode.value if files else None,
        machine.cores * own.devices,
    )


def _hours(recipe: Recipe, machine: Machine, row: Row, by_size: Dict[int, Workload]) -> Optional[float]:
    """Hours of training; None where the number of images is not known, or so large a batch cannot be trained with.

    Epochs with other image sizes take other times, those of images whose size changes in the midst of an epoch are
    counted in whole steps.
    """
    images = recipe.data.images("train")
    if images is None:
        return None
    size = recipe.batch.model_copy(update={"global_": row.global_batch})
    try:
        length = lengths(recipe.model_copy(update={"batch": size}), images)
    except UserError:
        return None
    seconds = 0.0
    sizes = recipe.data.image_sizes or [[0, recipe.model.image_size]]
    firsts = [first * length.steps_per_epoch for first, _ in sizes]
    for (_, pixels), first, end in zip(sizes, firsts, [*firsts[1:], length.total]):
        step = scaling.predict(recipe, machine, row.replicas, by_size[pixels]).seconds
        seconds += max(0, min(end, length.total) - first) * step
    return seconds / 3600
