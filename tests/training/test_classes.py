"""Which classes a model knows: by its file, by the data, and in a run that starts from other
weights."""

import types
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, DataError
from data.base import ClassNames
from tests.conftest import TINY
from tests.pictures import write_pictures
from tools import shards
from training.checkpoint import CheckpointFolder
from training.classes import Fitted, Known, for_data, of_model
from training.weights import StoredWeights

NAMES = ("10", "9", "A", "b")  # as bytes; timm has 9, 10, A, b
TENSORS = {
    "stem.conv_stem.weight": torch.ones(2, 3),
    "head.classifier.weight": torch.arange(4.0)[:, None].expand(4, 2),
    "head.classifier.bias": torch.arange(4.0),
}


def weights(classes=None, recipe=None):
    return StoredWeights(Path("w.pt"), TENSORS, recipe, classes)


def known_by(stored, recipe):
    return of_model(stored, recipe.data, recipe.model.classes)


@pytest.fixture
def recipe(tiny, tmp_path):
    """recipe(classes=4): of class folders with NAMES, and of a model with so many classes."""
    root = write_pictures(tmp_path / "images", NAMES, train=1, val=1)
    return lambda classes=4: tiny(
        "data.source=folder", f"data.root={root}", f"model.classes={classes}"
    )


def test_a_file_names_its_classes_or_the_data_does_in_timms_order_or_in_its_own(
    recipe, tiny, tmp_path
):
    root = tmp_path / "images"
    assert known_by(weights(["x", "y\x1b", "z", "a"]), recipe()) == Known(("x", "y\\x1b", "z", "a"))
    of_timm = known_by(weights(), recipe())
    own = known_by(weights(recipe="a recipe"), recipe())
    assert of_timm.names == ("9", "10", "A", "b") and own.names == NAMES
    assumed = f"w.pt: does not name its classes; assumed: those of {root}/train in"
    assert of_timm.note == f"{assumed} timm's order (numbers by value, case ignored): 9, 10, A, b"
    assert own.note == f"{assumed} the order of their names as bytes: 10, 9, A, b"
    digits = known_by(weights(), tiny())
    assert (
        digits.names == tuple("0123456789")
        and "data.source=digits in the order of the data's own" in digits.note
    )


def test_a_program_without_names_is_one_of_ours(recipe):
    """Unless the file says that tools.export made it of another program's weights."""
    program = types.SimpleNamespace(
        path=Path("p.onnx"), recipe="a recipe", classes=None, order=None
    )
    assert known_by(program, recipe()).names == NAMES
    program.order = "timm"
    assert known_by(program, recipe()).names == ("9", "10", "A", "b")


def test_validation_images_tell_where_there_are_none_for_training(recipe, tmp_path):
    (tmp_path / "images/train").rename(tmp_path / "images/elsewhere")
    assert known_by(weights(), recipe()).names == ("9", "10", "A", "b")


def test_packed_class_folders_have_timms_order_and_numbered_tars_their_own(tiny, tmp_path):
    """In tars of others a label is a number that a program chose; `pack` numbers class folders by
    their bytes, which indexes that are made anew still say."""
    folder = write_pictures(tmp_path / "images", NAMES, train=1) / "train"
    assert shards.main(["pack", str(folder), str(tmp_path / "shards/train"), "--workers", "1"]) == 0
    recipe = tiny("data.source=shards", f"data.root={tmp_path}/shards", "model.classes=4")
    assert known_by(weights(), recipe).names == ("9", "10", "A", "b")
    index = ["index", str(tmp_path / "shards/train")]
    assert shards.main(index) == 0
    assert known_by(weights(), recipe).names == ("9", "10", "A", "b")
    # Without the files beside it the tar could be anybody's.
    for path in (tmp_path / "shards/train").glob("*.[ij]*"):
        path.unlink()
    (tmp_path / "names").write_text("\n".join(NAMES))
    assert shards.main([*index, "--classes", str(tmp_path / "names")]) == 0
    known = known_by(weights(), recipe)
    assert known.names == NAMES and "in the order of the data's own labels" in known.note


def test_other_numbers_of_classes_are_refused(recipe, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"^w.pt: damaged: names 2 classes, but its model has 4"
    ):
        known_by(weights(["a", "b"]), recipe())
    with pytest.raises(
        DataError,
        match=rf"^{tmp_path}/images/val: 4 classes, but w.pt has 5 and does not name them",
    ):
        known_by(weights(), recipe(5))


def fitted():
    return Fitted(dict(TENSORS), fresh=[], note="")


def rows(found):
    assert found.tensors["head.classifier.weight"].tolist() == [
        [row] * 2 for row in found.tensors["head.classifier.bias"]
    ]
    return found.tensors["head.classifier.bias"].tolist()


def test_rows_of_a_classifier_follow_the_names_of_the_data(recipe):
    data = ClassNames("DATA", NAMES, sorted=True)
    same = for_data(weights(list(NAMES)), fitted(), recipe().model, data)
    assert rows(same) == [0, 1, 2, 3] and same.note == ""
    other = for_data(weights(["b", "A", "9", "10"]), fitted(), recipe().model, data)
    assert rows(other) == [3, 2, 1, 0] and other.fresh == []
    assert other.note == "w.pt: has the classes of DATA in another order; its classifier is sorted"
    of_timm = for_data(weights(), fitted(), recipe().model, data)
    assert rows(of_timm) == [1, 0, 2, 3] and "timm's order" in of_timm.note
    numbered = for_data(weights(), fitted(), recipe().model, data._replace(sorted=False))
    assert rows(numbered) == [0, 1, 2, 3] and "the data's own labels" in numbered.note


def test_a_classifier_of_as_many_but_other_classes_starts_anew(recipe, monkeypatch):
    data = ClassNames("DATA", NAMES, sorted=True)
    found = for_data(weights(["9", "10", "A", "c"]), fitted(), recipe().model, data)
    assert found.fresh == ["head.classifier.weight", "head.classifier.bias"]
    assert list(found.tensors) == ["stem.conv_stem.weight"]
    assert (
        found.note
        == "w.pt: was trained on other classes (9, 10, A, c), so the classifier starts anew"
    )
    monkeypatch.setattr("training.classes.is_classifier", lambda section, name: False)
    with pytest.raises(
        CheckpointError,
        match=r"has classes \(9, 10, A, c\) other than .* a classifier that has no name",
    ):
        for_data(weights(["9", "10", "A", "c"]), fitted(), recipe().model, data)


OVERRIDES = (
    *TINY,
    "model.classes=2",
    "batch.global=4",
    "batch.micro=4",
    "run.steps=1",
    "schedule.warmup_steps=0",
)


def test_a_run_on_other_classes_keeps_all_weights_but_the_classifier(session, tmp_path):
    """The rate is so small that the second run's weights are those that it started from."""
    keys = (*OVERRIDES, "data.source=folder", "precision.weights=float32", "schedule.peak=1e-30")
    for name, classes in (("first", "ab"), ("same", "ab"), ("other", "bc")):
        root = write_pictures(tmp_path / name / "images", classes, train=3, val=1)
        start = () if name == "first" else (f"model.init_from={tmp_path}/first/run", "run.seed=7")
        said = session(*keys, *start, f"data.root={root}", f"run.output={tmp_path}/{name}/run")
        assert ("other classes (a, b), so the classifier starts anew" in said) is (name == "other")
        assert "evaluation after epoch 1.00: top1 " in said and "top5" not in said, "of two classes"

    def trained(name):
        return CheckpointFolder(tmp_path / name / "run/checkpoints", 1, True).load_newest(
            pytest.fail
        )

    first, same, other = (trained(name)["engine"]["weights"] for name in ("first", "same", "other"))
    assert trained("other")["classes"] == ["b", "c"]
    for name, tensor in first.items():
        assert torch.allclose(tensor, same[name], rtol=0, atol=1e-20)
        assert torch.allclose(tensor, other[name], rtol=0, atol=1e-20) is (
            name != "head.classifier.weight"
        )
