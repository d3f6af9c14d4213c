"""Runs an experiment, or what is left of it, and writes its page: docs/results/NAME.{md,csv,png}.

    python -m benchmarks.evidence NAME      two runs at a time on two cores; cut off, it goes on where it was
    python -m benchmarks.evidence NAME --quick   its first run only, and that much shorter
    python -m benchmarks.evidence --list    which experiments there are, and how far they are

Finished runs are kept under benchmarks/cache/evidence/, each an ordinary run folder; without that folder everything
is trained anew, and compared with the figures in docs/results/ before these are replaced.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../../..")
    from training.command import run

    run(__file__)

import signal
from typing import Dict, Sequence

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.ablations import Ablations
from benchmarks.evidence.experiment import Experiment, changed
from benchmarks.evidence.half_weights import HalfWeights
from benchmarks.evidence.ladder import Ladder, LadderOnGpu
from benchmarks.evidence.micro import MicroBatches
from benchmarks.evidence.norms import Norms
from benchmarks.evidence.resolution import Resolution
from benchmarks.evidence.runs import Lost, Run, outcome, train_all
from recipe.errors import FAILED, STOPPED, WRONG_INPUT, UserError

EXPERIMENTS: Dict[str, Experiment] = {
    each.name: each
    for each in (
        Ladder(), Ablations(), HalfWeights(), Norms(), MicroBatches(), Resolution(), LadderOnGpu(),
    )
}  # fmt: skip

# With --quick.
_SHORT = ("run.steps=8", "schedule.warmup_steps=2", "data.train_images=6144")


def main() -> int:
    parser = claims.parser(__doc__, with_json=False)
    parser.add_argument("name", nargs="?", choices=list(EXPERIMENTS), metavar="NAME", help="of --list")
    parser.add_argument("--list", action="store_true", help="the experiments")
    options = claims.begin(
        parser, takes="one to two hours an experiment, less what is kept of runs before", quick="1 minute"
    )
    if options.list:
        _list()
        return 0
    if options.name is None:
        parser.error("name an experiment, or give --list")
    experiment = EXPERIMENTS[options.name]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        wanted = claims.less(experiment.wanted, lambda: [shortened(experiment.wanted()[0])])
        train_all(wanted, experiment.at_once(), lambda text: print(text, flush=True))
    except (Lost, UserError) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UserError) else FAILED
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    if claims.quick():
        print("quick: one short run only, so no page is written")
    else:
        _write(experiment)
    return 0


def shortened(run: Run) -> Run:
    """A few updates of it; named by what it is, so never taken for the whole one."""
    kept = [text for text in run.overrides if not text.startswith(("run.epochs=", "schedule.warmup_"))]
    return run._replace(overrides=changed(kept, _SHORT))


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _list() -> None:
    for name, experiment in EXPERIMENTS.items():
        runs = list(dict.fromkeys(experiment.wanted()))
        done = sum(outcome(run) is not None for run in runs)
        print(f"{name:<14} {done:>3} of {len(runs):>3} runs known so far are kept here   {experiment.question}")


def _write(experiment: Experiment) -> None:
    rows = experiment.rows()
    found = page.agreement(experiment, rows)
    page.write(experiment, rows)
    print(page.table(rows))
    if found is not None:
        _tell(found.compared, found.differing)
    print(f"verdict: {experiment.verdict(rows)}")
    print(f"written: docs/results/{experiment.name}.md, .csv, .png")


def _tell(compared: int, differing: Sequence[str]) -> None:
    same = compared - sum("not there before" not in each for each in differing)
    print(f"{same} of {compared} rows agree with the figures of before within the spread over the seeds")
    for each in differing:
        print(f"  {each}")
