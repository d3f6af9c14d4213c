"""Predictions of the plan's model beside published figures: python -m benchmarks.plan [--json]

Calibrated on the smallest machine of each published series (one rate), on nothing else of it. No time is measured here.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

from typing import Sequence

from benchmarks.claims import begin, claim, report
from tools.planning import published
from tools.planning.published import Comparison, Series


def main() -> None:
    """Compares, and prints rows and claims."""
    as_json = begin(__doc__, takes="5 seconds", quick="5 seconds").json
    pods, gpus = (_compared(series) for series in (published.PODS, published.A100))
    rows = [
        {
            "series": each.name,
            "replicas": each.replicas,
            "published": each.published,
            "predicted": round(each.predicted),
            "error": round(each.error, 4),
        }
        for each in (*pods, *gpus)
    ]
    claims = [
        claim("worst_error_bow_pods", [_worst(pods)], "relative", "<= 0.10"),
        claim("worst_error_a100", [_worst(gpus)], "relative", "<= 0.10"),
    ]
    report("plan", rows, claims, as_json)


def _compared(many: Sequence[Series]) -> list:
    return [comparison for series in many for comparison in published.compare(series)]


def _worst(comparisons: Sequence[Comparison]) -> float:
    return max(abs(comparison.error) for comparison in comparisons)
