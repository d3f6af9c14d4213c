"""Do float16 weights with stochastic rounding learn what float32 weights learn, and does nearest rounding stall?

    python -m benchmarks.half_weights [--json]

Trains the quickstart model on the embedded digits with three kinds of persistent weights (float32, float16
rounded stochastically, float16 rounded to nearest) at two peak learning rates, several seeds each, two runs at
a time. Runs are ordinary run folders: a benchmark that was cut off goes on where it was. Writes
docs/results/half_weights.{md,csv,png}.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import List, NamedTuple

from benchmarks import claims, experiments

NAME = "half_weights"
WEIGHTS = {
    "float32": ("precision.weights=float32",),
    "float16 stochastic": ("precision.weights=float16", "precision.rounding=stochastic"),
    "float16 nearest": ("precision.weights=float16", "precision.rounding=nearest"),
}
PEAKS = (3.0, 0.03)
SEEDS = (0, 1, 2, 3)


class Run(NamedTuple):
    """One training run of the experiment."""

    weights: str
    peak: float
    seed: int

    @property
    def folder(self) -> Path:
        words = f"{self.weights.replace(' ', '_')}-peak{self.peak:g}-seed{self.seed}"
        return experiments.CACHE / NAME / words

    @property
    def command(self) -> List[str]:
        overrides = [*WEIGHTS[self.weights], f"schedule.peak={self.peak}", f"run.seed={self.seed}"]
        return experiments.command(self.folder, [*overrides, "run.epochs=32", "data.crop_fraction=1.0"])


def folders(weights: str, peak: float) -> List[Path]:
    return [Run(weights, peak, seed).folder for seed in SEEDS]


def summarise() -> List[dict]:
    """A row per kind of weights and peak: final top-1 and training loss over the seeds."""
    return [
        {"peak": peak, "weights": weights, **experiments.ends(folders(weights, peak))}
        for peak, weights in itertools.product(PEAKS, WEIGHTS)
    ]


def gaps(rows: List[dict]) -> List[dict]:
    """Claims: how far the training loss ends above or below float32's, in standard errors of that difference."""
    table = {(row["peak"], row["weights"]): row for row in rows}
    small = min(PEAKS)

    def gap(weights: str, peak: float) -> float:
        return abs(experiments.gap(table[peak, weights], table[peak, "float32"]))

    expected = [(f"stochastic_gap_peak{peak:g}", gap("float16 stochastic", peak), "<= 3") for peak in PEAKS]
    expected.append((f"nearest_gap_peak{small:g}", gap("float16 nearest", small), ">= 5"))
    return [claims.claim(name, [value], "standard errors", goal) for name, value, goal in expected]


def draw(path: Path) -> None:
    """A panel per peak."""
    panels = {f"peak learning rate {peak:g}": {kind: folders(kind, peak) for kind in WEIGHTS} for peak in PEAKS}
    experiments.draw(panels, path)


def _page(rows: List[dict], found: List[dict]) -> str:
    table = [
        f"| {row['peak']:g} | {row['weights']} | {experiments.cell(row, 'top1', 2, 100)} "
        f"| {experiments.cell(row, 'train_loss', 4)} |"
        for row in rows
    ]
    about = claims.machine()
    head = f"""# Float16 weights: stochastic rounding beside float32 and beside nearest rounding

Measured on {about["date"]}, {about["cpu"]}, torch {about["torch"]}, by `python -m benchmarks.half_weights`:
the quickstart recipe, 32 epochs, on the embedded digits (1,437 training and 360 validation scans), {len(SEEDS)} seeds,
mean ± standard deviation over the seeds. "Weights" is what persists: weights and momentum.
Arithmetic is float32 in all rows.

| peak learning rate | weights | final validation top-1 (%) | final training loss |
| --- | --- | --- | --- |"""
    gap_head = """
![training loss and validation accuracy over epochs](half_weights.png)

Distance of the final training loss from float32's, in standard errors of the difference of the two means:

| claim | value | goal | |
| --- | --- | --- | --- |"""
    return "\n".join([head, *table, gap_head, *experiments.verdicts(found)]) + "\n"


def main() -> None:
    as_json = claims.wants_json(__doc__)
    runs = [Run(*choice) for choice in itertools.product(WEIGHTS, PEAKS, SEEDS)]
    experiments.train_all(runs, at_once=2)
    rows = summarise()
    found = gaps(rows)
    experiments.write(NAME, rows, _page(rows, found))
    draw(experiments.RESULTS / f"{NAME}.png")
    claims.report(NAME, rows, found, as_json)


if __name__ == "__main__":
    main()
