"""Predictions of the plan's model beside published figures: python -m benchmarks.plan [--json]

Calibrated on the smallest machine of each published series (one rate), on nothing else of it. No time is measured here.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

from typing import List, Sequence

from benchmarks import claims
from tools.planning import published
from tools.planning.published import Comparison, Series


def main() -> None:
    """Compare all predictions with what was published."""
    as_json = claims.begin(__doc__, takes="5 seconds", quick="5 seconds").json
    pods = _compared(published.PODS)
    gpus = _compared(published.A100)
    claimed = [
        _claim("worst_error_bow_pods", pods, "<= 0.05"),
        _claim("worst_error_a100", gpus, "<= 0.08"),
    ]
    rows = [_row(comparison) for comparison in (*pods, *gpus)]
    claims.report("plan", rows, claimed, as_json)


def _compared(several: Sequence[Series]) -> List[Comparison]:
    """Return the comparisons of several series."""
    comparisons = []
    for series in several:
        comparisons += published.compare(series)
    return comparisons


def _row(comparison: Comparison) -> dict:
    """Return the row of a comparison; rates are images a second."""
    return {
        "series": comparison.name,
        "replicas": comparison.replicas,
        "published": comparison.published,
        "predicted": round(comparison.predicted),
        "error": round(comparison.error, 4),
    }


def _claim(name: str, comparisons: Sequence[Comparison], goal: str) -> dict:
    """Return a claim about the worst of some predictions."""
    worst = max(abs(comparison.error) for comparison in comparisons)
    return claims.claim(name, [worst], "relative", goal)
