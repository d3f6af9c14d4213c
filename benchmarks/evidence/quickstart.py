"""Experiments with the quickstart's recipe and a narrow model."""

from __future__ import annotations

from typing import List, Sequence

from benchmarks.evidence.experiment import Experiment, Series, two
from benchmarks.evidence.runs import outcome

MODEL = ("model.width=0.35", "model.depth=0.3", "precision.weights=float32", "batch.global=64")
DIGITS = ("run.epochs=12", "schedule.warmup_epochs=2")


class QuickstartExperiment(Experiment):
    """Top-1 is a share, and curves are the figure."""

    base = "configs/quickstart.yaml"
    columns = (("top1", "final top-1 (%)", 1, 100), ("train_loss", "final training loss", 3, 1))

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """Labels, seeds; mean and standard deviation of the final top-1 and of the last training loss."""
        ends = [[outcome(run) for run in each.runs] for each in series]
        return [
            {
                **each.labels,
                "seeds": len(found),
                **two("top1", [end.top1 for end in found], 6),
                **two("train_loss", [end.train_loss for end in found], 6),
            }
            for each, found in zip(series, ends)
        ]
