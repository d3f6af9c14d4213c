"""Searches a recipe's best values:

    python -m tools.sweep --config SWEEP.yaml [--workers N] [section.key=value ...]

Every trial is an ordinary run in the sweep's folder, sweeps/NAME or --output. The same command
again goes on: also after kill -9. See docs/sweeps.md. With --json the last line is one JSON object.
Exit codes: 0 all trials are done, 1 failed, or no trial is complete, 2 the input is wrong, 75
stopped by a signal: the same command goes on.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__, computes=False)

import argparse
import contextlib
from pathlib import Path
from typing import Optional, Sequence

from common.command import Parser, fail, one_line
from common.errors import DONE, FAILED, STOPPED, first_line
from common.json_io import json_text
from tools import packages
from tools.arguments import whole
from tools.sweeping.candidates import Candidates, load_candidates, survey
from tools.sweeping.definition import read
from tools.sweeping.folder import SweepFolder
from tools.sweeping.scheduler import Scheduler
from tools.training_process import StopRequest

_AGAIN = "rerun the same command: it goes on where it was"
_TRAINER = (str(Path(__file__).resolve().parent.parent / "train.py"),)


@one_line(_AGAIN)
def main(arguments: Optional[Sequence[str]] = None, trainer: Sequence[str] = _TRAINER) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of this process.
        trainer: what trains a trial, as Python is given it.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    packages.check("tools.sweep", "optuna")
    stop = StopRequest()
    with stop:
        candidates = load_candidates(read(Path(options.config), options.overrides, options.trials))
        for note in survey(candidates):
            print(f"note: {note}", flush=True)
        path = Path(options.output or f"sweeps/{candidates.sweep.word}")
        with contextlib.closing(SweepFolder(path, candidates)) as folder:
            return _run(candidates, folder, options, trainer, stop)


def _run(
    candidates: Candidates,
    folder: SweepFolder,
    options: argparse.Namespace,
    trainer: Sequence[str],
    stop: StopRequest,
) -> int:
    """Run the trials of a sweep in its folder; return the exit code.

    Args:
        candidates: of the sweep.
        folder: of the sweep.
        options: of this command.
        trainer: what trains a trial, as Python is given it.
        stop: noted signals.
    """
    # Imported late: a wrong command line is refused before Optuna is loaded.
    from tools.sweeping.report import Report
    from tools.sweeping.study import StorageError, Study

    definition = candidates.sweep.definition
    trials = definition.trials or definition.combinations()
    # A sweep without a number of trials is that of a grid, whose combinations are counted.
    assert trials is not None
    try:
        with contextlib.closing(Study(folder.study, candidates.sweep)) as study:
            report = Report(candidates, study, folder)
            scheduler = Scheduler(
                candidates=candidates,
                study=study,
                folder=folder,
                workers=options.workers,
                trainer=trainer,
                request=stop,
                changed=report.changed,
            )
            scheduler.run(trials)
            data = {**report.conclude(), "trials": trials}
    except StorageError as error:
        text = first_line(getattr(error, "orig", None) or error)
        return fail(f"{folder.study}: {text}; fix this, then {_AGAIN}", FAILED)
    return _conclude(data, stop, options.json)


def _conclude(data: dict, stop: StopRequest, as_json: bool) -> int:
    """Print how the sweep stands; return the exit code."""
    best = data["best"]
    trials = data["trials"]
    counts = data["counts"]
    done = sum(counts.values()) - counts["running"]
    # A signal may have come when some were complete: the best so far is shown all the same.
    code = DONE
    if best is not None:
        value = f"{data['metric']} {best['value']:.6g}"
        print(f"best: trial {best['trial']}, {value}: {data['files']['best']}")
    if done < trials:
        line = f"{stop.name}: {done} of {trials} trials are done; the same command goes on"
        code = fail(line, STOPPED)
    elif best is None:
        code = fail(_complaint(data["leaderboard"]), FAILED)
    if as_json:
        print(json_text(data))
    return code


def _complaint(rows: Sequence[dict]) -> str:
    """Return that no trial is complete, and why the last one is not."""
    reasons = [row["reason"] for row in rows if row["reason"]]
    reason = reasons[-1] if reasons else ""
    # The trials of the folder have ended, so the same command would run none.
    return f"no trial is complete; the last says: {reason}; mend it and choose another --output"


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tools.sweep",
        description="Search a recipe's best values; a sweep that was cut off goes on.",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="SWEEP.yaml",
        help="e.g. configs/sweeps/digits.yaml",
    )
    parser.add_argument(
        "--workers",
        type=whole,
        default=1,
        metavar="N",
        help="trials at once (1)",
    )
    parser.add_argument(
        "--trials",
        type=whole,
        metavar="N",
        help="overrides the file's number",
    )
    parser.add_argument("--output", metavar="FOLDER", help="default: sweeps/NAME")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="laid over the recipe in all trials",
    )
    return parser
