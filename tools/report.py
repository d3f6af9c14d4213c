"""Writes a run, or the comparison of several, as a page that needs no network:

    python -m tools.report runs/quickstart                         # runs/quickstart/report.html
    python -m tools.report runs/a runs/b --output comparison.html

See docs/reports.md. With --json the last line is one JSON object. Exit codes: 0 done, 1 failed, 2 the input is wrong.
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
from typing import List, Optional, Sequence, Tuple

from recipe.errors import DONE, UserError
from recipe.files import write_text
from tools import output as outputs
from training.command import Parser, one_line

_NAME = "report.html"
_IMAGES = 32
_MOST_IMAGES = 64


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    output = options.output or (options.folders[0] / _NAME if len(options.folders) == 1 else Path(_NAME))
    page, summary = _report(options, output)
    write_text(output, page)
    print(f"{output}: {summary.pop('text')}, {len(page.encode()) / 1e6:.1f} MB")
    if options.json:
        print(json.dumps({"files": [str(output)], **summary}, allow_nan=False))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m tools.report", description="Write a run, or a comparison, as an HTML page.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="one run, or several to compare")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="default: report.html in the run folder; of several, here"
    )
    parser.add_argument(
        "--images",
        type=_count,
        default=_IMAGES,
        metavar="N",
        help=f"pictures of training images and of mistakes, at most; 0 leaves both out ({_IMAGES}; one run only)",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_IMAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 to {_MOST_IMAGES}")
    return int(text)


def _report(options: argparse.Namespace, output: Path) -> Tuple[str, dict]:
    """The page, and its summary, as data."""
    from tools.reporting import run

    _check_folders(options.folders)
    runs = [run.read(folder) for folder in options.folders]
    _check_output(output)
    return _of_one(runs[0], options.images) if len(runs) == 1 else _of_several(runs)


def _of_one(run, images: int) -> Tuple[str, dict]:
    from tools.reporting import page, sections
    from tools.reporting.run import headline

    parts, unit = sections.curve_sections(run)
    parts.append(sections.time_section(run))
    figures = headline(run)
    if images:
        from tools.reporting import gallery

        found = gallery.collect(run, images)
        parts += found.sections
        figures.update(images_shown=found.shown, scored=found.scored)
    parts += [sections.recipe_section(run), sections.environment_section(run)]
    text = page.render(sections.title(run), sections.head(run), parts, unit)
    return text, {"text": f"{run.name}, {figures['state']} at step {figures['step']:,}", "runs": [figures]}


def _of_several(runs: List) -> Tuple[str, dict]:
    from tools.reporting import comparison, page
    from tools.reporting.run import headline

    names = comparison.names_of(runs)
    parts, unit = comparison.sections(runs, names)
    text = page.render(f"{len(runs)} runs compared", comparison.head(runs, names), parts, unit)
    figures = [{**headline(run), "name": name} for run, name in zip(runs, names)]
    return text, {"text": f"{len(runs)} runs compared", "runs": figures}


def _check_folders(folders: Sequence[Path]) -> None:
    """Raises UserError for a folder that is named twice."""
    places = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if places[number] in places[:number]:
            raise UserError(f"{folder}: is named twice; name each run once")


def _check_output(output: Path) -> None:
    """Raises UserError where the file cannot be written: before images are read and scored for a minute."""
    if output.is_dir():
        raise UserError(f"{output}: is a folder; name a file in it, such as {output / _NAME}")
    if not output.parent.exists():
        raise UserError(f"{output}: there is no folder {output.parent}; make it, or name another file by --output")
    outputs.check(output)
