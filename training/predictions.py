"""The likeliest classes of images that have no labels, as lines and as a table."""

from __future__ import annotations

import contextlib
import csv
from typing import IO, Any, Callable, Dict, Iterator, NamedTuple, Sequence, Tuple, Union

from common import progress
from data.loader import EvaluationBatches
from data.named_files import NamedFiles
from engines.base import Engine
from recipe.config import Data, Recipe
from recipe.settled import image_size
from training.exported import ExportedModel
from training.metrics import TOP
from training.scoring import spreadsheet_text


class Prediction(NamedTuple):
    """Classes of an image, as the model sees them.

    path: of its file, printable.
    likeliest: names and probabilities of at most five classes, the likeliest first.
    """

    path: str
    likeliest: Tuple[Tuple[str, float], ...]

    def line(self) -> str:
        """Return `PATH: cat 90.1%, dog 8.0%, ...`."""
        guesses = [f"{name} {share:.1%}" for name, share in self.likeliest]
        return f"{self.path}: {', '.join(guesses)}"


class Table:
    """A CSV file with a row for each image.

    Its columns: `file`; the likeliest class, `class`, and its `probability`; `class_2`,
    `probability_2` and so on, up to the fifth.
    """

    def __init__(self, stream: IO[str], classes: int):
        """Write the heading.

        Args:
            stream: a text file, opened with newline="".
            classes: of the model; of fewer than five there are as many columns.
        """
        heading = ["file", "class", "probability"]
        for place in range(2, min(TOP, classes) + 1):
            heading += [f"class_{place}", f"probability_{place}"]
        self._writer = csv.writer(stream)
        self._writer.writerow(heading)

    def add(self, prediction: Prediction) -> None:
        """Write a row.

        Args:
            prediction: of one image, with as many classes as the heading has.
        """
        row = [spreadsheet_text(prediction.path)]
        for name, share in prediction.likeliest:
            row += [spreadsheet_text(name), f"{share:.6f}"]
        self._writer.writerow(row)


def predict(
    engine: Union[Engine, ExportedModel],
    source: NamedFiles,
    recipe: Recipe,
    names: Sequence[str],
    leave_out: Callable[[str], None],
) -> Iterator[Prediction]:
    """Yield a prediction for each image that can be read, in the order of the source.

    Args:
        engine: with the weights; it has one replica.
        source: of the images.
        recipe: whose evaluation says how they are cropped, read and batched.
        names: of the model's classes, by label.
        leave_out: called for each image that cannot be read, with its path and fault.

    Raises:
        NotLeftOut: an image cannot be read, and data.bad_images is `error`.
    """
    batch = min(recipe.batch.evaluation, len(source))
    batches = EvaluationBatches(
        source,
        data=_reading(recipe.data, is_one_batch=batch == len(source)),
        image_size=image_size(recipe.model),
        batch=batch,
        device=engine.device,
    )
    # Workers end also where the caller reads no further.
    with contextlib.closing(batches):
        for micro_batch in progress.counted(batches, len(batches), "batches are classified"):
            for message in micro_batch.unreadable:
                leave_out(message)
            if not micro_batch.valid:
                continue
            # In float64 probabilities near 1 are still told apart.
            logits = engine.predict_step(micro_batch).cpu()
            best = logits.double().softmax(1).topk(min(TOP, len(names)))
            rows = zip(micro_batch.indices.tolist(), best.indices.tolist(), best.values.tolist())
            for index, labels, shares in rows:
                likeliest = [(names[label], share) for label, share in zip(labels, shares)]
                yield Prediction(source.name(index), tuple(likeliest))


def _reading(data: Data, is_one_batch: bool) -> Data:
    """Return how named files are read: by torch's reader, as any section of data can ask for.

    Args:
        data: section of the recipe.
        is_one_batch: whether all images are in one batch, which workers would only delay.
    """
    changes: Dict[str, Any] = {"reader": "torch"}
    if is_one_batch:
        changes["workers"] = 0
    return data.model_copy(update=changes)
