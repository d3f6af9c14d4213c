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
    from common.command import run

    run(__file__)

from collections import Counter
from pathlib import Path
from typing import Optional, Sequence

from common.command import Parser, one_line
from common.errors import DONE, UserError
from common.files import write_text
from common.json_io import json_text
from tools import output as outputs
from tools.arguments import within
from tools.reporting import page, sections
from tools.reporting.run import headline, read


@one_line()
def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs the command; returns its exit code."""
    parser = Parser(prog="python -m tools.report", description="Write a run, or a comparison, as an HTML page.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="one run, or several to compare")
    place = "default: report.html in the run folder; of several, here"
    parser.add_argument("--output", type=Path, metavar="FILE.html", help=place)
    number = "pictures of training images and of mistakes, at most; 0 leaves both out (32; one run only)"
    parser.add_argument("--images", type=within(0, 64), default=32, metavar="N", help=number)
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    options = parser.parse_args(arguments)
    folders = options.folders
    output = options.output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    folder, times = Counter(folder.resolve() for folder in folders).most_common(1)[0]
    if times > 1:
        raise UserError(f"{folder}: is named twice; name each run once")
    runs = [read(folder) for folder in folders]
    if not output.parent.exists():
        raise UserError(f"{output}: there is no folder {output.parent}; make it, or name another file by --output")
    outputs.check(output)  # before images are read and scored for a minute
    figures = [headline(run) for run in runs]
    if len(runs) == 1:
        shown = sections.of_run(runs[0])
        text = f"{runs[0].name}, {figures[0]['state']} at step {figures[0]['step']:,}"
        if options.images:
            from tools.reporting import pictures  # loads torch

            images, data = pictures.collect(runs[0], options.images)
            shown.update(images)
            figures[0].update(data)
    else:
        names = sections.names_of(runs)
        shown, text = sections.of_comparison(runs, names), f"{len(runs)} runs compared"
        figures = [{**each, "name": name} for each, name in zip(figures, names)]
    content = page.render(shown)
    write_text(output, content)
    print(f"{output}: {text}, {len(content.encode()) / 1e6:.1f} MB")
    if options.json:
        print(json_text({"files": [str(output)], "runs": figures}))
    return DONE
