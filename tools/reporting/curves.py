"""Curves over epochs, steps and time: of one run, or of several in the same figures."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from tools.reporting.drawing import (
    COLOURS,
    Clock,
    LineStyle,
    abscissae,
    axes,
    in_words,
    number,
    run_style,
    thinned,
    trace,
    unit_of,
)
from tools.reporting.metrics import Events
from tools.reporting.page import Figure
from tools.reporting.run import Run, resumed_at, steps_per_epoch

_POINTS = 6000  # of all lines of a figure together
_MOST_MARKS = 30


class Series(NamedTuple):
    """One quantity. kind: of the events that have it. role: its name within its figure."""

    kind: str
    column: str
    role: str

    def events_of(self, run: Run) -> Events:
        return run.metrics.train if self.kind == "train" else run.metrics.evaluation

    def column_of(self, run: Run) -> Sequence[float]:
        return self.events_of(run)[self.column]

    def is_in(self, run: Run) -> bool:
        return self.events_of(run).has(self.column)


class Plan(NamedTuple):
    """One figure of the curves."""

    key: str
    title: str
    axis: str
    caption: str
    series: Tuple[Series, ...]
    log: bool = False
    share: bool = False
    dull: bool = False  # left out where nothing ever changes in it


def _scores(name: str) -> Tuple[Series, ...]:
    return (
        Series("train", name, "training"),
        Series("eval", name, "validation"),
        Series("eval", f"step_average/{name}", "average over updates"),
        Series("eval", f"epoch_average/{name}", "average over epochs"),
    )


_NORMS = ("weight", "gradient", "update")
_SCORES = (
    Plan(
        "loss", "Loss", "cross entropy, nats",
        "Training: the objective, label smoothing and mixing included, averaged over the updates since the line "
        "before. Validation: every image once.",
        _scores("loss"),
        log=True,
    ),
    Plan(
        "top1", "Top-1 accuracy", "share of images",
        "Training images are augmented, and mixed where the recipe says so: their accuracy can lie below that of "
        "validation.",
        _scores("top1"),
        share=True,
    ),
    Plan("lr", "Learning rate", "learning rate", "At the last update before a line.", (Series("train", "lr", ""),)),
)  # fmt: skip
_ALL_NORMS = (
    Plan(
        "norms", "Norms", "Euclidean norm", "Over all parameters, of the last update before each line.",
        tuple(Series("train", f"{name}_norm", name) for name in _NORMS), log=True,
    ),
)  # fmt: skip
_EACH_NORM = tuple(
    Plan(
        f"{name}_norm", f"Norm of the {name}", "Euclidean norm", "Over all parameters.",
        (Series("train", f"{name}_norm", name),), log=True,
    )
    for name in _NORMS
)  # fmt: skip
_REST = (
    Plan(
        "noise_scale", "Gradient noise scale", "images",
        "Batches far below it learn as much from each image, batches far above it as much from each update.",
        (Series("train", "noise_scale/images", "noise scale"),), log=True,
    ),
    Plan(
        "loss_scale", "Loss scale", "factor", "By which the loss is multiplied before the backward pass.",
        (Series("train", "loss_scale", "loss scale"),), log=True, dull=True,
    ),
    Plan(
        "skipped", "Skipped updates", "updates", "Left out so far because their gradient was not finite.",
        (Series("train", "skipped_steps", "skipped"),), dull=True,
    ),
    Plan(
        "unreadable", "Unreadable images", "images", "Left out so far.",
        (Series("train", "unreadable_images", "unreadable"),), dull=True,
    ),
    Plan(
        "pace", "Images a second", "images / s", "Training only, without evaluation and checkpoints.",
        (Series("train", "images_per_second", "images/s"),),
    ),
    Plan(
        "mfu", "Model FLOPs utilisation", "share of the reachable",
        "Floating-point operations of the model, over what this machine reached in a large matrix product.",
        (Series("train", "mfu", "MFU"),), share=True,
    ),
    Plan(
        "data_wait", "Waiting for images", "share of the time", "During which a device waited for images.",
        (Series("train", "data_wait", "waiting"),), share=True,
    ),
)  # fmt: skip
_ROLES = {
    "training": LineStyle(COLOURS[0], width=1.5),
    "validation": LineStyle(COLOURS[1], width=2.2, symbol="circle"),
    "average over updates": LineStyle(COLOURS[2], "dash", 2, "square"),
    "average over epochs": LineStyle(COLOURS[3], "dot", 2, "diamond"),
    "weight": LineStyle(COLOURS[0]),
    "gradient": LineStyle(COLOURS[1], "dash"),
    "update": LineStyle(COLOURS[2], "dot", 2),
}


class Curves(NamedTuple):
    """left_out: what is not drawn, and why. unit: (name, seconds) of the time axis. thinned: whether lines are."""

    figures: List[Figure]
    left_out: List[str]
    unit: tuple
    thinned: bool


def draw(runs: Sequence[Run], names: Sequence[str]) -> Curves:
    """Draws one run with a colour for each quantity, or several with a colour for each run."""
    unit = unit_of(max((time for run in runs for time in run.metrics.train["seconds"] if time == time), default=0.0))
    figures: List[Figure] = []
    left_out: List[str] = []
    for plan in (*_SCORES, *(_ALL_NORMS if len(runs) == 1 else _EACH_NORM), *_REST):
        figure, reason = _figure(plan, runs, names, unit[1])
        if figure:
            figures.append(figure)
        else:
            left_out.append(f"{plan.title.lower()} ({reason})")
    most = max((len(run.metrics.train) for run in runs), default=0)
    return Curves(figures, left_out, unit, most > _POINTS // max(1, len(runs)))


def _figure(plan: Plan, runs: Sequence[Run], names: Sequence[str], unit: float) -> Tuple[Optional[Figure], str]:
    """The figure, or None and why there is none."""
    found = [(order, series) for order, run in enumerate(runs) for series in plan.series if series.is_in(run)]
    if not found:
        return None, "not in metrics.jsonl"
    if plan.dull:
        seen = {value for order, series in found for value in series.column_of(runs[order]) if value == value}
        if len(seen) == 1:
            return None, f"{seen.pop():g} throughout"
    data, summary = [], []
    clocks = [Clock(run.metrics.train, unit) for run in runs]
    # Validation stands for the run in the legend: training is pale.
    named = dict(sorted(found, key=lambda pair: pair[1].role == "validation"))
    for order, series in found:
        events, values = series.events_of(runs[order]), series.column_of(runs[order])
        if len(runs) == 1:
            style, name, who, more = _ROLES.get(series.role, LineStyle(COLOURS[0])), series.role, series.role, {}
        else:
            style, name, who = _in_comparison(order, series), names[order], f"{names[order]}, {series.role}"
            more = {"legendgroup": str(order), "showlegend": series is named[order]}
        places = thinned(values, max(100, _POINTS // len(found)))
        x = abscissae(events, places, clocks[order])
        data.append(trace(name, style, x, [values[place] for place in places], **more))
        summary.append(in_words(who, values, events["epoch"], plan.share))
    layout = axes(plan.axis, data, log=plan.log, share=plan.share)
    if len(runs) == 1:
        layout["hovermode"] = "x unified"
        marks, caption = session_marks(runs[0], clocks[0]), plan.caption
    else:
        marks, caption = [], plan.caption + _line_key({series.role for _, series in found})
    return Figure(plan.key, plan.title, caption, " ".join(summary), data, layout, marks), ""


def _in_comparison(order: int, series: Series) -> LineStyle:
    """Validation as the run is drawn everywhere; what is beside it in the same figure thinner."""
    style = run_style(order)
    if series.role == "training":
        return style._replace(width=1.2, faint=True, symbol=None)
    if series.role.startswith("average"):
        return style._replace(width=1.2, symbol=f"{style.symbol}-open")
    return style if series.kind == "eval" else style._replace(width=1.8, symbol=None)


def _line_key(roles: set) -> str:
    """How the lines of one run differ within a figure; nothing where it has only one."""
    averages = any(role.startswith("average") for role in roles)
    key = {
        "Thin and pale: training.": "training" in roles,
        "Thick: validation.": "validation" in roles,
        "Hollow symbols: averages.": averages,
    }
    parts = [text for text, shown in key.items() if shown]
    return " " + " ".join(parts) if len(parts) > 1 else ""


def session_marks(run: Run, clock: Clock) -> List[dict]:
    """Where later sessions went on, for vertical lines; none where there would be too many to read."""
    steps, per_epoch = resumed_at(run.starts), steps_per_epoch(run)
    if len(steps) > _MOST_MARKS or not per_epoch:
        return []
    return [{"epoch": number(step / per_epoch), "step": step, "time": clock.at(step)} for step in steps]


def gaps(run: Run) -> List[str]:
    """How often a quantity of the log was not finite, where it was."""
    train = run.metrics.train
    counts = [(name, sum(value != value for value in train[name])) for name in ("loss", "gradient_norm", "update_norm")]
    return [f"{name}: {count} of {len(train)} lines are not finite" for name, count in counts if 0 < count < len(train)]
