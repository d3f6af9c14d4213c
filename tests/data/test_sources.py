"""Sources: which images in which order, the fixed split of the digits, and errors with remedies."""

import os
import pickle
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import data.base
import data.folder
from data.base import UnreadableImage
from data.digits import DigitsSource
from data.folder import FolderSource
from data.shards import ShardsSource
from data.sources import open_source
from recipe.config import Data
from recipe.errors import DataError
from tests.data.tar_shards import write_shards


def write(path, colour=(1, 2, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "PNG" if path.suffix.lower() == ".png" else "JPEG"
    Image.new("RGB", (6, 4), colour).save(path, kind)


@pytest.fixture
def root(tmp_path):
    """Two classes, three training and two validation images."""
    write(tmp_path / "train/cat/b.png", (9, 8, 7))
    write(tmp_path / "train/cat/a.jpg")
    write(tmp_path / "train/dog/c.JPEG")
    write(tmp_path / "val/cat/d.png")
    write(tmp_path / "val/dog/e.png")
    return tmp_path


def recipe(root, **options):
    return Data(source="folder", root=str(root), **options)


def names(source, folder=""):
    return [os.path.relpath(source.name(index), str(folder)) for index in range(len(source))]


def test_a_folder_is_read_in_the_order_of_classes_and_names_at_any_depth(root):
    write(root / "train/cat/more/deep/f.jpg")
    write(root / "elsewhere/g.jpg")
    (root / "train/dog/linked").symlink_to(root / "elsewhere")
    for hidden in ("train/cat/.hidden.jpg", "train/.thumbnails/h.jpg", "train/beside.jpg"):
        write(root / hidden)
    (root / "train/cat/notes.txt").write_text("words")
    source = FolderSource(str(root / "train"))
    assert source.classes == ("cat", "dog")
    expected = ["cat/a.jpg", "cat/b.png", "cat/more/deep/f.jpg", "dog/c.JPEG", "dog/linked/g.jpg"]
    assert names(source, root / "train") == expected
    assert source.labels.tolist() == [0, 0, 0, 1, 1]
    assert source.labels.dtype == np.int64
    for one in (source, pickle.loads(pickle.dumps(source))):
        image = one.read(1)
        assert (image.dtype, image.shape) == (torch.uint8, (3, 4, 6))
        assert image[:, 0, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_text("words"), "neither JPEG nor PNG"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: (path.touch(), os.truncate(path, 2**31 + 1)), "2,147,483,649 bytes, above the limit of .*"),
    ],
    ids=["gone", "text", "pipe", "device", "folder", "huge"],
)
def test_only_regular_files_are_images_and_others_are_named(root, make, reason):
    """A pipe would be waited for until somebody writes to it; /dev/zero never ends."""
    source = FolderSource(str(root / "train"))
    (root / "train/cat/a.jpg").unlink()
    make(root / "train/cat/a.jpg")
    with pytest.raises(UnreadableImage, match=rf"cat/a\.jpg: {reason}$"):
        source.read(0)


def test_links_that_lead_back_are_left_out_and_named(root):
    """To a folder around them, by way of another folder, to all classes, to what is around those, to itself."""
    (root / "train/cat/again").symlink_to(root / "train/cat")
    (root / "elsewhere").mkdir()
    (root / "train/dog/away").symlink_to(root / "elsewhere")
    write(root / "elsewhere/f.jpg")
    (root / "elsewhere/back").symlink_to(root / "train/dog")
    for name, target in (("all", "."), ("up", ".."), ("self", "self")):
        (root / "train" / name).symlink_to(target)
    source = FolderSource(str(root / "train"))
    assert names(source, root / "train") == ["cat/a.jpg", "cat/b.png", "dog/away/f.jpg", "dog/c.JPEG"]
    assert source.classes == ("cat", "dog")
    (note,) = source.notes
    assert note.startswith(f"{root}/train: left out links that lead back to a folder around them: 5; the first: ")


def test_other_kinds_of_images_are_counted_in_a_line(root):
    assert FolderSource(str(root / "train")).notes == ()
    for name in ("cat/a.webp", "cat/b.WEBP", "dog/more/c.bmp", "dog/notes.txt", "cat/.hidden.bmp"):
        (root / "train" / name).parent.mkdir(exist_ok=True)
        (root / "train" / name).write_bytes(b"pixels")
    (note,) = FolderSource(str(root / "train")).notes
    assert note.startswith(f"{root}/train: left out images that are neither JPEG nor PNG: 1 .bmp, 2 .webp; the first: ")
    assert "dog/more/c.bmp" in note and "\n" not in note


def test_the_paths_of_imagenet_fit_into_little_memory(monkeypatch):
    """A fifth of ImageNet's names. Measured: 12 MB kept, where a list of str takes 22 MB."""

    def paths(scan, name):
        return (b"%s/%s_%d.JPEG" % (name, name, number) for number in range(10000, 11281))

    monkeypatch.setattr(data.folder._Scan, "classes", lambda scan: [f"n{n:08}" for n in range(200)])
    monkeypatch.setattr(data.folder._Scan, "images", paths)
    tracemalloc.start()
    source = FolderSource("/imagenet/train")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == 256_200
    assert source.name(256_199) == "/imagenet/train/n00000199/n00000199_11280.JPEG"
    assert kept < 14e6
    assert peak < 30e6


def test_the_digits_are_the_original_ones_in_a_split_that_never_changes():
    """Class counts as the repository of the data set lists them; ink from 0 to 16 becomes 0 to 255. Figures of
    different runs and versions compare only on the same split, hence the checksums."""
    splits = train, validation = DigitsSource("train"), DigitsSource("validation")
    assert (len(train), len(validation)) == (1437, 360)
    counts = np.bincount(np.concatenate([train.labels, validation.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert abs(np.bincount(validation.labels) / counts - 0.2).max() < 1 / 174  # one image of the smallest class
    numbers = [int(split.name(index).partition("digits/")[2]) for split in splits for index in range(len(split))]
    assert sorted(numbers) == list(range(1797))
    image = train.read(0)
    assert (image.shape, image.dtype) == ((3, 8, 8), torch.uint8)
    levels = torch.unique(torch.stack([train.read(index) for index in range(100)])).tolist()
    assert levels == [round(ink * 255 / 16 + 1e-9) for ink in range(17)]
    checksums = []
    for source in splits:
        pixels = b"".join(source.read(index).numpy().tobytes() for index in range(len(source)))
        checksums.append(zlib.crc32(pixels + source.labels.astype("<i8").tobytes()))
    assert checksums == [2426950686, 2731348197]


def test_a_good_recipe_opens_both_splits_and_can_do_without_training_images(root):
    """The expected counts of a recipe for a folder do not bind the digits, which an override may choose."""
    train = open_source(recipe(root, train_images=3), 2, "train")
    validation = open_source(recipe(root, validation_images=2), 2, "validation")
    assert (len(train), len(validation)) == (3, 2)
    assert train.classes == validation.classes
    assert len(open_source(Data(source="digits"), 10, "validation")) == 360
    assert len(open_source(Data(source="digits", train_images=1281167), 10, "train")) == 1437
    (root / "train").rename(root / "gone")
    assert len(open_source(recipe(root), 2, "validation")) == 2


def test_each_error_of_a_recipe_is_one_line_with_its_remedy(root):
    (root / "none").mkdir()
    write(root / "few/cat/a.jpg")
    write(root / "other/cat/a.jpg")
    write(root / "other/emu/a.jpg")
    (root / "hollow/cat").mkdir(parents=True)
    cases = [
        (Data(), 2, "train", "data.root is not set", "data.root=/path/to/images"),
        (recipe("/nowhere"), 2, "train", "/nowhere: no such folder", "data.root"),
        (recipe(root, train_folder="x"), 2, "train", f"{root}: no folder 'x'", "data.train_folder"),
        (recipe(root, validation_folder="x"), 2, "validation", f"{root}: no folder 'x'", "data.validation_folder"),
        (recipe(root, train_folder="none"), 2, "train", f"{root}/none: no class folders", "one folder"),
        (recipe(root, train_folder="hollow"), 1, "train", f"{root}/hollow/cat: no .jpg, .jpeg or .png", "fill it"),
        (recipe(root), 1000, "train", f"{root}/train: 2 classes, but model.classes is 1000", "set model.classes=2"),
        (Data(source="digits"), 1000, "train", "data.source=digits: 10 classes, but", "set model.classes=10"),
        (recipe(root, train_images=1281167), 2, "train",
         f"{root}/train: 3 images, but data.train_images is 1281167", "set data.train_images=3"),
        (recipe(root, validation_images=50000), 2, "validation",
         f"{root}/val: 2 images, but data.validation_images is 50000", "set data.validation_images=2"),
        (recipe(root, validation_folder="few"), 2, "validation",
         f"{root}/train/dog: this class is not in {root}/few", "same class folders"),
        (recipe(root, validation_folder="other"), 2, "validation",
         f"{root}/other/emu: this class is not in {root}/train", "same class folders"),
    ]  # fmt: skip
    refused(cases)


def refused(cases):
    for section, classes, split, fault, remedy in cases:
        with pytest.raises(DataError) as caught:
            open_source(section, classes, split)
        message = str(caught.value)
        assert message.startswith(fault) and remedy in message[len(fault) :] and "\n" not in message


def shards(root, **options):
    return Data(source="shards", root=str(root), **options)


@pytest.fixture
def packed(tmp_path):
    """Five training and four validation images of two classes, in shards."""
    write_shards(tmp_path / "train", (3, 2))
    write_shards(tmp_path / "val", (4,))
    return tmp_path


def test_a_recipe_opens_shards(packed):
    roots = (packed, f"file://{packed}", f"file://{packed}/")
    for root in roots:
        train = open_source(shards(root, train_images=5, shuffle_window=1), 2, "train")
        validation = open_source(shards(root, validation_images=4), 2, "validation")
        assert isinstance(train, ShardsSource)
        assert (len(train), len(validation)) == (5, 4)
        assert train.order(0, 0).tolist() in ([0, 1, 2, 3, 4], [3, 4, 0, 1, 2])
        assert validation.name(0).startswith(f"{str(root).rstrip('/')}/val/part-0.tar/")
    whole = open_source(shards(packed, shuffle_window=5), 2, "train").order(0, 0)
    np.testing.assert_array_equal(whole, data.base.permutation(0, 0, 5))
    (packed / "train").rename(packed / "gone")
    for root in roots:
        assert len(open_source(shards(root), 2, "validation")) == 4


def test_each_error_of_a_recipe_of_shards_is_one_line_with_its_remedy(packed):
    write_shards(packed / "three", (4,), classes=3)
    write_shards(packed / "named", (4,))
    manifest = packed / "named/shards.json"
    manifest.write_text(manifest.read_text().replace('["0", "1"]', '["0", "dog"]'))
    (packed / "empty").mkdir()
    url, index = f"file://{packed}", "python -m tools.shards index FOLDER"
    cases = [
        (shards(packed, train_folder="empty"), 2, "train", f"{packed}/empty/shards.json: No such file", index),
        (shards(url, train_folder="empty"), 2, "train", f"{url}/empty/shards.json: no such file", index),
        (shards(packed, train_images=6), 2, "train", f"{packed}/train: 5 images, but data.train_images is 6",
         "data.train_images=5"),
        (shards(packed, validation_folder="three"), 3, "validation",
         f"{packed}/three: 3 classes, but {packed}/train has 2", "same classes"),
        (shards(packed, validation_folder="named"), 2, "validation",
         f"{packed}/named: label 1 is 'dog', but in {packed}/train it is '1'", "same classes"),
    ]  # fmt: skip
    refused(cases)
