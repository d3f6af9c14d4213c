"""All arithmetic of a run: global batch = micro batch x accumulation x replicas, and its lengths in steps."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import List, Set, Tuple

from common.errors import ConfigError, DataError
from common.text import count, printable
from recipe import checks, found_images, shares
from recipe.config import Recipe
from recipe.division import Batch
from recipe.ipu import plan as ipu_plan
from recipe.ipu import poprun
from recipe.section import as_yaml

# Keys that the first lines of a plan describe.
_ASSUMED = 32  # images: the most that `batch.micro: auto` takes where nothing is tried
_MOST = 1 << 16  # images of a micro batch that `auto` may take
_DESCRIBED = ("run.name", "run.output", "run.epochs", "run.steps", "run.images", "batch.global", "batch.micro")


@dataclass(frozen=True)
class Lengths:
    """The run in optimizer steps. `dropped` images an epoch are left over after its last whole step."""

    steps_per_epoch: int
    dropped: int
    total: int
    warmup: int

    def describe(self) -> str:
        """One line: epochs, steps, warm-up, images left out."""
        epochs = self.total / self.steps_per_epoch
        return (
            f"{count(self.total, 'step')} = {count(epochs, 'epoch')} x {count(self.steps_per_epoch, 'step')}, "
            f"{self.warmup} of warm-up; "
            f"{count(self.dropped, 'image')} left over in each epoch"
        )


def divide(recipe: Recipe, replicas: int | None = None) -> Batch:
    """The batch of `recipe` over `replicas` (None: the recipe's own number, one where that is auto).

    `batch.micro: auto` is taken as on a CPU: the largest micro batch of at most 32 images that the recipe allows, else
    the smallest above. On GPUs engines/micro_batch.py finds another.

    Raises ConfigError with the nearest batches for one that is no multiple of micro batch x replicas (in tree order, of
    the micro batch).
    """
    replicas = replicas or recipe.parallel.replicas or 1
    if recipe.batch.micro is not None:
        return _divided(recipe, recipe.batch.micro, replicas)
    sizes = _sizes(recipe, replicas)
    small = [micro for micro in sizes if micro <= _ASSUMED]
    first, *others = [*reversed(small), *sizes[len(small) :]]
    for micro in (first, *others):
        with contextlib.suppress(ConfigError):
            return _divided(recipe, micro, replicas)
    return _divided(recipe, first, replicas)  # raises: no micro batch mends what is wrong


def candidates(recipe: Recipe, replicas: int) -> List[int]:
    """The micro batches that `batch.micro: auto` may take with so many replicas, ascending. They divide a replica's
    share of `batch.global`, and so of every batch of `batch.schedule`, and pass the checks across sections."""
    found = []
    for micro in _sizes(recipe, replicas):
        with contextlib.suppress(ConfigError):
            found.append(_divided(recipe, micro, replicas).micro)
    return found


def settled(recipe: Recipe, micro: int) -> Recipe:
    """`recipe` with a micro batch in the place of `auto`."""
    return recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro": micro})})


def _sizes(recipe: Recipe, replicas: int) -> List[int]:
    """The divisors of what a replica has of `batch.global` (in tree order, of all of it), ascending; at least 1."""
    total, in_tree = recipe.batch.global_, recipe.exchange.in_tree
    portion = total if in_tree else 1 if total % replicas else total // replicas
    return [1, *(micro for micro in range(2, min(portion, _MOST) + 1) if portion % micro == 0)]


def _divided(recipe: Recipe, micro: int, replicas: int) -> Batch:
    """As `divide`, with this micro batch."""
    total, in_tree = recipe.batch.global_, recipe.exchange.in_tree
    portion = micro if in_tree else micro * replicas
    if total % portion:
        below = total // portion * portion
        product = "" if in_tree else f" x {count(replicas, 'replica')} = {portion}"
        raise ConfigError(
            f"batch.global {total} is not a multiple of {micro} micro{product}; "
            f"nearest: {f'{below} or ' if below else ''}{below + portion}"
        )
    found = total // micro
    if found < replicas:
        few = f"batch.global {total} is {count(found, 'micro batch', 'micro batches')} of {micro}"
        raise ConfigError(f"{few}, too few for {count(replicas, 'replica')}; lower batch.micro or start fewer")
    even = shares.even(found, replicas, min(recipe.parallel.least, found // replicas))
    batch = Batch(total, micro, found // replicas, replicas, recipe.parallel.stages).divided(even)
    checks.check(recipe, batch)
    return batch


def whole_pod(recipe: Recipe) -> Recipe:
    """`recipe` on all IPUs of its pod, if neither it nor poprun gives a number of replicas. Raises ConfigError."""
    pod, stages = recipe.ipu.pod, recipe.parallel.stages
    if recipe.run.device != "ipu" or pod is None or recipe.parallel.replicas or poprun.launched_by(os.environ):
        return recipe
    if pod % stages:
        raise ConfigError(f"ipu.pod {pod} is not a multiple of parallel.stages {stages}; correct one of them")
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"replicas": pod // stages})})


def planned(recipe: Recipe) -> Batch:
    """The batch as a process that this environment starts would divide it. Raises ConfigError as `divide` does."""
    launched = poprun.launched_by(os.environ) if recipe.run.device == "ipu" else None
    if launched is not None:
        poprun.check_launched(recipe, launched)
    return divide(recipe, launched.replicas if launched else None)


def lengths(recipe: Recipe, train_images: int) -> Lengths:
    """The run in steps for `train_images` images an epoch. Raises DataError for fewer images than one global batch,
    ConfigError for a warm-up or a delay as long as the run."""
    size = recipe.batch.global_
    per_epoch = steps_per_epoch(train_images, size)
    if per_epoch == 0:
        replicas = recipe.parallel.replicas or 1
        micro = recipe.batch.micro or 1
        each, portion = train_images // replicas, micro * replicas
        fitting = train_images // portion * portion
        remedy = f"batch.global={fitting}" if fitting else f"batch.global={each * replicas} batch.micro={each}"
        fault = f"batch.global {size} is more than the {train_images} training images"
        raise DataError(f"{fault}; give more images or {remedy}")
    run, schedule = recipe.run, recipe.schedule
    total = max(1, in_steps(run.epochs, run.steps, run.images, per_epoch, size))
    warmup = in_steps(schedule.warmup_epochs, schedule.warmup_steps, schedule.warmup_images, per_epoch, size)
    if warmup >= total:
        fault = f"the warm-up of {count(warmup, 'step')} is not shorter than the run of {total}"
        raise ConfigError(f"{fault}; lower {_given(recipe, 'schedule', 'warmup_')} or raise {_given(recipe, 'run')}")
    if recipe.exchange.delay >= total:
        fault = f"exchange.delay {recipe.exchange.delay} is not shorter than the run of {count(total, 'step')}"
        raise ConfigError(f"{fault}: no gradient would ever be applied; lower it or raise {_given(recipe, 'run')}")
    return Lengths(per_epoch, train_images - per_epoch * size, total, warmup)


def _given(recipe: Recipe, section: str, prefix: str = "") -> str:
    """Return the key by which a recipe gives the length of its run or of its warm-up."""
    part = getattr(recipe, section)
    keys = [f"{prefix}{unit}" for unit in ("epochs", "steps", "images")]
    return next(f"{section}.{key}" for key in keys if getattr(part, key) is not None)


def _check_warmup(recipe: Recipe) -> None:
    """Raises ConfigError for a warm-up as long as the run where that shows without the number of images."""
    for unit in ("epochs", "steps", "images"):
        warmup = getattr(recipe.schedule, f"warmup_{unit}")
        length = getattr(recipe.run, unit)
        if warmup and length is not None and warmup >= length:
            fault = f"the warm-up of {warmup:g} {unit} is not shorter than the run of {length:g}"
            raise ConfigError(f"{fault}; lower schedule.warmup_{unit} or raise run.{unit}")


def steps_per_epoch(train_images: int, global_batch: int) -> int:
    """Whole global batches in an epoch; the images left over are not trained on in that epoch."""
    return train_images // global_batch


def in_steps(epochs: float | None, steps: int | None, images: int | None, per_epoch: int, global_batch: int) -> int:
    """A duration in whole steps (epochs to the nearest, images rounded up); 0 if none of the three is given."""
    if steps is not None:
        return steps
    if images is not None:
        return -(-images // global_batch)
    return round((epochs or 0) * per_epoch)


def peak_learning_rate(recipe: Recipe) -> float:
    """The learning rate at the end of the warm-up, for the recipe's global batch."""
    schedule = recipe.schedule
    if schedule.peak_per_image is not None:
        return schedule.peak_per_image * recipe.batch.global_
    if schedule.batch_rule == "none":
        return schedule.peak
    return schedule.peak * rate_factor(schedule.batch_rule, recipe.batch.global_ / schedule.reference_batch)


def rate_factor(rule: str, ratio: float) -> float:
    """Return the factor on a learning rate for a batch that is `ratio` times the one which the rate is meant for.

    Args:
        rule: none, sqrt (Krizhevsky, 1404.5997) or linear (Goyal et al., 1706.02677).
        ratio: above 0.
    """
    if rule == "none":
        return 1.0
    return ratio if rule == "linear" else math.sqrt(ratio)


def training_image_size(recipe: Recipe, epoch: int) -> int:
    """Pixels a side of the training images of an epoch, counted from 0."""
    sizes = recipe.data.image_sizes or [(0, recipe.model.image_size)]
    return [pixels for first, pixels in sizes if first <= epoch][-1]


def training_image_sizes(recipe: Recipe) -> Set[int]:
    """Pixels a side of the training images of all epochs."""
    return {pixels for _, pixels in recipe.data.image_sizes or [(0, recipe.model.image_size)]}


def describe(recipe: Recipe, here: bool = True) -> str:
    """Return the plan that `--dry-run` prints: what follows from the recipe, and its keys that are not defaults.

    Args:
        recipe: of the run.
        here: whether images on this machine are counted; class folders of a million take seconds.

    Raises:
        ConfigError, DataError: the run would be refused.
    """
    batch, number = planned(recipe), recipe.data.images("train")
    recipe.data.check_classes(recipe.model.classes)
    images, counted = _images(recipe) if here else ("", None)
    number = counted if counted is not None else number
    if number is None:
        _check_warmup(recipe)
    auto = recipe.batch.micro is None and recipe.run.device != "cpu"
    length = f"{number} training images; {lengths(recipe, number).describe()}" if number else ""
    lines = [
        ("run", f"{recipe.run.name} -> {output_folder(recipe)}"),
        ("batch", batch.describe() + ("; batch.micro auto: a GPU takes the largest that fits" if auto else "")),
        ("peak", f"learning rate {peak_learning_rate(recipe):.6g}"),
        ("length", length or "known once data.root is read (or data.train_images given)"),
        ("images", images),
    ]
    for section, part in recipe:
        tag = getattr(part, "tag", None)
        keys = {**({tag: getattr(part, tag)} if tag else {}), **part.changes()}
        words = [f"{key} {as_yaml(value)}" for key, value in keys.items() if f"{section}.{key}" not in _DESCRIBED]
        lines.append((section, ", ".join(words)))
    plan = [f"{name:<10} {printable(text)}" for name, text in lines if text]
    return "\n".join([*plan, *(ipu_plan.lines(recipe, batch) if recipe.run.device == "ipu" else ())])


def _images(recipe: Recipe) -> Tuple[str, int | None]:
    """Return the plan's line about images on this machine, and the training images there; None if they are unknown.

    Raises:
        DataError: a run would refuse them.
    """
    splits = ("train", "validation")
    try:
        found = {split: found_images.find(recipe.data, split) for split in splits}
    except DataError as error:
        return f"not found here: {error}", None
    counted = {split: each for split, each in found.items() if each is not None}
    for split, each in counted.items():
        found_images.check(recipe, each, split)
    if len(counted) == len(splits):
        found_images.check_classes(counted["train"], counted["validation"])
    text = ", ".join(f"{each.images:,} in {each.place}" for each in counted.values())
    return f"found: {text}" if text else "", counted["train"].images if "train" in counted else None


def output_folder(recipe: Recipe) -> str:
    """The run folder: run.output, or runs/NAME."""
    return recipe.run.output or f"runs/{recipe.run.name}"
