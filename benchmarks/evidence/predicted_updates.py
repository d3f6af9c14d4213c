"""Does the noise scale of a small batch predict how many updates larger ones take?

An EfficientNet-B0 G16 of width 0.2 and depth 0.1 on glyphs of 16 px, SGD with momentum and a constant rate after a
short warm-up, batches of 8 to 128 around the noise scale. Each batch has four rates to choose from, which grow with the
root of the batch; the best is that which takes the fewest updates to the target, in the mean over seeds. The target is
reached where the mean of five evaluations is above it, because at a constant rate single ones scatter. The prediction
is made from runs at the smallest batch alone: their noise scale from the first update to the target (`tools.batch`).
"""

import statistics
from typing import Dict, List, NamedTuple, Sequence

from benchmarks.evidence.runs import Run, events_of, updates_to
from tools.planning import batches

# Batch -> updates of a run: more than the best rate takes to the target.
UPDATES = {8: 3600, 16: 2400, 32: 1600, 64: 1200, 128: 1000}
RATES = (0.002, 0.006, 0.018, 0.054)  # of the smallest batch
SEEDS = (0, 1)
TARGET = 0.6  # of top-1
SMALLEST = min(UPDATES)
_EVALUATIONS, _WINDOW = 50, 5
_IMAGES = 15360
_RECIPE = (
    "optimizer.name=sgd", "optimizer.weight_decay=2.5e-6", "schedule.name=constant", "model.classes=10",
    "data.glyph_difficulty=0.3", f"data.train_images={_IMAGES}", "data.validation_images=1000",
)  # fmt: skip


class Found(NamedTuple):
    """A batch: its best rate (of RATES), and the updates to the target as trained and as predicted."""

    batch: int
    rate: float
    trained: float
    predicted: float


def run_of(batch: int, rate: float, seed: int) -> Run:
    """A run whose updates have two micro batches, so that it has a noise scale. Args: rate: of RATES."""
    steps = UPDATES[batch]
    epochs = steps * batch / _IMAGES / _EVALUATIONS
    own = (
        f"batch.global={batch}", f"batch.micro={batch // 2}", f"run.steps={steps}",
        f"schedule.peak={rate * (batch / SMALLEST) ** 0.5:.4g}",
        "schedule.warmup_steps=50", f"evaluation.every_epochs={epochs:g}", f"log.every_steps={steps // _EVALUATIONS}",
    )  # fmt: skip
    return Run((*_RECIPE, *own), seed)


def wanted() -> List[Run]:
    """All runs, the smallest batches last: theirs take longest."""
    return [run_of(batch, rate, seed) for batch in sorted(UPDATES, reverse=True) for rate in RATES for seed in SEEDS]


def found() -> List[Found]:
    """A row for each batch; all runs are finished. Raises ValueError if a batch never reaches the target."""
    best = {batch: _best(batch) for batch in UPDATES}
    rate, _ = best[SMALLEST]
    small = [run_of(SMALLEST, rate, seed) for seed in SEEDS]
    scales = [until_target(run, updates_to(run, TARGET, _WINDOW), SMALLEST) for run in small]
    return [
        Found(batch, chosen, updates, statistics.mean(batches.updates(each, batch) for each in scales))
        for batch, (chosen, updates) in best.items()
    ]


def errors(rows: Sequence[Found]) -> List[float]:
    """Relative errors of the predictions for the larger batches."""
    return [abs(row.predicted / row.trained - 1) for row in rows if row.batch != SMALLEST]


def _best(batch: int) -> tuple:
    """Rate, and mean updates to the target, of the rate whose runs all come there and take the fewest."""
    means: Dict[float, float] = {}
    for rate in RATES:
        updates = [updates_to(run_of(batch, rate, seed), TARGET, _WINDOW) for seed in SEEDS]
        if None not in updates:
            means[rate] = statistics.mean(updates)
    if not means:
        raise ValueError(f"no rate reaches {TARGET:.0%} with a batch of {batch}")
    return min(means.items(), key=lambda item: item[1])


def until_target(run: Run, left: float, batch: int) -> List[batches.Interval]:
    """The noise scales of a run's log over the `left` updates that it takes to the target."""
    kept = []
    for each in batches.intervals(events_of(run)["train"], batch):
        kept.append(each._replace(updates=max(0.0, min(left, each.updates))))
        left -= each.updates
    return kept
