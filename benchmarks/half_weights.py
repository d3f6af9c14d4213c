"""Do float16 weights with stochastic rounding learn what float32 weights learn, and does nearest rounding stall?

    python -m benchmarks.half_weights [--json]

Trains the quickstart model on the embedded digits with three kinds of persistent weights (float32, float16
rounded stochastically, float16 rounded to nearest) at two peak learning rates, several seeds each, two runs at
a time. Runs are ordinary run folders: a benchmark that was cut off goes on where it was. Writes
docs/results/half_weights.{md,csv,png}.
"""

from __future__ import annotations

import concurrent.futures
import csv
import itertools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import List, NamedTuple

from benchmarks import claims
from tools.curves import read_events

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "benchmarks" / "cache" / "half_weights"
RESULTS = ROOT / "docs" / "results"
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
        return RUNS / f"{self.weights.replace(' ', '_')}-peak{self.peak:g}-seed{self.seed}"

    @property
    def command(self) -> List[str]:
        overrides = [*WEIGHTS[self.weights], f"schedule.peak={self.peak}", f"run.seed={self.seed}"]
        overrides += ["run.epochs=32", "data.crop_fraction=1.0"]
        fixed = ["log.tensorboard=false", "log.trust_ratios=false", f"run.output={self.folder}"]
        return [sys.executable, "train.py", "--config", "configs/quickstart.yaml", *overrides, *fixed]


def train(run: Run) -> None:
    """Runs to the end, or not at all if it has ended before. One thread: two runs share two cores."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(run.command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def summarise(runs: List[Run]) -> List[dict]:
    """A row per kind of weights and peak: final top-1 and training loss over the seeds."""
    rows = []
    for peak, weights in itertools.product(PEAKS, WEIGHTS):
        events = [read_events(run.folder) for run in runs if (run.weights, run.peak) == (weights, peak)]
        top1 = [event["end"][-1]["top1"] for event in events]
        loss = [event["train"][-1]["loss"] for event in events]
        rows.append(
            {
                "peak": peak,
                "weights": weights,
                "seeds": len(events),
                "top1_mean": statistics.mean(top1),
                "top1_sd": statistics.stdev(top1),
                "train_loss_mean": statistics.mean(loss),
                "train_loss_sd": statistics.stdev(loss),
            }
        )
    return rows


def gaps(rows: List[dict]) -> List[dict]:
    """Claims: how far the training loss ends above or below float32's, in standard errors of that difference."""
    table = {(row["peak"], row["weights"]): row for row in rows}
    small = min(PEAKS)

    def gap(weights: str, peak: float) -> float:
        row, reference = table[peak, weights], table[peak, "float32"]
        error = ((row["train_loss_sd"] ** 2 + reference["train_loss_sd"] ** 2) / row["seeds"]) ** 0.5
        return abs(row["train_loss_mean"] - reference["train_loss_mean"]) / error

    expected = [(f"stochastic_gap_peak{peak:g}", gap("float16 stochastic", peak), "<= 3") for peak in PEAKS]
    expected.append((f"nearest_gap_peak{small:g}", gap("float16 nearest", small), ">= 5"))
    return [claims.claim(name, [value], "standard errors", goal) for name, value, goal in expected]


def draw(runs: List[Run], path: Path) -> None:
    """Training loss and validation accuracy over epochs, a panel per peak, mean bold and each seed thin."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, len(PEAKS), squeeze=False)
    for (row, (kind, key)), (column, peak) in itertools.product(
        enumerate((("train", "loss"), ("eval", "top1"))), enumerate(PEAKS)
    ):
        axis = axes[row][column]
        axis.set(title=f"peak learning rate {peak:g}", xlabel="epoch")
        axis.set_ylabel("training loss" if key == "loss" else "validation top-1")
        if key == "loss":
            axis.set_yscale("log")
        for colour, weights in enumerate(WEIGHTS):
            curves = [
                [event[key] for event in read_events(run.folder)[kind]]
                for run in runs
                if (run.weights, run.peak) == (weights, peak)
            ]
            epochs = [event["epoch"] for event in read_events(runs[0].folder)[kind]]
            for curve in curves:
                axis.plot(epochs, curve, color=f"C{colour}", lw=0.5, alpha=0.5)
            axis.plot(epochs, [statistics.mean(values) for values in zip(*curves)], color=f"C{colour}", label=weights)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def write(rows: List[dict], found: List[dict]) -> None:
    """The table as CSV, and the page that shows it."""
    with open(RESULTS / "half_weights.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (RESULTS / "half_weights.md").write_text(_page(rows, found))


def _page(rows: List[dict], found: List[dict]) -> str:
    def cell(row: dict, key: str, digits: int, factor: float = 1) -> str:
        return f"{factor * row[f'{key}_mean']:.{digits}f} ± {factor * row[f'{key}_sd']:.{digits}f}"

    table = [
        f"| {row['peak']:g} | {row['weights']} | {cell(row, 'top1', 2, 100)} | {cell(row, 'train_loss', 4)} |"
        for row in rows
    ]
    verdicts = [
        f"| {each['name']} | {each['value']:.1f} | {each['goal']} | {'holds' if each['holds'] else 'does not hold'} |"
        for each in found
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
    return "\n".join([head, *table, gap_head, *verdicts]) + "\n"


def main() -> None:
    as_json = claims.wants_json(__doc__)
    runs = [Run(*choice) for choice in itertools.product(WEIGHTS, PEAKS, SEEDS)]
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        for number, _ in enumerate(pool.map(train, runs), start=1):
            print(f"{number} of {len(runs)} runs done", flush=True)
    rows = summarise(runs)
    found = gaps(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    draw(runs, RESULTS / "half_weights.png")
    write(rows, found)
    claims.report("half_weights", rows, found, as_json)


if __name__ == "__main__":
    main()
