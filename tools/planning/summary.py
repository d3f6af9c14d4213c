"""A plan of a recipe on a machine as numbers, from which text, JSON and picture are made."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional

from common.errors import UserError
from parallel.exchange import variants
from recipe.batch import lengths, planned, settled, training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.shares import mean_sums
from tools.planning import scaling, workload
from tools.planning.machine import Machine
from tools.planning.scaling import Row
from tools.planning.workload import Widest, Workload

STAGES = (1, 2, 4, 8)  # for which the widest model is found, as GPipe's paper does
FILE_BYTES = 115_400  # of an average training image of ImageNet: 147.9 GB of 1,281,167 files


class Stage(NamedTuple):
    """A device of a replica. activation_bytes: in the recipe, without and with recomputation of all blocks."""

    blocks: List[str]
    parameters: int
    multiply_adds: int
    state_bytes: int
    activation_bytes: int
    activation_bytes_kept: int
    activation_bytes_recomputed: int


class Summary(NamedTuple):
    """A plan. available: bytes of a device. step: on the replicas that the recipe, or the launcher, names.

    widest: empty for models without a width. widest_1f1b: empty where gpipe is not the schedule. input: of all
    replicas; bytes of files, and cores to decode them, are None where images are no files.
    """

    recipe: Recipe
    machine: Machine
    batch: Batch
    workload: Workload
    stages: List[Stage]
    available: float
    widest: List[Widest]
    widest_1f1b: List[Widest]
    exchange: Dict[str, float]
    input: Dict[str, Optional[float]]
    step: Row
    scaling: List[Row]

    @property
    def fits(self) -> bool:
        return max(stage.state_bytes + stage.activation_bytes for stage in self.stages) <= self.available


def make(recipe: Recipe, machine: Machine) -> Summary:
    """The plan of `recipe` on `machine`. Takes well below a second. Raises ConfigError for an impossible recipe."""
    batch = planned(recipe)
    recipe = settled(recipe, batch.micro)
    by_size = {size: workload.of(recipe, size) for size in training_image_sizes(recipe)}
    work = by_size[max(by_size)]
    step, *rows = (_row(recipe, machine, replicas, by_size) for replicas in (batch.replicas, *scaling.REPLICAS))
    recomputed = [workload.by_stage(recipe, machine.device, batch, work, wanted) for wanted in (None, False, True)]
    stages = []
    for stage, (state, own), (_, kept), (_, again) in zip(work.stages, *recomputed):
        stages.append(Stage(stage.names, stage.parameters, stage.multiply_adds, state, own, kept, again))
    widest, widest_1f1b = [], []
    if "width" in type(recipe.model).model_fields:
        widest = [workload.widest(recipe, machine, batch, count) for count in STAGES]
        if machine.device != "ipu" and recipe.parallel.schedule == "gpipe":
            other = workload.changed(recipe, "parallel", schedule="1f1b")
            widest_1f1b = [workload.widest(other, machine, batch, count) for count in STAGES]
    rate, encoded = step.images_per_second, recipe.data.encoded
    images = {
        "images_per_second": rate,
        "file_bytes_per_second": rate * FILE_BYTES if encoded else None,
        "device_bytes_per_second": rate * 3 * work.image_size**2,
        "cores": rate / machine.decode.value if encoded else None,
        "cores_there": machine.cores * step.devices,
    }
    methods = {}
    for each in variants(recipe.exchange):
        sums = mean_sums(batch.shares) if each.section.in_tree else 1.0
        methods[each.name] = scaling.exchange(machine, each, batch.replicas, work, sums)
    available = workload.available(recipe, machine, batch)
    return Summary(recipe, machine, batch, work, stages, available, widest, widest_1f1b, methods, images, step, rows)


def _row(recipe: Recipe, machine: Machine, replicas: int, by_size: Dict[int, Workload]) -> Row:
    """A step at the largest size of the images, with the hours of training at all sizes, where they are known."""
    steps = {size: scaling.predict(recipe, machine, replicas, work) for size, work in by_size.items()}
    row, images = steps[max(steps)], recipe.data.images("train")
    if images is None:
        return row
    try:
        length = lengths(workload.changed(recipe, "batch", global_=row.global_batch), images)
    except UserError:  # the batch is too large for them
        return row
    sizes = recipe.data.image_sizes or [[0, recipe.model.image_size]]
    firsts = [first * length.steps_per_epoch for first, _ in sizes]
    seconds = 0.0
    for (_, pixels), first, end in zip(sizes, firsts, [*firsts[1:], length.total]):
        seconds += max(0, min(end, length.total) - first) * steps[pixels].seconds
    return row._replace(hours=seconds / 3600)
