"""Micro batch, stages and replicas change where a gradient is computed; do they change what is learned?"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple

import torch

from benchmarks.evidence.experiment import Experiment, Series, row
from benchmarks.evidence.runs import Run
from training import weights

LENGTH = (
    "batch.global=768",
    "run.steps=40",
    "schedule.warmup_steps=8",
    "evaluation.every_epochs=1",
    "exchange.order=tree",
)


class Way(NamedTuple):
    """One way to compute the same run."""

    micro: int
    stages: int = 1
    replicas: int = 1

    def __str__(self) -> str:
        return f"micro batch {self.micro}, stages {self.stages}, replicas {self.replicas}"


REFERENCE = Way(384)
WAYS = (REFERENCE, Way(384, stages=2), Way(384, replicas=2), Way(192), Way(96), Way(96, stages=2), Way(48), Way(12))


class _Placed(Series):
    """Runs in as many processes as their way has."""

    @property
    def runs(self) -> List[Run]:
        stages, replicas = self.labels["stages"], self.labels["replicas"]
        return [Run(self.overrides, seed, stages, replicas) for seed in self.seeds]


class MicroBatches(Experiment):
    """Mixing and stochastic depth are off: they draw by micro batch."""

    name = "micro"
    question = "Micro batch, stages and replicas: do they change what is learned?"
    about = """Forty updates of 768 images, LARS, float32, no mixing, no dropout: what is drawn for a micro batch \
would otherwise change with its size. Replicas add up their gradients in a tree (`exchange.order=tree`). "Distance": \
of the final weights from those of the first row with the same seed, as a share of their norm."""
    published = (
        "Graphcore (2022) gives one accuracy, 82.54 ± 0.13 %, for all sizes of pods, so for 8 to 128 replicas; "
        "gradients are sums over micro batches, whose order is all that changes."
    )

    def series(self) -> List[Series]:
        return [_Placed(way._asdict(), (*LENGTH, f"batch.micro={way.micro}", *_split(way))) for way in WAYS]

    def rows(self) -> List[dict]:
        series = self.series()
        return [{**row(each), **_distance(each, series[0])} for each in series]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 0.4 * len(rows) + 1.2), layout="constrained")
        axis = figure.subplots()
        axis.barh(range(len(rows)), [row["distance_largest"] for row in rows], color="C0")
        axis.set_yticks(range(len(rows)), [str(way) for way in WAYS])
        axis.invert_yaxis()
        axis.set_xlabel("largest distance of the final weights over seeds, share of their norm")
        axis.grid(alpha=0.3)
        figure.savefig(path, dpi=110)

    def verdict(self, rows: Sequence[dict]) -> str:
        same = dict(zip(WAYS, rows))
        placed = [row for way, row in same.items() if way.micro == REFERENCE.micro]
        bits = all(row["same_bits"] == row["seeds"] for row in placed)
        others = [row for way, row in same.items() if way.micro != REFERENCE.micro]
        farthest = max(row["distance_largest"] for row in others)
        points = max(abs(row["top1_mean"] - rows[0]["top1_mean"]) for row in rows)
        return (
            f"Stages and replicas {'leave the weights the same to the bit' if bits else 'change bits of the weights'}; "
            f"other micro batches move them by up to {farthest:.1e} of their norm after forty updates, by rounding "
            f"alone, and mean top-1 by up to {points:.2f} points."
        )


def _split(way: Way) -> Tuple[str, ...]:
    if way.stages * way.replicas == 1:
        return ()
    return f"parallel.stages={way.stages}", f"parallel.replicas={way.replicas}"


def _distance(series: Series, reference: Series) -> Dict[str, float]:
    """Over the seeds: the largest distance, and how many runs have the same bits."""
    distances, same = [], 0
    for run, other in zip(series.runs, reference.runs):
        ours, theirs = (weights.read(str(each.folder), "trained").tensors for each in (run, other))
        apart = sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
        norm = sum(tensor.double().square().sum() for tensor in theirs.values())
        distances.append(float((apart / norm).sqrt()))
        same += all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return {"distance_largest": float(f"{max(distances):.3g}"), "same_bits": same}
