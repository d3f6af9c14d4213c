"""Does a run survive what happens to runs?

    python -m benchmarks.faults [--quick] [--json] [--seed N] [--kind NAME ...]

Real runs of one to four processes, or of two and three hosts (network namespaces), are struck at
random moments: killed, stopped, their disk full or failing, their checkpoints damaged, their clock
set, a worker killed, a shard deleted, a host's cable pulled, a host or its cable slow. Each must
end in time with the right exit code and words, or go on where that is promised, and, mended and
started again, end with the bits of the undisturbed run. Needs Linux, root (for a small disk and
hosts) and a C compiler (for a clock that jumps). Trials that were made before are in
benchmarks/cache/faults, also those that were not survived.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import json
import random
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Tuple

from benchmarks import CACHE, claims
from benchmarks.faults.kinds import KINDS, ONE, SHORT
from benchmarks.faults.site import RECIPE, Topology
from benchmarks.faults.trial import Bench, Trial
from common.errors import DONE, FAILED

_AT_ONCE = 2  # trials of runs of one process


class Planned(NamedTuple):
    """One trial, whose moments follow from the seed and from this.

    kind: of the fault.
    topology: of the run.
    number: among those of this kind and topology.
    """

    kind: str
    topology: Topology
    number: int

    def name(self, seed: int) -> str:
        """Return the name, which with the `seed` in it is that of the moments."""
        return f"{seed} {self.kind} {self.topology} {self.number}"

    def key(self, seed: int) -> str:
        """Return the key in the cache: the name with the `seed`, and a digest of what decides."""
        fields = KINDS[self.kind]._asdict()
        # More trials do not change those that were made; a function's text holds its address.
        del fields["trials"]
        values = {field: value for field, value in fields.items() if not callable(value)}
        digest = zlib.crc32(repr((RECIPE, SHORT, values)).encode())
        return f"{self.name(seed)} {digest:08x}"


class _Outcome(NamedTuple):
    """A trial that was planned, and what came of it."""

    planned: Planned
    trial: Trial


def main() -> int:
    """Run the command; return its exit code."""
    parser = claims.parser(__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the moments (%(default)s)",
    )
    parser.add_argument(
        "--kind",
        nargs="+",
        choices=list(KINDS),
        default=list(KINDS),
        metavar="NAME",
        help="only these",
    )
    options = claims.begin(
        parser,
        takes="three hours, less for cached trials",
        quick="4 minutes",
    )
    planned = plan(options.kind)
    if claims.quick():
        chosen = _first_of_each(planned)
        trials = [outcome.trial for outcome in _outcomes(chosen, options.seed)]
    else:
        trials = _cached(planned, options.seed)
    claims.report("faults", _rows(trials), _claims(trials), options.json)
    return FAILED if any(trial.wrong for trial in trials) else DONE


def plan(names: Iterable[str] = tuple(KINDS)) -> List[Planned]:
    """Return all trials of some kinds.

    They are in the order of their numbers, so that all kinds have had some trials at any time.

    Args:
        names: of the kinds.
    """
    planned = []
    for name in names:
        for topology, times in KINDS[name].trials.items():
            planned += [Planned(name, topology, number) for number in range(times)]
    return sorted(planned, key=lambda trial: trial.number)


def _first_of_each(planned: List[Planned]) -> List[Planned]:
    """Return one trial of each kind, on its smallest topology."""
    # The last that is put in stays: the first of the plan.
    by_kind = {trial.kind: trial for trial in reversed(planned)}
    return list(by_kind.values())


def _cached(planned: List[Planned], seed: int) -> List[Trial]:
    """Return the outcomes of some trials; those that the cache lacks are made, and added to it.

    Args:
        planned: the trials.
        seed: of their moments.
    """
    cache = CACHE / "faults" / "trials.jsonl"
    cache.parent.mkdir(parents=True, exist_ok=True)
    known = _read(cache)
    missing = []
    # What was not survived is told again, not tried again.
    for this in planned:
        trial = known.get(this.key(seed))
        if trial is None:
            missing.append(this)
        elif trial.wrong:
            print(f"before: {_told(trial)}")
    for outcome in _outcomes(missing, seed):
        key = outcome.planned.key(seed)
        trial = outcome.trial
        known[key] = trial
        line = json.dumps([key, trial._asdict()])
        # Trial by trial: the command may be stopped, and goes on from here.
        with open(cache, "a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    return [known[this.key(seed)] for this in planned]


def _read(cache: Path) -> Dict[str, Trial]:
    """Return the trials in the file of the cache, by key."""
    known: Dict[str, Trial] = {}
    if not cache.exists():
        return known
    for line in cache.read_text(encoding="utf-8").splitlines():
        key, fields = json.loads(line)
        known[key] = Trial(**fields)
    return known


def _outcomes(planned: List[Planned], seed: int) -> Iterator[_Outcome]:
    """Make trials, first those of several processes, and print what comes of each.

    Args:
        planned: the trials.
        seed: of their moments.
    """
    several = [trial for trial in planned if trial.topology != ONE]
    single = [trial for trial in planned if trial.topology == ONE]
    shown = claims.progress([*several, *single], "fault")
    temporary = tempfile.TemporaryDirectory(prefix="faults-")
    with temporary as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        bench = Bench(Path(folder))

        def outcome(this: Planned) -> _Outcome:
            """Make the trial `this`."""
            draws = random.Random(this.name(seed))
            trial = bench.trial(this.kind, this.topology, draws)
            return _Outcome(this, trial)

        def outcomes() -> Iterator[_Outcome]:
            """Make all trials, one after another and then several at once."""
            # The pool begins when it is asked: a run of several processes needs all cores.
            yield from map(outcome, several)
            yield from pool.map(outcome, single)

        for _, made in zip(shown, outcomes()):
            print(_told(made.trial), flush=True)
            yield made


def _told(trial: Trial) -> str:
    """Return a trial's outcome as a line."""
    where = f"{trial.kind}, {trial.topology}, at step {trial.step}"
    end = f"code {trial.code} after {trial.detection:.1f} s"
    judgement = f"NOT SURVIVED: {trial.wrong}" if trial.wrong else "survived"
    return f"{where}, {end}: {judgement}"


def _rows(trials: List[Trial]) -> List[dict]:
    """Return a row for each kind on each topology."""
    groups: Dict[Tuple[str, str], List[Trial]] = {}
    for trial in trials:
        group = groups.setdefault((trial.kind, trial.topology), [])
        group.append(trial)
    return [_row(group) for group in groups.values()]


def _row(group: List[Trial]) -> dict:
    """Return the row of some trials of one kind on one topology."""
    noticed = [round(trial.noticed, 2) for trial in group if trial.noticed]
    return {
        "fault": group[0].kind,
        "replicas_x_stages": group[0].topology,
        "tried": len(group),
        "survived": _survived(group),
        "updates_lost": sum(trial.lost for trial in group),
        "updates_repeated": sum(trial.repeated for trial in group),
        "longest_until_noticed_s": max(noticed, default=None),
        "longest_detection_s": round(_longest_detection(group), 2),
    }


def _claims(trials: List[Trial]) -> List[dict]:
    """Return what is claimed of all trials together."""
    made: List[dict] = []
    # With --kind there may be no rank that was killed.
    killed = [trial for trial in trials if trial.kind == "rank killed"]
    noticed = [trial.noticed for trial in killed if trial.noticed]
    if noticed:
        made.append(claims.claim("dead_rank_noticed", noticed, "s", goal="<= 2"))
    number = len(trials)
    share = _survived(trials) / number
    wrong_updates = sum(trial.lost + trial.repeated for trial in trials)
    made += [
        claims.claim(
            "faults_tried",
            [number],
            unit="faults",
            goal=">= 500",
        ),
        claims.claim(
            "faults_survived",
            [share],
            unit="of those tried",
            goal=">= 1",
        ),
        claims.claim(
            "updates_lost_or_repeated",
            [wrong_updates],
            unit="updates",
            goal="<= 0",
        ),
        claims.claim(
            "longest_detection",
            [_longest_detection(trials)],
            unit="s",
            goal="<= 30",
        ),
    ]
    return made


def _survived(trials: List[Trial]) -> int:
    """Return how many trials were survived."""
    return sum(not trial.wrong for trial in trials)


def _longest_detection(trials: List[Trial]) -> float:
    """Return the most seconds until a session had ended."""
    return max(trial.detection for trial in trials)
