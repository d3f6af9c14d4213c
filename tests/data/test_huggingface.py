"""Data sets of the package datasets: local parquet files with and without descriptions, and errors
in one line."""

import io
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import ConfigError, DataError
from data.base import UnreadableImage, permutation
from data.epochs import RunOrder
from data.folder import FolderSource
from data.loader import EvaluationBatches, TrainingBatches
from data.sources import candidates, class_names, open_source
from recipe.config import Data
from tests.data.image_sets import CLASSES, draw, write_class_folders, write_parquet
from tests.data.test_loader import contents
from tests.data.test_torchvision import assert_holds

TRAIN = draw(60, colours=True)
VALIDATION = draw(30, seed=1)
BOTH = {"train": TRAIN, "validation": VALIDATION}
NAMES = [f"class {number}" for number in range(CLASSES)]


@pytest.fixture(autouse=True)
def _quiet_and_of_this_test(monkeypatch, tmp_path):
    """Nothing is looked for in a network, and tables are made in the folder of the test."""
    datasets = pytest.importorskip("datasets", reason="datasets is not in requirements-ipu.txt")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def section(root, **keys):
    return Data(**{"source": "huggingface", "root": str(root), "workers": 0, **keys})


def opened(root, split="train", classes=CLASSES, **keys):
    return open_source(section(root, **keys), classes, split)


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("validation", ["validation", "test"])
def test_images_of_parquet_files_are_numbered_by_label(tmp_path, described, validation):
    """Without a description an image is a structure of bytes and path, and a label a number."""
    root = write_parquet(
        tmp_path / "set", NAMES if described else None, train=TRAIN, **{validation: VALIDATION}
    )
    for split, drawn in BOTH.items():
        source = opened(root, split)
        assert_holds(source, drawn)
        assert source.classes == tuple(NAMES if described else "0123456789")
    assert source.place == f"{root}/{validation}"
    rows = np.argsort(VALIDATION.labels, kind="stable")
    assert source.name(7) == f"{root}/{validation}/{rows[7]}"


def test_validation_comes_before_test_unless_another_split_is_named(tmp_path):
    root = write_parquet(tmp_path / "set", NAMES, train=TRAIN, validation=VALIDATION, test=TRAIN)
    assert len(opened(root, "validation")) == 30
    assert len(opened(root, "validation", validation_split="test")) == 60
    assert len(opened(root, train_split="validation")) == 30


def test_training_sees_the_bits_of_class_folders_with_any_number_of_workers(tmp_path):
    root = write_parquet(tmp_path / "set", NAMES, **BOTH)
    write_class_folders(tmp_path, **BOTH)

    def loaded(source, workers, kind):
        data = Data(source="digits", workers=workers, augment="randaugment", prefetch=1)
        if kind is EvaluationBatches:
            return contents(kind(source, data=data, image_size=9, batch=7))
        return contents(kind(RunOrder(source, data, 3, 20), range(7), image_size=9, micro=5))

    for split, folder, kind in (
        ("train", "train", TrainingBatches),
        ("validation", "val", EvaluationBatches),
    ):
        source = opened(root, split)
        expected = loaded(FolderSource(str(tmp_path / folder)), 0, kind)
        assert loaded(source, 0, kind) == loaded(source, 2, kind) == expected
        assert source.order(3, 1).tolist() == permutation(3, 1, len(source)).tolist()
        again = pickle.loads(pickle.dumps(source))
        assert [again.encoded(index) for index in range(9)] == [
            source.encoded(index) for index in range(9)
        ]


def test_files_keep_their_bytes(tmp_path):
    """A JPEG stays one: nothing is decoded and encoded again."""
    root = write_parquet(tmp_path / "set", NAMES, kind="JPEG", train=TRAIN)
    source = opened(root)
    number = int(np.argsort(TRAIN.labels, kind="stable")[5])
    stream = io.BytesIO()
    Image.fromarray(TRAIN.images[number]).save(stream, "JPEG")
    assert source.encoded(5) == stream.getvalue()
    assert source.open(5).plain and source.open(5).height == 12


def test_the_digest_is_of_labels_names_and_lengths(tmp_path):
    other = TRAIN._replace(labels=(TRAIN.labels + 1) % CLASSES)
    longer = TRAIN._replace(
        images=np.where(np.arange(60)[:, None, None, None] == 33, 0, TRAIN.images)
    )
    digests = []
    for number, (drawn, names) in enumerate(
        [(TRAIN, NAMES), (TRAIN, NAMES), (TRAIN, NAMES[::-1]), (other, NAMES), (longer, NAMES)]
    ):
        digests.append(opened(write_parquet(tmp_path / str(number), names, train=drawn)).digest)
    assert digests[0] == digests[1] and len(set(digests)) == 4


def test_columns_are_found_or_named(tmp_path):
    root = write_parquet(
        tmp_path / "two", NAMES, columns=("picture", "kind", "thumbnail"), train=TRAIN
    )
    with pytest.raises(DataError) as caught:
        opened(root)
    where = f"{root}/train"
    expected = (
        f"{where}: 2 columns of images; name one of picture, kind, thumbnail by data.image_column"
    )
    assert str(caught.value) == expected
    assert_holds(opened(root, image_column="picture"), TRAIN)
    for key, value, fault in (
        (
            "image_column",
            "pictur",
            "no column 'pictur'; name one of picture, kind, thumbnail by data.image_column",
        ),
        (
            "label_column",
            "picture",
            "column 'picture' holds no whole numbers; name another by data.label_column",
        ),
    ):
        with pytest.raises(DataError) as caught:
            opened(root, **{"image_column": "picture", key: value})
        assert str(caught.value) == f"{where}: {fault}"
    plain = write_parquet(tmp_path / "plain", None, columns=("image", "kind"), train=TRAIN)
    with pytest.raises(
        DataError, match=r"0 columns of labels; name one of image, kind by data\.label_column$"
    ):
        opened(plain)
    assert_holds(opened(plain, label_column="kind"), TRAIN)


def test_labels_that_a_split_lacks_are_known_from_training(tmp_path):
    few = VALIDATION._replace(images=VALIDATION.images[:1], labels=np.array([3], np.uint8))
    for names in (NAMES, None):
        root = write_parquet(tmp_path / str(names is None), names, train=TRAIN, validation=few)
        source = opened(root, "validation")
        assert source.labels.tolist() == [3] and len(source.classes) == CLASSES
        assert "has no validation images of 9 classes" in source.notes[0]
        assert torch.equal(source.read(0)[0], torch.from_numpy(few.images[0]))


def test_a_set_without_training_images_is_scored_by_its_own_classes(tmp_path):
    root = write_parquet(tmp_path / "set", NAMES, test=VALIDATION)
    assert class_names(section(root), "train") is None
    assert [found.names for found in candidates(section(root), CLASSES)] == [tuple(NAMES)]
    assert_holds(open_source(section(root), CLASSES, "validation", known=NAMES), VALIDATION)


def test_rows_without_an_image_are_unreadable_and_paths_are_followed(tmp_path):
    outside = tmp_path / "outside.png"
    Image.fromarray(TRAIN.images[0]).save(outside)
    rows = [
        {"bytes": None, "path": None},
        {"bytes": None, "path": str(outside)},
        {"bytes": b"text", "path": None},
    ]
    rows.append({"bytes": None, "path": "a\0.jpg"})
    root = write_parquet(tmp_path / "set", None, rows=rows)
    source = opened(root, classes=4)
    for index, reason in ((0, "there is no image in this row"), (2, "neither JPEG nor PNG")):
        with pytest.raises(UnreadableImage, match=rf"^{root}/train/{index}: {reason}"):
            source.read(index)
    with pytest.raises(UnreadableImage, match=r"^a\\x00\.jpg: the character NUL in its name$"):
        source.read(3)
    assert torch.equal(source.read(1), torch.from_numpy(TRAIN.images[0]).permute(2, 0, 1))


def test_each_error_is_one_line_with_its_remedy(tmp_path, monkeypatch):
    root = write_parquet(tmp_path / "set", NAMES, train=TRAIN, validation=VALIDATION)
    hidden = write_parquet(
        tmp_path / "hidden", None, train=TRAIN, test=VALIDATION._replace(labels=-np.ones(30, int))
    )
    numbers = write_parquet(
        tmp_path / "numbers", None, train=TRAIN._replace(labels=np.full(60, 30_000_000))
    )
    (tmp_path / "empty").mkdir()
    damaged = write_parquet(tmp_path / "damaged", NAMES, train=TRAIN)
    for path in damaged.rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:200])
    for keys, split, classes, fault in (
        ({}, "train", 9, f"{root}/train: 10 classes, but model.classes is 9; set model.classes=10"),
        (
            {"train_images": 61},
            "train",
            10,
            f"{root}/train: 60 images, but data.train_images is 61; complete",
        ),
        (
            {"train_split": "tain"},
            "train",
            10,
            f"{root}: no split tain, but train, validation; choose one by data.tr",
        ),
        (
            {"validation_split": "x"},
            "validation",
            10,
            f"{root}: no split x, but train, validation; choose one by da",
        ),
        (
            {"root": str(hidden)},
            "validation",
            10,
            f"{hidden}/test: labels from -1 to -1; choose a split that has labe",
        ),
        (
            {"root": str(numbers)},
            "train",
            10,
            f"{numbers}/train: column 'label' has a label 30,000,000 among 60 imag",
        ),
        (
            {"root": "/nowhere"},
            "train",
            10,
            "/nowhere: no such folder of parquet files; correct data.root",
        ),
        ({"root": str(tmp_path / "empty")}, "train", 10, f"{tmp_path}/empty: cannot be loaded ("),
        ({"root": str(damaged)}, "train", 10, f"{damaged}: cannot be loaded ("),
        (
            {"root": None},
            "train",
            10,
            "data.source=huggingface: no images are named; name a data set of the hub by",
        ),
        (
            {"root": None, "dataset": "nobody/nothing"},
            "train",
            10,
            "nobody/nothing: cannot be loaded (",
        ),
    ):
        with pytest.raises(DataError) as caught:
            open_source(
                Data(**{"source": "huggingface", "root": str(root), **keys}), classes, split
            )
        assert str(caught.value).startswith(fault) and "\n" not in str(caught.value)
    with pytest.raises(
        ValueError,
        match=r"dataset and root are both given; keep one: data\.root=null or data\.datas",
    ):
        section(root, dataset="ILSVRC/imagenet-1k")
    with pytest.raises(
        ConfigError, match=r"model\.classes auto: data\.source=huggingface is not read before a run"
    ):
        section(root).count_classes()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        DataError, match=r"the package datasets is not installed; pip install datasets$"
    ):
        opened(root)
