"""Scores of a classifier: exact for any batch size, and by class, as a table and as a picture."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Iterable, List, NamedTuple, Optional, Sequence, Union

import torch

from common.errors import DataError
from common.files import replacing
from data.batches import MicroBatch
from engines import base, factory
from engines.base import Counts, Engine
from recipe.batch import divide
from recipe.config import Recipe
from recipe.distribution import Parallel
from training import class_scores, weights
from training.calibration import Calibration
from training.exported import ExportedModel
from training.metrics import TOP

MOST_DRAWN = 4000  # classes of a picture; of more its cells would take gigabytes and not be seen
_NAMED_CLASSES = 40  # more do not fit beside the picture's rows
_FORMULA = tuple("=+-@")  # with which a formula of a spreadsheet begins
_TICKS = {0: "0", 0.01: "1 %", 0.1: "10 %", 0.25: "25 %", 0.5: "50 %", 1: "all"}  # of the picture


class Scores(NamedTuple):
    """Scores over all readable images.

    top1, top5: shares in [0, 1].
    loss: mean cross entropy, nats.
    images: readable ones.
    unreadable: images that were left out.
    calibration_error: from `score` alone, see `training.calibration`.
    confusion: from `score` alone, int64 [classes, classes]; rows are labels, columns predictions.
    """

    top1: float
    top5: float
    loss: float
    images: int
    unreadable: int
    calibration_error: Optional[float] = None
    confusion: Optional[torch.Tensor] = None


def accuracy(top1: float, top5: float, classes: int) -> str:
    """Return `top1 71.20%  top5 90.10%`.

    Args:
        top1: share in [0, 1].
        top5: share in [0, 1].
        classes: of the model; top5 is left out where it is 100 % in any case.
    """
    text = f"top1 {top1:.2%}"
    if classes > TOP:
        text += f"  top5 {top5:.2%}"
    return text


def quality(report: Scores) -> str:
    """Return `macro: precision 91.2%  recall 90.9%  F1 91.0%; calibration error 2.3%`.

    Args:
        report: with a confusion matrix.
    """
    assert report.confusion is not None
    means = class_scores.macro(report.confusion)
    error = report.calibration_error
    # Diverged weights give no probabilities.
    calibration = f"{error:.1%}" if error is not None and math.isfinite(error) else "unknown"
    return (
        f"macro: precision {means.macro_precision:.1%}  recall {means.macro_recall:.1%}  "
        f"F1 {means.macro_f1:.1%}; calibration error {calibration}"
    )


def evaluate(engine: Engine, batches: Iterable[Optional[MicroBatch]]) -> Scores:
    """Score the engine's current weights, over all replicas.

    Waits for the device once, at the end.

    Args:
        engine: of this process; every process calls.
        batches: of this replica; where images do not enter, as many times None.

    Raises:
        DataError: no image can be read.
    """
    # Sums stay on the device until the end: reading each would wait for it.
    counts: List[Counts] = []
    unreadable: List[str] = []
    for batch in batches:
        if batch is not None:
            unreadable.extend(batch.unreadable)
        counts.append(engine.evaluate_step(batch))
    total, messages = base.total(counts, unreadable, engine.processes, engine.device)
    if not total.images:
        # All ranks raise the error, one prints it.
        fault = f"no validation image can be read; the first: {messages[0]}"
        raise DataError(fault if engine.topology.is_main else "")
    return _scores(total, len(messages))


def engine_with(stored: weights.StoredWeights, recipe: Recipe) -> Engine:
    """Return an engine of one replica with stored weights, unrounded.

    Args:
        stored: weights of the recipe's model.
        recipe: with the device.

    Raises:
        ConfigError: the device is not there.
        CheckpointError: the weights are another model's.
    """
    if recipe.run.device != "ipu":
        recipe = _for_scores(recipe)
    engine = factory.create(recipe, divide(recipe, 1))
    tensors, _ = weights.fitted(stored, engine.shapes, recipe.model, new_classifier=False)
    engine.load_weights(tensors)
    return engine


def _for_scores(recipe: Recipe) -> Recipe:
    """Return the recipe of an engine that scores, without what only training can do.

    On IPUs weights have the format of the arithmetic, and schedules are those of the device.
    """
    # The engine would round float32 weights, such as averages, to the recipe's float16.
    precision = recipe.precision.model_copy(update={"weights": "float32"})
    # One process has all stages, and perhaps a number of micro batches that their schedule does not
    # take.
    parallel = Parallel()
    # Snapshots are of a GPU's memory; scores may be computed on a CPU.
    log = recipe.log.model_copy(update={"memory": False})
    return recipe.model_copy(
        update={"precision": precision, "parallel": parallel, "log": log},
    )


def score(
    engine: Union[Engine, ExportedModel],
    batches: Iterable[MicroBatch],
    classes: int,
) -> Scores:
    """Classify every image once.

    Args:
        engine: of a single process, or an exported program.
        batches: of images and labels.
        classes: of the model.

    Raises:
        DataError: none of the images can be read.
    """
    # Flat, so that label and prediction are one number. Only a batch's own cells are touched: of
    # 20,000 classes all are gigabytes.
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    calibration = Calibration()
    counts: List[Counts] = []
    unreadable: List[str] = []
    for batch in batches:
        unreadable.extend(batch.unreadable)
        if not batch.valid:
            continue
        logits = engine.predict_step(batch).cpu()
        labels = batch.labels[: batch.valid]
        counts.append(base.scored(logits, labels))
        # Of classes with equal logits the one that top1 counts, which need not be argmax.
        best = logits.topk(min(TOP, classes), dim=1).indices[:, 0]
        confusion.index_add_(0, labels * classes + best, torch.ones_like(best))
        confidence = logits.double().softmax(1).max(1).values
        calibration.count(confidence, best == labels)
    if not counts:
        raise DataError(f"no image can be read; the first: {unreadable[0]}")
    total = Counts(*(sum(field) for field in zip(*counts)))
    scores = _scores(total, len(unreadable))
    return scores._replace(
        calibration_error=calibration.error(),
        confusion=confusion.view(classes, classes),
    )


def class_rows(report: Scores, names: Sequence[str]) -> List[dict]:
    """Return a row per class, worst first.

    Args:
        report: with a confusion matrix.
        names: of the classes, by label.

    Returns:
        Rows with `class`, `images`, `top1`, which is also the class's recall, `precision`, `f1`,
        `taken_for`, the class that most of its misses were taken for, and `times`, how many. Shares
        are None where there is nothing to divide by.
    """
    assert report.confusion is not None
    scores = class_scores.by_class(report.confusion)
    guessed = report.confusion.sum(0)
    rows = []
    for label, name in enumerate(names):
        # Without the hits the largest entry is the class that it is most often taken for.
        predictions = report.confusion[label].clone()
        images = int(predictions.sum())
        guesses = int(guessed[label])
        hits = int(predictions[label])
        predictions[label] = 0
        mistaken = int(predictions.argmax())
        misses = int(predictions[mistaken])
        rows.append(
            {
                "class": name,
                "images": images,
                "top1": hits / images if images else None,
                "precision": float(scores.precision[label]) if guesses else None,
                "f1": float(scores.f1[label]) if images or guesses else None,
                "taken_for": names[mistaken] if misses else "",
                "times": misses,
            }
        )
    # Classes without images have no share, and come last.
    return sorted(rows, key=lambda row: (row["top1"] is None, row["top1"]))


def write_class_table(path: Path, rows: Sequence[dict]) -> None:
    """Write a table as CSV.

    Args:
        path: of the file.
        rows: of `class_rows`, at least one.
    """
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            quoted = dict(row)
            for key in ("class", "taken_for"):
                quoted[key] = spreadsheet_text(row[key])
            writer.writerow(quoted)


def spreadsheet_text(text: str) -> str:
    """Return a text with an apostrophe before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(_FORMULA) else text


def draw_confusion(path: Path, report: Scores, names: Sequence[str], title: str) -> None:
    """Draw the confusion matrix.

    Its rows are shares, so that rare classes show as well as frequent ones.

    Args:
        path: of the picture, a PNG, or a binary stream.
        report: with a confusion matrix, of MOST_DRAWN classes at most.
        names: of the classes, by label.
        title: of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    assert report.confusion is not None
    # A class without images keeps a row of zeros.
    shares = report.confusion / report.confusion.sum(1, keepdim=True).clamp(min=1)
    side = 4.5 + 0.12 * min(len(names), _NAMED_CLASSES)  # inches
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.add_subplot()
    # The square root lifts a few percent of mistakes out of the white.
    picture = axes.imshow(
        shares.sqrt().numpy(),
        cmap="magma_r",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    ticks = [share**0.5 for share in _TICKS]
    bar = figure.colorbar(picture, ax=axes, ticks=ticks, shrink=0.8)
    bar.ax.set_yticklabels(list(_TICKS.values()))
    bar.set_label("share of the images of the class")
    if len(names) <= _NAMED_CLASSES:
        positions = range(len(names))
        # Names may have dollar signs, between which matplotlib would look for mathematics.
        axes.set_xticks(positions, names, rotation=90, parse_math=False)
        axes.set_yticks(positions, names, parse_math=False)
    axes.set(xlabel="taken for", ylabel="class", title=title)
    # By its kind, as the name of a temporary file does not say it.
    figure.savefig(path, dpi=110, format="png")


def _scores(total: Counts, unreadable: int) -> Scores:
    """Return means over all readable images."""
    images = int(total.images)
    return Scores(
        top1=float(total.top1) / images,
        top5=float(total.top5) / images,
        loss=float(total.loss) / images,
        images=images,
        unreadable=unreadable,
    )
