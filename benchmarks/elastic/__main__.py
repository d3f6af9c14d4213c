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
- Stops on the same replicas: a launcher gets SIGTERM, SIGINT or SIGUSR1, some a second signal seconds later, before the
  first step, as the run trains, right after a rank is killed, while a replacement starts, waits or joins, and at the
  end of the run. It must end with 75 within 30 seconds (0 where the run is done, 1 where the second signal came before
  it was saved), and the same command must go on, to the same weights, averages and events. Such runs count for all
  that is claimed of runs, but what a stop and a start take is no time lost by a strike.
- Two replicas, one at half speed, with even and with measured shares.
- A step of two replicas that remember it and ask the store, as an elastic run does, beside one without, in turns.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import statistics
from typing import Dict, List

from benchmarks import claims
from benchmarks.elastic import overhead, uneven
from benchmarks.elastic.strikes import Planned, Struck, all_runs
from benchmarks.faults.site import Topology

RUNS = {Topology(3, 1): 5, Topology(4, 1): 5, Topology(3, 2): 3}
HOSTS = Topology(3, 1)
STOPPED_RUNS = {Topology(3, 1): 3, Topology(4, 1): 2, Topology(3, 2): 2}
_MINUTE = 60.0


def main() -> None:
    as_json = claims.begin(__doc__, takes="70 minutes, less for cached runs", quick="8 minutes").json
    planned = [Planned(HOSTS, seed, on_hosts=True) for seed in range(2)]
    planned += [Planned(topology, seed) for topology, number in RUNS.items() for seed in range(number)]
    stops = [Planned(topology, seed, stops=True) for topology, number in STOPPED_RUNS.items() for seed in range(number)]
    stops += [Planned(HOSTS, seed, on_hosts=True, stops=True) for seed in range(2)]
    runs = all_runs(claims.less([*planned, *stops], [planned[0], stops[0]]), claims.progress)
    uneven_rows, uneven_claim = uneven.measured()
    overhead_rows, overhead_claim = overhead.measured()
    rows = [*_rows(runs), *_rows_of_stops(runs), *uneven_rows, *overhead_rows]
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


def _rows_of_stops(runs: List[Struck]) -> List[dict]:
    """One for each signal in each phase, with each exit code."""
    kinds: Dict[tuple, List[float]] = {}
    for run in runs:
        for stop in run.stops:
            code = "none" if stop.code is None else stop.code
            kinds.setdefault((stop.phase, stop.signal, str(code), run.topology), []).append(stop.seconds)
    return [
        {
            "side": f"stop {topology}",
            "phase": phase,
            "signal": signal,
            "exit_code": code,
            "stops": len(found),
            "seconds_until_end": statistics.median(found),
            "most": max(found),
        }
        for (phase, signal, code, topology), found in sorted(kinds.items())
    ]


def _claims(runs: List[Struck]) -> List[dict]:
    strikes = [strike for run in runs for strike in run.strikes]
    stops = [(stop, run) for run in runs for stop in run.stops]
    resumed = [stop.as_promised and run.same for stop, run in stops]
    costs = [1 - run.seconds / max(1, len(run.strikes)) / _MINUTE for run in runs if not run.stops]
    return [
        claims.claim("strikes", [len(strikes)], "at random moments", ">= 200"),
        claims.claim("runs_with_the_undisturbed_bits", [statistics.mean(run.same for run in runs)], "of runs", ">= 1"),
        claims.claim("steps_with_images_lost_or_repeated", [sum(run.wrong_steps for run in runs)], "steps", "<= 0"),
        claims.claim("median_seconds_lost", [strike.seconds for strike in strikes], "s, beside a step", "<= 2"),
        claims.claim("restarts_from_checkpoint", [sum(run.restarts for run in runs)], "restarts", "<= 0"),
        claims.claim("stops_that_resumed", [statistics.mean(resumed)], f"of {len(resumed)} stops", ">= 1"),
        claims.claim("effective_time", costs, "of the time, with a strike a minute", ">= 0.95"),
    ]
