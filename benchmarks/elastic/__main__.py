"""Does a run that loses replicas, or has slow ones, lose anything?

    python -m benchmarks.elastic [--quick] [--json]

- Strikes at random moments on 3 and 4 replicas and on 3 of 2 stages: a rank is killed or stopped,
  two at once, one stopped as the others meet after a kill, in an evaluation or while a checkpoint
  is written, while another replica comes back. One replica that has the run's state is left. And on
  3 replicas with a host each (network namespaces; needs root): a host's launcher is killed and
  started again, its cable is pulled for 20 seconds, or a new host takes the place of one whose
  cable is pulled for good. Each run must end with the weights, averages and events of one process
  that nothing disturbed. What a strike costs: seconds until a step is done that had not been, less
  a usual step; and, for a strike a minute, also those of the replica's return. Runs that were made
  before are in benchmarks/cache/elastic.
- Stops on the same replicas: a launcher gets SIGTERM, SIGINT or SIGUSR1, some a second signal
  seconds later, before the first step, as the run trains, right after a rank is killed, while a
  replacement starts, waits or joins, and at the end of the run. It must end with 75 within 30
  seconds (0 where the run is done, 1 where the second signal came before it was saved), and the
  same command must go on, to the same weights, averages and events. Such runs count for all that is
  claimed of runs, but what a stop and a start take is no time lost by a strike.
- Two replicas, one at half speed, with even and with measured shares.
- A step of two replicas that remember it and ask the store, as an elastic run does, beside one
  without, in turns.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import statistics
from typing import Dict, List, NamedTuple

from benchmarks import claims
from benchmarks.elastic import overhead, uneven
from benchmarks.elastic.strikes import Planned, Struck, all_runs
from benchmarks.faults.site import Topology

RUNS = {  # on one host, by topology
    Topology(3, 1): 5,
    Topology(4, 1): 5,
    Topology(3, 2): 3,
}
STOPPED_RUNS = {
    Topology(3, 1): 3,
    Topology(4, 1): 2,
    Topology(3, 2): 2,
}
HOSTS = Topology(3, 1)
_RUNS_ON_HOSTS = 2  # that are struck, and as many that are stopped
_MINUTE = 60.0


class _Group(NamedTuple):
    """Stops that are one row."""

    phase: str
    signal: str
    code: str
    topology: str


def main() -> None:
    """Run the command."""
    options = claims.begin(
        __doc__,
        takes="70 minutes, less for cached runs",
        quick="8 minutes",
    )
    strikes = [*_on_hosts(stops=False), *_on_one_host(RUNS, stops=False)]
    stops = [*_on_one_host(STOPPED_RUNS, stops=True), *_on_hosts(stops=True)]
    planned = claims.less([*strikes, *stops], [strikes[0], stops[0]])
    runs = all_runs(planned, claims.progress)
    # In what follows nothing is struck.
    uneven_rows, uneven_claim = uneven.measured()
    overhead_rows, overhead_claim = overhead.measured()
    rows = [*_rows(runs), *_rows_of_stops(runs), *uneven_rows, *overhead_rows]
    made = [*_claims(runs), uneven_claim, overhead_claim]
    claims.report("elastic", rows, made, options.json)


def _on_hosts(stops: bool) -> List[Planned]:
    """Return the runs with a host for each replica that are struck, or stopped."""
    seeds = range(_RUNS_ON_HOSTS)
    return [Planned(HOSTS, seed, on_hosts=True, stops=stops) for seed in seeds]


def _on_one_host(numbers: Dict[Topology, int], stops: bool) -> List[Planned]:
    """Return the runs on one host that are struck, or stopped, with their number by topology."""
    planned = []
    for topology, number in numbers.items():
        planned += [Planned(topology, seed, stops=stops) for seed in range(number)]
    return planned


def _rows(runs: List[Struck]) -> List[dict]:
    """Return a row for each kind of strike."""
    seconds: Dict[str, List[float]] = {}
    for run in runs:
        for strike in run.strikes:
            kind = f"{strike.kind} {run.topology}"
            seconds.setdefault(kind, []).append(strike.seconds)
    rows = []
    for kind, lost in sorted(seconds.items()):
        row = {
            "side": kind,
            "strikes": len(lost),
            "seconds_lost": statistics.median(lost),
            "most": max(lost),
        }
        rows.append(row)
    return rows


def _rows_of_stops(runs: List[Struck]) -> List[dict]:
    """Return a row for each signal in each phase, with each exit code."""
    seconds: Dict[_Group, List[float]] = {}
    for run in runs:
        for stop in run.stops:
            code = "none" if stop.code is None else str(stop.code)
            group = _Group(stop.phase, stop.signal, code, run.topology)
            seconds.setdefault(group, []).append(stop.seconds)
    rows = []
    for group, until_end in sorted(seconds.items()):
        row = {
            "side": f"stop {group.topology}",
            "phase": group.phase,
            "signal": group.signal,
            "exit_code": group.code,
            "stops": len(until_end),
            "seconds_until_end": statistics.median(until_end),
            "most": max(until_end),
        }
        rows.append(row)
    return rows


def _claims(runs: List[Struck]) -> List[dict]:
    """Return what is claimed of all runs together."""
    seconds_lost = []
    resumed = []
    costs = []
    for run in runs:
        seconds_lost += [strike.seconds for strike in run.strikes]
        resumed += [stop.as_promised and run.same for stop in run.stops]
        # A stop and a start are no time that a strike takes.
        if not run.stops:
            seconds_each = run.seconds / max(1, len(run.strikes))
            costs.append(1 - seconds_each / _MINUTE)
    share_same = statistics.mean(run.same for run in runs)
    wrong_steps = sum(run.wrong_steps for run in runs)
    restarts = sum(run.restarts for run in runs)
    return [
        claims.claim(
            "strikes",
            [len(seconds_lost)],
            unit="at random moments",
            goal=">= 200",
        ),
        claims.claim(
            "runs_with_the_undisturbed_bits",
            [share_same],
            unit="of runs",
            goal=">= 1",
        ),
        claims.claim(
            "steps_with_images_lost_or_repeated",
            [wrong_steps],
            unit="steps",
            goal="<= 0",
        ),
        claims.claim(
            "median_seconds_lost",
            seconds_lost,
            unit="s, beside a step",
            goal="<= 2",
        ),
        claims.claim(
            "restarts_from_checkpoint",
            [restarts],
            unit="restarts",
            goal="<= 0",
        ),
        claims.claim(
            "stops_that_resumed",
            [statistics.mean(resumed)],
            unit=f"of {len(resumed)} stops",
            goal=">= 1",
        ),
        claims.claim(
            "effective_time",
            costs,
            unit="of the time, with a strike a minute",
            goal=">= 0.95",
        ),
    ]
