"""What an experiment leaves behind: a CSV file, a figure, and a page that ends with a verdict."""

from __future__ import annotations

import contextlib
import csv
from pathlib import Path
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from benchmarks import claims
from benchmarks.evidence.experiment import Experiment
from benchmarks.evidence.runs import RECIPE
from benchmarks.experiments import RESULTS

# Column of the table: (key of a row, heading, digits). A mean's standard deviation stands beside it.
_MEASURED = (
    ("top1", "top-1 (%)", 1),
    ("loss", "validation loss", 3),
    ("train_loss", "training loss", 3),
    ("behind", "behind float32", 4),
)


def write(experiment: Experiment, rows: Sequence[dict], folder: Path = RESULTS) -> None:
    """NAME.csv, NAME.png, NAME.md."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(folder / f"{experiment.name}.csv", "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    experiment.draw(rows, folder / f"{experiment.name}.png")
    (folder / f"{experiment.name}.md").write_text(_page(experiment, rows))


def _page(experiment: Experiment, rows: Sequence[dict]) -> str:
    about = claims.machine()
    example = experiment.wanted()[-1]
    parts = [
        f"# {experiment.question}",
        f"Measured on {about['date']}, {about['cpu']}, torch {about['torch']}, by `python -m benchmarks.evidence "
        f"{experiment.name}`; recipe [`{RECIPE}`](../../{RECIPE}), one thread a run.",
        experiment.about.strip(),
        f"**Published elsewhere**: {experiment.published.strip()}",
        table(rows),
        f"![the same as a figure]({experiment.name}.png)",
        experiment.more(rows).strip(),
        experiment.findings.strip(),
        f"The last row's last run by itself: `python train.py --config {RECIPE} {' '.join(example.arguments)}`",
        f"**Verdict.** {experiment.verdict(rows)}",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[dict]) -> str:
    """Markdown: labels, mean ± standard deviation over the seeds of what was measured, how many runs diverged."""
    measured = [each for each in _MEASURED if any(row.get(f"{each[0]}_mean") is not None for row in rows)]
    known = {f"{key}_{kind}" for key, _, _ in _MEASURED for kind in ("mean", "sd")} | {"seeds", "diverged"}
    labels = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in known]
    diverged = any(row["diverged"] for row in rows)
    head = [*(label.replace("_", " ") for label in labels), *(heading for _, heading, _ in measured)]
    head += ["diverged"] if diverged else []
    lines = [head, ["---"] * len(head)]
    for row in rows:
        line = [_label(row.get(label)) for label in labels]
        line += [plus_minus(row[f"{key}_mean"], row[f"{key}_sd"], digits) for key, _, digits in measured]
        lines.append(line + ([f"{row['diverged']} of {row['seeds']}"] if diverged else []))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plus_minus(mean: Optional[float], deviation: Optional[float], digits: int) -> str:
    if mean is None:
        return ""
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation is not None else "")


def _label(value: object) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def read(path: Path) -> List[dict]:
    """Rows of a CSV file that was written here: numbers as numbers, None where there was none."""
    with open(path, newline="") as stream:
        return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(stream)]


def _value(text: str) -> Union[int, float, str, None]:
    """Of how it was written: 1e-3 is a word, as a number is written in another way."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            if str(kind(text)) == text:
                return kind(text)
    return text or None


class Agreement(NamedTuple):
    """Of a run of the experiment with the figures that were there before: rows compared, and those that differ."""

    compared: int
    differing: List[str]


def agreement(experiment: Experiment, rows: Sequence[dict], folder: Path = RESULTS) -> Optional[Agreement]:
    """Compares top-1 with NAME.csv as it is, before it is written anew. None where there is none.

    Rows agree whose means differ by no more than the larger of the two standard deviations over the seeds.
    """
    path = folder / f"{experiment.name}.csv"
    if not path.exists():
        return None
    labels = list(experiment.series()[0].labels)
    before = {_named(row, labels): row for row in read(path)}
    differing, compared = [], 0
    for row in rows:
        found = before.get(_named(row, labels))
        if found is None:
            differing.append(f"{_named(row, labels)}: not there before")
            continue
        compared += 1
        mean = found["top1_mean"]
        if abs(row["top1_mean"] - mean) > max(row["top1_sd"] or 0, found["top1_sd"] or 0):
            differing.append(f"{_named(row, labels)}: top-1 {row['top1_mean']:.2f} %, before {mean:.2f} %")
    return Agreement(compared, differing)


def _named(row: dict, labels: Sequence[str]) -> str:
    return ", ".join(f"{label} {_label(row[label])}" for label in labels)


Points = Sequence[Tuple[float, float, Optional[float]]]  # x, mean, standard deviation


def draw(panels: Mapping[str, Mapping[str, Points]], path: Path, *, x: str, y: str, log_x: bool = False) -> None:
    """Points with error bars, a panel per title, a line per name; a name has one colour in all panels."""
    from matplotlib.figure import Figure

    columns = min(len(panels), 4)
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.0, 4.2 * columns), 3.6 * height + 0.6), layout="constrained")
    axes = figure.subplots(height, columns, squeeze=False)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    shown: Dict[str, object] = {}
    for axis, (title, lines) in zip(axes.flat, panels.items()):
        for name, points in lines.items():
            places, means, deviations = zip(*sorted(points, key=lambda point: point[0]))
            errors = [each or 0.0 for each in deviations]
            shown[name] = axis.errorbar(
                places, means, errors, color=f"C{names.index(name)}", marker="o", ms=4, lw=1.3, capsize=3
            )
        axis.set(title=title, xlabel=x, ylabel=y)
        if log_x:
            axis.set_xscale("log", base=2)
            every = sorted({point[0] for points in lines.values() for point in points})
            axis.set_xticks(every, [f"{value:g}" for value in every])
            axis.minorticks_off()
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    if len(names) > 1:
        figure.legend(list(shown.values()), list(shown), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
