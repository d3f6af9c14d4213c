"""Scores of a classifier: exact whatever the batch size, and by class, as a table and as a picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Sequence, Union

import torch

from common.errors import DataError
from data.batches import MicroBatch
from engines import base, factory
from engines.base import Counts, Engine
from recipe.batch import divide
from recipe.config import Recipe
from training import weights
from training.exported import ExportedModel
from training.metrics import TOP

_NAMED_CLASSES = 40  # more do not fit beside the picture's rows


class Scores(NamedTuple):
    """Shares in [0, 1] and the mean cross entropy (nats) over `images` readable images.
    confusion: of `score` alone, int64 [classes, classes], rows are labels, columns predictions."""

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: int
    confusion: Optional[torch.Tensor] = None


def accuracy(top1: float, top5: float, classes: int) -> str:
    """`top1 71.20%  top5 90.10%`, without top5 where so few classes are always among the likeliest five."""
    return f"top1 {top1:.2%}" + (f"  top5 {top5:.2%}" if classes > TOP else "")


def evaluate(engine: Engine, batches: Iterable[Optional[MicroBatch]]) -> Scores:
    """Scores of the engine's current weights, over all replicas. Waits for the device once, at the end.
    Args: batches: of this replica; where images do not enter, as many times None."""
    counts: List[Counts] = []
    unreadable: List[str] = []
    for batch in batches:
        if batch is not None:
            unreadable.extend(batch.unreadable)
        counts.append(engine.evaluate_step(batch))
    total, messages = base.total(counts, unreadable, engine.processes, engine.device)
    if not total.images:  # all ranks find it, one prints it
        fault = f"no validation image can be read; the first: {messages[0]}"
        raise DataError(fault if engine.topology.is_main else "")
    return _scores(total, len(messages))


def _scores(total: Counts, unreadable: int) -> Scores:
    images = int(total.images)
    return Scores(*(float(each) / images for each in (total.top1, total.top5, total.loss)), images, unreadable)


def engine_with(stored: weights.StoredWeights, recipe: Recipe) -> Engine:
    """Return an engine of one replica with stored weights, unrounded.
    Raises ConfigError where its device is not there, CheckpointError for weights of another model."""
    if recipe.run.device != "ipu":  # there weights have the format of the arithmetic
        precision = recipe.precision.model_copy(update={"weights": "float32"})
        recipe = recipe.model_copy(update={"precision": precision})
    engine = factory.create(recipe, divide(recipe, 1))
    engine.load_weights(weights.fitted(stored, engine.shapes, recipe.model, new_classifier=False)[0])
    return engine


def score(engine: Union[Engine, ExportedModel], batches: Iterable[MicroBatch], classes: int) -> Scores:
    """Classify every image of `batches` once. Raises DataError where none of them can be read."""
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    counts, unreadable = [], []
    for batch in batches:
        unreadable.extend(batch.unreadable)
        if batch.valid:
            logits, labels = engine.predict_step(batch).cpu(), batch.labels[: batch.valid]
            counts.append(base.scored(logits, labels))
            best = logits.topk(min(TOP, classes), dim=1).indices[:, 0]
            confusion += torch.bincount(labels * classes + best, minlength=classes * classes)
    if not counts:
        raise DataError(f"no image can be read; the first: {unreadable[0]}")
    scores = _scores(Counts(*map(sum, zip(*counts))), len(unreadable))
    return scores._replace(confusion=confusion.view(classes, classes))


def class_rows(report: Scores, names: Sequence[str]) -> List[dict]:
    """Return a row per class, worst first: images, top1, and the class that most of its misses were taken for."""
    rows = []
    for label, name in enumerate(names):
        counts = report.confusion[label].clone()
        total, right = int(counts.sum()), int(counts[label])
        counts[label] = 0
        wrong = int(counts.argmax())
        taken_for = names[wrong] if counts[wrong] else ""
        top1 = right / total if total else None
        rows.append({"class": name, "images": total, "top1": top1, "taken_for": taken_for, "times": int(counts[wrong])})
    return sorted(rows, key=lambda row: (row["top1"] is None, row["top1"]))


def write_class_table(path: Path, rows: Sequence[dict]) -> None:
    """Write rows as CSV; names that a spreadsheet would take for a formula get an apostrophe."""
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            names = {key: row[key] for key in ("class", "taken_for")}
            quoted = {key: f"'{name}" if name.startswith(tuple("=+-@")) else name for key, name in names.items()}
            writer.writerow({**row, **quoted})


def draw_confusion(path: Path, report: Scores, names: Sequence[str], title: str) -> None:
    """Draw the confusion matrix as shares of each row, so that rare classes show as well as frequent ones."""
    from matplotlib.figure import Figure

    shares = report.confusion / report.confusion.sum(1, keepdim=True).clamp(min=1)
    side = 4.5 + 0.12 * min(len(names), _NAMED_CLASSES)
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    # The square root lifts a few percent of mistakes out of the white.
    picture = axes.imshow(shares.sqrt().numpy(), cmap="magma_r", vmin=0, vmax=1, interpolation="nearest")
    bar = figure.colorbar(picture, ax=axes, ticks=[share**0.5 for share in (0, 0.01, 0.1, 0.25, 0.5, 1)], shrink=0.8)
    bar.ax.set_yticklabels(["0", "1 %", "10 %", "25 %", "50 %", "all"])
    bar.set_label("share of the images of the class")
    if len(names) <= _NAMED_CLASSES:
        axes.set_xticks(range(len(names)), names, rotation=90, parse_math=False)  # names may have dollar signs
        axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set(xlabel="taken for", ylabel="class", title=title)
    figure.savefig(path, dpi=110)
