"""Validation images as the newest checkpoint of a run classifies them: by class, and the mistakes as pictures."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Iterable, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch

from data.base import Source, permutation
from data.batches import MicroBatch
from data.loader import EvaluationBatches
from data.sources import open_source
from data.transforms import Evaluation
from engines.base import Engine
from recipe import loading
from tools.reporting.pictures import Picture, data_uri, read_here
from training import scoring, weights
from training.scoring import engine_with

_SECONDS = 60.0


class Findings(NamedTuple):
    """file: the checkpoint. report: scores over the images that were classified, of `validation` that there are.

    missed: how many of those were taken for another class; pictures: the ones of which the model was surest.
    """

    file: Path
    report: scoring.Report
    validation: int
    classes: Sequence[str]
    missed: int
    pictures: List[Picture]


class _Mistake(NamedTuple):
    """share: what the softmax gave to the class `taken_for`. index: of the image in the source."""

    share: float
    index: int
    label: int
    taken_for: int


def find(folder: Path, count: int, seconds: float = _SECONDS) -> Findings:
    """Classifies validation images for at most so many seconds: all of them, or as many random ones as can be.

    Args:
        folder: of the run.
        count: pictures of mistakes, at most.

    Raises:
        UserError: there is no checkpoint or no image, or the two do not fit.
    """
    stored = weights.read(str(folder))
    recipe = loading.loads(str(stored.recipe), str(stored.path))
    data = read_here(recipe.data, min(recipe.data.workers, os.cpu_count() or 1))
    source = open_source(data, recipe.model.classes, "validation")
    # On what this machine has: the run may have had other devices.
    here = recipe.model_copy(update={"run": recipe.run.model_copy(update={"device": "auto"})})
    engine = engine_with(stored, here)
    try:
        watched = _Watched(engine)
        spread = _Spread(source)
        size, batch = recipe.model.image_size, recipe.batch.evaluation
        batches = EvaluationBatches(spread, data=data, image_size=size, batch=batch, device=engine.device)
        try:
            report = scoring.score(watched, _for(batches, seconds), recipe.model.classes)
        finally:
            batches.close()
    finally:
        engine.close()
    surest = sorted(watched.mistakes, reverse=True)[:count]
    transform = Evaluation(data.crop_fraction)
    pictures = [_picture(mistake, spread, transform, size) for mistake in surest]
    return Findings(stored.path, report, len(source), source.classes, len(watched.mistakes), pictures)


class _Watched:
    """In the place of an engine: notes each image that it takes for another class."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.mistakes: List[_Mistake] = []

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        logits = self._engine.predict_step(batch).cpu()
        shares, guesses = logits.double().softmax(1).max(1)
        labels, indices = batch.labels[: batch.valid], batch.indices[: batch.valid]
        for row in (guesses != labels).nonzero()[:, 0].tolist():
            self.mistakes.append(
                _Mistake(float(shares[row]), int(indices[row]), int(labels[row]), int(guesses[row]))
            )  # fmt: skip
        return logits


class _Spread(Source):
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


def _for(batches: Iterable[MicroBatch], seconds: float) -> Iterator[MicroBatch]:
    """The batches that begin within so many seconds; one in any case."""
    end = time.monotonic() + seconds
    for batch in batches:
        yield batch
        if time.monotonic() >= end:
            return


def _picture(mistake: _Mistake, source: Source, transform: Evaluation, size: int) -> Picture:
    image = transform(source.open(mistake.index), size, epoch=0, index=mistake.index)
    taken_for, label = source.classes[mistake.taken_for], source.classes[mistake.label]
    return Picture(
        data_uri(image), f"{label} taken for {taken_for}, {100 * mistake.share:.0f}\u00a0%", source.name(mistake.index)
    )
