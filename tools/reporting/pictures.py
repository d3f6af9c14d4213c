"""Pictures that lie in the page itself: training images as a run received them, and what it mistakes in validation."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import time
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from PIL import Image

from common import cores
from common.errors import ConfigError, DataError, UserError, first_line
from data import loader, mixing
from data.base import permutation
from data.batches import MicroBatch
from data.sources import open_source
from data.transforms import Evaluation
from engines.base import Engine
from recipe import division, loading
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from tools.reporting.run import Run
from tools.reporting.sections import share
from training import classes, scoring, weights
from training.metrics import TOP

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


def collect(run: Run, count: int) -> Tuple[dict, dict]:
    """Both sections of the page, of so many pictures at most, and their figures; or the reason why there are none."""
    data: dict = {"images_shown": 0, "scored": None}
    try:
        if run.recipe is None:
            raise ConfigError(run.complaint)
        images = {"reason": "", "pictures": training_pictures(run.recipe, count)}
        data["images_shown"] = len(images["pictures"])
    except _FAILURES as error:
        images = {"reason": _reason(error)}
    try:
        mistakes, data["scored"] = find_mistakes(run.folder, count)
    except _FAILURES as error:
        mistakes = {"reason": _reason(error)}
    return {"images": images, "mistakes": mistakes}, data


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


def training_pictures(recipe: Recipe, count: int) -> List[Picture]:
    """The first images of a run's first epoch, made again as its first updates saw them: cropped, augmented and mixed.

    Raises DataError: the images are not there, or not as many as one update takes.
    """
    data, size = _readable(recipe.data), recipe.batch.global_
    source = open_source(data, recipe.model.classes, "train")
    if len(source) < size:
        raise DataError(f"{len(source)} training images, but an update took {size}: not the run's own")
    pixels = functools.partial(training_image_size, recipe)
    numbers = {"global_batch": size, "micro": recipe.batch.micro, "seed": recipe.run.seed, "first_step": 0}
    batches = loader.TrainingBatches(source, data=data, image_size=pixels, last_step=-(-count // size), **numbers)
    pictures: List[Picture] = []
    with contextlib.closing(batches):
        for batch in batches:
            images, targets = _as_trained(batch, recipe)
            for row in range(batch.valid):
                name = source.name(int(batch.indices[row]))
                pictures.append(Picture(data_uri(images[row]), _shares(targets[row], source.classes), name))
            if len(pictures) >= count:
                break
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


def find_mistakes(folder: Path, count: int, seconds: float = _SECONDS) -> Tuple[dict, dict]:
    """Classifies validation images by the newest checkpoint: all of them, or as many random ones as `seconds` allow.

    Returns what the page shows, with the `count` most confident mistakes, and the scores. Raises UserError: there is no
    checkpoint or no image, or they do not fit.
    """
    stored = weights.read(str(folder))
    recipe = loading.loads(str(stored.recipe), str(stored.path))
    data = _readable(recipe.data, min(recipe.data.workers, cores.available()))
    known = classes.of_model(stored, recipe.data, recipe.model.classes)
    source = open_source(data, recipe.model.classes, "validation", known.names)
    # On the devices of this machine: the run may have had others.
    here = recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "auto"})})
    order = permutation(0, 0, len(source)).tolist()  # the first are a fair sample: images often lie by class
    size, batch = recipe.model.image_size, recipe.batch.evaluation
    with contextlib.closing(scoring.engine_with(stored, here)) as engine:
        watched = _Watched(engine)
        batches = loader.EvaluationBatches(
            source, data=data, image_size=size, batch=batch, device=engine.device, order=order
        )
        with contextlib.closing(batches):
            report = scoring.score(watched, _within(seconds, batches), recipe.model.classes)
    transform, names, pictures = Evaluation(data.crop_fraction), source.classes, []
    for part, index, label, guess in sorted(watched.mistakes, reverse=True)[:count]:
        image = transform(source.open(index), size, epoch=0, index=index)
        caption = f"{names[label]} taken for {names[guess]}, {100 * part:.0f}\u00a0%"
        pictures.append(Picture(data_uri(image), caption, source.name(index)))
    missed, stream = len(watched.mistakes), io.BytesIO()
    sampled = report.images + report.unreadable < len(source)
    sample = f" of a sample of {report.images:,} images" if sampled else ""
    scoring.draw_confusion(stream, report, names, f"top-1 {share(report.top1)}{sample}")
    rows = [row for row in scoring.class_rows(report, names) if row["images"] and row["top1"] < 1][:_WORST]
    top5 = f"top-5 {share(report.top5)}, " if recipe.model.classes > TOP else ""
    scores = f"top-1 {share(report.top1)}, {top5}{missed:,} misclassified."
    if sampled:
        text = (
            f"A random sample of the validation images, {report.images:,} of {len(source):,}, as {stored.path.name} "
            f"classifies them: {scores} The sample only shows mistakes, because all images would take longer than a "
            "minute here. The score of the run is the one at the top, of all images; evaluate.py computes it again."
        )
    else:
        text = f"All validation images, {report.images:,}, as {stored.path.name} classifies them: {scores}"
    shown = {
        "reason": "",
        "text": text + "".join(f" {note}." for note in source.notes),
        "worst": [
            (
                row["class"],
                row["images"],
                share(row["top1"]),
                f"{row['taken_for']} ({division.count(row['times'], 'time')})",
            )
            for row in rows
        ],
        "confusion": png_uri(stream),
        "pictures": pictures,
    }
    figures = {name: getattr(report, name) for name in ("images", "top1", "top5", "loss")}
    return shown, {"file": str(stored.path), **figures, "of": len(source), "missed": missed}


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


def _within(seconds: float, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The batches that begin within so many seconds; one in any case."""
    end = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() >= end:
            return
