"""Pictures are what the model was given and what it got wrong; what cannot be shown is explained."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from data.base import Pixels
from data.digits import DigitsSource
from data.sources import open_source
from data.transforms import Evaluation
from engines import factory
from engines.feed import Feed
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import batch
from recipe.errors import UserError
from tests.tools.reporting.runs import ODD_NAMES, folders_of_images, trained, written
from tools.reporting import gallery, pictures, run


def pixels(source):
    """uint8 [height, width, 3] of a data URI."""
    kind, _, content = source.partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        return np.asarray(picture)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory, _one_thread):
    return trained(tmp_path_factory.mktemp("runs") / "digits", "data.mixup=0.3", "run.steps=20", "parallel.stages=2")


@pytest.fixture(scope="module")
def found(digits_run):
    return pictures.find_mistakes(digits_run, 64)


@pytest.fixture(scope="module")
def folder_run(tmp_path_factory, _one_thread):
    place = tmp_path_factory.mktemp("images")
    images = folders_of_images(place)
    data = ("data.source=folder", f"data.root={images}", "model.classes=3")
    return trained(place / "<b>run & co", *data, "run.steps=2", "schedule.warmup_steps=1"), images


def test_training_images_are_those_that_the_engine_is_fed(tiny):
    """By the engine's own way of taking micro batches, with mixing and random operations; rounded to whole values."""
    recipe = tiny("data.mixup=0.4", "data.cutmix=0.8", "data.augment=randaugment", "model.image_size=64")
    engine = factory.create(recipe, batch.divide(recipe))
    source = open_source(recipe.data, 10, "train")
    micro_batches = engine.training_batches(source, range(2))
    feed = Feed(recipe, Processes(Topology(), torch.device("cpu")), torch.device("cpu"))
    expected, targets = [], []
    for step in range(2):
        feed.start(micro_batches, range(step, step + 1), 2, 0, recipe.batch.micro, 64)
        for number in range(2):
            expected.extend(feed.images(number))
            targets.extend(feed.targets(number).targets)
    micro_batches.close()
    engine.close()
    shown = pictures.training_pictures(recipe, 40)
    assert len(shown) == 40
    for picture, image, target in zip(shown, expected, targets):
        assert np.array_equal(pixels(picture.source), image.round().to(torch.uint8).permute(1, 2, 0).numpy())
        assert picture.caption.startswith(str(int(target.argmax())))
        largest = float(target.max())
        assert largest > 0.994 or f"({100 * largest:.0f}\u00a0%)" in picture.caption


def test_tiny_pictures_have_their_pixels_repeated_and_large_ones_are_made_smaller():
    tiny = torch.arange(3 * 5 * 5, dtype=torch.uint8).view(3, 5, 5)
    shown = pixels(pictures.data_uri(tiny))
    assert shown.shape == (65, 65, 3)
    assert np.array_equal(shown[6::13, 6::13], tiny.permute(1, 2, 0).numpy())
    large = torch.full((3, 380, 190), 77, dtype=torch.uint8)
    assert pixels(pictures.data_uri(large)).shape == (128, 64, 3) and (pixels(pictures.data_uri(large)) == 77).all()


def test_the_mistakes_are_what_the_newest_checkpoint_gets_wrong(digits_run, found):
    """The scores are those of the run's own last evaluation."""
    end = run.read(digits_run).metrics.end
    assert found.report.top1 == end["top1"] and found.report.top5 == end["top5"]
    assert found.report.images == found.validation == 360
    assert found.missed == 360 - int(found.report.confusion.diagonal().sum()) > 0
    assert len(found.pictures) == min(64, found.missed)
    source = DigitsSource("validation")
    by_name = {source.name(index): index for index in range(360)}
    shares = []
    for picture in found.pictures:
        label, _, rest = picture.caption.partition(" taken for ")
        guess, _, share = rest.partition(", ")
        index = by_name[picture.name]
        assert int(label) == source.labels[index] != int(guess)
        shown = Evaluation(0.933)(Pixels(source.read(index)), 16, 0, index).permute(1, 2, 0).numpy()
        assert np.array_equal(pixels(picture.source)[2::4, 2::4], shown)
        shares.append(int(share[: -len("\u00a0%")]))
    assert shares == sorted(shares, reverse=True), "the surest first"


def test_of_more_images_than_there_is_time_for_a_random_part_is_classified(digits_run):
    found = pictures.find_mistakes(digits_run, 4, seconds=0)
    assert (found.report.images, found.validation, len(found.pictures)) == (180, 360, 4)
    assert (found.report.confusion.sum(1) > 0).all(), "of all classes, though the images lie by class"
    content, _ = gallery.mistakes_content(found)
    assert "180 random ones of 360 validation images" in content[0]


def test_names_of_classes_and_images_are_text(folder_run):
    folder, images = folder_run
    sections, shown = gallery.collect(run.read(folder), 8)
    assert shown["images_shown"] == 8 and shown["scored"]["images"] == 24
    markup = "".join(str(part) for section in sections for part in section.content)
    for name in ODD_NAMES:
        assert name not in markup
    assert "&lt;img src=x onerror=alert(1)&gt;" in markup and "/&lt;b&gt;0&amp;.png" in markup
    assert "<b>run & co" not in markup and str(images) in markup


def test_images_that_are_gone_are_reported_and_the_rest_is_shown(folder_run):
    folder, images = folder_run
    (images / "train").rename(images / "elsewhere")
    try:
        sections, shown = gallery.collect(run.read(folder), 8)
        assert shown["images_shown"] == 0 and shown["scored"]["images"] == 24
        assert "Not shown: " in sections[0].content[0] and "no folder" in sections[0].content[0]
    finally:
        (images / "elsewhere").rename(images / "train")


def test_a_run_that_has_no_checkpoint_yet_still_shows_its_images(tmp_path):
    sections, shown = gallery.collect(run.read(written(tmp_path / "run")), 4)
    assert shown == {"images_shown": 4, "scored": None}
    assert "no checkpoint in this folder" in sections[1].content[0]


def test_fewer_images_than_the_run_had_are_refused(tiny):
    with pytest.raises(UserError, match="1437 training images, but an update took 2000"):
        pictures.training_pictures(tiny("batch.global=2000", "batch.micro=20"), 8)


def test_a_perfect_run_has_nothing_to_show(found):
    right = found.report._replace(confusion=torch.eye(10, dtype=torch.int64), top1=1.0)
    content, figures = gallery.mistakes_content(found._replace(report=right, missed=0, pictures=[]))
    assert figures == [] and "classified correctly" in content[1]


def test_many_classes_are_a_picture_and_few_a_figure(found):
    assert [figure.key for figure in gallery.mistakes_content(found)[1]] == ["confusion"]
    confusion = torch.eye(300, dtype=torch.int64) * 2
    confusion[3, 4] = 1
    many = found._replace(report=found.report._replace(confusion=confusion), classes=[f"c{n}" for n in range(300)])
    content, figures = gallery.mistakes_content(many)
    assert figures == [] and any("data:image/png" in str(part) for part in content)
