"""Micro batch, stages and replicas change where a gradient is computed; do they change what is learned?"""

from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import torch

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series
from benchmarks.evidence.runs import Run
from training import weights

BASE = ("batch.global=768", "evaluation.every_epochs=1", "exchange.order=tree")
FEW, ALL = 4, 40  # updates
WARM_UP = {FEW: 1, ALL: 8}  # updates


class Way(NamedTuple):
    """One way to compute the same run."""

    micro: int
    stages: int = 1
    replicas: int = 1


REFERENCE = Way(384)
WAYS = (REFERENCE, Way(384, stages=2), Way(384, replicas=2), Way(192), Way(96), Way(96, stages=2), Way(48), Way(12))


class MicroBatches(Experiment):
    """The same updates computed in several ways. Mixing and stochastic depth are off: they draw by micro batch."""

    name = "micro"
    question = "Micro batch, stages and replicas: do they change what is learned?"

    def series(self) -> List[Series]:
        return _series(ALL)

    def wanted(self) -> List[Run]:
        return [*(run for series in _series(FEW) for run in series.runs), *super().wanted()]

    def rows(self) -> List[dict]:
        rows = super().rows()
        few, all_ = ([_distance(each, every[0]) for each in every] for every in (_series(FEW), _series(ALL)))
        for row, (first, _), (last, same) in zip(rows, few, all_):
            row.update({f"distance_after_{FEW}": first, f"distance_after_{ALL}": last, "same_bits": same})
        return rows

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        names = [", ".join(f"{name} {value}" for name, value in way._asdict().items()) for way in WAYS]
        sides = {f"after {each} updates": [row[f"distance_after_{each}"] for row in rows] for each in (FEW, ALL)}
        page.bars(names, sides, path, "distance of the final weights, largest over seeds", xscale="log")

    def verdict(self, rows: Sequence[dict]) -> str:
        placed = [row for row in rows if row["micro"] == REFERENCE.micro]
        bits = all(row["same_bits"] == row["seeds"] for row in placed)
        few, all_ = (max(row[f"distance_after_{updates}"] for row in rows) for updates in (FEW, ALL))
        lost = max(abs(row["top1_mean"] - rows[0]["top1_mean"]) for row in rows)
        return (
            f"Stages and replicas {'leave the weights the same to the bit' if bits else 'change bits of the weights'}; "
            f"other micro batches move them by up to {few:.0e} of their norm after {FEW} updates and {all_:.0e} after "
            f"{ALL}, and mean top-1 by up to {lost:.2f} points, beside {rows[0]['top1_sd']:.2f} between seeds."
        )


def _series(updates: int) -> List[Series]:
    length = (*BASE, f"run.steps={updates}", f"schedule.warmup_steps={WARM_UP[updates]}")
    found = []
    for way in WAYS:
        several = (f"parallel.stages={way.stages}", f"parallel.replicas={way.replicas}")
        overrides = (*length, f"batch.micro={way.micro}", *(several if way.stages * way.replicas > 1 else ()))
        found.append(Series(way._asdict(), overrides, stages=way.stages, replicas=way.replicas))
    return found


def _distance(series: Series, reference: Series) -> Tuple[float, int]:
    """Distance of the final weights from the reference's, largest over the seeds; how many seeds have equal bits."""
    distances, same = [], 0
    for run, other in zip(series.runs, reference.runs):
        ours, theirs = (weights.read(str(each.folder), "trained").tensors for each in (run, other))
        apart = sum((ours[name].double() - theirs[name].double()).square().sum() for name in theirs)
        norm = sum(tensor.double().square().sum() for tensor in theirs.values())
        distances.append(float((apart / norm).sqrt()))
        same += all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return float(f"{max(distances):.3g}"), same
