"""Pictures that lie in the page itself: training images as a run received them, and what it mistakes in validation."""

from __future__ import annotations

import base64
import functools
import io
import os
import time
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from PIL import Image

from data import loader, mixing
from data.base import Source, permutation
from data.batches import MicroBatch
from data.sources import open_source
from data.transforms import Evaluation
from engines.base import Engine
from recipe import loading
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from recipe.errors import ConfigError, DataError, UserError, first_line
from tools.reporting.run import Run
from tools.reporting.sections import share
from training import scoring, weights

_LARGEST = 128  # pixels a side: sixty-four photographs of that size are two megabytes
_SECONDS = 60.0
_WORST = 12
# What images, checkpoints and devices can fail with: the report is made all the same.
_FAILURES = (UserError, OSError, RuntimeError)


class Picture(NamedTuple):
    """One image of the page. source: a data URI. caption: a line below it. name: of the image in its source."""

    source: str
    caption: str
    name: str


class Findings(NamedTuple):
    """file: the checkpoint. report: scores over the images that were classified, out of `validation`.

    missed: how many of those were taken for another class; pictures: those with the most confident guesses.
    """

    file: Path
    report: scoring.Scores
    validation: int
    classes: Sequence[str]
    missed: int
    pictures: List[Picture]


def collect(run: Run, count: int) -> Tuple[dict, dict]:
    """Both sections of the page, and what is in them as data; where one cannot be made, it has the reason.

    Args: count: pictures of each kind, at most.
    """
    shown: List[Picture] = []
    scored = None
    try:
        if run.recipe is None:
            raise ConfigError(run.complaint)
        shown = training_pictures(run.recipe, count)
        images: dict = {"reason": "", "pictures": shown}
    except _FAILURES as error:
        images = {"reason": _reason(error)}
    try:
        found = find_mistakes(run.folder, count)
    except _FAILURES as error:
        mistakes = {"reason": _reason(error)}
    else:
        scores = {name: getattr(found.report, name) for name in ("images", "top1", "top5", "loss")}
        scored = {"file": str(found.file), **scores, "of": found.validation, "missed": found.missed}
        mistakes = mistakes_section(found)
    return {"images": images, "mistakes": mistakes}, {"images_shown": len(shown), "scored": scored}


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def mistakes_section(found: Findings) -> dict:
    """What the page shows of the validation images."""
    report, names = found.report, found.classes
    which, remark = f"all {report.images:,}", ""
    if report.images < found.validation:
        which = f"{report.images:,} random ones of {found.validation:,}"
        remark = " More would take longer than a minute here: evaluate.py scores them all."
    scores = f"top-1 {share(report.top1)}, top-5 {share(report.top5)}, {found.missed:,} misclassified."
    worst = [row for row in scoring.class_rows(report, names) if row["images"] and row["top1"] < 1][:_WORST]
    stream = io.BytesIO()
    scoring.draw_confusion(stream, report, names, f"top1 {report.top1:.2%}")
    return {
        "reason": "",
        "text": f"{found.file.name} classified {which} validation images: {scores}{remark}",
        "worst": [
            (row["class"], row["images"], share(row["top1"]), f"{row['taken_for']} ({row['times']} times)")
            for row in worst
        ],
        "confusion": png_uri(stream),
        "pictures": found.pictures,
    }


def training_pictures(recipe: Recipe, count: int) -> List[Picture]:
    """The first images of a run's first epoch, made again as its first updates saw them: cropped, augmented and mixed.

    Raises:
        DataError: the images are not there, or not as many as one update takes.
    """
    data, size = _readable(recipe.data), recipe.batch.global_
    source = open_source(data, recipe.model.classes, "train")
    if len(source) < size:
        raise DataError(f"{len(source)} training images, but an update took {size}: not the run's own")
    batches = loader.training_batches(
        source,
        data=data,
        image_size=functools.partial(training_image_size, recipe),
        global_batch=size,
        micro=recipe.batch.micro,
        seed=recipe.run.seed,
        first_step=0,
        last_step=-(-count // size),
    )
    pictures: List[Picture] = []
    try:
        for batch in batches:
            images, targets = _as_trained(batch, recipe)
            for row in range(batch.valid):
                name = source.name(int(batch.indices[row]))
                pictures.append(Picture(data_uri(images[row]), _shares(targets[row], source.classes), name))
            if len(pictures) >= count:
                break
    finally:
        batches.close()
    return pictures[:count]


def _readable(data: Data, workers: int = 0) -> Data:
    """`data` read by so many processes; images that cannot be read are left out instead of ending the report."""
    return data.model_copy(update={"workers": workers, "reader": "torch", "bad_images": "skip"})


def _as_trained(batch: MicroBatch, recipe: Recipe) -> tuple:
    """Images [micro, 3, size, size] from 0 to 255 and targets [micro, classes], as engines/feed.py makes them."""
    seed, size = recipe.run.seed, batch.images.shape[-1]
    plan = mixing.draw(recipe.data, seed, batch.step, batch.number, len(batch.images), batch.valid, size, size)
    targets = mixing.mix_targets(batch.labels, plan, recipe.model.classes)
    return batch.images if plan is None else mixing.mix_images(batch.images.contiguous(), plan), targets


def _shares(target: torch.Tensor, classes: Sequence[str]) -> str:
    """The classes of a target, the largest share first: `cat`, or `cat (72 %) + dog (28 %)`."""
    shares, labels = target.sort(descending=True, stable=True)
    found = [(float(share), classes[int(label)]) for share, label in zip(shares[:3], labels[:3]) if share >= 0.005]
    return found[0][1] if len(found) == 1 else " + ".join(f"{name} ({100 * share:.0f}\u00a0%)" for share, name in found)


def data_uri(image: torch.Tensor) -> str:
    """A PNG of an image [3, height, width] from 0 to 255, of any dtype, in a URI; made smaller where it is large."""
    pixels = image.float().round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    picture, stream = Image.fromarray(pixels), io.BytesIO()
    picture.thumbnail((_LARGEST, _LARGEST))
    picture.save(stream, "PNG", optimize=True)
    return png_uri(stream)


def png_uri(stream: io.BytesIO) -> str:
    """The data URI of a PNG."""
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def find_mistakes(folder: Path, count: int, seconds: float = _SECONDS) -> Findings:
    """Classifies validation images by the newest checkpoint: all of them, or as many random ones as time allows.

    Args: folder: of the run. count: pictures of mistakes, at most. seconds: time limit.

    Raises:
        UserError: there is no checkpoint or no image, or the two do not fit.
    """
    stored = weights.read(str(folder))
    recipe = loading.loads(str(stored.recipe), str(stored.path))
    data = _readable(recipe.data, min(recipe.data.workers, os.cpu_count() or 1))
    source = open_source(data, recipe.model.classes, "validation")
    # On the devices of this machine: the run may have had others.
    here = recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "auto"})})
    engine = scoring.engine_with(stored, here)
    try:
        watched, shuffled = _Watched(engine), _Shuffled(source)
        size, batch = recipe.model.image_size, recipe.batch.evaluation
        batches = loader.EvaluationBatches(shuffled, data=data, image_size=size, batch=batch, device=engine.device)
        try:
            report = scoring.score(watched, _within(seconds, batches), recipe.model.classes)
        finally:
            batches.close()
    finally:
        engine.close()
    transform = Evaluation(data.crop_fraction)
    pictures = []
    for part, index, label, guess in sorted(watched.mistakes, reverse=True)[:count]:
        image = transform(shuffled.open(index), size, epoch=0, index=index)
        caption = f"{source.classes[label]} taken for {source.classes[guess]}, {100 * part:.0f}\u00a0%"
        pictures.append(Picture(data_uri(image), caption, shuffled.name(index)))
    return Findings(stored.path, report, len(source), source.classes, len(watched.mistakes), pictures)


class _Watched:
    """In the place of an engine: records (share of the softmax, image, label, guess) of each wrong guess."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.mistakes: List[tuple] = []

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        logits = self._engine.predict_step(batch).cpu()
        shares, guesses = logits.double().softmax(1).max(1)
        rows = (guesses != batch.labels[: batch.valid]).nonzero()[:, 0]
        columns = (shares[rows], batch.indices[rows], batch.labels[rows], guesses[rows])
        self.mistakes += zip(*(column.tolist() for column in columns))
        return logits


class _Shuffled(Source):
    """A source's images in a random order, so that the first of them are a fair sample: they often lie by class."""

    def __init__(self, source: Source):
        self._source, self._numbers = source, permutation(0, 0, len(source))
        self.classes = source.classes
        self.labels = np.asarray(source.labels)[self._numbers]

    def name(self, index: int) -> str:
        return self._source.name(int(self._numbers[index]))

    def read(self, index: int) -> torch.Tensor:
        return self._source.read(int(self._numbers[index]))

    def open(self, index: int):
        return self._source.open(int(self._numbers[index]))

    def open_all(self, indices: Sequence[int]):
        return self._source.open_all([int(self._numbers[index]) for index in indices])


def _within(seconds: float, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The batches that begin within so many seconds; one in any case."""
    end = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() >= end:
            return
