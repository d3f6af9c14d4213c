"""Lists of images, and one folder or list from which the validation images are taken."""

import csv
import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import ConfigError, DataError
from data.folder import FolderSource
from data.image_list import ListSource
from data.sources import open_source
from recipe import batch, found_images
from recipe.config import Data
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT

CLASSES = ("Bee", "ant", "cat")
SHARE = 0.25


def colour(number):
    return (number % 256, number // 256, 9)


@pytest.fixture
def photos(tmp_path):
    """Forty images in each of three class folders, of which no two are alike, and a list of them in
    a mixed order."""
    rows = []
    for number in range(120):
        path = tmp_path / CLASSES[number % 3] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 4), colour(number)).save(path)
        rows.append((str(path.relative_to(tmp_path)), CLASSES[number % 3]))
    np.random.default_rng(0).shuffle(rows)
    write(tmp_path / "photos.csv", rows)
    return tmp_path


def write(file, rows):
    with open(file, "w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return file


def folder(root, **keys):
    return Data(source="folder", root=str(root), train_folder=".", **keys)


def image_list(place, **keys):
    return Data(**{"source": "list", "root": str(place), "train_list": "photos.csv", **keys})


def images(data, split):
    source = open_source(data, len(CLASSES), split)
    return [
        (os.path.basename(source.name(i)), source.classes[source.labels[i]])
        for i in range(len(source))
    ]


@pytest.mark.parametrize("share", [0.0, SHARE])
def test_a_list_has_the_images_of_class_folders_in_their_order(photos, share):
    for split in ("train", "validation")[: 2 if share else 1]:
        of_folder = open_source(folder(photos, validation_share=share), 3, split)
        of_list = open_source(image_list(photos, validation_share=share), 3, split)
        assert of_list.classes == of_folder.classes == CLASSES
        assert (
            of_list.labels.dtype == np.int64
            and of_list.labels.tolist() == of_folder.labels.tolist()
        )
        for one in (of_list, pickle.loads(pickle.dumps(of_list))):
            for index in range(len(of_folder)):
                assert torch.equal(one.read(index), of_folder.read(index))


def test_the_split_is_that_of_the_hash_of_the_name(photos):
    """The rule as docs/data.md states it, so that other programs can find the same images."""

    def validates(name):
        digits = hashlib.sha256(name.encode()).hexdigest()[:16]
        return int(digits, 16) / 16**16 < SHARE

    data = folder(photos, validation_share=SHARE)
    expected = {
        f"{label}/{name}"
        for split in ("train", "validation")
        for name, label in images(data, split)
    }
    assert len(expected) == 120
    found = {f"{label}/{name}" for name, label in images(data, "validation")}
    assert found == {name for name in expected if validates(name)}
    assert 15 <= len(found) <= 45  # 30 in the mean, 3.2 standard deviations (4.7) to both sides


def test_images_that_are_added_or_removed_move_no_other(photos):
    data = folder(photos, validation_share=SHARE)
    before = {split: set(images(data, split)) for split in ("train", "validation")}
    gone = next(iter(before["train"]))
    (photos / gone[1] / gone[0]).unlink()
    for number in range(1000, 1030):
        Image.new("RGB", (6, 4)).save(photos / "ant" / f"{number}.png")
    (photos / "dog").mkdir()
    Image.new("RGB", (6, 4)).save(photos / "dog" / "1.png")
    for split in before:
        source = open_source(data, 4, split)
        after = {
            (os.path.basename(source.name(i)), source.classes[source.labels[i]])
            for i in range(len(source))
        }
        assert before[split] - {gone} <= after
        assert not after & before["train" if split == "validation" else "validation"]


def test_every_class_keeps_an_image_to_train(photos):
    """With a share of 0.99 nearly every image validates; the classes of the training images are
    still all."""
    data = folder(photos, validation_share=0.99)
    (photos / "dog").mkdir()
    Image.new("RGB", (6, 4)).save(photos / "dog" / "1.png")
    train = open_source(data, 4, "train")
    validation = open_source(data, 4, "validation")
    assert set(train.labels.tolist()) == {0, 1, 2, 3}
    assert len(train) + len(validation) == 121
    assert any("no validation images of 1 class: dog" in note for note in validation.notes)


def test_a_path_that_is_listed_twice_is_two_images_of_one_split(photos):
    write(photos / "photos.csv", [("ant/1.png", "ant"), ("ant/1.png", "ant"), ("cat/2.png", "cat")])
    data = image_list(photos, validation_share=0.999)
    assert len(open_source(data, 2, "train")) == 3
    with pytest.raises(
        DataError, match=r"none of its images falls into the share 0.999 that validates; raise"
    ):
        open_source(data, 2, "validation")


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na/1.png,ant\na/2.png,cat\n",
        "\ufeffpath,label\r\na/1.png,ant\r\n\r\na/2.png,cat\r\n",
        "Label, width, Path\nant, 3, a/1.png\ncat, 4, a/2.png\n",
        "a/1.png, ant\na/2.png, cat",
        '"a/1.png","ant"\n"a/2.png","cat"\n',
    ],
    ids=["columns", "spreadsheet", "other columns", "no columns", "quotes"],
)
def test_lists_as_programs_write_them(photos, text):
    (photos / "photos.csv").write_bytes(text.encode())
    (photos / "a").mkdir()
    for number in (1, 2):
        Image.new("RGB", (6, 4), colour(number)).save(photos / "a" / f"{number}.png")
    source = open_source(image_list(photos), 2, "train")
    assert source.classes == ("ant", "cat") and source.labels.tolist() == [0, 1]
    assert source.read(1)[:, 0, 0].tolist() == list(colour(2))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "lists no images; give each a line: path,label"),
        ("path,label\n", "lists no images"),
        (
            "image,class\na/1.png,ant\n",
            "line 1: 'image' is no .jpg, .jpeg or .png file; correct the path, or name the",
        ),
        ("a/1.webp,ant\n", "line 1: 'a/1.webp' is no .jpg, .jpeg or .png file"),
        (
            "a,b,c\n",
            "line 1: neither the columns path and label nor a path and a label, but a, b, c; name the",
        ),
        (
            "path,label\nant/1.png\n",
            "line 2: 1 field, where the first line has 2; correct the line",
        ),
        (
            "path,label\na.jpg,crane, bird\nb.jpg,crane, machine\n",
            "line 2: 3 fields, where the first line has 2; put quotes around a label that has a comma",
        ),
        (
            "a.jpg,ant\nb.jpg,crane, bird\n",
            "line 2: 3 fields, where the first line has 2; put quotes",
        ),
        (
            "path,label,width\na.jpg,crane, bird,4\n",
            "line 2: 4 fields, where the first line has 3; put quotes",
        ),
        ("a\0.jpg,ant\n", "line 1: (the character NUL in a path; remove it, or|line contains NUL)"),
        ("ant/1.png,\n", "line 1: ant/1.png has no label; give it one"),
        (
            "ant/1.png,ant\nant/1.png,cat\n",
            "line 2: ant/1.png is cat, but ant on line 1; correct one of them",
        ),
        (
            "ant/1.png,ant\n./ant//1.png,cat\n",
            "line 2: ./ant//1.png is cat, but ant on line 1 as ant/1.png; correct",
        ),
        (
            "ant/1.png,ant\ncat/../ant/1.png,cat\n",
            "is cat, but ant on line 1 as ant/1.png; correct one of them",
        ),
        (
            "ant/1.png,ant\nFOLDER/ant/1.png,cat\n",
            "is cat, but ant on line 1 as ant/1.png; correct one of them",
        ),
        ('ant/1.png,"ant\n', "unexpected end of data; correct the line"),
        (
            "gone.png,ant\nant/1.png,cat\n",
            "line 1: no file .*/gone.png; correct the path, or set data.root to the",
        ),
    ],
)
def test_faults_of_lists_are_one_line_with_the_place_and_a_remedy(photos, text, fault):
    (photos / "photos.csv").write_text(text.replace("FOLDER", str(photos)))
    with pytest.raises(DataError, match=fault) as raised:
        open_source(image_list(photos), 2, "train")
    assert str(photos / "photos.csv") in str(raised.value) and "\n" not in str(raised.value)


def test_lists_that_are_not_there_are_named_with_their_key(photos):
    with pytest.raises(
        DataError,
        match=r"gone\.csv: no such file; set data\.train_list to the list of the train images",
    ):
        open_source(image_list(photos, train_list="gone.csv"), 3, "train")
    with pytest.raises(
        DataError,
        match=r"val\.csv: no such file; set data\.validation_list to the list of the valid",
    ):
        open_source(image_list(photos), 3, "validation")


def test_paths_are_relative_to_the_list_without_a_root(photos, monkeypatch):
    for place in (photos, photos.parent):
        monkeypatch.chdir(place)
        name = os.path.relpath(str(photos / "photos.csv"))
        source = open_source(image_list(photos, root=None, train_list=name), 3, "train")
        assert source.read(0)[:, 0, 0].tolist() == list(colour(0))


def test_a_changed_label_is_noticed(photos):
    """A list's paths need not have changed."""
    rows = [line.split(",") for line in (photos / "photos.csv").read_text().split()]
    before = ListSource(str(photos / "photos.csv"), str(photos)).digest
    rows[0][1] = "cat" if rows[0][1] == "ant" else "ant"
    write(photos / "photos.csv", rows)
    assert ListSource(str(photos / "photos.csv"), str(photos)).digest != before


def test_plans_count_what_is_read(photos):
    keys = [
        f"data.root={photos}",
        f"data.validation_share={SHARE}",
        "batch.global=30",
        "batch.micro=3",
        "model.classes=auto",
    ]
    for source in (
        ["data.source=folder", "data.train_folder=."],
        ["data.source=list", "data.train_list=photos.csv"],
    ):
        recipe = load(QUICKSTART, [*keys, *source])
        assert recipe.model.classes == 3
        for split in ("train", "validation"):
            opened = open_source(recipe.data, 3, split)
            found = found_images.find(recipe.data, split)
            assert (found.images, found.classes) == (len(opened), 3)
            per_class = [found.by_class[name] for name in opened.classes]
            assert per_class == np.bincount(opened.labels, minlength=3).tolist()
        assert f"found: {len(open_source(recipe.data, 3, 'train'))} in {photos}" in batch.describe(
            recipe
        )


def test_a_folder_of_splits_is_not_taken_for_classes(photos):
    for name in ("train", "Val"):
        (photos / "set" / name).mkdir(parents=True)
    keys = [
        "data.source=folder",
        f"data.root={photos / 'set'}",
        "data.train_folder=.",
        "data.validation_share=0.2",
    ]
    with pytest.raises(
        ConfigError,
        match=r"Val, train are parts of a data set, not classes; set data\.train_folder",
    ):
        load(QUICKSTART, [*keys, "model.classes=auto"])


def test_a_folder_of_validation_beside_a_share_is_refused(photos):
    keys = [
        "data.source=folder",
        f"data.root={photos}",
        "data.train_folder=.",
        "data.validation_share=0.2",
    ]
    with pytest.raises(
        ConfigError, match=r"data\.validation_folder has no effect with data\.validation_share=0\.2"
    ):
        load(QUICKSTART, [*keys, "data.validation_folder=mine"])


def test_photos_yaml_takes_a_folder_by_one_override(photos):
    recipe = load(ROOT / "configs" / "photos.yaml", [f"data.root={photos}", "model.init_from=null"])
    assert recipe.model.classes == 3
    train, validation = (images(recipe.data, split) for split in ("train", "validation"))
    assert len(train) + len(validation) == 120 and 10 <= len(validation) <= 38  # 24 +- 3.2 x 4.4
    assert FolderSource(str(photos)).labels.tolist() == [0] * 40 + [1] * 40 + [2] * 40
