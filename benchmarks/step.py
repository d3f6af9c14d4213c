"""Is a training step faster than timm's own and than it was, and is training from JPEG files faster?

    python -m benchmarks.step [--quick] [--json]

The same EfficientNet G16 with LARS, the same batch, float32 arithmetic and weights on both sides, in turn:
- `step`: images in memory. EfficientNet-B0 at 64 px on one thread and on two, and B4 at 224 px, micro batch 8, on two.
  timm's loop gets normalised float32 images in each of torch's two layouts, ours uint8. `before` computes with torch's
  layers instead of ours in C++. float16 weights are rounded stochastically, which timm has not.
- `files`: JPEG files (benchmarks/drawn_photographs.py) by each side's own workers, with the layout, threads and workers
  with which it is fastest here. The claim is about the quickstart's model at 32 px, where two cores spend most of their
  time on files, as those beside a GPU do.
- `norm`: GroupNorm and SiLU beside a copy, the limit of what moves through memory (benchmarks/step_norms.py).
- `parts`: where the time of our step goes, and how far each part is from its limit (benchmarks/step_parts.py).
timm's side is the loop of its train.py (accumulation, meters) around timm's model, timm's Lars and timm's loader. For
each number of threads claims are about the layout in which it is faster.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import functools
import itertools
import statistics
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

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

MICRO, ACCUMULATION = 32, 2
B4_MICRO = 8  # and its whole update
STEP_ROUNDS = 30  # of one update each: the shorter the turns, the less the machine changes from one to the next
B4_ROUNDS = 9
FILE_ROUNDS = 9
FILE_STEPS = 8  # updates of a round, after those that start the workers
SETTINGS = ((2, 0), (1, 1), (2, 1), (1, 2), (2, 2))  # threads of training, workers

B0 = ("model.image_size=64", "model.drop_path=0.2", "model.dropout=0.2")
SMALL = ("model.image_size=32", "model.width=0.5", "model.depth=0.4", "model.drop_path=0", "model.dropout=0")
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

OURS, OURS_BEFORE = "ours", "ours, before"
LAYOUTS = {"timm, contiguous": torch.contiguous_format, "timm, channels_last": torch.channels_last}

Seconds = Dict[str, List[float]]  # of updates, by side


def recipe(*overrides: str) -> Recipe:
    """A small G16 model with LARS; an update of 2 micro batches of 32."""
    fixed = [
        "model.name=efficientnet_b0", f"model.classes={len(CLASSES)}",
        f"batch.micro={MICRO}", f"batch.global={MICRO * ACCUMULATION}", "precision.weights=float32", "run.device=cpu",
        "data.mixup=0", "data.cutmix=null", "average.epoch_decay=null", f"data.root={FOLDER.parent}",
        f"data.train_folder={FOLDER.name}", "data.train_images=null", "data.validation_images=null",
    ]  # fmt: skip
    return loading.load(ROOT / "configs" / "gpu.yaml", [*fixed, *overrides])


class Side(NamedTuple):
    """A loop and a loader. update: of the next micro batches. batches: of a number of workers."""

    update: Callable[[Iterator], object]
    batches: Callable[[int], Iterator]


def ours(plan: Recipe) -> Side:
    """Our engine and loader."""
    engine, steps, size = ranks.Ours(plan, steps_per_epoch=1).engine, itertools.count(), plan.model.image_size

    def batches(workers: int) -> Iterator:
        return our_batches(
            plan.data.model_copy(update={"workers": workers}), size, plan.batch.micro, plan.batch.global_
        )

    return Side(lambda images: engine.train_step(images, one_step(next(steps)), lr=0.1), batches)


def timms(plan: Recipe, layout: torch.memory_format) -> Side:
    """timm's loop and loader."""
    loop, accumulation = Loop(plan.model, lr=0.1, layout=layout), plan.batch.global_ // plan.batch.micro
    return Side(
        lambda images: loop.update(list(itertools.islice(images, accumulation))),
        functools.partial(timm_batches, plan.model.image_size, plan.batch.micro),
    )


# ---- Steps.


def step_sides(model: Sequence[str], half: bool) -> Dict[str, Callable[[], object]]:
    """Updates of images in memory, by side. Args: half: with our step with float16 weights among them."""
    plan = recipe(*model)
    images, labels = images_and_labels(plan, plan.batch.micro)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (plan.model.mean, plan.model.std))
    normalised = (images / 255 - mean) / std
    sides = {}
    for name, layout in LAYOUTS.items():
        batches = itertools.repeat((normalised.contiguous(memory_format=layout), labels))
        sides[name] = functools.partial(timms(plan, layout).update, batches)
    own = {OURS_BEFORE: BEFORE, OURS: NATIVE}
    if half:
        own["ours, float16 weights"] = (*NATIVE, "precision.weights=float16")
    for name, changes in own.items():
        sides[name] = ranks.Ours(recipe(*model, *changes), steps_per_epoch=1).update
    return sides


def measure_steps(model: Sequence[str], threads: Sequence[int], rounds: int, half: bool, what: str) -> List[Seconds]:
    """Seconds of updates, for each number of threads."""
    sides, found = step_sides(model, half), []
    for count in threads:
        torch.set_num_threads(count)
        turns = f"{what}, {count} threads, turn"
        found.append(claims.in_turn(sides, rounds, lambda side, _: claims.seconds(side), what=turns))
    return found


def faster_timm(times: Seconds) -> List[float]:
    """Seconds of timm's updates in the layout in which they are faster."""
    return min((times[name] for name in LAYOUTS), key=statistics.median)


def step_claims(one: Seconds, two: Seconds, large: Seconds) -> List[dict]:
    """Claims of B0's steps on one thread and on two, and of B4's."""

    def over_timm(times: Seconds) -> List[float]:
        return claims.ratios(faster_timm(times), times[OURS])

    before = claims.ratios(one[OURS_BEFORE], one[OURS])
    return [
        claims.claim("step_speedup_over_timm", over_timm(one), "times", ">= 1.4"),
        claims.claim("step_speedup_over_timm_2_threads", over_timm(two), "times", ">= 1.4"),
        claims.claim("step_speedup_over_before", before, "times", ">= 1.6"),
        claims.claim("b4_step_speedup_over_timm", over_timm(large), "times", ">= 1.25"),
    ]


def step_rows(part: str, threads: int, times: Seconds, images: int) -> List[dict]:
    return [row(part, name, (threads, 0), values, faster_timm(times), images=images) for name, values in times.items()]


# ---- Files.


def measure_files(part: str, model: Sequence[str], rounds: int, trials: int) -> Tuple[List[dict], List[float]]:
    """Rows, and timm's time over ours round by round, each with its fastest layout, threads and workers.

    Args: trials: of each of these, of which the fastest counts.
    """
    plan = recipe(*model, *NATIVE)
    layouts = {name: timms(plan, layout) for name, layout in LAYOUTS.items()}
    own = ours(plan)
    timm_name, timm_setting = fastest_setting(part, layouts, trials)
    _, our_setting = fastest_setting(part, {OURS: own}, trials)
    sides = {timm_name: (layouts[timm_name], timm_setting), OURS: (own, our_setting)}
    times = claims.in_turn(sides, rounds, lambda side, _: seconds_with_files(*side), what=f"{part}, turn")
    reference = times[timm_name]
    images = plan.batch.global_
    rows = [row(part, name, sides[name][1], times[name], reference, images=images) for name in sides]
    return rows, claims.ratios(reference, times[OURS])


def fastest_setting(part: str, sides: Dict[str, Side], trials: int) -> Tuple[str, Tuple[int, int]]:
    """The side, threads and workers with which training from files is fastest."""
    found, settings = {}, claims.less(SETTINGS, SETTINGS[1:2])
    for name, setting in claims.progress(list(itertools.product(sides, settings)), f"{part}, setting"):
        found[name, setting] = min(seconds_with_files(sides[name], setting) for _ in range(trials))
    return min(found, key=lambda trial: found[trial])


def seconds_with_files(side: Side, setting: Tuple[int, int]) -> float:
    """Seconds per update from files, once the workers have started and what they loaded ahead is used up."""
    threads, workers = setting
    torch.set_num_threads(threads)
    batches = iter(side.batches(workers))
    for _ in range(4):
        side.update(batches)
    steps, start = claims.less(FILE_STEPS, 2), time.perf_counter()
    for _ in range(steps):
        side.update(batches)
    return (time.perf_counter() - start) / steps


def row(
    part: str, side: str, setting: Tuple[int, int], values: List[float], reference: List[float], *, images: int
) -> dict:
    """A row. Args: setting: threads, workers. images: of an update."""
    return {
        "part": part,
        "side": side,
        "threads": setting[0],
        "workers": setting[1],
        **claims.milliseconds(values),
        "images_per_second": images / statistics.median(values),
        "speedup_over_timm": claims.median_ratio(reference, values),
    }


def main() -> None:
    as_json = claims.begin(__doc__, takes="10 to 12 minutes", quick="2 minutes").json
    fault = library.fault()
    if fault:
        raise ConfigError(f"benchmarks.step: no native kernels: {fault}")
    name, model = claims.less(("B0 64 px", B0), ("quickstart's 32 px", SMALL))
    one, two = measure_steps(model, (1, 2), STEP_ROUNDS, half=True, what=f"step, {name}")
    (large,) = measure_steps(B4, (2,), B4_ROUNDS, half=False, what="step, B4 224 px")
    rows = [
        *step_rows(f"step, {name}", 1, one, MICRO * ACCUMULATION),
        *step_rows(f"step, {name}", 2, two, MICRO * ACCUMULATION),
        *step_rows("step, B4 224 px", 2, large, B4_MICRO),
    ]
    count = len(photographs())
    file_rows, file_ratios = measure_files("files, quickstart's 32 px", SMALL, FILE_ROUNDS, claims.less(2, 1))
    rows += file_rows
    if not claims.quick():
        rows += measure_files("files, B0 64 px", B0, rounds=5, trials=1)[0]  # no claim is made of it
    norm_rows, norm_claims = step_norms.measure()
    plans = {name: recipe(*model, *NATIVE), **claims.less({"B4 224 px": recipe(*B4, *NATIVE)}, {})}
    rows += [*norm_rows, *step_parts.measure(plans)]
    print(f"timm {timm.__version__}; {count} JPEG files of 500 x 375 pixels")
    made = [
        *step_claims(one, two, large),
        claims.claim("end_to_end_speedup_over_timm", file_ratios, "times", ">= 1.6"),
        *norm_claims,
    ]
    claims.report("step", rows, made, as_json)
