"""Float16 weights and no others: does stochastic rounding keep what rounding to nearest loses?"""

import itertools
import math
from pathlib import Path
from typing import List, Sequence

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, two
from benchmarks.evidence.runs import Run, outcome

KEPT = "float32"
STOCHASTIC = "float16 stochastic"
NEAREST = "float16 nearest"
WEIGHTS = {
    KEPT: ("precision.weights=float32",),
    STOCHASTIC: ("precision.weights=float16", "precision.rounding=stochastic"),
    NEAREST: ("precision.weights=float16", "precision.rounding=nearest"),
}
PAIRED = 4.3  # standard errors; of three differences, chance exceeds this once in 20 times
PEAKS = (0.03125, 0.125, 0.5, 2.0)
LENGTH = (
    "data.glyph_difficulty=0.3",
    "data.train_images=20480",
    "run.epochs=2",
    "schedule.warmup_epochs=0.3",
    "batch.global=64",
    "batch.micro=64",
    "evaluation.every_epochs=2",
)


class HalfWeights(Experiment):
    """Three kinds of persistent weights over the peak rate; arithmetic is float32 in all of
    them.
    """

    name = "half_weights"
    question = "Float16 weights: stochastic rounding beside float32 and beside rounding to nearest, over the rate"

    def series(self) -> List[Series]:
        """Return a series for each kind of weights at each peak rate."""
        return [_series(peak, kind) for peak, kind in itertools.product(PEAKS, WEIGHTS)]

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """Return the rows, with the validation loss above that of float32 weights, seed by seed.

        A seed counts only where neither of its two runs diverged.

        Args:
            series: finished ones.
        """
        rows = super().rows_of(series)
        losses = [[_loss(run) for run in one_kind.runs] for one_kind in series]
        for place, row in enumerate(rows):
            # At each peak rate float32 weights come first.
            exact = losses[place - place % len(WEIGHTS)]
            differences = [loss - other for loss, other in zip(losses[place], exact)]
            # The loss of a diverged run is infinite, and so would be the mean.
            behind = [difference for difference in differences if math.isfinite(difference)]
            row.update(two("behind", behind))
        return rows

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Draw top-1 and the loss behind float32 over the peak rate.

        Args:
            rows: of the table.
            path: of the figure.
        """
        panels = {
            "validation top-1 (%)": page.lines(rows, "weights", "peak", "top1"),
            "validation loss behind float32": page.lines(rows, "weights", "peak", "behind"),
        }
        page.draw(
            panels,
            path,
            x="peak learning rate",
            y="mean ± standard deviation over seeds",
        )

    def verdict(self, rows: Sequence[dict]) -> str:
        """Return at which rates float16 weights differ from float32 ones.

        Args:
            rows: of the table.
        """
        nearest = _clear_peaks(rows, NEAREST)
        stochastic = _clear_peaks(rows, STOCHASTIC)
        word = "Reproduced" if nearest and not stochastic else "Not fully reproduced"
        return (
            f"{word}: peak rates at which the validation loss clearly differs from that of float32 weights: with "
            f"stochastic rounding {_listed(stochastic)}; with rounding to nearest {_listed(nearest)}."
        )


def _series(peak: float, kind: str) -> Series:
    """Return the runs with one kind of weights at a peak rate."""
    overrides = (*LENGTH, *WEIGHTS[kind], f"schedule.peak={peak:g}")
    return Series({"peak": peak, "weights": kind}, overrides)


def _loss(run: Run) -> float:
    """Return the validation loss of a finished run."""
    finished = outcome(run)
    assert finished is not None, f"{run.folder}: is not finished"
    return finished.loss


def _clear_peaks(rows: Sequence[dict], kind: str) -> List[float]:
    """Return the peak rates at which a kind of weights differs from float32 beyond chance."""
    exact = {row["peak"]: row for row in rows if row["weights"] == KEPT}
    compared = [row for row in rows if row["weights"] == kind]
    return [row["peak"] for row in compared if _is_clear(row, exact[row["peak"]])]


def _is_clear(row: dict, exact: dict) -> bool:
    """Return whether a row differs from the `exact` one, of float32, by more than chance."""
    # Without float32's runs there is nothing to compare with, and without the others the
    # difference is plain. PAIRED is for the differences of all seeds.
    if exact["diverged"]:
        return False
    if row["diverged"]:
        return True
    by_chance = PAIRED * row["behind_sd"] / row["seeds"] ** 0.5
    return abs(row["behind_mean"]) > by_chance


def _listed(peaks: Sequence[float]) -> str:
    """Return peak rates as text."""
    return ", ".join(f"{peak:g}" for peak in peaks) or "none"
