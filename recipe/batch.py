"""All arithmetic of a run: global batch = micro batch x accumulation x replicas, and its lengths in
steps.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Sequence, Set

from common.errors import ConfigError, DataError
from common.text import count, printable
from recipe import checks, found_images, shares
from recipe.config import Recipe
from recipe.course import Course
from recipe.division import Batch
from recipe.ipu import plan as ipu_plan
from recipe.ipu import poprun
from recipe.section import Section, as_yaml

_ASSUMED = 32  # images: the most that `batch.micro: auto` takes where nothing is tried
_MOST = 1 << 16  # images of a micro batch that `auto` may take
_UNITS = ("epochs", "steps", "images")  # in which a recipe may give a length
_SPLITS = ("train", "validation")
# Keys that the first lines of a plan describe.
_DESCRIBED = (
    *(f"run.{key}" for key in ("name", "output", *_UNITS)),
    "batch.global",
    "batch.micro",
)


@dataclass(frozen=True)
class Lengths:
    """The run in steps. `dropped` images an epoch are left over after its last whole
    step.
    """

    steps_per_epoch: int
    dropped: int
    total: int
    warmup: int

    def describe(self) -> str:
        """Return one line: epochs, steps, warm-up, images left out."""
        epochs = self.total / self.steps_per_epoch
        return (
            f"{count(self.total, 'step')} = {count(epochs, 'epoch')} x {count(self.steps_per_epoch, 'step')}, "
            f"{self.warmup} of warm-up; "
            f"{count(self.dropped, 'image')} left over in each epoch"
        )


class Description(NamedTuple):
    """The plan that `--dry-run` prints.

    text: of several lines.
    train_images: in an epoch, by which the text gives the length; None where it is not known.
    """

    text: str
    train_images: Optional[int]


def divide(recipe: Recipe, replicas: int | None = None) -> Batch:
    """Divide the images of a step into micro batches and over replicas.

    `batch.micro: auto` is taken as on a CPU: the largest micro batch of at most 32 images that the
    recipe allows, else the smallest above. On GPUs engines/micro_batch.py finds another.

    Args:
        recipe: whose `batch.global` is divided.
        replicas: None takes the recipe's own number, or one where that is auto.

    Raises:
        ConfigError: the batch is no multiple of micro batch x replicas (in tree order, of the micro
            batch), or sections do not go together. The message names the nearest batches.
    """
    replicas = replicas or recipe.parallel.replicas or 1
    if recipe.batch.micro is not None:
        return _with_micro_batch(recipe, recipe.batch.micro, replicas)
    # Sections may refuse some sizes: a pipeline needs several micro batches, mixing needs partners.
    sizes = _micro_batch_sizes(recipe, replicas)
    small = [micro for micro in sizes if micro <= _ASSUMED]
    large = sizes[len(small) :]
    in_order = [*reversed(small), *large]
    for micro in in_order:
        with contextlib.suppress(ConfigError):
            return _with_micro_batch(recipe, micro, replicas)
    # No micro batch mends what is wrong: this raises the fault of the first.
    return _with_micro_batch(recipe, in_order[0], replicas)


def candidates(recipe: Recipe, replicas: int) -> List[int]:
    """Return the micro batches that `batch.micro: auto` may take, ascending.

    They divide a replica's share of `batch.global`, and so of every batch of `batch.schedule`; where
    replicas are added up in tree order, the whole batch. They pass the checks across sections.

    Args:
        recipe: whose `batch.global` is divided.
        replicas: of the run.
    """
    allowed = []
    for micro in _micro_batch_sizes(recipe, replicas):
        with contextlib.suppress(ConfigError):
            _with_micro_batch(recipe, micro, replicas)
            allowed.append(micro)
    return allowed


def settled(recipe: Recipe, micro: int | None) -> Recipe:
    """Return `recipe` with `micro` images in the place of `batch.micro: auto`."""
    batch = recipe.batch.model_copy(update={"micro": micro})
    return recipe.model_copy(update={"batch": batch})


def _micro_batch_sizes(recipe: Recipe, replicas: int) -> List[int]:
    """Return the divisors of a replica's share of `batch.global`, ascending; at least 1.

    In tree order: of the whole batch.
    """
    images = recipe.batch.global_
    # In tree order replicas may have different numbers of micro batches.
    if not recipe.exchange.in_tree:
        images = images // replicas if images % replicas == 0 else 1
    largest = min(images, _MOST)
    return [1, *(micro for micro in range(2, largest + 1) if images % micro == 0)]


def _with_micro_batch(recipe: Recipe, micro: int, replicas: int) -> Batch:
    """Divide the images of a step as `divide` does, with a given micro batch."""
    images = recipe.batch.global_
    # Sums in tree order do not depend on shares, so these may differ. Other sums weight replicas
    # alike, which is the mean over images for equal shares only.
    in_tree = recipe.exchange.in_tree
    unit = micro if in_tree else micro * replicas
    if images % unit:
        product = "" if in_tree else f" x {count(replicas, 'replica')} = {unit}"
        raise ConfigError(
            f"batch.global {images} is not a multiple of {micro} micro{product}; "
            f"nearest: {_nearest(images, unit)}"
        )
    micro_batches = images // micro
    if micro_batches < replicas:
        few = f"batch.global {images} is {count(micro_batches, 'micro batch', 'micro batches')} of {micro}"
        raise ConfigError(
            f"{few}, too few for {count(replicas, 'replica')}; lower batch.micro or start fewer"
        )
    accumulation = micro_batches // replicas
    batch = Batch(images, micro, accumulation, replicas, recipe.parallel.stages)
    # The pipeline needs some micro batches on each replica. Where there are too few, `check` says
    # so.
    least = min(recipe.parallel.least, accumulation)
    batch = batch.with_shares(shares.even(micro_batches, replicas, least))
    checks.check(recipe, batch)
    return batch


def _nearest(images: int, unit: int) -> str:
    """Return the multiples of `unit` next to `images`, as text; the one above where none is below."""
    below = images // unit * unit
    above = below + unit
    return f"{below} or {above}" if below else f"{above}"


def whole_pod(recipe: Recipe) -> Recipe:
    """Return `recipe` on all IPUs of its pod, if neither it nor poprun gives a number of replicas.

    Raises:
        ConfigError: the stages of a replica do not divide the pod.
    """
    # Who starts poprun, or names replicas, may want a part of the pod only.
    pod = recipe.ipu.pod
    stages = recipe.parallel.stages
    if (
        recipe.run.device != "ipu"
        or pod is None
        or recipe.parallel.replicas
        or poprun.launched_by(os.environ)
    ):
        return recipe
    if pod % stages:
        raise ConfigError(
            f"ipu.pod {pod} is not a multiple of parallel.stages {stages}; correct one of them"
        )
    parallel = recipe.parallel.model_copy(update={"replicas": pod // stages})
    return recipe.model_copy(update={"parallel": parallel})


def planned(recipe: Recipe) -> Batch:
    """Return the batch of `recipe` as a process that this environment starts would divide it.

    Raises:
        ConfigError: see `divide`; or poprun started what does not fit the recipe.
    """
    # Other launchers give each rank its place, which training/run.py divides by; poprun's count of
    # replicas is known to every process.
    launched = poprun.launched_by(os.environ) if recipe.run.device == "ipu" else None
    if launched is None:
        return divide(recipe)
    poprun.check_launched(recipe, launched)
    return divide(recipe, launched.replicas)


def lengths(recipe: Recipe, train_images: int) -> Lengths:
    """Return the lengths of a run in steps.

    Args:
        recipe: of the run.
        train_images: in an epoch.

    Raises:
        DataError: there are fewer images than one global batch.
        ConfigError: the warm-up or the delay of the exchange is as long as the run.
    """
    size = recipe.batch.global_
    per_epoch = steps_per_epoch(train_images, size)
    if per_epoch == 0:
        raise DataError(_too_few_images(recipe, train_images))
    # A part of an epoch may round to no step at all.
    total = max(1, _length(recipe.run, "", per_epoch, size))
    warmup = _length(recipe.schedule, "warmup_", per_epoch, size)
    # Schedules divide by the steps after the warm-up.
    if warmup >= total:
        lower = f"schedule.{_given(recipe.schedule, 'warmup_')}"
        fault = f"the warm-up of {count(warmup, 'step')} is not shorter than the run of {total}"
        raise ConfigError(f"{fault}; lower {lower} or raise run.{_given(recipe.run)}")
    delay = recipe.exchange.delay
    if delay >= total:
        fault = f"exchange.delay {delay} is not shorter than the run of {count(total, 'step')}"
        raise ConfigError(
            f"{fault}: no gradient would ever be applied; lower it or raise run.{_given(recipe.run)}"
        )
    return Lengths(
        steps_per_epoch=per_epoch,
        dropped=train_images - per_epoch * size,
        total=total,
        warmup=warmup,
    )


def _too_few_images(recipe: Recipe, train_images: int) -> str:
    """Return the fault of fewer images than one global batch, with a batch that they would fill."""
    # As a whole number of micro batches on each replica, so that the remedy is no fault itself.
    replicas = recipe.parallel.replicas or 1
    unit = (recipe.batch.micro or 1) * replicas
    fitting = train_images // unit * unit
    micro = train_images // replicas
    if fitting:
        remedy = f"batch.global={fitting}"
    elif micro:  # not even one micro batch on each replica
        remedy = f"batch.global={micro * replicas} batch.micro={micro}"
    else:
        remedy = f"use at most {count(train_images, 'replica')}"
    fault = f"batch.global {recipe.batch.global_} is more than the {train_images} training images"
    return f"{fault}; give more images or {remedy}"


def _length(section: Section, prefix: str, per_epoch: int, size: int) -> int:
    """Return in steps the length that a section gives by PREFIXepochs, PREFIXsteps or PREFIXimages."""
    epochs, steps, images = (getattr(section, f"{prefix}{unit}") for unit in _UNITS)
    return in_steps(epochs, steps, images, per_epoch, size)


def _given(section: Section, prefix: str = "") -> str:
    """Return the key by which a section gives the length of the run or of the warm-up."""
    keys = [f"{prefix}{unit}" for unit in _UNITS]
    return next(key for key in keys if getattr(section, key) is not None)


def _check_warmup(recipe: Recipe) -> None:
    """Raise ConfigError for a warm-up as long as the run where that shows without the number of
    images.
    """
    # Only lengths in the same unit compare; `lengths` compares all once images are counted.
    for unit in _UNITS:
        warmup = getattr(recipe.schedule, f"warmup_{unit}")
        length = getattr(recipe.run, unit)
        if warmup and length is not None and warmup >= length:
            fault = f"the warm-up of {warmup:g} {unit} is not shorter than the run of {length:g}"
            raise ConfigError(f"{fault}; lower schedule.warmup_{unit} or raise run.{unit}")


def steps_per_epoch(train_images: int, global_batch: int) -> int:
    """Return the whole batches of `global_batch` images in an epoch of `train_images`.

    The images left over are not trained on in that epoch.
    """
    return train_images // global_batch


def in_steps(
    epochs: float | None, steps: int | None, images: int | None, per_epoch: int, global_batch: int
) -> int:
    """Return a duration in whole steps; 0 if none of the three is given.

    Args:
        epochs: rounded to the nearest step.
        steps: taken before the others.
        images: rounded up to a whole step.
        per_epoch: steps in an epoch.
        global_batch: images in a step.
    """
    if steps is not None:
        return steps
    if images is not None:
        return -(-images // global_batch)
    return round((epochs or 0) * per_epoch)  # an epoch need not be whole


def peak_learning_rate(recipe: Recipe) -> float:
    """Return the learning rate at the end of the warm-up, for the global batch of `recipe`."""
    schedule = recipe.schedule
    size = recipe.batch.global_
    if schedule.peak_per_image is not None:
        return schedule.peak_per_image * size
    assert schedule.peak is not None, "a schedule has one of the two"
    if schedule.batch_rule == "none":
        return schedule.peak
    assert schedule.reference_batch is not None, "a schedule with batch_rule has one"
    return schedule.peak * rate_factor(schedule.batch_rule, size / schedule.reference_batch)


def unusual_peak(recipe: Recipe) -> str:
    """Return a line about a peak rate that hardly any recipe with this optimizer has, or nothing."""
    peak = peak_learning_rate(recipe)
    optimizer = recipe.optimizer
    lowest, highest = optimizer.usual_peaks
    if lowest <= peak <= highest:
        return ""
    return (
        f"a peak rate of {peak:.4g} is unusual for {optimizer.name} ({lowest:g} to {highest:g}); "
        "was it meant for another optimizer? schedule.peak sets it"
    )


def empty_average(recipe: Recipe, lengths: Lengths) -> str:
    """Return a line about an average over epochs of which a run ends none, or nothing.

    Args:
        recipe: of the run.
        lengths: of the run.
    """
    # No fault: a recipe with this average is to be tried in a few steps, too.
    if recipe.average.epoch_decay is None or lengths.total >= lengths.steps_per_epoch:
        return ""
    steps = f"{count(lengths.total, 'step')} of {lengths.steps_per_epoch}"
    return (
        f"average.epoch_decay: the run ends within its first epoch ({steps}), so there will be no "
        "average over epochs; average.step_decay averages over updates"
    )


def rate_factor(rule: str, ratio: float) -> float:
    """Return the factor on a learning rate for a batch that is `ratio` times the one which the rate
    is meant for.

    Args:
        rule: none, sqrt (Krizhevsky, 1404.5997) or linear (Goyal et al., 1706.02677).
        ratio: above 0.
    """
    if rule == "none":
        return 1.0
    return ratio if rule == "linear" else math.sqrt(ratio)


def training_image_size(recipe: Recipe, epoch: int) -> int:
    """Return the pixels a side of the training images of an epoch, counted from 0."""
    return [pixels for first, pixels in _image_sizes(recipe) if first <= epoch][-1]


def training_image_sizes(recipe: Recipe) -> Set[int]:
    """Return the pixels a side of the training images of all epochs of `recipe`."""
    return {pixels for _, pixels in _image_sizes(recipe)}


def _image_sizes(recipe: Recipe) -> Sequence[Sequence[int]]:
    """Return (first epoch, pixels a side) of each size of the training images."""
    if recipe.data.image_sizes:
        return recipe.data.image_sizes
    assert recipe.model.image_size is not None, "recipe/checks.py refuses null"
    return [(0, recipe.model.image_size)]


def describe(recipe: Recipe, here: bool = True) -> str:
    """Return the text of the plan that `--dry-run` prints.

    Args:
        recipe: of the run.
        here: as for `described`.

    Raises:
        ConfigError, DataError: the run would be refused.
    """
    return described(recipe, here).text


def described(recipe: Recipe, here: bool = True) -> Description:
    """Describe what follows from the recipe, and its keys that are not defaults.

    Args:
        recipe: of the run.
        here: whether images on this machine are counted; class folders of a million take seconds.

    Raises:
        ConfigError, DataError: the run would be refused.
    """
    # First what a run would refuse: its plan would only mislead.
    batch = planned(recipe)
    recipe.data.check_classes(recipe.model.classes)
    images = _images(recipe) if here else _Images("", None)
    train_images = images.training
    if train_images is None:
        train_images = recipe.data.images("train")
    length = _described_length(recipe, train_images)
    average = ""
    if train_images:
        average = empty_average(recipe, lengths(recipe, train_images))
    division = batch.describe()
    # What fits into a GPU is known only once it is tried, which a plan does not do.
    if recipe.batch.micro is None and recipe.run.device != "cpu":
        division += "; batch.micro auto: a GPU takes the largest that fits"
    # What follows from several keys, then the keys of each section.
    lines = [
        ("run", f"{recipe.run.name} -> {output_folder(recipe)}"),
        ("batch", division),
        ("peak", f"learning rate {peak_learning_rate(recipe):.6g}"),
        ("", unusual_peak(recipe)),
        ("length", length),
        ("", average),
        ("images", images.line),
    ]
    for name, section in recipe:
        lines.append((name, _changed_keys(name, section)))
    plan = [f"{name:<10} {printable(text)}" for name, text in lines if text]
    if recipe.run.device == "ipu":
        plan += ipu_plan.lines(recipe, batch)
    return Description("\n".join(plan), train_images)


def check_length(recipe: Recipe) -> None:
    """Refuse classes and lengths that no number of replicas could train.

    Args:
        recipe: of the run.

    Raises:
        ConfigError, DataError: the run would be refused.
    """
    recipe.data.check_classes(recipe.model.classes)
    _described_length(recipe, recipe.data.images("train"))


def described_lengths(recipe: Recipe, lengths: Lengths) -> str:
    """Return one line about the length of a run, and about its updates where these grow.

    Args:
        recipe: of the run.
        lengths: of the run.
    """
    line = lengths.describe()
    # How far the schedule `noise` grows is known only once the noise has been measured.
    if isinstance(recipe.batch.schedule, list):
        course = Course(recipe, lengths.steps_per_epoch, lengths.total)
        updates = len(course.done(lengths.total))
        line += f"; {count(updates, 'update')} by batch.schedule"
    return line


def _described_length(recipe: Recipe, train_images: int | None) -> str:
    """Return the plan's line about the length of the run.

    Args:
        recipe: of the run.
        train_images: in an epoch; None where it is not known.

    Raises:
        ConfigError, DataError: the lengths do not go together.
    """
    if train_images is None:
        _check_warmup(recipe)
    if not train_images:
        return "known once data.root is read (or data.train_images given)"
    length = described_lengths(recipe, lengths(recipe, train_images))
    return f"{train_images} training images; {length}"


def _changed_keys(name: str, section: Section) -> str:
    """Return the keys of a section that are not defaults, its kind first, without those described
    already.
    """
    # The kind is printed also where it is the default: the other keys belong to it.
    keys = {}
    tag = getattr(section, "tag", None)
    if tag is not None:
        keys[tag] = getattr(section, tag)
    keys.update(section.changes())
    return ", ".join(
        f"{key} {as_yaml(value)}"
        for key, value in keys.items()
        if f"{name}.{key}" not in _DESCRIBED
    )


class _Images(NamedTuple):
    """Images on this machine. line: of the plan. training: how many there are; None if unknown."""

    line: str
    training: Optional[int]


def _images(recipe: Recipe) -> _Images:
    """Count the images on this machine.

    Raises:
        DataError: a run would refuse them.
    """
    counted = {}
    try:
        for split in _SPLITS:
            images = found_images.find(recipe.data, split)
            if images is not None:
                counted[split] = images
    # A plan is also made where the images are not: before they are copied, or elsewhere.
    except DataError as error:
        return _Images(f"not found here: {error}", None)
    for split, images in counted.items():
        found_images.check(recipe, images, split)
    if len(counted) == len(_SPLITS):
        found_images.check_classes(counted["train"], counted["validation"])
    places = ", ".join(f"{images.images:,} in {images.place}" for images in counted.values())
    training = counted["train"].images if "train" in counted else None
    return _Images(f"found: {places}" if places else "", training)


def output_folder(recipe: Recipe) -> str:
    """Return the run folder of `recipe`: run.output, or runs/NAME."""
    return recipe.run.output or f"runs/{recipe.run.name}"
