"""Writes a run, or the comparison of several, as a page that needs no network:

    python -m tools.report runs/quickstart                         # runs/quickstart/report.html
    python -m tools.report runs/a runs/b --output comparison.html

See docs/reports.md. With --json the last line is one JSON object. Exit codes: 0 done, 1 failed,
2 the input is wrong.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

from collections import Counter
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from common.command import Parser, one_line
from common.errors import DONE, UserError
from common.files import check_file, write_text
from common.json_io import json_text
from tools import packages
from tools.arguments import within
from tools.reporting import page, sections
from tools.reporting.run import Run, headline, read


class _Report(NamedTuple):
    """A report before it is rendered.

    content: the values that report.html shows.
    text: what it shows, in a few words.
    figures: of each run, as data.
    """

    content: dict
    text: str
    figures: List[dict]


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    packages.check("tools.report", "plotly")
    runs = _read(options.folders)
    output = options.output
    if output is None:
        # A comparison belongs to none of its runs.
        folder = options.folders[0] if len(runs) == 1 else Path()
        output = folder / "report.html"
    # Checked before images are read and scored for a minute.
    if not output.parent.exists():
        raise UserError(
            f"{output}: there is no folder {output.parent}; make it, or name another file by --output"
        )
    check_file(output)
    report = _compare(runs) if len(runs) > 1 else _show(runs[0], options.images)
    html = page.render(report.content)
    write_text(output, html)
    megabytes = len(html.encode()) / 1e6
    print(f"{output}: {report.text}, {megabytes:.1f} MB")
    if options.json:
        print(json_text({"files": [str(output)], "runs": report.figures}))
    return DONE


def _read(folders: Sequence[Path]) -> List[Run]:
    """Read the runs in some folders."""
    # Resolved, because one folder may have several names.
    folder, times = Counter(folder.resolve() for folder in folders).most_common(1)[0]
    if times > 1:
        raise UserError(f"{folder}: is named twice; name each run once")
    return [read(folder) for folder in folders]


def _show(run: Run, images: int) -> _Report:
    """Return the report of one run, with so many pictures of each kind at most."""
    figures = headline(run)
    content = sections.of_run(run)
    text = f"{run.name}, {figures['state']} at step {figures['step']:,}"
    if images:
        from tools.reporting import pictures  # loads torch

        shown, data = pictures.collect(run, images)
        content.update(shown)
        figures.update(data)
    return _Report(content, text, [figures])


def _compare(runs: Sequence[Run]) -> _Report:
    """Return the comparison of several runs."""
    names = sections.names_of(runs)
    figures = []
    for run, name in zip(runs, names):
        # Folders of several runs may have the same name.
        figures.append({**headline(run), "name": name})
    content = sections.of_comparison(runs, names)
    return _Report(content, f"{len(runs)} runs compared", figures)


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tools.report",
        description="Write a run, or a comparison, as an HTML page.",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="RUN_FOLDER",
        help="one run, or several to compare",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the run folder; of several, here",
    )
    parser.add_argument(
        "--images",
        type=within(0, 64),
        default=32,
        metavar="N",
        help="pictures of training images and of mistakes, at most; 0 leaves both out (32; one run only)",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    return parser
