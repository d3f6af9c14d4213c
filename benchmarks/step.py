"""Is a training step as fast as timm's own, and is training from JPEG files faster?

    python -m benchmarks.step [--quick] [--json]

The same EfficientNet G16 with LARS, the same batch, float32 arithmetic and weights on both sides, in turn:
- `step`: EfficientNet-B0 at 64 px, images in memory. timm's loop gets normalised float32 images, ours uint8. Beside
  them our step with float16 weights rounded stochastically, which timm has not.
- `files`: JPEG files (benchmarks/photographs.py) by each side's own workers, with the threads and workers with which
  it is fastest here. The claim is about the quickstart's model at 32 px, where two cores spend most of their time on
  files, as those beside a GPU do.
timm's side is the loop of its train.py (accumulation, meters) around timm's model, timm's Lars and timm's loader.
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import functools
import itertools
import statistics
import time
from typing import Callable, Iterator, List, NamedTuple, Tuple

import timm
import torch

from benchmarks import ROOT, claims, ranks
from benchmarks.loader import our_batches, timm_batches
from benchmarks.photographs import CLASSES, FOLDER, photographs
from benchmarks.ranks import images_and_labels
from benchmarks.timm_peer import Loop
from recipe import loading
from recipe.config import Recipe

MICRO, ACCUMULATION = 32, 2
STEP_ROUNDS = 40  # of one update each: the shorter the turns, the less the machine changes from one to the next
FILE_ROUNDS = 9
FILE_STEPS = 8  # updates of a round, after those that start the workers
SETTINGS = ((2, 0), (1, 1), (2, 1), (1, 2), (2, 2))  # threads of training, workers


B0 = ("model.image_size=64", "model.drop_path=0.2", "model.dropout=0.2")
SMALL = ("model.image_size=32", "model.width=0.5", "model.depth=0.4", "model.drop_path=0", "model.dropout=0")


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
    engine, steps, size = ranks.Ours(plan).engine, itertools.count(), plan.model.image_size

    def batches(workers: int) -> Iterator:
        return our_batches(plan.data.model_copy(update={"workers": workers}), size, MICRO, plan.batch.global_)

    return Side(lambda images: engine.train_step(images, next(steps), lr=0.1), batches)


def timms(plan: Recipe) -> Side:
    """timm's loop and loader."""
    loop = Loop(plan.model, lr=0.1)
    return Side(
        lambda images: loop.update(list(itertools.islice(images, ACCUMULATION))),
        functools.partial(timm_batches, plan.model.image_size, MICRO),
    )


def measure_steps() -> Tuple[List[dict], List[float]]:
    """Rows, and timm's time over ours round by round."""
    threads, part = claims.less(2, 1), claims.less("step, B0 64 px", "step, quickstart's 32 px")
    torch.set_num_threads(threads)
    model = claims.less(B0, SMALL)
    plan = recipe(*model)
    update, (images, labels) = timms(plan).update, images_and_labels(plan, MICRO)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (plan.model.mean, plan.model.std))
    theirs = itertools.repeat(((images / 255 - mean) / std, labels))
    sides = {
        "timm": lambda: update(theirs),
        "ours": ranks.Ours(plan).update,
        "ours, float16 weights": ranks.Ours(recipe(*model, "precision.weights=float16")).update,
    }
    times = claims.in_turn(sides, STEP_ROUNDS, lambda side, _: claims.seconds(side))
    rows = [row(part, name, (threads, 0), values, times["timm"]) for name, values in times.items()]
    return rows, claims.ratios(times["timm"], times["ours"])


def measure_files(part: str, model: Tuple[str, ...]) -> Tuple[List[dict], List[float]]:
    """Rows, and timm's time over ours round by round, each with its fastest setting."""
    plan = recipe(*model)
    sides = {"timm": timms(plan), "ours": ours(plan)}
    fastest, settings = {}, claims.less(SETTINGS, SETTINGS[1:2])
    for name, side in sides.items():
        trials = {}
        for setting in claims.progress(settings, f"{part}, {name}: setting"):
            trials[setting] = min(seconds_with_files(side, setting) for _ in range(claims.less(2, 1)))
        fastest[name] = min(trials, key=lambda setting: trials[setting])
    measure = {name: functools.partial(seconds_with_files, side, fastest[name]) for name, side in sides.items()}
    times = claims.in_turn(measure, FILE_ROUNDS, lambda side, _: side(), what=f"{part}, turn")
    rows = [row(part, name, fastest[name], times[name], times["timm"]) for name in sides]
    return rows, claims.ratios(times["timm"], times["ours"])


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


def row(part: str, side: str, setting: Tuple[int, int], values: List[float], reference: List[float]) -> dict:
    images = MICRO * ACCUMULATION
    return {
        "part": part,
        "side": side,
        "threads": setting[0],
        "workers": setting[1],
        **claims.milliseconds(values, "_per_update"),
        "images_per_second": images / statistics.median(values),
        "speedup_over_timm": claims.median_ratio(reference, values),
    }


def main() -> None:
    as_json = claims.begin(__doc__, takes="10 to 15 minutes", quick="2 minutes").json
    step_rows, step_ratios = measure_steps()
    count = len(photographs())
    file_rows, file_ratios = measure_files("files, quickstart's 32 px", SMALL)
    large_rows, _ = claims.less(lambda: measure_files("files, B0 64 px", B0), lambda: ([], []))()
    print(f"timm {timm.__version__}; {count} JPEG files of 500 x 375 pixels")
    made = [
        claims.claim("step_speedup_over_timm", step_ratios, "times", ">= 1.0"),
        claims.claim("end_to_end_speedup_over_timm", file_ratios, "times", ">= 1.4"),
    ]
    claims.report("step", [*step_rows, *file_rows, *large_rows], made, as_json)
