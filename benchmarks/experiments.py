"""What experiments that train whole runs share: runs that are kept, their last figures over seeds, curves, tables.

A run is an ordinary run folder under benchmarks/cache/: an experiment that was cut off goes on where it was.
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
from typing import Dict, List, Mapping, Sequence

from tools.curves import read_events

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
RESULTS = ROOT / "docs" / "results"
# What a run does not need that is only looked at from here.
QUIET = ("log.tensorboard=false", "log.trust_ratios=false")


def command(folder: Path, overrides: Sequence[str], replicas: int = 1) -> List[str]:
    """Trains the quickstart recipe with overrides into a run folder."""
    start = ["train.py"] if replicas == 1 else ["-m", "tools.launch", "--replicas", str(replicas)]
    recipe = ["--config", "configs/quickstart.yaml", *overrides, *QUIET, f"run.output={folder}"]
    return [sys.executable, *start, *recipe]


def train_all(commands: Sequence[List[str]], at_once: int) -> None:
    """Runs each to its end, or not at all if it has ended before. One thread to a process."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=at_once) as pool:
        for number, _ in enumerate(pool.map(_train, commands), start=1):
            print(f"{number} of {len(commands)} runs done", flush=True)


def _train(arguments: List[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(arguments, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def ends(folders: Sequence[Path]) -> dict:
    """Final top-1 and training loss over runs that differ in the seed: mean and standard deviation."""
    events = [read_events(folder) for folder in folders]
    top1 = [event["end"][-1]["top1"] for event in events]
    loss = [event["train"][-1]["loss"] for event in events]
    return {
        "seeds": len(events),
        "top1_mean": statistics.mean(top1),
        "top1_sd": statistics.stdev(top1),
        "train_loss_mean": statistics.mean(loss),
        "train_loss_sd": statistics.stdev(loss),
    }


def gap(row: dict, reference: dict) -> float:
    """How much higher a row's final training loss is than another's, in standard errors of the difference."""
    error = ((row["train_loss_sd"] ** 2 + reference["train_loss_sd"] ** 2) / row["seeds"]) ** 0.5
    return (row["train_loss_mean"] - reference["train_loss_mean"]) / error


def draw(panels: Mapping[str, Mapping[str, Sequence[Path]]], path: Path) -> None:
    """Training loss and validation accuracy over epochs, the mean over seeds bold and each seed thin.

    Args:
        panels: title -> name of a line -> the folders of its runs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(5.5 * len(panels), 24), 7), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False)
    for (row, (kind, key)), (column, (title, lines)) in itertools.product(
        enumerate((("train", "loss"), ("eval", "top1"))), enumerate(panels.items())
    ):
        axis = axes[row][column]
        axis.set(title=title, xlabel="epoch", ylabel="training loss" if key == "loss" else "validation top-1")
        if key == "loss":
            axis.set_yscale("log")
        for number, (name, folders) in enumerate(lines.items()):
            events = [read_events(folder)[kind] for folder in folders]
            epochs, curves = [event["epoch"] for event in events[0]], [[event[key] for event in run] for run in events]
            for curve in curves:
                axis.plot(epochs, curve, color=f"C{number}", lw=0.5, alpha=0.5)
            axis.plot(epochs, [statistics.mean(values) for values in zip(*curves)], color=f"C{number}", label=name)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def write(name: str, rows: List[dict], page: str) -> None:
    """The table as CSV, and the page that shows it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with open(RESULTS / f"{name}.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (RESULTS / f"{name}.md").write_text(page)


def cell(row: Dict[str, float], key: str, digits: int, factor: float = 1) -> str:
    """Mean ± standard deviation of a key of `ends`."""
    return f"{factor * row[f'{key}_mean']:.{digits}f} ± {factor * row[f'{key}_sd']:.{digits}f}"


def verdicts(found: Sequence[dict]) -> List[str]:
    """Claims as rows of a table: name, value, goal, whether it holds."""
    return [
        f"| {each['name']} | {each['value']:.1f} | {each['goal']} | {'holds' if each['holds'] else 'does not hold'} |"
        for each in found
    ]
