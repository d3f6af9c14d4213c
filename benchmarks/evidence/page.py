"""Results of an experiment: a CSV file, a figure, and a page that ends with a verdict."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Union

from benchmarks import RESULTS, provenance
from benchmarks.evidence import runs
from benchmarks.evidence.experiment import Experiment, cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Texts of a page by which its parts are found again.
_EXAMPLE = "The last row's last run by itself:"
_MEASURED = "one thread a run.\n\n"
_FINDINGS = "## Findings\n"


# The page and its table ---------------------------------------------------------------------------


def write(experiment: Experiment, rows: Sequence[dict], folder: Path) -> None:
    """Write NAME.csv, NAME.md and NAME.png.

    Args:
        experiment: whose runs are finished.
        rows: of its table.
        folder: which is created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts(experiment, rows, folder).items():
        path.write_text(text, encoding="utf-8")
    experiment.draw(rows, folder / f"{experiment.name}.png")


def texts(experiment: Experiment, rows: Sequence[dict], folder: Path) -> Dict[Path, str]:
    """Return what NAME.csv and NAME.md would be, by their paths.

    Days, processors and torch are those of the runs. Of a page that is there the text before the
    table and the section "Findings" are kept: they are written by hand.

    Args:
        experiment: whose runs are finished.
        rows: of its table.
        folder: of the files.
    """
    table = folder / f"{experiment.name}.csv"
    page = folder / f"{experiment.name}.md"
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    return {
        table: _csv(rows),
        page: _page(experiment, rows, before),
    }


def _csv(rows: Sequence[dict]) -> str:
    """Return rows as CSV; a row may lack some of the columns."""
    stream = io.StringIO()
    keys = dict.fromkeys(key for row in rows for key in row)
    writer = csv.DictWriter(stream, list(keys), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _page(experiment: Experiment, rows: Sequence[dict], before: str) -> str:
    """Return the page in Markdown.

    Args:
        experiment: whose runs are finished.
        rows: of its table.
        before: the page that is there, or an empty text.
    """
    # The head says when and where the runs were trained, the end how to train one of them.
    known = dict.fromkeys(experiment.wanted())
    trained = provenance.described([runs.provenance_of(run) for run in known])
    command = f"`python -m benchmarks.evidence {experiment.name}`"
    recipe = f"recipe [`{experiment.base}`](../../{experiment.base})"
    last = experiment.series()[-1].runs[-1]
    example = " ".join(["python", *last.program])

    # Parts that are empty leave no gap.
    parts = [
        f"# {experiment.question}",
        f"{trained}, by {command}; {recipe}, {_MEASURED}".strip(),
        _about_by_hand(before) or inspect.cleandoc(experiment.__doc__ or ""),
        experiment.table(rows),
        f"![the same as a figure]({experiment.name}.png)",
        experiment.more(rows),
        _findings_by_hand(before),
        f"{_EXAMPLE} `{example}`",
        f"**Verdict.** {experiment.verdict(rows)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about_by_hand(page: str) -> str:
    """Return the text between the head of a page and its table, or nothing."""
    after_head = page.partition(_MEASURED)[2]
    return after_head.partition("\n\n| ")[0]


def _findings_by_hand(page: str) -> str:
    """Return the section "Findings" of a page, or nothing."""
    _, heading, text = page.partition(_FINDINGS)
    findings = text.partition(_EXAMPLE)[0]
    return (heading + findings).strip()


# The earlier figures ------------------------------------------------------------------------------


def read(path: Path) -> List[dict]:
    """Return the rows of a CSV file that was written here.

    Numbers are numbers, and None stands where there was none.

    Args:
        path: of the file.
    """
    rows = []
    with open(path, newline="") as stream:
        for row in csv.DictReader(stream):
            rows.append({key: _value(text) for key, text in row.items()})
    return rows


def _value(text: str) -> Union[int, float, str, None]:
    """Return the number or the text of a cell.

    1e-3 is a text, because numbers are written in another way.
    """
    # A whole float was written with its point, so it is no text of an integer.
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            if str(number) == text:
                return number
    return text or None


def differences(
    experiment: Experiment,
    rows: Sequence[dict],
    folder: Path = RESULTS,
) -> List[str]:
    """Compare top-1 with NAME.csv, before it is written anew.

    Rows agree whose means differ by no more than the larger of the two spreads over the seeds.

    Args:
        experiment: whose runs are finished.
        rows: of its table.
        folder: of NAME.csv, which need not be there.

    Returns:
        A line for each row that differs, or was not there.
    """
    path = folder / f"{experiment.name}.csv"
    labels = list(experiment.series()[0].labels)
    rows_before = read(path) if path.exists() else []
    before = {_named(row, labels): row for row in rows_before}
    differing = []
    for row in rows:
        name = _named(row, labels)
        difference = _difference(row, before.get(name))
        if difference:
            differing.append(f"{name}: {difference}")
    return differing


def _difference(row: dict, before: Optional[dict]) -> str:
    """Return how the top-1 of a row differs from that of the row before; nothing if they agree."""
    if before is None:
        return "not there before"
    top1 = row["top1_mean"]
    earlier = before["top1_mean"]
    # A single seed has no spread.
    spread = max(row["top1_sd"] or 0, before["top1_sd"] or 0)
    if abs(top1 - earlier) > spread:
        return f"top-1 {top1:.2f} %, before {earlier:.2f} %"
    return ""


def _named(row: dict, labels: Sequence[str]) -> str:
    """Return the labels of a row with their values, as text."""
    return ", ".join(f"{label} {cell(row[label])}" for label in labels)


# Figures ------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A point of a line in a figure.

    x: its place.
    mean: over the seeds.
    deviation: standard deviation over the seeds; None of a single one.
    """

    x: float
    mean: float
    deviation: Optional[float]


def lines(rows: Sequence[dict], line: str, x: str, y: str = "top1") -> Dict[str, List[Point]]:
    """Return the points of each line of a figure.

    Args:
        rows: of a table. Those without a mean are left out, as where all runs diverged.
        line: the column whose values are the names of the lines.
        x: the column of the places.
        y: the figure, of which the rows have mean and deviation.
    """
    points: Dict[str, List[Point]] = {}
    for row in rows:
        mean = row[f"{y}_mean"]
        deviation = row[f"{y}_sd"]
        if mean is not None:
            name = row[line]
            points.setdefault(name, []).append(Point(row[x], mean, deviation))
    return points


def draw(
    panels: Mapping[str, Mapping[str, Sequence[Point]]],
    path: Path,
    *,
    x: str,
    y: str,
    log_x: bool = True,
) -> None:
    """Draw panels side by side, each with lines of points that have error bars.

    Args:
        panels: points by title of the panel and name of the line.
        path: of the PNG file.
        x: what the horizontal axes show.
        y: what the vertical axes show.
        log_x: horizontal axes are logarithmic.
    """
    # Imported here: only figures need it, and it takes a second.
    from matplotlib.figure import Figure

    width = max(5.0, 4.2 * len(panels))
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False).flat
    for axis, (title, points) in zip(axes, panels.items()):
        _draw_lines(axis, points)
        axis.set(title=title, xlabel=x, ylabel=y)
        if log_x:
            axis.set_xscale("log", base=2)
        _set_ticks(axis, points)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def _draw_lines(axis: Axes, points: Mapping[str, Sequence[Point]]) -> None:
    """Draw the lines of a panel, whose points are given by name of the line."""
    for name, line in points.items():
        in_order = sorted(line, key=lambda point: point.x)
        axis.errorbar(
            x=[point.x for point in in_order],
            y=[point.mean for point in in_order],
            yerr=[point.deviation or 0.0 for point in in_order],
            marker="o",
            ms=4,
            lw=1.3,
            capsize=3,
            label=name,
        )


def _set_ticks(axis: Axes, points: Mapping[str, Sequence[Point]]) -> None:
    """Set a tick wherever a point is: batches and rates are few, and hardly ever round."""
    places: Set[float] = set()
    for line in points.values():
        places.update(point.x for point in line)
    marks = sorted(places)
    labels = [f"{mark:g}" for mark in marks]
    axis.set_xticks(marks, labels, rotation=45)


def bars(
    names: Sequence[str],
    sides: Mapping[str, Sequence[float]],
    path: Path,
    x: str,
) -> None:
    """Draw a group of horizontal bars for each name, with a bar for each side.

    Args:
        names: of the groups, from the top down.
        sides: widths of the bars by side, in the order of `names`.
        path: of the PNG file.
        x: what the horizontal axis shows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(names) + 1.6), layout="constrained")
    axis = figure.subplots()
    # A fifth of the place is left between two groups.
    height = 0.8 / len(sides)
    for number, (side, widths) in enumerate(sides.items()):
        places = [place + height * number for place in range(len(names))]
        axis.barh(places, widths, height, label=side)
    axis.set(xlabel=x)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
