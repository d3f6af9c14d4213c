"""Micro batch, stages and replicas change where a gradient is computed; do they change what is learned?"""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple, Sequence, Tuple

import torch

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

    def __str__(self) -> str:
        return f"micro batch {self.micro}, stages {self.stages}, replicas {self.replicas}"


REFERENCE = Way(384)
WAYS = (REFERENCE, Way(384, stages=2), Way(384, replicas=2), Way(192), Way(96), Way(96, stages=2), Way(48), Way(12))


class MicroBatches(Experiment):
    """Mixing and stochastic depth are off: they draw by micro batch."""

    name = "micro"
    question = "Micro batch, stages and replicas: do they change what is learned?"
    about = f"""{ALL} updates of 768 images, LARS, float32, no mixing, no dropout: what is drawn for a micro batch \
would otherwise change with its size. Replicas add up their gradients in a tree (`exchange.order=tree`). "Distance": \
of the final weights from those of the first row with the same seed, as a share of their norm; after {FEW} updates it \
is that of runs so short."""
    published = (
        "Graphcore (2022) gives one accuracy, 82.54 ± 0.13 %, for all sizes of pods, so for 8 to 128 replicas; "
        "gradients are sums over micro batches, whose order is all that changes."
    )

    def series(self) -> List[Series]:
        return _series(ALL)

    def wanted(self) -> List[Run]:
        return [*(run for series in _series(FEW) for run in series.runs), *super().wanted()]

    def rows(self) -> List[dict]:
        """With the distances and equal bits of the final weights, against the first row's."""
        rows = super().rows()
        few, all_ = ([_distance(each, every[0]) for each in every] for every in (_series(FEW), _series(ALL)))
        for row, (first, _), (last, same) in zip(rows, few, all_):
            row.update({f"distance_after_{FEW}": first, f"distance_after_{ALL}": last, "same_bits": same})
        return rows

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 0.4 * len(rows) + 1.6), layout="constrained")
        axis = figure.subplots()
        for number, updates in enumerate((FEW, ALL)):
            # Rows without a distance have no place on such an axis: nothing is drawn of them.
            places = [place + 0.2 * (2 * number - 1) for place in range(len(rows))]
            widths = [row[f"distance_after_{updates}"] for row in rows]
            axis.barh(places, widths, 0.4, color=f"C{number}", label=f"after {updates} updates")
        axis.set_yticks(range(len(rows)), [str(way) for way in WAYS])
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("distance of the final weights, largest over seeds")
        axis.legend()
        axis.grid(alpha=0.3)
        figure.savefig(path, dpi=110)

    def verdict(self, rows: Sequence[dict]) -> str:
        same = dict(zip(WAYS, rows))
        placed = [row for way, row in same.items() if way.micro == REFERENCE.micro]
        bits = all(row["same_bits"] == row["seeds"] for row in placed)
        others = [row for way, row in same.items() if way.micro != REFERENCE.micro]
        few, all_ = (max(row[f"distance_after_{updates}"] for row in others) for updates in (FEW, ALL))
        points = max(abs(row["top1_mean"] - rows[0]["top1_mean"]) for row in rows)
        return (
            f"Stages and replicas {'leave the weights the same to the bit' if bits else 'change bits of the weights'}; "
            f"other micro batches move them by up to {few:.0e} of their norm after {FEW} updates and {all_:.0e} after "
            f"{ALL}, and mean top-1 by up to {points:.2f} points, beside {rows[0]['top1_sd']:.2f} between seeds."
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
