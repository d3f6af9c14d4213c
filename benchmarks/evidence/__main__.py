"""Run an experiment, or the rest of it, and compare what came out with its page: docs/results/NAME.{md,csv}.

    python -m benchmarks.evidence NAME [--json]   with as many runs as the cores hold; after an interruption it goes on
    python -m benchmarks.evidence NAME --write    the same; then renew the page, and keep all finished runs
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
from typing import Callable, Dict, Iterable, List

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

EXPERIMENTS: Dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (Photographs(), Ladder2(), HalfWeights(), ExchangeLearning(), Staleness())
}


def main() -> int:
    """Run the command, and return its exit code."""
    parser = claims.parser(__doc__)
    parser.add_argument(
        "name",
        nargs="?",
        choices=list(EXPERIMENTS),
        metavar="NAME",
        help="of --list",
    )
    parser.add_argument("--list", action="store_true", help="the experiments")
    tracked.add_option(parser)
    options = claims.begin(parser, takes=_takes, quick=_quick_takes)
    if options.list:
        _print_list()
        return 0
    if options.name is None:
        parser.error("name an experiment, or give --list")
    return conclude(EXPERIMENTS[options.name], options)


def _takes(options: argparse.Namespace) -> str:
    """Return how long the experiment takes that the options name."""
    return EXPERIMENTS.get(options.name, Experiment).takes


def _quick_takes(options: argparse.Namespace) -> str:
    """Return how long that experiment takes with --quick."""
    return EXPERIMENTS.get(options.name, Experiment).quick_takes


def command(name: str) -> Callable[[], int]:
    """Return main() of a file that is the command of one experiment.

    Args:
        name: of the experiment, and of the file in benchmarks/.
    """
    experiment = EXPERIMENTS[name]
    usage = f"    python -m benchmarks.{name} [--quick] [--json] [--write]"

    def main() -> int:
        """Run the command, and return its exit code."""
        parser = claims.parser(f"{experiment.question}\n\n{usage}")
        tracked.add_option(parser)
        options = claims.begin(parser, takes=experiment.takes, quick=experiment.quick_takes)
        return conclude(experiment, options)

    return main


def _print_list() -> None:
    """Print the experiments, and how many of their runs are finished."""
    for name, experiment in EXPERIMENTS.items():
        known = dict.fromkeys(experiment.wanted())
        done = sum(outcome(run) is not None for run in known)
        state = f"{done:>3} of {len(known):>3} runs known so far are finished here"
        print(f"{name:<20} {state}   {experiment.question}")


def conclude(experiment: Experiment, options: argparse.Namespace) -> int:
    """Train what is missing, compare or write the page (neither with --quick), and print the rows.

    Args:
        experiment: the one that was named.
        options: write: renew the page; json: also print an object.

    Returns:
        The exit code.
    """
    # SIGTERM stops training as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    quick = experiment.quick() if claims.quick() else []
    short = [run for series in quick for run in series.runs]

    def wanted() -> List[Run]:
        """Return the runs that are known by now."""
        return short or experiment.wanted()

    # What is finished is kept as runs end, so that an interruption loses nothing.
    try:
        train_all(
            wanted,
            cores.available(),
            functools.partial(print, file=sys.stderr, flush=True),
            kept=options.write and not quick,
        )
    except Lost as error:
        return fail(error, FAILED)
    except KeyboardInterrupt:
        return fail("stopped; the same command goes on", STOPPED)
    if quick:
        print("quick: short runs only, so no page is written")
        rows = experiment.rows_of(quick)
        claims.report(experiment.name, rows, [], options.json, about=_about(short))
    else:
        _conclude_page(experiment, options)
    return 0


def _conclude_page(experiment: Experiment, options: argparse.Namespace) -> None:
    """Compare or write the page of an experiment whose runs are finished, and print the rows."""
    # They are compared before anything is replaced.
    rows = experiment.rows()
    differing = page.differences(experiment, rows, RESULTS)
    head = f"{len(differing)} of {len(rows)} rows differ from the earlier figures"
    print(head, *differing, sep="\n  ")
    if options.write:
        page.write(experiment, rows, RESULTS)
        print(f"written: docs/results/{experiment.name}.md, .csv, .png")
    else:
        tracked.compare(page.texts(experiment, rows, RESULTS))
    print(f"verdict: {experiment.verdict(rows)}")
    about = _about(experiment.wanted())
    claims.report(experiment.name, rows, experiment.claims(), options.json, about=about)


def _about(runs: Iterable[Run]) -> Dict[str, str]:
    """Return when and where the runs were trained, which need not be here and now."""
    return provenance.about([provenance_of(run) for run in dict.fromkeys(runs)])
