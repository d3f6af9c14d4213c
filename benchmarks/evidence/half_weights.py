"""Float16 weights and no others: does stochastic rounding keep what rounding to nearest loses?"""

import itertools
from pathlib import Path
from typing import List, Sequence

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, two
from benchmarks.evidence.runs import outcome

KEPT, STOCHASTIC, NEAREST = "float32", "float16 stochastic", "float16 nearest"
WEIGHTS = {
    KEPT: ("precision.weights=float32",),
    STOCHASTIC: ("precision.weights=float16", "precision.rounding=stochastic"),
    NEAREST: ("precision.weights=float16", "precision.rounding=nearest"),
}
PAIRED = 4.3  # standard errors; of three differences, chance exceeds this once in 20 times
PEAKS = (0.03125, 0.125, 0.5, 2.0)
LENGTH = (
    "data.glyph_difficulty=0.3", "data.train_images=20480", "run.epochs=2", "schedule.warmup_epochs=0.3",
    "batch.global=64", "batch.micro=64", "evaluation.every_epochs=2",
)  # fmt: skip


class HalfWeights(Experiment):
    """Three kinds of persistent weights over the peak rate; arithmetic is float32 in all of them."""

    name = "half_weights"
    question = "Float16 weights: stochastic rounding beside float32 and beside rounding to nearest, over the rate"

    def series(self) -> List[Series]:
        return [
            Series({"peak": peak, "weights": kind}, (*LENGTH, *WEIGHTS[kind], f"schedule.peak={peak:g}"))
            for peak, kind in itertools.product(PEAKS, WEIGHTS)
        ]

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """With the validation loss above that of float32 weights, seed by seed."""
        found = super().rows_of(series)
        losses = [[outcome(run).loss for run in each.runs] for each in series]
        for place, row in enumerate(found):
            exact = losses[place - place % len(WEIGHTS)]
            row.update(two("behind", [loss - other for loss, other in zip(losses[place], exact)]))
        return found

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        titles = {"validation top-1 (%)": "top1", "validation loss behind float32": "behind"}
        panels = {title: page.lines(rows, "weights", "peak", key) for title, key in titles.items()}
        page.draw(panels, path, x="peak learning rate", y="mean ± standard deviation over seeds")

    def verdict(self, rows: Sequence[dict]) -> str:
        clear = {kind: [row["peak"] for row in rows if row["weights"] == kind and _clear(row)] for kind in WEIGHTS}
        word = "Reproduced" if clear[NEAREST] and not clear[STOCHASTIC] else "Not fully reproduced"
        peaks = {kind: ", ".join(f"{peak:g}" for peak in found) or "none" for kind, found in clear.items()}
        return (
            f"{word}: peak rates at which the validation loss clearly differs from that of float32 weights: with "
            f"stochastic rounding {peaks[STOCHASTIC]}; with rounding to nearest {peaks[NEAREST]}."
        )


def _clear(row: dict) -> bool:
    """Whether the difference from the runs with float32 weights is more than chance explains."""
    return abs(row["behind_mean"]) > PAIRED * row["behind_sd"] / row["seeds"] ** 0.5
