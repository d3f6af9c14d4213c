"""Results of an experiment: a CSV file, a figure, and a page that ends with a verdict."""

import contextlib
import csv
import inspect
import io
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, Union

from benchmarks import RESULTS, provenance
from benchmarks.evidence import runs
from benchmarks.evidence.experiment import Experiment, cell

_EXAMPLE = "The last row's last run by itself:"
_MEASURED = "one thread a run.\n\n"


def write(experiment: Experiment, rows: Sequence[dict], folder: Path) -> None:
    """Write NAME.csv, NAME.md and NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts(experiment, rows, folder).items():
        path.write_text(text, encoding="utf-8")
    experiment.draw(rows, folder / f"{experiment.name}.png")


def texts(experiment: Experiment, rows: Sequence[dict], folder: Path) -> Dict[Path, str]:
    """Return what NAME.csv and NAME.md would be.

    Days, processors and torch are those of the runs. Of a page that is there the text before the table and the section
    "Findings" are kept: they are written by hand.
    """
    page = folder / f"{experiment.name}.md"
    before = page.read_text(encoding="utf-8") if page.exists() else ""
    return {folder / f"{experiment.name}.csv": _csv(rows), page: _page(experiment, rows, before)}


def _csv(rows: Sequence[dict]) -> str:
    stream = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _page(experiment: Experiment, rows: Sequence[dict], before: str) -> str:
    """Args: before: the page that is there, or an empty text."""
    about = before.partition(_MEASURED)[2].partition("\n\n| ")[0]
    _, heading, after = before.partition("## Findings\n")
    trained = provenance.described([runs.provenance_of(run) for run in dict.fromkeys(experiment.wanted())])
    base = experiment.base
    parts = [
        f"# {experiment.question}",
        f"{trained}, by `python -m benchmarks.evidence {experiment.name}`; recipe [`{base}`](../../{base}), "
        f"{_MEASURED}".strip(),
        about or inspect.cleandoc(experiment.__doc__),
        experiment.table(rows),
        f"![the same as a figure]({experiment.name}.png)",
        experiment.more(rows),
        (heading + after.partition(_EXAMPLE)[0]).strip(),
        f"{_EXAMPLE} `{' '.join(['python', *experiment.series()[-1].runs[-1].program])}`",
        f"**Verdict.** {experiment.verdict(rows)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def read(path: Path) -> List[dict]:
    """Rows of a CSV file that was written here: numbers as numbers, None where there was none."""
    with open(path, newline="") as stream:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(stream)]


def _value(text: str) -> Union[int, float, str, None]:
    """The number or text of a cell; 1e-3 is a text, because numbers are written in another way."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text or None


def differences(experiment: Experiment, rows: Sequence[dict], folder: Path = RESULTS) -> List[str]:
    """Compare top-1 with NAME.csv, before it is written anew: a line for each row that differs, or was not there.

    Rows agree whose means differ by no more than the larger of the two spreads over the seeds.
    """
    path = folder / f"{experiment.name}.csv"
    labels = list(experiment.series()[0].labels)
    before = {_named(row, labels): row for row in (read(path) if path.exists() else ())}
    found = []
    for row in rows:
        name = _named(row, labels)
        then = before.get(name)
        if then is None:
            found.append(f"{name}: not there before")
        elif abs(row["top1_mean"] - then["top1_mean"]) > max(row["top1_sd"] or 0, then["top1_sd"] or 0):
            found.append(f"{name}: top-1 {row['top1_mean']:.2f} %, before {then['top1_mean']:.2f} %")
    return found


def _named(row: dict, labels: Sequence[str]) -> str:
    return ", ".join(f"{label} {cell(row[label])}" for label in labels)


Points = Sequence[Tuple[float, float, Optional[float]]]  # x, mean, standard deviation


def lines(rows: Sequence[dict], line: str, x: str, y: str = "top1") -> Dict[str, Points]:
    """Points of `y` by the value of the column `line`; without rows that have no mean, as where all runs diverged."""
    found: Dict[str, list] = {}
    for row in rows:
        if row[f"{y}_mean"] is not None:
            found.setdefault(row[line], []).append((row[x], row[f"{y}_mean"], row[f"{y}_sd"]))
    return found


def draw(panels: Mapping[str, Mapping[str, Points]], path: Path, *, x: str, y: str, log_x: bool = True) -> None:
    """Points with error bars, a panel per title side by side, a line per name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.0, 4.2 * len(panels)), 4.2), layout="constrained")
    for axis, (title, found) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items()):
        ticks = set()
        for name, points in found.items():
            places, means, deviations = zip(*sorted(points, key=lambda point: point[0]))
            errors = [each or 0.0 for each in deviations]
            axis.errorbar(places, means, errors, marker="o", ms=4, lw=1.3, capsize=3, label=name)
            ticks.update(places)
        axis.set(title=title, xlabel=x, ylabel=y)
        if log_x:
            axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(ticks), [f"{value:g}" for value in sorted(ticks)], rotation=45)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=110)


def bars(names: Sequence[str], sides: Mapping[str, Sequence[float]], path: Path, x: str) -> None:
    """A group of horizontal bars for each name, a bar for each side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(names) + 1.6), layout="constrained")
    axis = figure.subplots()
    for number, (side, widths) in enumerate(sides.items()):
        height = 0.8 / len(sides)
        axis.barh([place + height * number for place in range(len(names))], widths, height, label=side)
    axis.set(xlabel=x)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
