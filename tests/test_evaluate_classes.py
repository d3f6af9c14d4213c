"""evaluate.py compares classes by name: other test sets than the training's, and weights that name
no classes."""

import csv
import json

import pytest
import safetensors.torch
import torch
from timm.data.readers.reader_image_folder import find_images_and_targets

import evaluate
from recipe import loading
from tests.conftest import QUICKSTART, TINY
from tests.recognizer import recognizer, write_classes
from tools import shards

DONE = 0
WRONG_INPUT = 2
CLASSES = ("blue", "green", "red")  # of the model


def overrides(root, classes, source="folder"):
    own = (
        f"data.source={source}",
        f"data.root={root}",
        f"model.classes={classes}",
        "data.crop_fraction=1",
    )
    return (*TINY, *own, "data.workers=0", "precision.compute=float32")


@pytest.fixture
def command(capsys, tmp_path, undrawn_confusion):
    """command(*arguments): exit code, stdout, stderr, rows of classes.csv by class."""

    def call(*arguments):
        capsys.readouterr()
        # Scores have a folder, images that are classified have none.
        output = () if "--images" in arguments else ("--output", str(tmp_path / "out"))
        code = evaluate.main([*map(str, arguments), *output])
        table = tmp_path / "out/classes.csv"
        lines = table.read_text().splitlines() if table.exists() else []
        return code, *capsys.readouterr(), {row["class"]: row for row in csv.DictReader(lines)}

    return call


@pytest.fixture
def own(tmp_path):
    """A file of weights that carries its recipe and the names of its classes."""
    recipe = loading.load(QUICKSTART, overrides(tmp_path, len(CLASSES)))
    about = {"recipe": loading.dump(recipe), "classes": json.dumps(CLASSES)}
    safetensors.torch.save_file(recognizer(recipe, CLASSES), tmp_path / "own.safetensors", about)
    return tmp_path / "own.safetensors"


@pytest.mark.parametrize(
    ("source", "theirs", "absent", "unknown"),
    [
        ("folder", ("green", "red", "white"), "blue", "white"),
        ("shards", ("green", "red", "white"), "blue", "white"),
        ("folder", ("amber", "blue", "green", "red"), None, "amber"),
        ("shards", ("red",), "2 classes: blue, green", None),
    ],
    ids=str,
)
def test_classes_are_scored_under_their_names(
    own, command, tmp_path, source, theirs, absent, unknown
):
    """A perfect model stays perfect whatever else is in the test set, and no image is counted for
    another class."""
    place = write_classes(tmp_path / "images/val", theirs)
    if source == "shards":
        place = tmp_path / "shards/val"
        assert (
            shards.main(["pack", str(tmp_path / "images/val"), str(place), "--workers", "1"])
            == DONE
        )
    code, said, errors, rows = command(
        "--checkpoint", own, f"data.root={place.parent}", f"data.source={source}"
    )
    assert (code, errors) == (DONE, "")
    known = [name for name in theirs if name in CLASSES]
    assert f"top1 100.00%  loss 0.0000  ({2 * len(known)} images)" in said
    assert {name: int(row["images"]) for name, row in rows.items()} == {
        name: 2 * (name in known) for name in CLASSES
    }
    assert {rows[name]["top1"] for name in known} == {"1.0"}
    notes = [line for line in said.splitlines() if line.startswith(f"{place}: ")]
    assert (f"{place}: has no validation images of " in said) is (absent is not None)
    assert absent is None or notes[-1].endswith(f": {absent.partition(': ')[2] or absent}")
    left_out = f"{place}: left out 2 images of 1 class that the model does not know: {unknown}"
    assert (left_out in notes) is (unknown is not None)
    assert json.loads((tmp_path / "out/scores.json").read_text())["notes"] == notes


def test_a_class_without_images_is_an_empty_folder_or_none(own, command, tmp_path):
    write_classes(tmp_path / "images/val", ("green", "red"))
    (tmp_path / "images/val/blue").mkdir()
    code, said, _, rows = command("--checkpoint", own, f"data.root={tmp_path / 'images'}")
    assert (
        code == DONE
        and "has no validation images of 1 class: blue" in said
        and rows["blue"]["images"] == "0"
    )


def test_other_classes_only_are_refused(own, command, tmp_path):
    place = write_classes(tmp_path / "images/val", ("cyan", "pink", "teal"))
    code, _, error, _ = command("--checkpoint", own, f"data.root={place.parent}")
    assert code == WRONG_INPUT and error.count("\n") == 1
    assert (
        f"{place}: none of its images is of a class that the model knows: it has cyan, pink, teal; "
        in error
    )


NUMBERS = tuple(str(number) for number in range(1, 13))


@pytest.mark.parametrize(
    ("names", "train"),
    [(NUMBERS, False), (("ant", "Bee", "cat"), True), (("10a", "2B", "2a", "x"), False)],
    ids=str,
)
def test_weights_that_name_no_classes_have_those_of_timm(command, tmp_path, names, train):
    """The rows of the classifier are in the order of timm's own reader, whose labels the weights
    were trained on."""
    place = write_classes(tmp_path / "images/val", names)
    _, labels = find_images_and_targets(str(place))
    if train:  # which has a class that is missing in the validation images
        place = place.rename(tmp_path / "images/train")
        write_classes(tmp_path / "images/val", sorted(names)[:-1])
    keys = overrides(place.parent, len(names))
    weights = recognizer(loading.load(QUICKSTART, keys), sorted(labels, key=labels.get))
    torch.save({"state_dict": weights}, tmp_path / "model.pth")
    about = ("--checkpoint", tmp_path / "model.pth", "--config", QUICKSTART, *keys)
    code, said, errors, rows = command(*about)
    assert (code, errors) == (DONE, "") and list(labels) != sorted(names)
    assert {row["top1"] for row in rows.values() if row["images"] != "0"} == {"1.0"}
    order = f"model.pth: does not name its classes; assumed: those of {place} in timm's order"
    assert sum(order in line for line in said.splitlines()) == 1
    images = [str(place / name / "0.png") for name in names]
    code, said, _, _ = command(*about, "--images", *images)
    assert code == DONE and order in said
    assert [line.partition(": ")[2].partition(" ")[0] for line in said.splitlines()[1:]] == list(
        names
    )


def test_fewer_folders_than_weights_that_name_no_classes_have_are_refused(command, tmp_path):
    """Nobody can know which of them is missing, until there is an empty folder for it."""
    place = write_classes(tmp_path / "images/val", ("Bee", "cat"))
    keys = overrides(place.parent, 3)
    torch.save(
        recognizer(loading.load(QUICKSTART, keys), ("ant", "Bee", "cat")), tmp_path / "model.pth"
    )
    about = ("--checkpoint", tmp_path / "model.pth", "--config", QUICKSTART, *keys)
    code, _, error, _ = command(*about)
    assert (
        code == WRONG_INPUT
        and f"{place}: 2 classes, but {tmp_path}/model.pth has 3 and does not name them" in error
    )
    (place / "ant").mkdir()
    code, said, _, _ = command(*about)
    assert code == DONE and "top1 100.00%" in said
