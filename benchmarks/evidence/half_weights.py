"""Float16 weights and no others: does stochastic rounding keep what rounding to nearest loses?"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import List, Sequence

from benchmarks.evidence import page
from benchmarks.evidence.experiment import Experiment, Series, standard_errors
from benchmarks.evidence.ladder import CLEAR

WEIGHTS = {
    "float32": ("precision.weights=float32",),
    "float16 stochastic": ("precision.weights=float16", "precision.rounding=stochastic"),
    "float16 nearest": ("precision.weights=float16", "precision.rounding=nearest"),
}
PEAKS = (0.03125, 0.125, 0.5, 2.0, 8.0)


class HalfWeights(Experiment):
    """Three kinds of persistent weights over the peak rate."""

    name = "half_weights"
    question = "Float16 weights: stochastic rounding beside float32 and beside rounding to nearest, over the rate"
    about = """LARS as in the recipe, at a batch of 256 and 61,440 images. "Weights" is what persists, weights and \
momentum; arithmetic is float32 in all rows, so that rounding is all that differs."""
    published = (
        "Graphcore trains B4 G16 to 82.54 ± 0.13 % with float16 weights and stochastic rounding; with rounding to "
        "nearest, updates below half the spacing of two float16 numbers are lost (Micikevicius et al., 1710.03740, who "
        "keep float32 master weights for that reason)."
    )

    def series(self) -> List[Series]:
        length = ("run.epochs=1", "schedule.warmup_epochs=0.15", "batch.global=256", "batch.micro=256")
        return [
            Series({"peak": peak, "weights": kind}, (*length, *WEIGHTS[kind], f"schedule.peak={peak:g}"))
            for peak, kind in itertools.product(PEAKS, WEIGHTS)
        ]

    def draw(self, rows: Sequence[dict], path: Path) -> None:
        panels = {
            title: {
                kind: [(row["peak"], row[f"{key}_mean"], row[f"{key}_sd"]) for row in rows if row["weights"] == kind]
                for kind in WEIGHTS
            }
            for title, key in (("validation top-1 (%)", "top1"), ("training loss", "train_loss"))
        }
        page.draw(panels, path, x="peak learning rate", y="mean ± standard deviation over seeds", log_x=True)

    def verdict(self, rows: Sequence[dict]) -> str:
        at = {(row["peak"], row["weights"]): row for row in rows}
        apart = {
            kind: [
                peak
                for peak in PEAKS
                if abs(standard_errors(at[peak, kind], at[peak, "float32"], "train_loss")) > CLEAR
            ]
            for kind in WEIGHTS
        }
        stochastic, nearest = apart["float16 stochastic"], apart["float16 nearest"]
        worst = max(PEAKS, key=lambda peak: at[peak, "float32"]["top1_mean"] - at[peak, "float16 nearest"]["top1_mean"])
        lost = at[worst, "float32"]["top1_mean"] - at[worst, "float16 nearest"]["top1_mean"]
        return (
            f"{'Reproduced' if nearest and not stochastic else 'Not fully reproduced'}: the training loss with "
            f"stochastic rounding {'differs from' if stochastic else 'cannot be told from'} that of float32 weights "
            f"{_peaks(stochastic) or 'at any rate'}, that with rounding to nearest "
            f"{'differs ' + _peaks(nearest) if nearest else 'neither'}; rounding to nearest costs up to {lost:.1f} "
            f"points of top-1 (at {worst:g})."
        )


def _peaks(values: Sequence[float]) -> str:
    return f"at {', '.join(f'{value:g}' for value in values)}" if values else ""
