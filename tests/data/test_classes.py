"""Classes by name: timm's order, and the images of a source under a model's labels."""

import pickle
import random

import numpy as np
import pytest
from timm.data.readers.reader_image_folder import find_images_and_targets

from common.errors import DataError
from data.base import permutation
from data.classes import in_timm_order, matched, places
from data.folder import FolderSource
from data.sources import open_source
from recipe.config import Data
from tests.pictures import write_pictures
from tools import shards


@pytest.mark.parametrize(
    "names",
    [
        [str(number) for number in range(1, 24)],
        ["ant", "Bee", "cat", "Dog", "_", "Zebra"],
        ["n02", "n1", "N3x10", "n3X9", "10 b", "9 b", "é2", "É10", "٣", "12"],
        [f"class{number}.{part}" for number in (9, 10, 100) for part in "Ba"],
    ],
    ids=str,
)
def test_class_folders_have_the_order_of_timms_own_reader(tmp_path, names):
    for name in random.Random(0).sample(names, len(names)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    _, labels = find_images_and_targets(str(tmp_path))
    order = in_timm_order(random.Random(1).sample(names, len(names)))
    assert {name: label for label, name in enumerate(order)} == labels
    assert list(order) != sorted(names)


def test_names_that_differ_in_case_alone_keep_their_order():
    """timm sorts a set of them, whose order changes from process to process."""
    assert in_timm_order(["B", "a", "b", "2", "02"]) == ("2", "02", "a", "B", "b")
    # Digits that are no decimals, of which timm's own key makes an error, are text.
    assert in_timm_order(["10²", "²", "9①", "m²"]) == ("9①", "10²", "m²", "²")


def test_equal_names_are_told_apart_by_their_order():
    """ImageNet has two classes called crane, and two called maillot."""
    cranes = ("crane", "maillot", "crane", "maillot")
    assert places(cranes, cranes).tolist() == [0, 1, 2, 3]
    assert places(("maillot", "crane", "crane", "crane"), cranes).tolist() == [1, 0, 2, -1]


def test_names_are_equal_in_either_of_unicodes_forms_unless_these_tell_them_apart():
    """A copy by way of macOS has é as two characters, and so another order of bytes."""
    original = ("caf\u00e9", "cafz")
    copy = ("cafe\u0301", "cafz")
    assert places(copy, original).tolist() == places(original, copy).tolist() == [0, 1]
    both = (original[0], copy[0])
    assert places(both, both[::-1]).tolist() == [1, 0]
    assert places(copy, both).tolist() == [1, -1]


def test_images_keep_their_names_pixels_and_order_under_other_labels(tmp_path):
    """Classes a to e of two images each; the model knows e, x, c, a and b, in this order."""
    source = FolderSource(str(write_pictures(tmp_path, "abcde", val=2) / "val"))
    assert matched(source, "abcde") is source
    known = matched(source, ("e", "x", "c", "a", "b"))
    assert known.labels.dtype == np.int64 and known.labels.tolist() == [3, 3, 4, 4, 2, 2, 0, 0]
    kept = [0, 1, 2, 3, 4, 5, 8, 9]
    assert [known.name(index) for index in range(len(known))] == [
        source.name(index) for index in kept
    ]
    assert known.classes == ("e", "x", "c", "a", "b") and known.digest == source.digest
    left_out, absent = known.notes
    assert (
        left_out == f"{tmp_path}/val: left out 2 images of 1 class that the model does not know: d"
    )
    assert absent == f"{tmp_path}/val: has no validation images of 1 class: x"
    for one in (known, pickle.loads(pickle.dumps(known))):
        opened = one.open_all([7, 0, 6])
        for index, image in zip((9, 0, 8), opened):
            assert image.encoded == source.open(index).encoded
        assert (one.read(7) == source.read(9)).all() and (
            one.open(7).pixels() == source.read(9)
        ).all()
        expected = [kept.index(index) for index in permutation(3, 4, 10).tolist() if index in kept]
        assert one.order(3, 4).tolist() == expected


def test_no_image_of_a_known_class_is_an_error_that_names_both(tmp_path):
    source = FolderSource(str(write_pictures(tmp_path, "ab", val=1) / "val"))
    with pytest.raises(
        DataError,
        match=r"/val: none of its images is of .*: it has a, b; the model knows c, d; give",
    ):
        matched(source, "cd")


def pack(images, place):
    """Both splits as shards."""
    for split in ("train", "val"):
        assert shards.main(["pack", str(images / split), str(place / split), "--workers", "1"]) == 0


def test_a_class_may_lack_validation_images(tmp_path):
    """A folder that is missing is the same as an empty one, also for the digest, by which a run is
    resumed."""
    root = write_pictures(tmp_path / "images", "bcd", train=1, val=1)
    (root / "val/c/0.png").unlink()
    data = Data(source="folder", root=str(root))
    empty = open_source(data, 3, "validation")
    (root / "val/c").rmdir()
    missing = open_source(data, 3, "validation")
    for source in (empty, missing):
        assert source.classes == ("b", "c", "d") and source.labels.tolist() == [0, 2]
        assert [source.name(index) for index in (0, 1)] == [
            f"{root}/val/{name}/0.png" for name in "bd"
        ]
        assert source.notes == (f"{root}/val: has no validation images of 1 class: c",)
    assert empty.digest == missing.digest
    pack(root, tmp_path / "shards")
    packed = open_source(Data(source="shards", root=str(tmp_path / "shards")), 3, "validation")
    assert packed.classes == ("b", "c", "d") and sorted(packed.labels.tolist()) == [0, 2]
    assert packed.notes == (f"{tmp_path}/shards/val: has no validation images of 1 class: c",)


def test_validation_shards_in_another_order_of_classes_are_relabelled(tmp_path):
    pack(write_pictures(tmp_path / "images", train=1, val=1), tmp_path / "shards")
    manifest = tmp_path / "shards/val/shards.json"
    manifest.write_text(manifest.read_text().replace('["a", "b"]', '["b", "a"]'))
    data = Data(source="shards", root=str(tmp_path / "shards"))
    before = open_source(
        data.model_copy(update={"validation_folder": "train"}), 2, "validation"
    ).labels
    assert open_source(data, 2, "validation").labels.tolist() == (1 - before).tolist()
