"""Images are counted before a run by the rule that the run reads them by, and a plan uses their
number."""

import gzip
import json
import os

import pytest

from common.errors import ConfigError, DataError
from data.folder import FolderSource
from recipe import batch, found_images
from recipe.loading import load
from tests.conftest import QUICKSTART


@pytest.fixture
def photos(tmp_path):
    """Three classes: 7 training images and 3 of validation, among what is left out; empty files, as
    none is opened."""
    for split, names in (
        (
            "train",
            (
                "a/1.jpg",
                "a/deep/2.JPEG",
                "a/deep/er/3.png",
                "b/4.v2.jpg",
                "b/5.PNG",
                "c/6.jpg",
                "c/7.jpg",
            ),
        ),
        ("val", ("a/1.jpg", "b/2.jpg", "c/3.jpg")),
    ):
        others = (
            "a/.hidden.jpg",
            "a/.cache/1.jpg",
            "a/notes.txt",
            "a/x.webp",
            ".ipynb_checkpoints/1.jpg",
            "beside.jpg",
            "lost+found/1.jpg",
            "a/@eaDir/1.jpg",
        )
        for name in (*names, *others):
            path = tmp_path / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    os.symlink("..", str(tmp_path / "train" / "b" / "loop"))
    os.symlink("../a/deep", str(tmp_path / "train" / "b" / "more"))
    return tmp_path


def recipe(photos, *overrides):
    given = [
        "data.source=folder",
        f"data.root={photos}",
        "model.classes=3",
        "batch.global=3",
        "batch.micro=3",
    ]
    return load(QUICKSTART, [*given, *overrides])


def test_folders_have_as_many_images_and_classes_as_their_source_reads(photos):
    for split, folder in (("train", "train"), ("validation", "val")):
        source = FolderSource(str(photos / folder))
        found = found_images.find(recipe(photos).data, split)
        assert found[:3] == (str(photos / folder), len(source), len(source.classes))
        counts = [int((source.labels == label).sum()) for label in range(len(source.classes))]
        assert found.by_class == dict(zip(source.classes, counts))


def test_local_shards_are_counted_by_their_manifest(photos):
    for split in ("train", "val"):
        shards = [{"name": f"{n}.tar", "bytes": 1, "images": n, "sha256": ""} for n in (2, 5)]
        (photos / split / "shards.json").write_text(
            json.dumps({"format": 1, "classes": ["a", "b"], "shards": shards})
        )
    data = recipe(photos, "data.source=shards").data
    assert found_images.find(data, "train") == (str(photos / "train"), 7, 2, None)
    (photos / "train" / "shards.json").write_text("{}")
    assert found_images.find(data, "train") is None  # the run says what is wrong with it
    assert (
        found_images.find(recipe(photos, "data.source=shards", "data.root=s3://b").data, "train")
        is None
    )
    assert found_images.find(load(QUICKSTART).data, "train") is None


def test_a_plan_has_the_number_that_was_found(photos):
    plan = batch.describe(recipe(photos))
    assert (
        "length     9 training images; 108 steps = 36 epochs x 3 steps, 12 of warm-up; 0 images left over"
        in plan
    )
    assert f"images     found: 9 in {photos}/train, 3 in {photos}/val" in plan
    assert "known once data.root is read" in batch.describe(recipe(photos), here=False)


def test_a_plan_refuses_classes_that_the_run_would_refuse(photos):
    (photos / "val" / "d").mkdir()
    batch.describe(recipe(photos))  # a class without images is none
    (photos / "val" / "d" / "1.jpg").touch()
    with pytest.raises(
        DataError, match=r"val: 1 class without training images: d; training and validation need"
    ):
        batch.describe(recipe(photos))
    (photos / "train" / "d").mkdir()
    with pytest.raises(
        DataError,
        match=r"train/d: no \.jpg, \.jpeg or \.png files in this class folder; fill it or",
    ):
        batch.describe(recipe(photos, "model.classes=4"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "run.epochs=4",
            "the warm-up of 12 steps is not shorter than the run of 12; lower schedule.warmup_epochs or raise",
        ),
        (
            "data.train_images=1281167",
            "9 images, but data.train_images is 1281167 (3 steps an epoch instead of 427055); ",
        ),
        (
            "data.validation_images=4",
            "3 images, but data.validation_images is 4; complete the images or set data.vali",
        ),
        ("model.classes=4", "train: 3 classes, but model.classes is 4; set model.classes=3"),
        (
            "batch.global=12",
            "batch.global 12 is more than the 9 training images; give more images or batch.global=9",
        ),
    ],
)
def test_a_plan_refuses_what_the_run_would_refuse(photos, override, words):
    with pytest.raises((ConfigError, DataError)) as caught:
        batch.describe(recipe(photos, override))
    assert words in str(caught.value)


@pytest.mark.parametrize("number", ["null", "4"])
def test_a_plan_refuses_what_has_no_validation_images(photos, number):
    """The remedy is not a number of 0, which the key does not take."""
    expected = f"data.validation_images={number}"
    with pytest.raises(
        DataError,
        match=r"train: none of its images falls into the share 1e-09 that validates; raise",
    ):
        batch.describe(recipe(photos, expected, "data.validation_share=1e-9"))
    for path in (photos / "val").glob("*/*.jpg"):
        path.unlink()
    with pytest.raises(DataError, match=r"val: holds no validation images; fill it$"):
        batch.describe(recipe(photos, expected))


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ("run.epochs=4", "lower schedule.warmup_epochs or raise run.epochs"),
        ("run.steps=60", "lower schedule.warmup_epochs or raise run.steps"),
        ("run.images=640", "lower schedule.warmup_epochs or raise run.images"),
        ("run.steps=60 schedule.warmup_steps=60", "lower schedule.warmup_steps or raise run.steps"),
        ("schedule.warmup_images=100000", "lower schedule.warmup_images or raise run.epochs"),
    ],
)
def test_the_remedy_of_a_long_warmup_names_the_keys_that_were_given(overrides, remedy):
    with pytest.raises(ConfigError, match="is not shorter than the run of") as caught:
        batch.describe(load(QUICKSTART, overrides.split()))
    assert str(caught.value).endswith(f"; {remedy}")


def test_a_warmup_in_the_units_of_the_run_is_refused_without_images():
    elsewhere = ["data.source=folder", "run.epochs=4"]
    fault = "the warm-up of 4 epochs is not shorter than the run of 4; lower schedule.warmup_epochs or raise run.epochs"
    with pytest.raises(ConfigError, match=fault):
        batch.describe(load(QUICKSTART, elsewhere))
    batch.describe(load(QUICKSTART, [*elsewhere, "run.steps=4"]))


def data_set(*overrides):
    given = [
        "data.source=torchvision",
        "data.dataset=FashionMNIST",
        "model.classes=auto",
        "run.epochs=1",
    ]
    return load(QUICKSTART, [*given, "schedule.warmup_epochs=0.1", *overrides])


def test_a_data_set_is_planned_without_its_files(tmp_path):
    """With as many images as it is known to have; the plan says how to get them."""
    plan = batch.describe(data_set(f"data.root={tmp_path}"))
    assert "length     60000 training images; 937 steps = 1 epoch x 937 steps" in plan
    assert (
        f"images     not found here: {tmp_path}: no train-images-idx3-ubyte (or .gz) of FashionMNIST"
        in plan
    )
    assert data_set().model.classes == 10
    with pytest.raises(
        ConfigError, match=r"10 classes, but model\.classes is 11; set model\.classes=10$"
    ):
        batch.describe(data_set("model.classes=11"))
    with pytest.raises(
        ConfigError,
        match=r"data\.dataset is not set; name a data set of torchvision: FashionMNIST, ",
    ):
        data_set("data.dataset=null")
    with pytest.raises(ConfigError, match=r"data\.dataset is not set"):
        batch.describe(data_set("data.dataset=null", "model.classes=10"))
    with pytest.raises(
        ConfigError,
        match=r"^command line: data\.dataset: must be 'FashionMNIST', 'MNIST',.*'SVNH'$",
    ):
        data_set("data.dataset=SVNH")


def test_files_of_a_data_set_say_how_many_images_they_hold(tmp_path):
    """Unpacked, and packed by gzip; of the other sets the number is known once a file is there."""
    content = bytes([0, 0, 8, 3]) + (60_000).to_bytes(4, "big")
    for name, packed in (
        ("train-images-idx3-ubyte", content),
        ("t10k-images-idx3-ubyte.gz", gzip.compress(content)),
    ):
        (tmp_path / name).write_bytes(packed)
    for name in ("train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).touch()
    place = f"data.root={tmp_path}"
    assert found_images.find(data_set(place).data, "train") == (str(tmp_path), 60_000, 10, None)
    with pytest.raises(
        DataError,
        match=r": 60000 images, but data\.validation_images is 10000; complete the images",
    ):
        batch.describe(data_set(place))
    plan = batch.describe(data_set(place, "data.validation_images=60000"))
    assert f"images     found: 60,000 in {tmp_path}, 60,000 in {tmp_path}" in plan
    with pytest.raises(
        DataError, match=r": 60000 images, but data\.train_images is 1281167 \(937 steps an epoch "
    ):
        batch.describe(data_set(place, "data.train_images=1281167"))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(b"text")
    # the run says what is wrong with it
    assert found_images.find(data_set(place).data, "validation") is None
    (tmp_path / "test_32x32.mat").touch()
    street = data_set(place, "data.dataset=SVHN").data
    assert found_images.find(street, "validation") == (str(tmp_path), 26_032, 10, None)
    with pytest.raises(DataError, match=r"no train_32x32\.mat of SVHN"):
        found_images.find(street, "train")
