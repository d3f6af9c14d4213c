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

import argparse
import json
from pathlib import Path
from typing import List, Optional, Sequence

from recipe import loading
from recipe.batch import planned
from recipe.division import count
from recipe.errors import DONE, ConfigError, UserError
from recipe.files import writing
from tools import pictures
from tools.formats import duration
from tools.planning import batches, machine
from tools.planning.batches import Cost, Interval
from training.command import Parser, one_line
from training.metrics import read_events

_POWERS = range(-2, 5)  # of two: batches beside the run's own


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    if not (options.run / "config.yaml").exists():
        raise ConfigError(f"{options.run}: no run folder; name one, e.g. runs/quickstart")
    recipe = loading.load(options.run / "config.yaml")
    try:
        run = batches.intervals(read_events(options.run).get("train", []), recipe.batch.global_)
    except UserError as error:
        raise ConfigError(f"{options.run}: {error}") from None
    own, place = recipe.batch.global_, machine.load(options.machine) if options.machine else None
    replicas = options.replicas or planned(recipe).replicas
    others = options.batches or sorted({own * 2**power if power >= 0 else max(1, own >> -power) for power in _POWERS})
    costs = [batches.cost(run, recipe, other, place, replicas) for other in others]
    whole = batches.critical(run)
    print("\n".join(_lines(run, whole, costs)))
    if options.picture:
        with writing(options.picture):
            _draw(run, own, costs, options.picture)
        print(f"picture: {options.picture}")
    if options.json:
        data = {"batch": own, "critical_batch": whole, "run": [each._asdict() for each in run]}
        print(json.dumps({**data, "costs": [each._asdict() for each in costs]}, allow_nan=False))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m tools.batch", description="Predict what other batches would cost a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run, e.g. runs/quickstart")
    parser.add_argument(
        "--batches",
        type=_numbers,
        metavar="N,N...",
        help="images in an update (default: a quarter to 16 times the run's)",
    )
    parser.add_argument(
        "--machine", metavar="NAME|FILE", help=f"one of {', '.join(machine.names())}, or a file by tools.doctor"
    )
    parser.add_argument("--replicas", type=_number, metavar="N", help="on that machine (default: the run's)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the critical batch, and updates over images")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    return parser


def _number(text: str) -> int:
    if text.isdecimal() and 0 < int(text) <= 10**9:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1e9")


def _numbers(text: str) -> List[int]:
    return [_number(part) for part in text.split(",")]


def _lines(run: Sequence[Interval], whole: float, costs: Sequence[Cost]) -> List[str]:
    updates, middle = sum(each.updates for each in run), len(run) // 2
    images = sum(each.updates * each.batch for each in run)
    along = [run[0], run[middle], run[-1]] if len(run) > 2 else run
    said = ", ".join(f"{each.noise:,.0f} ± {each.error:,.0f} by epoch {each.epoch:.3g}" for each in along)
    lines = [
        f"run        {updates:,.0f} updates of {images / updates:,.0f} images",
        f"critical   {whole:,.0f} images over the whole run; noise scale {said}",
        f"{'batch':>9} {'updates':>10} {'(range)':>19} {'images':>13} {'x images':>9} {'time':>12}",
    ]
    for each in costs:
        span = f"{each.updates_range[0]:,.0f}-{each.updates_range[1]:,.0f}"
        time, more = "" if each.seconds is None else duration(each.seconds), each.images / images
        lines.append(f"{each.batch:9,} {each.updates:10,.0f} {span:>19} {each.images:13,.0f} {more:9.2f} {time:>12}")
    first, last = costs[0], costs[-1]
    if len(costs) > 1 and first.seconds is not None:
        times = first.seconds / last.seconds
        ends = f"finishes {times:.1f} times sooner" if times >= 1 else f"takes {1 / times:.1f} times as long"
        lines.append(
            f"at {last.batch:,} this costs {last.images / first.images:.1f} times the images of {first.batch:,} and "
            f"{ends}, on {count(last.replicas, 'replica')}"
        )
    return lines


def _draw(run: Sequence[Interval], own: int, costs: Sequence[Cost], path: Path) -> None:
    figure = pictures.figure(path, (10, 4.2), "batch.png")
    left, right = figure.subplots(1, 2)
    epochs, noise = [each.epoch for each in run], [each.noise for each in run]
    left.plot(epochs, noise, color="C0")
    low, high = ([max(1.0, each.noise + sign * each.error) for each in run] for sign in (-1, 1))
    left.fill_between(epochs, low, high, color="C0", alpha=0.2)
    left.axhline(own, color="grey", ls="--", lw=0.8)
    left.set(xlabel="epoch", ylabel="images", yscale="log", title="noise scale; dashed: the run's batch")
    right.plot([each.images for each in costs], [each.updates for each in costs], "o-", color="C1")
    for each in costs:
        right.annotate(
            f"{each.batch:,}", (each.images, each.updates), fontsize=8, xytext=(4, 4), textcoords="offset points"
        )
    right.set(xlabel="images", ylabel="updates", xscale="log", yscale="log", title="to the same point, by batch")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
