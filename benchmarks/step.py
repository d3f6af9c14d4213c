"""Is a training step faster than timm's own and than it was, and is training from JPEG files faster?

    python -m benchmarks.step [--quick] [--json]

The same EfficientNet G16 with LARS, the same batch, float32 arithmetic and weights on both sides,
in turn:
- `step`: images in memory. EfficientNet-B0 at 64 px on one thread and on two, and B4 at 224 px,
  micro batch 8, on two. timm's loop gets normalised float32 images in each of torch's two layouts,
  ours uint8. `before` computes with torch's layers instead of ours in C++. float16 weights are
  rounded stochastically, which timm has not.
- `files`: JPEG files (benchmarks/drawn_photographs.py) by each side's own workers, with the layout,
  threads and workers with which it is fastest here. The claim is about the quickstart's model at
  32 px, where two cores spend most of their time on files, as those beside a GPU do.
- `norm`: GroupNorm and SiLU beside a copy, the limit of what moves through memory
  (benchmarks/step_norms.py).
- `parts`: where the time of our step goes, and how far each part is from its limit
  (benchmarks/step_parts.py).
timm's side is the loop of its train.py (accumulation, meters) around timm's model, timm's Lars and
timm's loader. For each number of threads claims are about the layout in which it is faster.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import functools
import itertools
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import timm
import torch

from benchmarks import ROOT, claims, ranks, step_norms, step_parts
from benchmarks.drawn_photographs import CLASSES, FOLDER, photographs
from benchmarks.loader import our_batches, timm_batches
from benchmarks.ranks import images_and_labels
from benchmarks.timm_peer import Loop
from common.errors import ConfigError
from engines.base import one_step
from models.native import library
from recipe import loading
from recipe.config import Recipe
from recipe.settled import image_size, micro_batch


class Setting(NamedTuple):
    """The resources of training from files.

    threads: of training.
    workers: processes that load images.
    """

    threads: int
    workers: int


MICRO = 32
ACCUMULATION = 2
B4_MICRO = 8  # and its whole update
# Rounds of one update each: the shorter the turns, the less the machine changes from one to the
# next.
STEP_ROUNDS = 30
B4_ROUNDS = 9
FILE_ROUNDS = 9
FILE_STEPS = 8  # updates of a round, after those that start the workers
SETTINGS = (
    Setting(threads=2, workers=0),
    Setting(threads=1, workers=1),
    Setting(threads=2, workers=1),
    Setting(threads=1, workers=2),
    Setting(threads=2, workers=2),
)

B0 = ("model.image_size=64", "model.drop_path=0.2", "model.dropout=0.2")
SMALL = (
    "model.image_size=32",
    "model.width=0.5",
    "model.depth=0.4",
    "model.drop_path=0",
    "model.dropout=0",
)
B4 = (
    "model.name=efficientnet_b4",
    "model.image_size=224",
    "model.drop_path=0.2",
    "model.dropout=0.4",
    f"batch.micro={B4_MICRO}",
    f"batch.global={B4_MICRO}",
)
NATIVE = ("engine.kernels=native", "engine.memory_format=channels_last")
BEFORE = ("engine.kernels=torch", "engine.memory_format=contiguous")

OURS = "ours"
OURS_BEFORE = "ours, before"
OURS_HALF = "ours, float16 weights"
LAYOUTS = {"timm, contiguous": torch.contiguous_format, "timm, channels_last": torch.channels_last}

Seconds = Dict[str, List[float]]  # of updates, by side
Update = Callable[[], object]


def recipe(*overrides: str) -> Recipe:
    """Return the recipe of a small G16 model with LARS; an update is 2 micro batches of 32.

    Args:
        overrides: of the recipe, which come last.
    """
    fixed = [
        "model.name=efficientnet_b0",
        f"model.classes={len(CLASSES)}",
        f"batch.micro={MICRO}",
        f"batch.global={MICRO * ACCUMULATION}",
        "precision.weights=float32",
        "run.device=cpu",
        "data.mixup=0",
        "data.cutmix=null",
        "average.epoch_decay=null",
        f"data.root={FOLDER.parent}",
        f"data.train_folder={FOLDER.name}",
        "data.train_images=null",
        "data.validation_images=null",
    ]
    return loading.load(ROOT / "configs" / "gpu.yaml", [*fixed, *overrides])


class Side(NamedTuple):
    """A training loop and its loader.

    update: makes an update of the next micro batches of an iterator.
    batches: returns an iterator over micro batches that a number of workers load.
    """

    update: Callable[[Iterator[Any]], object]
    batches: Callable[[int], Iterator[Any]]


def ours(plan: Recipe) -> Side:
    """Return our engine with our loader.

    Args:
        plan: the recipe of both.
    """
    engine = ranks.Ours(plan, steps_per_epoch=1).engine
    numbers = itertools.count()

    def update(micro_batches: Iterator[Any]) -> object:
        """Make an update of the next `micro_batches`."""
        return engine.train_step(micro_batches, one_step(next(numbers)), lr=0.1)

    def batches(workers: int) -> Iterator[Any]:
        """Return micro batches that `workers` load."""
        data = plan.data.model_copy(update={"workers": workers})
        size = image_size(plan.model)
        return our_batches(data, size, micro_batch(plan), batch=plan.batch.global_)

    return Side(update, batches)


def timms(plan: Recipe, layout: torch.memory_format) -> Side:
    """Return timm's loop with timm's loader.

    Args:
        plan: the recipe, of which timm's side follows the model and the batch.
        layout: in which timm's model computes.
    """
    loop = Loop(plan.model, lr=0.1, layout=layout)
    accumulation = plan.batch.global_ // micro_batch(plan)

    def update(micro_batches: Iterator[Any]) -> None:
        """Make an update of the next `micro_batches`."""
        loop.update(list(itertools.islice(micro_batches, accumulation)))

    def batches(workers: int) -> Iterator[Any]:
        """Return micro batches that `workers` load."""
        return timm_batches(image_size(plan.model), micro_batch(plan), workers)

    return Side(update, batches)


# Steps --------------------------------------------------------------------------------------------


def step_sides(model: Sequence[str], half: bool) -> Dict[str, Update]:
    """Return updates of images in memory, by side.

    Args:
        model: overrides that name the model.
        half: have our step with float16 weights among them.
    """
    plan = recipe(*model)
    # timm's loop gets what its loader would make: our engine normalises images itself.
    images, labels = images_and_labels(plan, micro_batch(plan))
    mean = torch.tensor(plan.model.mean).view(3, 1, 1)
    std = torch.tensor(plan.model.std).view(3, 1, 1)
    normalised = (images / 255 - mean) / std
    sides: Dict[str, Update] = {}
    # Images are brought into the layout here, so that no update pays for it.
    for name, layout in LAYOUTS.items():
        batches = itertools.repeat((normalised.contiguous(memory_format=layout), labels))
        sides[name] = functools.partial(timms(plan, layout).update, batches)

    # Ours take the same images as they are made, uint8.
    our_changes: Dict[str, Tuple[str, ...]] = {OURS_BEFORE: BEFORE, OURS: NATIVE}
    if half:
        our_changes[OURS_HALF] = (*NATIVE, "precision.weights=float16")
    for name, changes in our_changes.items():
        sides[name] = ranks.Ours(recipe(*model, *changes), steps_per_epoch=1).update
    return sides


def measure_steps(
    model: Sequence[str],
    threads: Sequence[int],
    rounds: int,
    *,
    half: bool,
    what: str,
) -> List[Seconds]:
    """Measure updates of images in memory.

    Args:
        model: overrides that name the model.
        threads: the numbers of threads to measure with.
        rounds: of one update of each side.
        half: have our step with float16 weights among the sides.
        what: name of the part in the progress.

    Returns:
        Seconds for each number of threads.
    """
    sides = step_sides(model, half)
    results = []
    for count in threads:
        torch.set_num_threads(count)
        turns = f"{what}, {count} threads, turn"
        results.append(claims.in_turn(sides, rounds, _update_seconds, what=turns))
    return results


def _update_seconds(update: Update, turn: int) -> float:
    """Return how many seconds an update takes, whatever the turn."""
    return claims.seconds(update)


def faster_timm(times: Seconds) -> List[float]:
    """Return the seconds of timm's updates in the layout in which they are faster.

    Args:
        times: of all sides.
    """
    return min((times[name] for name in LAYOUTS), key=statistics.median)


def step_claims(one: Seconds, two: Seconds, large: Seconds) -> List[dict]:
    """Return the claims about steps.

    Args:
        one: times of B0's on one thread.
        two: times of B0's on two threads.
        large: times of B4's.
    """
    on_one = claims.ratios(faster_timm(one), one[OURS])
    on_two = claims.ratios(faster_timm(two), two[OURS])
    before = claims.ratios(one[OURS_BEFORE], one[OURS])
    of_large = claims.ratios(faster_timm(large), large[OURS])
    return [
        claims.claim("step_speedup_over_timm", on_one, "times", ">= 1.4"),
        claims.claim("step_speedup_over_timm_2_threads", on_two, "times", ">= 1.4"),
        claims.claim("step_speedup_over_before", before, "times", ">= 1.6"),
        claims.claim("b4_step_speedup_over_timm", of_large, "times", ">= 1.25"),
    ]


def step_rows(part: str, threads: int, times: Seconds, images: int) -> List[dict]:
    """Return a row for each side.

    Args:
        part: name of the measurement.
        threads: of training.
        times: of all sides.
        images: of an update.
    """
    setting = Setting(threads, workers=0)
    reference = faster_timm(times)
    rows = []
    for side, seconds in times.items():
        rows.append(row(part, side, setting, seconds=seconds, reference=reference, images=images))
    return rows


# Files --------------------------------------------------------------------------------------------


def measure_files(
    part: str,
    model: Sequence[str],
    rounds: int,
    trials: int,
) -> Tuple[List[dict], List[float]]:
    """Measure training from files, each side with its fastest threads and workers, timm also with
    its fastest layout.

    Args:
        part: name of the measurement.
        model: overrides that name the model.
        rounds: of some updates of each side.
        trials: of each layout and setting, of which the fastest counts.

    Returns:
        Rows, and timm's time over ours round by round.
    """
    plan = recipe(*model, *NATIVE)
    # Each side is first tried in all settings, then both take turns in their fastest.
    layouts = {name: timms(plan, layout) for name, layout in LAYOUTS.items()}
    our_side = ours(plan)
    timm_name, timm_setting = fastest_setting(part, layouts, trials)
    _, our_setting = fastest_setting(part, {OURS: our_side}, trials)

    sides = {timm_name: (layouts[timm_name], timm_setting), OURS: (our_side, our_setting)}
    times = claims.in_turn(
        sides,
        rounds,
        lambda side, _: seconds_with_files(*side),
        what=f"{part}, turn",
    )
    reference = times[timm_name]
    images = plan.batch.global_
    rows = []
    for name, (_, setting) in sides.items():
        rows.append(
            row(part, name, setting, seconds=times[name], reference=reference, images=images)
        )
    return rows, claims.ratios(reference, times[OURS])


def fastest_setting(part: str, sides: Dict[str, Side], trials: int) -> Tuple[str, Setting]:
    """Return the side and the setting with which training from files is fastest.

    Args:
        part: name of the measurement in the progress.
        sides: to choose from.
        trials: of each side in each setting, of which the fastest counts.
    """
    settings = claims.less(SETTINGS, SETTINGS[1:2])
    # Several trials, because a single slow one would hide the fastest.
    candidates = list(itertools.product(sides, settings))
    fastest = {}
    for name, setting in claims.progress(candidates, f"{part}, setting"):
        seconds = [seconds_with_files(sides[name], setting) for _ in range(trials)]
        fastest[name, setting] = min(seconds)
    return min(fastest, key=lambda candidate: fastest[candidate])


def seconds_with_files(side: Side, setting: Setting) -> float:
    """Return the seconds of an update from files, a mean.

    Args:
        side: that trains.
        setting: with which it does.
    """
    torch.set_num_threads(setting.threads)
    batches = iter(side.batches(setting.workers))
    # Until the workers have started, and what they loaded ahead is used up.
    for _ in range(4):
        side.update(batches)
    steps = claims.less(FILE_STEPS, 2)
    start = time.perf_counter()
    for _ in range(steps):
        side.update(batches)
    return (time.perf_counter() - start) / steps


def row(
    part: str,
    side: str,
    setting: Setting,
    *,
    seconds: List[float],
    reference: List[float],
    images: int,
) -> dict:
    """Return a row of the table.

    Args:
        part: name of the measurement.
        side: its name.
        setting: of the side.
        seconds: of its updates.
        reference: seconds of timm's updates.
        images: of an update.
    """
    return {
        "part": part,
        "side": side,
        "threads": setting.threads,
        "workers": setting.workers,
        **claims.milliseconds(seconds),
        "images_per_second": images / statistics.median(seconds),
        "speedup_over_timm": claims.median_ratio(reference, seconds),
    }


def main() -> None:
    """Measure all parts; print the table and the claims."""
    as_json = claims.begin(__doc__, takes="10 to 12 minutes", quick="2 minutes").json
    fault = library.fault()
    if fault:
        raise ConfigError(f"benchmarks.step: no native kernels: {fault}")

    # Images in memory.
    name, model = claims.less(("B0 64 px", B0), ("quickstart's 32 px", SMALL))
    one, two = measure_steps(model, (1, 2), STEP_ROUNDS, half=True, what=f"step, {name}")
    (large,) = measure_steps(B4, (2,), B4_ROUNDS, half=False, what="step, B4 224 px")
    rows = [
        *step_rows(f"step, {name}", 1, one, images=MICRO * ACCUMULATION),
        *step_rows(f"step, {name}", 2, two, images=MICRO * ACCUMULATION),
        *step_rows("step, B4 224 px", 2, large, images=B4_MICRO),
    ]

    # Files. No claim is made of B0's.
    count = len(photographs())
    trials = claims.less(2, 1)
    file_rows, file_ratios = measure_files("files, quickstart's 32 px", SMALL, FILE_ROUNDS, trials)
    rows += file_rows
    if not claims.quick():
        b0_rows, _ = measure_files("files, B0 64 px", B0, rounds=5, trials=1)
        rows += b0_rows

    # What a step consists of.
    norm_rows, norm_claims = step_norms.measure()
    rows += norm_rows
    plans = {name: recipe(*model, *NATIVE)}
    if not claims.quick():
        plans["B4 224 px"] = recipe(*B4, *NATIVE)
    rows += step_parts.measure(plans)

    print(f"timm {timm.__version__}; {count} JPEG files of 500 x 375 pixels")
    all_claims = [
        *step_claims(one, two, large),
        claims.claim("end_to_end_speedup_over_timm", file_ratios, "times", ">= 1.6"),
        *norm_claims,
    ]
    claims.report("step", rows, all_claims, as_json)
