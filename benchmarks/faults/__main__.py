"""Does a run survive what happens to runs?

    python -m benchmarks.faults [--quick] [--json] [--seed N] [--kind NAME ...]

Real runs of one to four processes are struck at random moments: killed, stopped, their disk full or failing, their
checkpoints damaged, their clock set, a worker killed, a shard deleted. Each must end in time with the right exit code
and words, and, mended and started again, end with the bits of the undisturbed run. Needs Linux, root (for a small
disk) and a C compiler (for a clock that jumps).
"""

if __name__ == "__main__":  # before the imports: see run
    from training.command import run

    run(__file__)

import random
import tempfile
from pathlib import Path
from typing import Dict, Iterable, List, Tuple

from benchmarks import claims
from benchmarks.faults.kinds import KINDS
from benchmarks.faults.site import Topology
from benchmarks.faults.trial import Bench, Trial
from recipe.errors import DONE, FAILED


def main() -> int:
    parser = claims.parser(__doc__)
    parser.add_argument("--seed", type=int, default=None, metavar="N", help="of the moments (drawn, and told)")
    parser.add_argument(
        "--kind", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="NAME", help="only these"
    )
    options = claims.begin(parser, takes="half an hour", quick="3 minutes")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    trials = _all(options.kind, seed)
    claims.report("faults", _rows(trials), _claims(trials), options.json)
    return DONE if all(not trial.wrong for trial in trials) else FAILED


def plan(names: Iterable[str] = tuple(KINDS)) -> List[Tuple[str, Topology, int]]:
    return [
        (name, topology, number)
        for name in names
        for topology, times in KINDS[name].trials.items()
        for number in range(times)
    ]


def _all(names: List[str], seed: int) -> List[Trial]:
    planned = plan(names)
    planned = claims.less(planned, planned[:: max(1, len(planned) // 4)])  # of several kinds
    trials = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for name, topology, number in claims.progress(planned, "fault"):
            trial = bench.trial(name, topology, random.Random(f"{seed} {name} {topology} {number}"))
            trials.append(trial)
            print(
                f"{name}, {topology}, at step {trial.step}, code {trial.code} after {trial.detection:.1f} s: "
                f"{f'NOT SURVIVED: {trial.wrong}' if trial.wrong else 'survived'}",
                flush=True,
            )
    return trials


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
        claims.claim("faults_tried", [len(trials)], "faults", ">= 50"),
        claims.claim("faults_survived", [survived / len(trials)], "of those tried", ">= 1"),
        claims.claim("updates_lost_or_repeated", [wrong_updates], "updates", "<= 0"),
        claims.claim("longest_detection", [max(trial.detection for trial in trials)], "s", "<= 30"),
    ]
