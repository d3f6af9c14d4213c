"""Small pictures that lie in the page itself, and the training images as a run was shown them."""

from __future__ import annotations

import base64
import functools
import io
from typing import List, NamedTuple, Sequence

import torch
from PIL import Image
from torch.nn.functional import interpolate

from data import loader, mixing
from data.batches import MicroBatch
from data.sources import open_source
from recipe.batch import training_image_size
from recipe.config import Data, Recipe
from recipe.errors import DataError

_LARGEST = 128  # pixels a side: sixty-four photographs of that size are two megabytes
_SMALLEST = 64


class Picture(NamedTuple):
    """One image of the page. source: a data URI. caption: a line below it. name: of the image in its source."""

    source: str
    caption: str
    name: str


def training_pictures(recipe: Recipe, count: int) -> List[Picture]:
    """The first images of a run's first epoch, as its first updates saw them: cropped, augmented and mixed.

    Which images these are, and what was done to them, is a function of the recipe: they are drawn again.

    Raises:
        DataError: the images are not there, or not as many as one update takes.
    """
    data = read_here(recipe.data)
    source = open_source(data, recipe.model.classes, "train")
    if len(source) < recipe.batch.global_:
        raise DataError(f"{len(source)} training images, but an update took {recipe.batch.global_}: not the run's own")
    batches = loader.training_batches(
        source,
        data=data,
        image_size=functools.partial(training_image_size, recipe),
        global_batch=recipe.batch.global_,
        micro=recipe.batch.micro,
        seed=recipe.run.seed,
        first_step=0,
        last_step=-(-count // recipe.batch.global_),
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


def read_here(data: Data, workers: int = 0) -> Data:
    """`data` read by so many processes; images that cannot be read are left out instead of ending the report."""
    return data.model_copy(update={"workers": workers, "reader": "torch", "bad_images": "skip"})


def _as_trained(batch: MicroBatch, recipe: Recipe) -> tuple:
    """Images [micro, 3, size, size] from 0 to 255 and targets [micro, classes], as engines/feed.py makes them."""
    size = batch.images.shape[-1]
    plan = mixing.draw(
        recipe.data, recipe.run.seed, batch.step, batch.number, len(batch.images), batch.valid, size, size
    )  # fmt: skip
    targets = mixing.mix_targets(batch.labels, plan, recipe.model.classes)
    return batch.images if plan is None else mixing.mix_images(batch.images.contiguous(), plan), targets


def _shares(target: torch.Tensor, classes: Sequence[str]) -> str:
    """The classes of a target, the largest share first: `cat`, or `cat (72 %) + dog (28 %)`."""
    shares, labels = target.sort(descending=True, stable=True)
    found = [(float(share), classes[int(label)]) for share, label in zip(shares[:3], labels[:3]) if share >= 0.005]
    return found[0][1] if len(found) == 1 else " + ".join(f"{name} ({100 * share:.0f}\u00a0%)" for share, name in found)


def data_uri(image: torch.Tensor) -> str:
    """A PNG of an image in a URI; made smaller where it is large, its pixels repeated where it is tiny.

    Args:
        image: [3, height, width] from 0 to 255, of any dtype.
    """
    height, width = image.shape[1:]
    if max(height, width) > _LARGEST:
        scale = _LARGEST / max(height, width)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        image = interpolate(image[None].float(), size, mode="bilinear", align_corners=False, antialias=True)[0]
    times = -(-_SMALLEST // max(image.shape[1:]))
    image = image.repeat_interleave(times, 1).repeat_interleave(times, 2)
    pixels = image.float().round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
