"""A plan of a recipe on a machine as numbers, from which text, JSON and picture are made."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

from common.errors import UserError
from parallel.exchange import variants
from recipe.batch import Lengths, lengths, planned, settled, training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.settled import image_size
from recipe.shares import mean_sums
from tools.planning import scaling, workload
from tools.planning.machine import Machine
from tools.planning.scaling import Row
from tools.planning.workload import Widest, Workload

STAGES = (1, 2, 4, 8)  # for which the widest model is found, as GPipe's paper does
FILE_BYTES = 115_400  # of an average training image of ImageNet: 147.9 GB of 1,281,167 files


class Stage(NamedTuple):
    """A device of a replica.

    blocks: their names.
    parameters: of these.
    multiply_adds: of one image, forward, backward and recomputed.
    state_bytes: of the parameters and all that belongs to them.
    activation_bytes: in the recipe.
    activation_bytes_kept: without recomputation.
    activation_bytes_recomputed: with recomputation of all blocks.
    """

    blocks: List[str]
    parameters: int
    multiply_adds: int
    state_bytes: int
    activation_bytes: int
    activation_bytes_kept: int
    activation_bytes_recomputed: int


class Input(NamedTuple):
    """Needs of all replicas for their images, and the cores that there are.

    file_bytes_per_second: of files as large as ImageNet's; None where images are no files.
    device_bytes_per_second: of decoded images.
    cores: to decode files; None where images are no files.
    cores_there: of all devices.
    """

    images_per_second: float
    file_bytes_per_second: Optional[float]
    device_bytes_per_second: float
    cores: Optional[float]
    cores_there: float


class Summary(NamedTuple):
    """A plan.

    batch: of the recipe.
    workload: at the largest size of the images.
    stages: devices of a replica.
    available: bytes of a device.
    widest: empty for models without a width.
    widest_1f1b: empty where gpipe is not the schedule.
    exchange: seconds by method.
    step: on the replicas that the recipe, or the launcher, names.
    scaling: steps on 1 to 4,096 replicas.
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
    input: Input
    step: Row
    scaling: List[Row]

    @property
    def fits(self) -> bool:
        """Return whether each stage fits into the memory of its device."""
        needed = [stage.state_bytes + stage.activation_bytes for stage in self.stages]
        return max(needed) <= self.available

    @property
    def width(self) -> Optional[float]:
        """Return the model's width multiplier; None for a family that has none."""
        return getattr(self.recipe.model, "width", None)


def make(recipe: Recipe, machine: Machine, train_images: Optional[int] = None) -> Summary:
    """Plan a recipe. Takes well below a second.

    Args:
        recipe: that is trained.
        machine: that trains it.
        train_images: that were counted; None takes as many as the recipe expects.

    Raises:
        ConfigError: the recipe is impossible.
    """
    batch = planned(recipe)
    # `batch.micro: auto` has been decided by the plan: the rest needs a number.
    recipe = settled(recipe, batch.micro)
    # Images may grow during training: the largest decide on memory and on the step.
    by_size = {size: workload.of(recipe, size) for size in training_image_sizes(recipe)}
    largest = by_size[max(by_size)]
    if train_images is None:
        train_images = recipe.data.images("train")

    def row(replicas: int) -> Row:
        """Return the step on so many replicas."""
        return _row(recipe, machine, replicas, by_size=by_size, train_images=train_images)

    step = row(batch.replicas)
    widest, widest_1f1b = _widest(recipe, machine, batch)
    return Summary(
        recipe=recipe,
        machine=machine,
        batch=batch,
        workload=largest,
        stages=_stages(recipe, machine.device, batch, largest),
        available=workload.available(recipe, machine, batch),
        widest=widest,
        widest_1f1b=widest_1f1b,
        exchange=_exchange(recipe, machine, batch, largest),
        input=_input(recipe.data.encoded, machine, step, largest.image_size),
        step=step,
        scaling=[row(replicas) for replicas in scaling.REPLICAS],
    )


def _stages(recipe: Recipe, device: str, batch: Batch, work: Workload) -> List[Stage]:
    """Return the devices of a replica, with their memory by the blocks that are recomputed.

    Args:
        recipe: that is trained.
        device: kind of the devices.
        batch: of the recipe.
        work: of the recipe.
    """
    # Memory is shown for all three, as recomputing is the remedy where a model does not fit.
    as_said = workload.by_stage(recipe, device, batch, work)
    nothing = workload.by_stage(recipe, device, batch, work, wanted=False)
    everything = workload.by_stage(recipe, device, batch, work, wanted=True)
    stages = []
    for number, part in enumerate(work.stages):
        stage = Stage(
            blocks=part.names,
            parameters=part.parameters,
            multiply_adds=part.multiply_adds,
            state_bytes=as_said[number].state,
            activation_bytes=as_said[number].activations,
            activation_bytes_kept=nothing[number].activations,
            activation_bytes_recomputed=everything[number].activations,
        )
        stages.append(stage)
    return stages


def _widest(
    recipe: Recipe,
    machine: Machine,
    batch: Batch,
) -> Tuple[List[Widest], List[Widest]]:
    """Find the widest models, in the recipe's schedule and, where that is gpipe, in 1f1b."""
    if "width" not in type(recipe.model).model_fields:
        return [], []
    widest = [workload.widest(recipe, machine, batch, stages) for stages in STAGES]
    if machine.device == "ipu" or recipe.parallel.schedule != "gpipe":
        return widest, []
    # 1f1b keeps fewer micro batches in flight than gpipe, so wider models fit.
    other = workload.changed(recipe, "parallel", schedule="1f1b")
    return widest, [workload.widest(other, machine, batch, stages) for stages in STAGES]


def _exchange(
    recipe: Recipe,
    machine: Machine,
    batch: Batch,
    work: Workload,
) -> Dict[str, float]:
    """Return the seconds of an exchange by each method, with the recipe's keys.

    Args:
        recipe: whose keys of `exchange` the methods take over.
        machine: whose links are used.
        batch: of the recipe.
        work: of the recipe.
    """
    seconds = {}
    for method in variants(recipe.exchange):
        # In tree order a replica may send several partial sums.
        sums = mean_sums(batch.shares) if method.section.in_tree else 1.0
        seconds[method.name] = scaling.exchange(machine, method, batch.replicas, work, sums)
    return seconds


def _input(
    encoded: bool,
    machine: Machine,
    step: Row,
    size: int,
) -> Input:
    """Return the needs of all replicas for their images.

    Args:
        encoded: these are files.
        machine: that has the cores.
        step: of all replicas.
        size: pixels a side.
    """
    rate = step.images_per_second
    return Input(
        images_per_second=rate,
        file_bytes_per_second=rate * FILE_BYTES if encoded else None,
        device_bytes_per_second=rate * 3 * size**2,
        cores=rate / machine.decode.value if encoded else None,
        cores_there=machine.cores * step.devices,
    )


def _row(
    recipe: Recipe,
    machine: Machine,
    replicas: int,
    by_size: Dict[int, Workload],
    train_images: Optional[int],
) -> Row:
    """Predict a step at the largest size of the images, and the hours of training at all sizes.

    Hours are left out where they are not known.

    Args:
        recipe: that is trained.
        machine: that trains it.
        replicas: of the model.
        by_size: workload by pixels a side.
        train_images: in an epoch; None where it is not known.
    """
    steps = {}
    for size, work in by_size.items():
        steps[size] = scaling.predict(recipe, machine, replicas, work)
    row = steps[max(steps)]
    if train_images is None:
        return row
    # Many replicas may need a larger batch, and then the run has fewer steps.
    grown = workload.changed(recipe, "batch", global_=row.global_batch)
    try:
        length = lengths(grown, train_images)
    except UserError:  # the batch is too large for them
        return row
    seconds_by_size = {size: step.seconds for size, step in steps.items()}
    return row._replace(hours=_training_seconds(recipe, length, seconds_by_size) / 3600)


def _training_seconds(recipe: Recipe, length: Lengths, by_size: Dict[int, float]) -> float:
    """Return the seconds of a whole run. by_size: seconds of a step, by the size of its images."""
    # Each size is shown from its first epoch on, until the next one is or the run ends.
    sizes = recipe.data.image_sizes or [[0, image_size(recipe.model)]]
    starts = [epoch * length.steps_per_epoch for epoch, _ in sizes]
    ends = [*starts[1:], length.total]
    seconds = 0.0
    for (_, pixels), start, end in zip(sizes, starts, ends):
        # A size may begin after the run has ended.
        count = max(0, min(end, length.total) - start)
        seconds += count * by_size[pixels]
    return seconds
