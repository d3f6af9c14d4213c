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
    as_json = claims.begin(__doc__, takes="5 seconds", quick="5 seconds").json
    pods, gpus = _compared(published.PODS), _compared(published.A100)
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
    made = [
        claims.claim(f"worst_error_{name}", [max(abs(each.error) for each in compared)], "relative", goal)
        for name, compared, goal in (("bow_pods", pods, "<= 0.05"), ("a100", gpus, "<= 0.08"))
    ]
    claims.report("plan", rows, made, as_json)


def _compared(many: Sequence[Series]) -> List[Comparison]:
    return [comparison for series in many for comparison in published.compare(series)]
