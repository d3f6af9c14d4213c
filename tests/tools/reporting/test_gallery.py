"""Pictures are what the model was given and what it got wrong; what cannot be shown is
explained."""

import base64
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import UserError
from data.base import Pixels
from data.digits import DigitsSource
from data.sources import open_source
from data.transforms import Evaluation
from engines import factory
from engines.feed import Feed
from engines.torch_engine import image_settings
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import batch
from recipe.config import Data
from tests.tools.reporting.runs import trained, written
from tools.reporting import pictures, run


def pixels(source):
    """uint8 [height, width, 3] of a data URI."""
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        return np.asarray(picture)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory, _one_thread):
    return trained(
        tmp_path_factory.mktemp("runs") / "digits",
        "data.mixup=0.3",
        "run.steps=20",
        "parallel.stages=2",
    )


@pytest.fixture(scope="module")
def found(digits_run):
    return pictures.find_mistakes(digits_run, 64)


def test_training_images_are_those_that_the_engine_is_fed(tiny):
    """By the engine's own way of taking micro batches, with mixing and random operations; rounded
    to whole values."""
    recipe = tiny(
        "data.mixup=0.4", "data.cutmix=0.8", "data.augment=randaugment", "model.image_size=64"
    )
    engine = factory.create(recipe, batch.divide(recipe))
    source = open_source(recipe.data, 10, "train")
    micro_batches = engine.training_batches(source, range(2))
    feed = Feed(
        image_settings(recipe), Processes(Topology(), torch.device("cpu")), torch.device("cpu")
    )
    expected = []
    targets = []
    for step in range(2):
        steps = range(step, step + 1)
        feed.start(micro_batches, steps=steps, share=range(2), rows=recipe.batch.micro, size=64)
        for number in range(2):
            expected.extend(feed.images(number))
            targets.extend(feed.targets(number)[1])
    micro_batches.close()
    engine.close()
    shown = pictures.training_pictures(recipe, 40)
    assert len(shown) == 40
    for picture, image, target in zip(shown, expected, targets):
        assert np.array_equal(
            pixels(picture.source), image.round().to(torch.uint8).permute(1, 2, 0).numpy()
        )
        assert picture.caption.startswith(str(int(target.argmax())))
        largest = float(target.max())
        assert largest > 0.994 or f"({100 * largest:.0f}\u00a0%)" in picture.caption


def test_the_mistakes_are_what_the_newest_checkpoint_gets_wrong(digits_run, found):
    """The scores are those of the run's own last evaluation."""
    shown, scores = found
    end = run.read(digits_run).metrics.end
    assert [scores[name] for name in ("top1", "top5", "images", "of")] == [
        end["top1"],
        end["top5"],
        360,
        360,
    ]
    assert scores["missed"] == round(360 * (1 - end["top1"])) > 0
    assert len(shown["pictures"]) == min(64, scores["missed"])
    source = DigitsSource("validation")
    by_name = {source.name(index): index for index in range(360)}
    shares = []
    for picture in shown["pictures"]:
        label, _, rest = picture.caption.partition(" taken for ")
        guess, _, share = rest.partition(", ")
        index = by_name[picture.name]
        assert int(label) == source.labels[index] != int(guess)
        cropped = Evaluation(Data(crop_fraction=0.933))(Pixels(source.read(index)), 16, 0, index)
        expected = cropped.permute(1, 2, 0).numpy()
        assert np.array_equal(pixels(picture.source), expected)
        shares.append(int(share[: -len("\u00a0%")]))
    assert shares == sorted(shares, reverse=True), "the surest first"
    label, images, top1, precision, f1, _ = shown["worst"][0]
    assert 0 <= float(f1[:-2]) <= 100
    assert precision == "" or 0 <= float(precision[:-2]) <= 100, (
        "empty where no image was taken for the class"
    )
    assert (
        images == (source.labels == int(label)).sum() and 0 <= float(top1[:-2]) < 100 * end["top1"]
    )


def test_of_more_images_than_there_is_time_for_a_random_part_is_classified(digits_run):
    shown, scores = pictures.find_mistakes(digits_run, 64, seconds=0)
    assert (scores["images"], scores["of"]) == (180, 360)
    labels = {picture.caption.partition(" ")[0] for picture in shown["pictures"]}
    assert len(labels) > 5, "of all classes, though the images lie by class"
    assert "A random sample of the validation images, 180 of 360, as step-" in shown["text"]
    assert "The score of the run is the one at the top, of all images" in shown["text"]


def test_without_matplotlib_the_mistakes_are_shown_without_the_matrix(digits_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown, _ = pictures.find_mistakes(digits_run, 1, seconds=0)
    assert shown["confusion"] == "" and len(shown["pictures"]) == 1
    fault = "the package matplotlib is not installed; pip install matplotlib"
    assert f" No picture of the confusion: {fault}." in shown["text"]


def test_what_cannot_be_shown_has_a_reason(tmp_path):
    folder = written(tmp_path / "run")
    shown, data = pictures.collect(run.read(folder), 4)
    assert data == {"images_shown": 4, "scored": None}
    assert "no checkpoint in this folder" in shown["mistakes"]["reason"]
    written(tmp_path / "run", overrides=["data.source=folder", f"data.root={tmp_path}"])
    assert "no folder" in pictures.collect(run.read(folder), 4)[0]["images"]["reason"]
    (folder / "config.yaml").write_text("modl: {}\n")
    assert "modl: unknown key" in pictures.collect(run.read(folder), 4)[0]["images"]["reason"]


def test_large_pictures_are_made_smaller_and_fewer_images_than_the_run_had_are_refused(tiny):
    shown = pixels(pictures.data_uri(torch.full((3, 380, 190), 77, dtype=torch.uint8)))
    assert shown.shape == (128, 64, 3) and (shown == 77).all()
    with pytest.raises(UserError, match="1437 training images, but an update took 2000"):
        pictures.training_pictures(tiny("batch.global=2000", "batch.micro=20"), 8)
