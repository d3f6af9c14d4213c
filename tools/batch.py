"""What would a run cost with other batches? From its gradient noise scale (docs/batch.md):

    python -m tools.batch RUN [--batches 768,1536] [--machine NAME|FILE] [--replicas N] [--picture FILE.png] [--json]

RUN is a run folder whose log has a noise scale. Prints the critical batch along the run, and for each batch the updates
and images to where the run came; on a machine that is known by published figures or was measured by `tools.doctor` also
the time. With --json the last line is one JSON object. Exit codes: 0 done, 1 the picture cannot be written, 2 the input
is wrong.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import textwrap
from pathlib import Path
from typing import Iterator, List, Optional, Sequence

from recipe import loading
from recipe.batch import planned
from recipe.division import count
from recipe.errors import DONE
from recipe.files import writing
from recipe.json_text import json_text
from tools import output
from tools.arguments import whole
from tools.formats import duration
from tools.planning import batches, machine
from tools.planning.batches import Cost, Interval
from training.command import Parser, naming, one_line
from training.metrics import read_events

_WIDTH = 100  # of a line of text


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    recipe = loading.load(options.run / "config.yaml")
    own, place = recipe.batch.global_, machine.load(options.machine) if options.machine else None
    events = read_events(options.run).get("train", [])
    run = naming(options.run, lambda train: batches.intervals(train, own), events)
    replicas = options.replicas or planned(recipe).replicas
    costs: List[Cost] = []
    critical = None
    if batches.is_predictable(run):
        others = options.batches or sorted({max(1, int(own * 2.0**power)) for power in range(-2, 5)})
        costs = [batches.cost(run, recipe, other, place, replicas) for other in others]
        critical = batches.critical(run)
    print("\n".join(_lines(run, critical, costs, replicas)))
    if options.picture:
        with writing(options.picture):
            _draw(run, own, costs, options.picture)
        print(f"picture: {options.picture}")
    if options.json:
        data = {
            "batch": own,
            "critical_batch": critical,
            "run": [{**each._asdict(), "known": each.known} for each in run],
            "costs": [each._asdict() for each in costs],
            "bias": batches.BIAS if any(each.upper_bound for each in costs) else None,
        }
        print(json_text(data))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m tools.batch", description="Predict what other batches would cost a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, e.g. runs/quickstart")
    images = "images in an update (default: a quarter to 16 times the run's)"
    parser.add_argument("--batches", type=_numbers, metavar="N,N...", help=images)
    known = f"one of {', '.join(machine.names())}, or a file by tools.doctor"
    parser.add_argument("--machine", metavar="NAME|FILE", help=known)
    parser.add_argument("--replicas", type=whole, metavar="N", help="on that machine (default: the run's)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the critical batch, and updates over images")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    return parser


def _numbers(text: str) -> List[int]:
    return [whole(part) for part in text.split(",")]


def _lines(run: Sequence[Interval], critical: Optional[float], costs: Sequence[Cost], replicas: int) -> Iterator[str]:
    updates = sum(each.updates for each in run)
    images = sum(each.updates * each.batch for each in run)
    along = [run[0], run[len(run) // 2], run[-1]] if len(run) > 2 else run
    scales = ", ".join(f"{_scale(each)} by epoch {each.epoch:.3g}" for each in along)
    yield f"run        {updates:,.0f} updates of {images / updates:,.0f} images"
    if critical is None:
        yield f"critical   unknown; noise scale {scales}"
        yield from _wrapped(
            "For most updates zero is within two standard errors of the noise scale, so nothing is predicted from it. "
            "A longer run measures it better, and so does one with more micro batches in an update."
        )
        return
    yield f"critical   {critical:,.0f} images over the whole run; noise scale {scales}"
    yield f"{'batch':>9} {'updates':>10} {'(range)':>19} {'images':>13} {'x images':>9} {'time':>12}"
    for each in costs:
        span = f"{each.updates_range[0]:,.0f}-{each.updates_range[1]:,.0f}"
        bound = "<= " if each.upper_bound else ""
        needed = f"{bound}{each.updates:,.0f}"
        row = f"{each.batch:9,} {needed:>10} {span:>19} {each.images:13,.0f} {each.images / images:9.2f}"
        yield row if each.seconds is None else f"{row} {duration(each.seconds):>12}"
    if any(each.upper_bound for each in costs):
        yield from _wrapped(f"{batches.BIAS}.")
    if costs[0].seconds is not None:
        yield f"times on {count(replicas, 'replica')}"


def _scale(interval: Interval) -> str:
    """A noise scale with its error; no figure where zero is within two of it."""
    return f"{interval.noise:,.0f} ± {interval.error:,.0f}" if interval.known else "unknown"


def _wrapped(text: str) -> List[str]:
    return textwrap.wrap(text, _WIDTH)


def _draw(run: Sequence[Interval], own: int, costs: Sequence[Cost], path: Path) -> None:
    figure = output.figure(path, (10, 4.2))
    left, right = figure.subplots(1, 2)
    known = [each for each in run if each.known]
    left.set(xlabel="epoch", ylabel="images", title="noise scale; dashed: the run's batch")
    left.axhline(own, color="grey", ls="--", lw=0.8)
    if known:
        errors = [each.error for each in known]
        left.errorbar([each.epoch for each in known], [each.noise for each in known], errors, fmt="o", ms=3, color="C0")
        left.set_yscale("log")
        output.few_ticks(left.yaxis)
    right.set(xlabel="images", ylabel="updates", title="to the same point, by batch" if costs else "updates: unknown")
    if costs:
        right.plot([each.images for each in costs], [each.updates for each in costs], "o-", color="C1")
        right.set(xscale="log", yscale="log")
        output.few_ticks(right.xaxis)
        output.few_ticks(right.yaxis)
    for each in costs:
        bound = ", at most" if each.upper_bound else ""
        right.annotate(f"{each.batch:,}{bound}", (each.images, each.updates), fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
