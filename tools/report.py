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
from tools.reporting import gallery, page, sections
from tools.reporting.run import Run, headline, read
from training.command import Parser, one_line

_NAME = "report.html"
_IMAGES = 32
_MOST_IMAGES = 64


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
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
    options = parser.parse_args(arguments)
    one = len(options.folders) == 1
    output = options.output or (options.folders[0] / _NAME if one else Path(_NAME))
    runs = _read(options.folders)
    _check_output(output)  # before images are read and scored for a minute
    text, content, figures = _of_one(runs[0], options.images) if one else _of_several(runs)
    write_text(output, content)
    print(f"{output}: {text}, {len(content.encode()) / 1e6:.1f} MB")
    if options.json:
        print(json.dumps({"files": [str(output)], "runs": figures}, allow_nan=False))
    return DONE


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) > _MOST_IMAGES:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 to {_MOST_IMAGES}")
    return int(text)


def _read(folders: Sequence[Path]) -> List[Run]:
    places = [folder.resolve() for folder in folders]
    for number, folder in enumerate(folders):
        if places[number] in places[:number]:
            raise UserError(f"{folder}: is named twice; name each run once")
    return [read(folder) for folder in folders]


def _check_output(output: Path) -> None:
    if not output.parent.exists():
        raise UserError(f"{output}: there is no folder {output.parent}; make it, or name another file by --output")
    outputs.check(output)


def _of_one(run: Run, images: int) -> Tuple[str, str, List[dict]]:
    """(a few words, the page, the figures of the run)."""
    parts, unit = sections.curve_sections(run)
    parts.append(sections.time_section(run))
    figures = headline(run)
    if images:
        pictures, shown = gallery.collect(run, images)
        parts += pictures
        figures.update(shown)
    parts += [sections.recipe_section(run), sections.environment_section(run)]
    text = f"{run.name}, {figures['state']} at step {figures['step']:,}"
    return text, page.render(sections.title(run), sections.head(run), parts, unit), [figures]


def _of_several(runs: Sequence[Run]) -> Tuple[str, str, List[dict]]:
    """(a few words, the page, the figures of the runs)."""
    names = sections.names_of(runs)
    parts, unit = sections.comparison(runs, names)
    text = f"{len(runs)} runs compared"
    figures = [{**headline(run), "name": name} for run, name in zip(runs, names)]
    return text, page.render(text, sections.head_of_comparison(runs, names), parts, unit), figures
