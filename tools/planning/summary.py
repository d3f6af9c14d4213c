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
    """Bytes of each stage's device: as in the recipe, without and with recomputation of all blocks; `available`."""

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

    widest: empty for a family of models that has no width.
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
    rows = [scaling.predict(recipe, machine, replicas, work) for replicas in scaling.REPLICAS]
    own = scaling.predict(recipe, machine, batch.replicas, work)
    memories = [
        memory.by_stage(recipe, machine.device, batch, work, workload.recomputed(recipe, list(work.shapes), wanted))
        for wanted in (None, False, True)
    ]
    widest, widest_1f1b = [], []
    has_width = "width" in type(recipe.model).model_fields
    if has_width:
        widest = [memory.widest(recipe, machine, batch, stages) for stages in STAGES]
    if has_width and machine.device != "ipu" and recipe.parallel.schedule == "gpipe":
        parallel = recipe.parallel.model_copy(update={"schedule": "1f1b"})
        other = recipe.model_copy(update={"parallel": parallel})
        widest_1f1b = [memory.widest(other, machine, batch, stages) for stages in STAGES]
    rate, files = own.images_per_second, recipe.data.files
    return Summary(
        recipe,
        machine,
        batch,
        work,
        Memory(*memories, memory.available(recipe, machine, batch)),
        widest,
        widest_1f1b,
        scaling.methods(recipe, machine, batch.replicas, work),
        Input(
            rate,
            file_bytes_per_second=rate * FILE_BYTES if files else None,
            device_bytes_per_second=rate * 3 * work.image_size**2,
            cores=rate / machine.decode.value if files else None,
            cores_there=machine.cores * own.devices,
        ),
        own,
        rows,
        [_hours(recipe, machine, row, by_size) for row in rows],
        _hours(recipe, machine, own, by_size),
    )


def _hours(recipe: Recipe, machine: Machine, row: Row, by_size: Dict[int, Workload]) -> Optional[float]:
    """Hours of training; None where the number of images is not known, or the batch is too large for them."""
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
