"""Does a run survive what happens to runs?

    python -m benchmarks.faults [--quick] [--json] [--seed N] [--kind NAME ...]

Real runs of one to four processes, or of two and three hosts (network namespaces), are struck at random moments:
killed, stopped, their disk full or failing, their checkpoints damaged, their clock set, a worker killed, a shard
deleted, a host's cable pulled, a host or its cable slow. Each must end in time with the right exit code and words, or
go on where that is promised, and, mended and started again, end with the bits of the undisturbed run. Needs Linux, root
(for a small disk and hosts) and a C compiler (for a clock that jumps). Trials that were made before are in
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
    """One trial, whose moments follow from the seed and from this."""

    kind: str
    topology: Topology
    number: int

    def name(self, seed: int) -> str:
        return f"{seed} {self.kind} {self.topology} {self.number}"

    def key(self, seed: int) -> str:
        """In the cache: with a digest of the recipe."""
        return f"{self.name(seed)} {zlib.crc32(repr((RECIPE, SHORT)).encode()):08x}"


def main() -> int:
    parser = claims.parser(__doc__)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the moments (%(default)s)")
    parser.add_argument(
        "--kind", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="NAME", help="only these"
    )
    options = claims.begin(parser, takes="two hours, less for cached trials", quick="4 minutes")
    planned = plan(options.kind)
    if claims.quick():
        trials = [trial for _, trial in _made(_first_of_each(planned), options.seed)]
    else:
        trials = _cached(planned, options.seed)
    claims.report("faults", _rows(trials), _claims(trials), options.json)
    return DONE if all(not trial.wrong for trial in trials) else FAILED


def plan(names: Iterable[str] = tuple(KINDS)) -> List[Planned]:
    """By number, so that all kinds have had some trials at any time."""
    planned = [
        Planned(name, topology, number)
        for name in names
        for topology, times in KINDS[name].trials.items()
        for number in range(times)
    ]
    return sorted(planned, key=lambda each: each.number)


def _first_of_each(planned: List[Planned]) -> List[Planned]:
    """One of each kind, on its smallest topology."""
    return list({each.kind: each for each in reversed(planned)}.values())


def _cached(planned: List[Planned], seed: int) -> List[Trial]:
    """Of these trials those that the cache does not have are made, and added to it."""
    cache = CACHE / "faults" / "trials.jsonl"
    cache.parent.mkdir(parents=True, exist_ok=True)
    lines = cache.read_text(encoding="utf-8").splitlines() if cache.exists() else []
    known = {key: Trial(**fields) for key, fields in map(json.loads, lines)}
    for trial in [known[each.key(seed)] for each in planned if each.key(seed) in known]:
        if trial.wrong:
            print(f"before: {_told(trial)}")
    for each, trial in _made([each for each in planned if each.key(seed) not in known], seed):
        known[each.key(seed)] = trial
        with open(cache, "a", encoding="utf-8") as stream:
            stream.write(json.dumps([each.key(seed), trial._asdict()]) + "\n")
    return [known[each.key(seed)] for each in planned]


def _made(planned: List[Planned], seed: int) -> Iterator[Tuple[Planned, Trial]]:
    """Makes trials, first those of several processes."""
    several = [each for each in planned if each.topology != ONE]
    single = [each for each in planned if each.topology == ONE]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ThreadPoolExecutor(_AT_ONCE) as pool:
        bench = Bench(Path(folder))

        def made(each: Planned) -> Trial:
            return bench.trial(each.kind, each.topology, random.Random(each.name(seed)))

        def in_order() -> Iterator[Trial]:
            yield from map(made, several)
            yield from pool.map(made, single)

        for each, trial in zip(claims.progress([*several, *single], "fault"), in_order()):
            print(_told(trial), flush=True)
            yield each, trial


def _told(trial: Trial) -> str:
    where = f"{trial.kind}, {trial.topology}, at step {trial.step}, code {trial.code} after {trial.detection:.1f} s"
    return f"{where}: {f'NOT SURVIVED: {trial.wrong}' if trial.wrong else 'survived'}"


def _rows(trials: List[Trial]) -> List[dict]:
    groups: Dict[Tuple[str, str], List[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.kind, trial.topology), []).append(trial)
    return [
        {
            "fault": name,
            "replicas_x_stages": topology,
            "tried": len(own),
            "survived": sum(not trial.wrong for trial in own),
            "updates_lost": sum(trial.lost for trial in own),
            "updates_repeated": sum(trial.repeated for trial in own),
            "longest_until_noticed_s": max((round(trial.noticed, 2) for trial in own if trial.noticed), default=None),
            "longest_detection_s": round(max(trial.detection for trial in own), 2),
        }
        for (name, topology), own in groups.items()
    ]


def _claims(trials: List[Trial]) -> List[dict]:
    survived = sum(not trial.wrong for trial in trials)
    wrong_updates = sum(trial.lost + trial.repeated for trial in trials)
    noticed = [trial.noticed for trial in trials if trial.kind == "rank killed" and trial.noticed]
    return [
        *([claims.claim("dead_rank_noticed", noticed, "s", "<= 2")] if noticed else []),
        claims.claim("faults_tried", [len(trials)], "faults", ">= 500"),
        claims.claim("faults_survived", [survived / len(trials)], "of those tried", ">= 1"),
        claims.claim("updates_lost_or_repeated", [wrong_updates], "updates", "<= 0"),
        claims.claim("longest_detection", [max(trial.detection for trial in trials)], "s", "<= 30"),
    ]
