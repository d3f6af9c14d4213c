"""Runs an experiment, or the rest of it, and compares what came out with its page: docs/results/NAME.{md,csv}.

    python -m benchmarks.evidence NAME [--json]   two runs at a time on two cores; after an interruption it goes on
    python -m benchmarks.evidence NAME --write    the same; then renews the page, and keeps all finished runs
    python -m benchmarks.evidence NAME --quick    one or a few short runs, and no page
    python -m benchmarks.evidence --list          the experiments, and how many of their runs are finished

Finished runs are cached under benchmarks/cache/evidence/, each an ordinary run folder. docs/results/runs.jsonl keeps
what pages need of them, with day, processor and torch of the machine that trained them. Without both, everything is
trained anew. Only --write changes files that git tracks: runs.jsonl, as runs end, and the page with CSV and figure.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import argparse
import functools
import signal
import sys
from typing import Callable, Dict, Iterable

from benchmarks import RESULTS, claims, provenance, tracked
from benchmarks.evidence import page
from benchmarks.evidence.exchange_learning import ExchangeLearning
from benchmarks.evidence.experiment import Experiment
from benchmarks.evidence.half_weights import HalfWeights
from benchmarks.evidence.ladder2 import Ladder2
from benchmarks.evidence.photographs import Photographs
from benchmarks.evidence.runs import Lost, Run, outcome, provenance_of, train_all
from benchmarks.evidence.staleness import Staleness
from common import cores
from common.command import fail
from common.errors import FAILED, STOPPED

_ALL = (Photographs, Ladder2, HalfWeights, ExchangeLearning, Staleness)
EXPERIMENTS: Dict[str, Experiment] = {each.name: each() for each in _ALL}


def main() -> int:
    parser = claims.parser(__doc__)
    parser.add_argument("name", nargs="?", choices=list(EXPERIMENTS), metavar="NAME", help="of --list")
    parser.add_argument("--list", action="store_true", help="the experiments")
    tracked.add_option(parser)
    options = claims.begin(parser, takes=Experiment.takes, quick=Experiment.quick_takes)
    if options.list:
        for name, experiment in EXPERIMENTS.items():
            runs = list(dict.fromkeys(experiment.wanted()))
            done = sum(outcome(run) is not None for run in runs)
            print(f"{name:<20} {done:>3} of {len(runs):>3} runs known so far are finished here   {experiment.question}")
        return 0
    if options.name is None:
        parser.error("name an experiment, or give --list")
    return conclude(EXPERIMENTS[options.name], options)


def command(name: str) -> Callable[[], int]:
    """main() of a file that is the command of one experiment."""
    experiment = EXPERIMENTS[name]
    about = f"{experiment.question}\n\n    python -m benchmarks.{name} [--quick] [--json] [--write]"

    def main() -> int:
        parser = claims.parser(about)
        tracked.add_option(parser)
        options = claims.begin(parser, takes=experiment.takes, quick=experiment.quick_takes)
        return conclude(experiment, options)

    return main


def conclude(experiment: Experiment, options: argparse.Namespace) -> int:
    """Train what is missing, compare or write the page (neither with --quick), print the rows; return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    quick = experiment.quick() if claims.quick() else []
    # Train. What is finished is kept as runs end, so that an interruption loses nothing.
    try:
        report = functools.partial(print, file=sys.stderr, flush=True)
        short = [run for series in quick for run in series.runs]
        train_all(lambda: short or experiment.wanted(), cores.available(), report, kept=options.write and not quick)
    except Lost as error:
        return fail(error, FAILED)
    except KeyboardInterrupt:
        return fail("stopped; the same command goes on", STOPPED)
    if quick:
        print("quick: short runs only, so no page is written")
        claims.report(experiment.name, experiment.rows_of(quick), [], options.json, _about(short))
        return 0
    # Compare before anything is replaced.
    rows = experiment.rows()
    differing = page.differences(experiment, rows, RESULTS)
    print(f"{len(differing)} of {len(rows)} rows differ from the earlier figures", *differing, sep="\n  ")
    if options.write:
        page.write(experiment, rows, RESULTS)
        print(f"written: docs/results/{experiment.name}.md, .csv, .png")
    else:
        tracked.compare(page.texts(experiment, rows, RESULTS))
    print(f"verdict: {experiment.verdict(rows)}")
    claims.report(experiment.name, rows, experiment.claims(), options.json, _about(experiment.wanted()))
    return 0


def _about(runs: Iterable[Run]) -> Dict[str, str]:
    """When and where the runs were trained, which need not be here and now."""
    return provenance.about([provenance_of(run) for run in dict.fromkeys(runs)])
