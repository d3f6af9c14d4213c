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
from typing import Dict, List, Mapping, Protocol, Sequence

from benchmarks import claims
from parallel.parent_death import bound_to_parent
from tools.curves import read_events

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / "cache"
RESULTS = ROOT / "docs" / "results"
# What a run does not need that is only looked at from here.
QUIET = ("log.tensorboard=false", "log.trust_ratios=false")


_SHORT = ("run.epochs=1", "schedule.warmup_epochs=0.2")  # with --quick


def command(folder: Path, overrides: Sequence[str], replicas: int = 1) -> List[str]:
    """Trains the quickstart recipe with overrides into a run folder."""
    start = ["train.py"] if replicas == 1 else ["-m", "tools.launch", "--replicas", str(replicas)]
    recipe = ["--config", "configs/quickstart.yaml", *overrides, *QUIET, f"run.output={folder}"]
    return [sys.executable, *start, *recipe, *claims.less((), _SHORT)]


def kept(name: str) -> Path:
    """Where the runs of an experiment are kept; short ones are not taken for whole ones."""
    return CACHE / claims.less("", "quick") / name


class Run(Protocol):
    """A training run of an experiment: its run folder, and the command that trains it."""

    @property
    def folder(self) -> Path: ...

    @property
    def command(self) -> List[str]: ...


def train_all(runs: Sequence[Run], at_once: int) -> None:
    """Trains each run to its end that has not come to it before. One thread to a process."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=at_once) as pool:
        done = pool.map(_train, runs)
        for _ in claims.progress(runs, "run"):
            next(done)


def _train(run: Run) -> None:
    if (run.folder / "metrics.jsonl").exists() and "end" in read_events(run.folder):
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(bound_to_parent(run.command), cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def ends(folders: Sequence[Path]) -> dict:
    """Final top-1 and training loss over runs that differ in the seed: mean and standard deviation."""
    top1 = [read_events(folder)["end"][-1]["top1"] for folder in folders]
    loss = final_losses(folders)
    return {
        "seeds": len(folders),
        "top1_mean": statistics.mean(top1),
        "top1_sd": statistics.stdev(top1),
        "train_loss_mean": statistics.mean(loss),
        "train_loss_sd": statistics.stdev(loss),
    }


def final_losses(folders: Sequence[Path]) -> List[float]:
    """The last training loss of each run."""
    return [read_events(folder)["train"][-1]["loss"] for folder in folders]


def draw(panels: Mapping[str, Mapping[str, Sequence[Path]]], path: Path) -> None:
    """Training loss and validation accuracy over epochs, the mean over seeds bold and each seed thin.

    Args:
        panels: title -> name of a line -> the folders of its runs.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(5.5 * len(panels), 24), 7), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))  # a colour each in all panels
    shown = {}
    for (row, (kind, key)), (column, (title, lines)) in itertools.product(
        enumerate((("train", "loss"), ("eval", "top1"))), enumerate(panels.items())
    ):
        axis = axes[row][column]
        axis.set(title=title, xlabel="epoch", ylabel="training loss" if key == "loss" else "validation top-1")
        if key == "loss":
            axis.set_yscale("log")
        for name, folders in lines.items():
            colour = f"C{names.index(name)}"
            events = [read_events(folder)[kind] for folder in folders]
            epochs, curves = [event["epoch"] for event in events[0]], [[event[key] for event in run] for run in events]
            for curve in curves:
                axis.plot(epochs, curve, color=colour, lw=0.5, alpha=0.5)
            (shown[name],) = axis.plot(epochs, [statistics.mean(values) for values in zip(*curves)], color=colour)
        axis.grid(alpha=0.3)
    figure.legend([shown[name] for name in names], names, loc="outside lower center", ncols=4)
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
