"""Does a run that loses replicas, or has slow ones, lose anything?

    python -m benchmarks.elastic [--quick] [--json]

- Strikes at random moments on 3 and 4 replicas and on 3 of 2 stages: a rank is killed or stopped, two at once, one
  stopped as the others meet after a kill, in an evaluation or while a checkpoint is written, while another replica
  comes back. One replica that has the run's state is left. And on 3 replicas with a host each (network namespaces;
  needs root): a host's launcher is killed and started again, its cable is pulled for 20 seconds, or a new host takes
  the place of one whose cable is pulled for good. Each run must end with the weights, averages and events of one
  process that nothing disturbed. What a strike costs: seconds until a step is done that had not been, less a usual
  step; and, for a strike a minute, also those of the replica's return. Runs that were made before are in
  benchmarks/cache/elastic.
- Two replicas, one at half speed, with even and with measured shares.
- A step of two replicas that remember it and ask the store, as an elastic run does, beside one without, in turns.
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import statistics
from typing import Dict, List

from benchmarks import claims
from benchmarks.elastic import overhead, uneven
from benchmarks.elastic.strikes import Planned, Struck, all_runs
from benchmarks.faults.site import Topology

RUNS = {Topology(3, 1): 5, Topology(4, 1): 5, Topology(3, 2): 3}
HOSTS = Topology(3, 1)
_MINUTE = 60.0


def main() -> None:
    as_json = claims.begin(__doc__, takes="50 minutes, less for cached runs", quick="5 minutes").json
    planned = [Planned(HOSTS, seed, on_hosts=True) for seed in range(2)]
    planned += [Planned(topology, seed) for topology, number in RUNS.items() for seed in range(number)]
    runs = all_runs(claims.less(planned, planned[:1]), claims.progress)
    uneven_rows, uneven_claim = uneven.measured()
    overhead_rows, overhead_claim = overhead.measured()
    rows = [*_rows(runs), *uneven_rows, *overhead_rows]
    claims.report("elastic", rows, [*_claims(runs), uneven_claim, overhead_claim], as_json)


def _rows(runs: List[Struck]) -> List[dict]:
    """One for each kind of strike."""
    kinds: Dict[str, List[float]] = {}
    for run in runs:
        for strike in run.strikes:
            kinds.setdefault(f"{strike.kind} {run.topology}", []).append(strike.seconds)
    return [
        {"side": kind, "strikes": len(found), "seconds_lost": statistics.median(found), "most": max(found)}
        for kind, found in sorted(kinds.items())
    ]


def _claims(runs: List[Struck]) -> List[dict]:
    strikes = [strike for run in runs for strike in run.strikes]
    costs = [1 - run.seconds / max(1, len(run.strikes)) / _MINUTE for run in runs]
    return [
        claims.claim("strikes", [len(strikes)], "at random moments", ">= 200"),
        claims.claim("runs_with_the_undisturbed_bits", [statistics.mean(run.same for run in runs)], "of runs", ">= 1"),
        claims.claim("steps_with_images_lost_or_repeated", [sum(run.wrong_steps for run in runs)], "steps", "<= 0"),
        claims.claim("median_seconds_lost", [strike.seconds for strike in strikes], "s, beside a step", "<= 2"),
        claims.claim("restarts_from_checkpoint", [sum(run.restarts for run in runs)], "restarts", "<= 0"),
        claims.claim("effective_time", costs, "of the time, with a strike a minute", ">= 0.95"),
    ]
