"""Experiments: the runs of one, its table, and its verdict."""

from __future__ import annotations

import abc
import statistics
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from benchmarks import claims
from benchmarks.evidence.runs import RECIPE, Run, outcome

SEEDS = (0, 1, 2)
_SHORT = ("run.steps=8", "schedule.warmup_steps=2", "data.train_images=6144")  # with --quick


class Series(NamedTuple):
    """Runs that differ in the seed only.

    labels: column -> value that distinguishes it from other series. The other fields are those of Run.
    """

    labels: Mapping[str, Union[str, int, float]]
    overrides: Tuple[str, ...]
    seeds: Tuple[int, ...] = SEEDS
    stages: int = 1
    replicas: int = 1
    base: str = RECIPE

    @property
    def runs(self) -> List[Run]:
        return [Run(self.overrides, seed, *self[3:]) for seed in self.seeds]

    def shortened(self, *by: str, seeds: int = 1) -> Series:
        """The series with so many seeds and the length that `by` gives; its runs have folders of their own."""
        length = ("run.epochs=", "schedule.warmup_")
        overrides = [text for text in self.overrides if not text.startswith(length)]
        return self._replace(overrides=changed(overrides, by), seeds=self.seeds[:seeds])


class Experiment(abc.ABC):
    """One question, the runs that answer it, and the answer. A new page begins with the docstring of the class.

    Attributes:
        name: of the command line and of the files of docs/results. question: the page's title.
        takes, quick_takes: times of the command, whole and with --quick.
        base: the recipe. columns: of the page's table: key of a row, heading, digits; the first is top-1.
    """

    name: str
    question: str
    takes, quick_takes = "one to two hours an experiment, less for cached runs", "1 minute"
    base = RECIPE
    columns: Sequence[Tuple[str, str, int]] = (
        ("top1", "top-1 (%)", 1),
        ("loss", "validation loss", 3),
        ("train_loss", "training loss", 3),
        ("behind", "behind float32", 4),
    )

    @abc.abstractmethod
    def series(self) -> List[Series]:
        """The rows of the table, as far as they are known by now."""

    @abc.abstractmethod
    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Write the figure; all runs are finished."""

    @abc.abstractmethod
    def verdict(self, rows: Sequence[dict]) -> str:
        """The answer in a sentence, computed from the rows."""

    def trials(self) -> Iterable[Run]:
        """Runs whose outcome decides which series there are; all that are known by now."""
        return ()

    def quick(self) -> List[Series]:
        """The series of --quick: a few updates of the first run."""
        first = self.wanted()[0]
        return [Series({"run": "the first, shortened"}, first.overrides, (first.seed,), *first[2:]).shortened(*_SHORT)]

    def more(self, rows: Sequence[dict]) -> str:
        return ""

    def claims(self) -> List[dict]:
        """Claims about the figures, as `benchmarks.claims.claim` makes them."""
        return []

    def wanted(self) -> List[Run]:
        """All runs that are known by now to belong to the experiment."""
        return [*self.trials(), *(run for series in self.series() for run in series.runs)]

    def rows(self) -> List[dict]:
        return self.rows_of(self.series())

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """The rows of some series, finished."""
        return [row(each) for each in series]

    def table(self, rows: Sequence[dict]) -> str:
        """Markdown: labels, mean ± standard deviation over the seeds of the columns, how many runs diverged."""
        measured = [each for each in self.columns if any(row.get(f"{each[0]}_mean") is not None for row in rows)]
        hidden = {f"{key}_{kind}" for key, _, _ in Experiment.columns for kind in ("mean", "sd")} | {
            "seeds",
            "diverged",
        }
        labels = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden]
        diverged = any(row.get("diverged") for row in rows)
        head = [*(label.replace("_", " ") for label in labels), *(heading for _, heading, _ in measured)]
        lines = []
        for row in rows:
            line = [cell(row.get(label)) for label in labels]
            line += [plus_minus(row[f"{key}_mean"], row[f"{key}_sd"], digits) for key, _, digits in measured]
            lines.append(line + ([f"{row['diverged']} of {row['seeds']}"] if diverged else []))
        return claims.markdown(head + ["diverged"] * diverged, lines)


def cell(value: object) -> str:
    """A label or a value of a table, with the digits that it needs."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value or "")


def plus_minus(mean: Optional[float], deviation: Optional[float], digits: int) -> str:
    """`mean ± deviation`; empty without a mean."""
    return " ± ".join(f"{value:.{digits}f}" for value in (mean, deviation) if value is not None)


def row(series: Series) -> dict:
    """Labels; mean and standard deviation over the seeds of top-1 in percent and of both losses; how many diverged.

    A run that diverged counts as guessing in top-1, and in no loss.
    """
    found = [outcome(run) for run in series.runs]
    ended = [each for each in found if not each.diverged]
    return {
        **series.labels,
        "seeds": len(found),
        "diverged": len(found) - len(ended),
        **two("top1", [100 * each.top1 for each in found]),
        **two("loss", [each.loss for each in ended]),
        **two("train_loss", [each.train_loss for each in ended]),
    }


def two(name: str, values: Sequence[float]) -> Dict[str, Optional[float]]:
    """Mean and standard deviation, rounded as in the CSV: a rerun is compared with that."""
    mean = round(statistics.mean(values), 4) if values else None
    return {f"{name}_mean": mean, f"{name}_sd": round(statistics.stdev(values), 4) if len(values) > 1 else None}


def changed(overrides: Sequence[str], by: Sequence[str]) -> Tuple[str, ...]:
    """Overrides with others in the place of those of the same keys, so that a run's name says each key once."""
    keys = {text.partition("=")[0] for text in by}
    return (*(text for text in overrides if text.partition("=")[0] not in keys), *by)


class Search(abc.ABC):
    """A search for the peak rate with the lowest validation loss; which rates are tried depends on those before."""

    def __init__(self, overrides: Sequence[str], seeds: Sequence[int]):
        """Args: overrides: of all runs, without the peak rate."""
        self._overrides, self._seeds = tuple(overrides), seeds

    @abc.abstractmethod
    def rates(self) -> List[float]:
        """The peak rates that are known to be needed by now."""

    def tried(self, rate: float) -> List[Run]:
        return [Run((*self._overrides, f"schedule.peak={rate:g}"), seed) for seed in self._seeds]

    def runs(self) -> List[Run]:
        return [run for rate in self.rates() for run in self.tried(rate)]

    def loss(self, rate: float) -> Optional[float]:
        """Mean validation loss over the seeds, infinite if a run diverged; None until all are done."""
        found = [outcome(run) for run in self.tried(rate)]
        return None if None in found else statistics.mean(each.loss for each in found)

    def losses(self) -> Dict[float, float]:
        """Peak rate -> loss, of those that are done; in the order of the rates."""
        found = {rate: self.loss(rate) for rate in sorted(self.rates())}
        return {rate: loss for rate, loss in found.items() if loss is not None}

    def best(self) -> Optional[float]:
        """The rate with the lowest loss, None as long as runs are missing."""
        losses = self.losses()
        return min(losses, key=losses.__getitem__) if len(losses) == len(self.rates()) else None


def search_table(searches: Mapping[Tuple[str, int], Search]) -> str:
    """Markdown: each search's peak rates and losses, the best one bold. Args: searches: by optimizer and batch."""
    lines = []
    for (optimizer, batch), search in searches.items():
        best = search.best()
        texts = [f"{rate:g}: {loss:.3f}" for rate, loss in search.losses().items()]
        marked = [f"**{text}**" if float(text.partition(":")[0]) == best else text for text in texts]
        lines.append((optimizer, batch, ", ".join(marked)))
    return claims.markdown(("optimizer", "batch", "peak: loss"), lines)
