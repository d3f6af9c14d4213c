"""Runs an experiment, or the rest of it, and writes its page: docs/results/NAME.{md,csv,png}.

    python -m benchmarks.evidence NAME [--json]   two runs at a time on two cores; after an interruption it goes on
    python -m benchmarks.evidence NAME --quick    one or a few short runs, and no page
    python -m benchmarks.evidence --list          the experiments, and how many of their runs are finished

Finished runs are cached under benchmarks/cache/evidence/, each an ordinary run folder; without that folder everything
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
from typing import Callable, Dict

from benchmarks import claims
from benchmarks.evidence import page
from benchmarks.evidence.ablations import Ablations
from benchmarks.evidence.exchange_convergence import ExchangeConvergence
from benchmarks.evidence.experiment import Experiment
from benchmarks.evidence.half_weights import HalfWeights
from benchmarks.evidence.ladder import Ladder, LadderOnGpu
from benchmarks.evidence.lars_forms import LarsForms
from benchmarks.evidence.micro import MicroBatches
from benchmarks.evidence.norms import Norms
from benchmarks.evidence.resolution import Resolution
from benchmarks.evidence.runs import Lost, outcome, train_all
from benchmarks.evidence.staleness import Staleness
from recipe.errors import FAILED, STOPPED, WRONG_INPUT, UserError

EXPERIMENTS: Dict[str, Experiment] = {
    each.name: each
    for each in (
        Ladder(), Ablations(), HalfWeights(), Norms(), MicroBatches(), Resolution(), LadderOnGpu(), LarsForms(),
        ExchangeConvergence(), Staleness(),
    )
}  # fmt: skip


def main() -> int:
    parser = claims.parser(__doc__)
    parser.add_argument("name", nargs="?", choices=list(EXPERIMENTS), metavar="NAME", help="of --list")
    parser.add_argument("--list", action="store_true", help="the experiments")
    options = claims.begin(parser, takes=Experiment.takes, quick=Experiment.quick_takes)
    if options.list:
        _list()
        return 0
    if options.name is None:
        parser.error("name an experiment, or give --list")
    return conclude(EXPERIMENTS[options.name], options.json)


def command(name: str) -> Callable[[], int]:
    """main() of a file that is the command of one experiment."""
    experiment = EXPERIMENTS[name]
    about = f"{experiment.question}\n\n    python -m benchmarks.{name} [--quick] [--json]"

    def main() -> int:
        options = claims.begin(claims.parser(about), takes=experiment.takes, quick=experiment.quick_takes)
        return conclude(experiment, options.json)

    return main


def conclude(experiment: Experiment, as_json: bool) -> int:
    """Trains what is missing, writes the page (not with --quick), prints the rows; returns the exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    quick = experiment.quick() if claims.quick() else []
    try:
        wanted = [run for series in quick for run in series.runs]
        train_all((lambda: wanted) if quick else experiment.wanted, experiment.at_once(), _progress)
    except (Lost, UserError) as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UserError) else FAILED
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return STOPPED
    if quick:
        print("quick: short runs only, so no page is written")
        claims.report(experiment.name, experiment.rows_of(quick), [], as_json)
        return 0
    rows = experiment.rows()
    _write(experiment, rows)
    claims.report(experiment.name, rows, experiment.claims(), as_json)
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _list() -> None:
    for name, experiment in EXPERIMENTS.items():
        runs = list(dict.fromkeys(experiment.wanted()))
        done = sum(outcome(run) is not None for run in runs)
        print(f"{name:<20} {done:>3} of {len(runs):>3} runs known so far are finished here   {experiment.question}")


def _write(experiment: Experiment, rows: list) -> None:
    found = page.agreement(experiment, rows)
    page.write(experiment, rows)
    if found is not None:
        same = found.compared - sum("not there before" not in each for each in found.differing)
        print(f"{same} of {found.compared} rows agree with the earlier figures within the spread over the seeds")
        for each in found.differing:
            print(f"  {each}")
    print(f"verdict: {experiment.verdict(rows)}")
    print(f"written: docs/results/{experiment.name}.md, .csv, .png")
