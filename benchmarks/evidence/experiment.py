"""Experiments: the runs of one, its table, and its verdict."""

from __future__ import annotations

import abc
import statistics
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from benchmarks import claims
from benchmarks.evidence.runs import RECIPE, Outcome, Run, outcome

SEEDS = (0, 1, 2)
_SHORT = ("run.steps=8", "schedule.warmup_steps=2", "data.train_images=6144")  # with --quick

Label = Union[str, int, float]


class Series(NamedTuple):
    """Runs that differ in the seed only.

    labels: column -> value that distinguishes it from other series.
    seeds: one run for each.
    overrides, stages, replicas, base: see Run.
    """

    labels: Mapping[str, Label]
    overrides: Tuple[str, ...]
    seeds: Tuple[int, ...] = SEEDS
    stages: int = 1
    replicas: int = 1
    base: str = RECIPE

    @property
    def runs(self) -> List[Run]:
        """Return the run of each seed."""
        return [
            Run(
                self.overrides,
                seed,
                stages=self.stages,
                replicas=self.replicas,
                base=self.base,
            )
            for seed in self.seeds
        ]

    def shortened(self, *by: str, seeds: int = 1) -> Series:
        """Return the series with other lengths of its runs, which have folders of their own.

        Args:
            by: overrides that give the length of the run and of its warm-up.
            seeds: how many of the seeds are kept.
        """
        # A recipe with two lengths, in different units, would be refused.
        lengths = ("run.epochs=", "schedule.warmup_")
        overrides = [text for text in self.overrides if not text.startswith(lengths)]
        return self._replace(overrides=changed(overrides, by), seeds=self.seeds[:seeds])


class Experiment(abc.ABC):
    """One question, the runs that answer it, and the answer.

    A new page begins with the docstring of the class.

    Attributes:
        name: on the command line, and of the files in docs/results.
        question: the page's title.
        takes: time of the whole command.
        quick_takes: time of the command with --quick.
        base: the recipe.
        columns: measured columns of the page's table: key of a row, heading, digits; the first is
            top-1.
    """

    name: str
    question: str
    takes = "one to two hours an experiment, less for cached runs"
    quick_takes = "1 minute"
    base = RECIPE
    columns: Sequence[Tuple[str, str, int]] = (
        ("top1", "top-1 (%)", 1),
        ("loss", "validation loss", 3),
        ("train_loss", "training loss", 3),
        ("behind", "behind float32", 4),
    )

    @abc.abstractmethod
    def series(self) -> List[Series]:
        """Return the rows of the table, as far as they are known by now."""

    @abc.abstractmethod
    def draw(self, rows: Sequence[dict], path: Path) -> None:
        """Write the figure.

        Args:
            rows: of the table; all runs are finished.
            path: of the PNG file.
        """

    @abc.abstractmethod
    def verdict(self, rows: Sequence[dict]) -> str:
        """Return the answer in a sentence, computed from the `rows` of the table."""

    def trials(self) -> Iterable[Run]:
        """Return the runs that decide which series there are, as far as they are known by now."""
        return ()

    def quick(self) -> List[Series]:
        """Return the series of --quick: a few updates of the first run."""
        first = self.wanted()[0]
        series = Series(
            {"run": "the first, shortened"},
            first.overrides,
            (first.seed,),
            stages=first.stages,
            replicas=first.replicas,
            base=first.base,
        )
        return [series.shortened(*_SHORT)]

    def more(self, rows: Sequence[dict]) -> str:
        """Return what the page says below the figure of its `rows`, in Markdown."""
        return ""

    def claims(self) -> List[dict]:
        """Return claims about the figures, as `benchmarks.claims.claim` makes them."""
        return []

    def wanted(self) -> List[Run]:
        """Return all runs that are known by now to belong to the experiment."""
        # Trials come first: the series follow from them.
        runs = list(self.trials())
        for series in self.series():
            runs += series.runs
        return runs

    def rows(self) -> List[dict]:
        """Return the rows of the table; all runs are finished."""
        return self.rows_of(self.series())

    def rows_of(self, series: Sequence[Series]) -> List[dict]:
        """Return the rows of some `series` whose runs are finished."""
        return [row(part) for part in series]

    def table(self, rows: Sequence[dict]) -> str:
        """Return the table in Markdown.

        Its columns are the labels, mean ± standard deviation over the seeds of what was measured,
        and how many runs diverged, where any did.

        Args:
            rows: of the table.
        """
        # Some experiments measure more than others, and hardly any run diverges: a column without
        # figures is left out.
        labels = _labels(rows)
        measured = [
            (key, heading, digits)
            for key, heading, digits in self.columns
            if any(row.get(f"{key}_mean") is not None for row in rows)
        ]
        any_diverged = any(row.get("diverged") for row in rows)

        # Labels, figures, diverged: in the head as in each line.
        head = [label.replace("_", " ") for label in labels]
        head += [heading for _, heading, _ in measured]
        if any_diverged:
            head.append("diverged")

        lines = []
        for row in rows:
            line = [cell(row.get(label)) for label in labels]
            for key, _, digits in measured:
                line.append(plus_minus(row[f"{key}_mean"], row[f"{key}_sd"], digits))
            if any_diverged:
                line.append(f"{row['diverged']} of {row['seeds']}")
            lines.append(line)
        return claims.markdown(head, lines)


def _labels(rows: Sequence[dict]) -> List[str]:
    """Return the keys of `rows` that are no figures of any experiment's measured columns."""
    figures = {"seeds", "diverged"}
    for key, _, _ in Experiment.columns:
        figures |= {f"{key}_mean", f"{key}_sd"}
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if key not in figures]


def cell(value: object) -> str:
    """Return a label or a `value` of a table as text, with the digits that it needs."""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value or "")


def plus_minus(mean: Optional[float], deviation: Optional[float], digits: int) -> str:
    """Return `mean ± deviation` as text; nothing without a mean, the mean alone without the other.

    Args:
        mean: of the seeds.
        deviation: standard deviation over the seeds.
        digits: after the point.
    """
    return " ± ".join(f"{value:.{digits}f}" for value in (mean, deviation) if value is not None)


def row(series: Series) -> dict:
    """Return a row of the table.

    It has the labels, mean and standard deviation over the seeds of top-1 in percent and of both
    losses, and how many runs diverged. A run that diverged counts as guessing in top-1, and in no
    loss.

    Args:
        series: whose runs are finished.
    """
    outcomes = [_finished(run) for run in series.runs]
    # The losses of a diverged run are infinite, and so would be their means.
    ended = [result for result in outcomes if not result.diverged]
    return {
        **series.labels,
        "seeds": len(outcomes),
        "diverged": len(outcomes) - len(ended),
        **two("top1", [100 * result.top1 for result in outcomes]),
        **two("loss", [result.loss for result in ended]),
        **two("train_loss", [result.train_loss for result in ended]),
    }


def _finished(run: Run) -> Outcome:
    """Return the outcome of a run that is finished."""
    result = outcome(run)
    assert result is not None, f"not finished: {' '.join(run.arguments)}"
    return result


def two(name: str, values: Sequence[float]) -> Dict[str, Optional[float]]:
    """Return mean and standard deviation, rounded as in the CSV: a rerun is compared with that.

    Args:
        name: of the figure; the keys are `NAME_mean` and `NAME_sd`.
        values: one for each seed. Without any there is no mean, and of one no deviation.
    """
    mean = None
    if values:
        mean = round(statistics.mean(values), 4)
    deviation = None
    if len(values) > 1:
        deviation = round(statistics.stdev(values), 4)
    return {f"{name}_mean": mean, f"{name}_sd": deviation}


def changed(overrides: Sequence[str], by: Sequence[str]) -> Tuple[str, ...]:
    """Return overrides with others in the place of those of the same keys.

    So a run's name says each key once.

    Args:
        overrides: texts such as "section.key=value".
        by: those that follow, and that replace.
    """
    replaced = {_key(text) for text in by}
    kept = [text for text in overrides if _key(text) not in replaced]
    return (*kept, *by)


def _key(override: str) -> str:
    """Return what stands before the = of an override."""
    return override.partition("=")[0]


class Part(NamedTuple):
    """A part of a run whose batch changes.

    begin: share of the run's images that come before it.
    times: how many times the smallest batch an update has.
    """

    begin: float
    times: int


def batch_schedule(parts: Sequence[Part], images: int, smallest: int) -> str:
    """Return the override of a batch that changes.

    Args:
        parts: of the run, in order.
        images: of the whole run.
        smallest: the smallest batch.
    """
    pairs = [f"[{round(part.begin * images)}, {part.times * smallest}]" for part in parts]
    return f"batch.schedule=[{', '.join(pairs)}]"


class Search(abc.ABC):
    """A search for the peak rate with the lowest validation loss.

    Which rates are tried depends on the losses of those before.
    """

    def __init__(self, overrides: Sequence[str], seeds: Sequence[int]):
        """
        Args:
            overrides: of all runs, without the peak rate.
            seeds: with which each rate is tried.
        """
        self._overrides = tuple(overrides)
        self._seeds = seeds

    @abc.abstractmethod
    def rates(self) -> List[float]:
        """Return the peak rates that are known to be needed by now."""

    @abc.abstractmethod
    def loss(self, rate: float) -> Optional[float]:
        """Return the validation loss with a peak `rate`, the mean over the seeds.

        It is None until all of these runs are done.
        """

    def tried(self, rate: float) -> List[Run]:
        """Return the runs with a peak `rate`, one for each seed."""
        overrides = (*self._overrides, f"schedule.peak={rate:g}")
        return [Run(overrides, seed) for seed in self._seeds]

    def runs(self) -> List[Run]:
        """Return all runs that are known to be needed by now."""
        return [run for rate in self.rates() for run in self.tried(rate)]

    def losses(self) -> Dict[float, float]:
        """Return peak rate -> loss of the rates that are done, in ascending order of the rates."""
        losses = {}
        for rate in sorted(self.rates()):
            loss = self.loss(rate)
            if loss is not None:
                losses[rate] = loss
        return losses

    def best(self) -> Optional[float]:
        """Return the rate with the lowest loss; None as long as runs are missing."""
        losses = self.losses()
        if len(losses) != len(self.rates()):
            return None
        return min(losses, key=losses.__getitem__)


def search_table(searches: Mapping[Tuple[str, int], Search]) -> str:
    """Return a table in Markdown of each search's peak rates and losses, the best one bold.

    Args:
        searches: by optimizer and batch.
    """
    lines = []
    for (optimizer, batch), search in searches.items():
        best = search.best()  # None while rates are missing: then nothing is bold
        tries = []
        for rate, loss in search.losses().items():
            text = f"{rate:g}: {loss:.3f}"
            tries.append(f"**{text}**" if rate == best else text)
        lines.append((optimizer, batch, ", ".join(tries)))
    return claims.markdown(("optimizer", "batch", "peak: loss"), lines)
