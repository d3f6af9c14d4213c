"""Pictures in the page itself: training images as a run received them, and what it mistakes."""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import time
from pathlib import Path
from typing import Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from PIL import Image

from common import cores
from common.errors import ConfigError, DataError, UserError, first_line
from common.text import count as plural
from data import loader, mixing
from data.augmentation import Colours
from data.base import Source, permutation
from data.batches import MicroBatch
from data.epochs import RunOrder
from data.sources import open_source
from data.transforms import Evaluation
from engines.base import Engine
from recipe import loading
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from recipe.settled import image_size, micro_batch
from tools import packages
from tools.reporting.run import Run
from tools.reporting.sections import share
from training import classes, scoring, weights
from training.metrics import TOP
from training.scoring import Scores
from training.weights import StoredWeights

_LARGEST = 128  # pixels a side: sixty-four photographs of that size are two megabytes
_SECONDS = 60.0
_WORST = 12
_LEAST_SHARE = 0.005  # of a target, below which a class is not named
# What images, checkpoints and devices can fail with: the report is made all the same.
_FAILURES = (UserError, OSError, RuntimeError)


class Picture(NamedTuple):
    """One image of the page.

    source: a data URI.
    caption: a line below it.
    name: of the image in its source.
    """

    source: str
    caption: str
    name: str


def collect(run: Run, count: int) -> Tuple[Dict[str, dict], dict]:
    """Collect the pictures of a run, or the reasons why there are none.

    Args:
        run: whose images and mistakes are shown.
        count: of pictures in each section, at most.

    Returns:
        Both sections of the page by their keys there, and their figures.
    """
    # The images of a run may be gone while its checkpoint is there, or the other way round.
    figures: dict = {"images_shown": 0, "scored": None}
    try:
        if run.recipe is None:
            raise ConfigError(run.complaint)
        images = {"reason": "", "pictures": training_pictures(run.recipe, count)}
        figures["images_shown"] = len(images["pictures"])
    except _FAILURES as error:
        images = {"reason": _reason(error)}
    try:
        mistakes, figures["scored"] = find_mistakes(run.folder, count)
    except _FAILURES as error:
        mistakes = {"reason": _reason(error)}
    return {"images": images, "mistakes": mistakes}, figures


def _reason(error: BaseException) -> str:
    """Return a failure in one line."""
    if isinstance(error, UserError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def training_pictures(recipe: Recipe, count: int) -> List[Picture]:
    """Make the first images of a run again as its first updates saw them.

    They are cropped, augmented and mixed.

    Args:
        recipe: of the run.
        count: of the pictures, at most.

    Raises:
        DataError: the images are not there, or not as many as one update takes.
    """
    data = _readable(recipe.data)
    size = recipe.batch.global_
    source = open_source(data, recipe.model.classes, "train")
    if len(source) < size:
        raise DataError(
            f"{len(source)} training images, but an update took {size}: not the run's own"
        )
    # The run's own draws: order, crops and augmentation are functions of seed, epoch and image.
    batches = loader.TrainingBatches(
        RunOrder(source, data, recipe.run.seed, size),
        range(-(-count // size)),
        image_size=functools.partial(training_image_size, recipe),
        micro=micro_batch(recipe),
        colours=Colours(recipe.model.mean, recipe.model.std),
    )
    pictures: List[Picture] = []
    with contextlib.closing(batches):
        for batch in batches:
            pictures += _pictures_of(batch, recipe, source)
            if len(pictures) >= count:
                break
    return pictures[:count]


def _pictures_of(batch: MicroBatch, recipe: Recipe, source: Source) -> List[Picture]:
    """Return pictures of the images of a micro batch, mixed, that could be read."""
    images, targets = _mix(batch, recipe.data, recipe.run.seed, recipe.model.classes)
    pictures = []
    for row in range(batch.valid):
        picture = Picture(
            source=data_uri(images[row]),
            caption=_class_shares(targets[row], source.classes),
            name=source.name(int(batch.indices[row])),
        )
        pictures.append(picture)
    return pictures


def _readable(data: Data, workers: int = 0) -> Data:
    """Return `data` with other workers; images that cannot be read are left out.

    They do not end the report, though they would have ended the run.
    """
    # The run's reader may be DALI, which this machine may not have.
    changes = {"workers": workers, "reader": "torch", "bad_images": "skip"}
    return data.model_copy(update=changes)


def _mix(
    batch: MicroBatch,
    data: Data,
    seed: int,
    class_count: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mix a micro batch as engines/feed.py does.

    Args:
        batch: images uint8 [micro, 3, size, size] and their labels.
        data: section of the recipe.
        seed: of the run.
        class_count: classes of the model.

    Returns:
        Images [micro, 3, size, size] from 0 to 255 and targets [micro, classes].
    """
    # The same key as in the run: step and micro batch decide on partners and shares.
    height, width = batch.images.shape[-2:]
    plan = mixing.draw(
        data,
        seed,
        (batch.step, batch.number),
        rows=len(batch.images),
        valid=batch.valid,
        size=(height, width),
    )
    targets = mixing.mix_targets(batch.labels, plan, class_count)
    if plan is None:
        return batch.images, targets
    return mixing.mix_images(batch.images.contiguous(), plan), targets


def _class_shares(target: torch.Tensor, names: Sequence[str]) -> str:
    """Return the classes of a target: `cat`, or `cat (72 %) + dog (28 %)`."""
    shares, labels = target.sort(descending=True, stable=True)
    parts = []
    # Mixup and cutmix join three images at most.
    for portion, label in zip(shares[:3].tolist(), labels[:3].tolist()):
        if portion >= _LEAST_SHARE:
            parts.append((names[label], portion))
    if len(parts) == 1:
        return parts[0][0]
    return " + ".join(f"{name} ({100 * portion:.0f}\u00a0%)" for name, portion in parts)


def data_uri(image: torch.Tensor) -> str:
    """Return a PNG of an image in a data URI; a large image is made smaller.

    Args:
        image: [3, height, width] from 0 to 255, of any dtype.
    """
    pixels = image.float().round().clamp(0, 255).to(torch.uint8)
    picture = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
    picture.thumbnail((_LARGEST, _LARGEST))
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    return png_uri(stream)


def png_uri(stream: io.BytesIO) -> str:
    """Return the data URI of a PNG in a `stream`."""
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


class Mistake(NamedTuple):
    """A wrong guess. share: of the softmax. image: its number. label, guess: classes."""

    share: float
    image: int
    label: int
    guess: int


def find_mistakes(folder: Path, count: int, seconds: float = _SECONDS) -> Tuple[dict, dict]:
    """Classify validation images by the newest checkpoint.

    Args:
        folder: of the run.
        count: of the most confident mistakes that are shown.
        seconds: that classifying may take; where it takes longer, random images are a sample.

    Returns:
        The section of the page, and the scores.

    Raises:
        UserError: there is no checkpoint or no image, or they do not fit.
    """
    stored = weights.read(str(folder))
    recipe = loading.loads(str(stored.recipe), str(stored.path))
    data = _readable(recipe.data, workers=min(recipe.data.workers, cores.available()))
    # Labels must be numbered as the model's classes are.
    known = classes.of_model(stored, recipe.data, recipe.model.classes)
    source = open_source(data, recipe.model.classes, "validation", known.names)
    report, mistakes = _score(stored, recipe, source, data, seconds)
    # The most confident ones first: `share` is the first field.
    shown = sorted(mistakes, reverse=True)[:count]
    text = _scores_text(report, len(mistakes), source, stored.path.name)
    without_confusion = packages.lacking("matplotlib")
    if without_confusion:
        text += f" No picture of the confusion: {without_confusion}."
    section = {
        "reason": "",
        "text": text,
        "worst": _worst_classes(report, source.classes),
        "confusion": "" if without_confusion else _confusion_uri(report, source),
        "pictures": _mistaken_pictures(shown, recipe, source),
    }
    figures = {
        "file": str(stored.path),
        "images": report.images,
        "top1": report.top1,
        "top5": report.top5,
        "loss": report.loss,
        "of": len(source),
        "missed": len(mistakes),
    }
    return section, figures


def _mistaken_pictures(
    mistakes: Sequence[Mistake],
    recipe: Recipe,
    source: Source,
) -> List[Picture]:
    """Return pictures of misclassified images, cropped as they were classified."""
    transform = Evaluation(recipe.data)
    size = image_size(recipe.model)
    pictures = []
    for mistake in mistakes:
        stored = source.open(mistake.image)
        # Evaluation crops alike in all epochs.
        image = transform(stored, size, showing=0, index=mistake.image)
        label = source.classes[mistake.label]
        guess = source.classes[mistake.guess]
        caption = f"{label} taken for {guess}, {100 * mistake.share:.0f}\u00a0%"
        pictures.append(Picture(data_uri(image), caption, source.name(mistake.image)))
    return pictures


def _score(
    stored: StoredWeights,
    recipe: Recipe,
    source: Source,
    data: Data,
    seconds: float,
) -> Tuple[Scores, List[Mistake]]:
    """Score the images that can be classified within some seconds, in a random order.

    Args:
        stored: weights of the checkpoint.
        recipe: of the run.
        source: of the validation images.
        data: section of the recipe by which they are read.
        seconds: for all of them.
    """
    # On the devices of this machine: the run may have had others.
    here = recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "auto"})})
    # The first images of a random order are a fair sample: in files they often lie by class.
    order = permutation(0, 0, len(source)).tolist()
    with contextlib.closing(scoring.engine_with(stored, here)) as engine:
        watched = _Watched(engine)
        batches = loader.EvaluationBatches(
            source,
            data=data,
            image_size=image_size(recipe.model),
            batch=recipe.batch.evaluation,
            device=engine.device,
            order=order,
        )
        with contextlib.closing(batches):
            report = scoring.score(
                watched,  # type: ignore[arg-type]  # of an engine it calls predict_step alone
                _within(seconds, batches),
                recipe.model.classes,
            )
    return report, watched.mistakes


def _is_sample(report: Scores, source: Source) -> bool:
    """Return whether only some of the images were classified."""
    return report.images + report.unreadable < len(source)


def _scores_text(report: Scores, missed: int, source: Source, checkpoint: str) -> str:
    """Return the sentences above the pictures.

    Args:
        report: the scores.
        missed: images that were misclassified.
        source: of the validation images.
        checkpoint: its name.
    """
    assert report.confusion is not None  # `scoring.score` makes one
    # Each class is among the likeliest of five or fewer.
    top5 = f"top-5 {share(report.top5)}, " if len(report.confusion) > TOP else ""
    quality = scoring.quality(report)
    scores = f"top-1 {share(report.top1)}, {top5}{missed:,} misclassified; {quality}."
    if _is_sample(report, source):
        text = (
            f"A random sample of the validation images, {report.images:,} of {len(source):,}, as "
            f"{checkpoint} classifies them: {scores} The sample only shows mistakes, because all "
            "images would take longer than a minute here. The score of the run is the one at the "
            "top, of all images; evaluate.py computes it again."
        )
    else:
        text = (
            f"All validation images, {report.images:,}, as {checkpoint} classifies them: {scores}"
        )
    return text + "".join(f" {note}." for note in source.notes)


def _worst_classes(report: Scores, names: Sequence[str]) -> List[tuple]:
    """Return rows of the classes with most mistakes.

    Returns:
        (class, images, recall, precision, F1, class that it is most often taken for), as text.
    """
    rows = []
    for row in scoring.class_rows(report, names):
        if row["images"] and row["top1"] < 1:
            taken_for = f"{row['taken_for']} ({plural(row['times'], 'time')})"
            shares = (share(row["top1"]), share(row["precision"]), share(row["f1"]))
            rows.append((row["class"], row["images"], *shares, taken_for))
    return rows[:_WORST]


def _confusion_uri(report: Scores, source: Source) -> str:
    """Return the picture of the confusion matrix in a data URI; empty for too many classes."""
    if len(source.classes) > scoring.MOST_DRAWN:
        return ""
    sample = f" of a sample of {report.images:,} images" if _is_sample(report, source) else ""
    stream = io.BytesIO()
    scoring.draw_confusion(
        stream,  # type: ignore[arg-type]  # which its docstring allows
        report,
        source.classes,
        title=f"top-1 {share(report.top1)}{sample}",
    )
    return png_uri(stream)


class _Watched:
    """An engine that evaluates, and records each wrong guess."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.mistakes: List[Mistake] = []

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Return the logits of a `batch`, as the engine does."""
        logits = self._engine.predict_step(batch).cpu()
        # In float64 the surest mistakes, with shares near 1, are still told apart.
        shares, guesses = logits.double().softmax(1).max(1)
        rows = (guesses != batch.labels[: batch.valid]).nonzero()[:, 0]
        columns = zip(
            shares[rows].tolist(),
            batch.indices[rows].tolist(),
            batch.labels[rows].tolist(),
            guesses[rows].tolist(),
        )
        self.mistakes += [Mistake(*column) for column in columns]
        return logits


def _within(seconds: float, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the batches that begin within some seconds; one in any case."""
    end = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() >= end:
            return
