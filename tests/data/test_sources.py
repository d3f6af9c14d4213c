"""Sources: what is found and in which order, the fixed split of the digits, and errors with remedies."""

import os
import pickle
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

import data.base
import data.sources
from data.base import UnreadableImage
from data.shards import ShardsSource
from data.sources import DigitsSource, FolderSource, open_source
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


def names(source):
    return [source.name(index) for index in range(len(source))]


def test_a_folder_is_read_in_the_order_of_classes_and_names(root):
    source = FolderSource(str(root / "train"))
    assert source.classes == ("cat", "dog")
    assert names(source) == [str(root / "train" / name) for name in ("cat/a.jpg", "cat/b.png", "dog/c.JPEG")]
    np.testing.assert_array_equal(source.labels, [0, 0, 1])
    assert source.labels.dtype == np.int64
    assert len(source) == 3


def test_an_image_is_read_as_rgb_planes(root):
    image = FolderSource(str(root / "train")).read(1)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 4, 6)
    assert image[:, 0, 0].tolist() == [9, 8, 7]


def test_folders_inside_a_class_folder_belong_to_the_class(root):
    write(root / "train/cat/more/deep/f.jpg")
    (root / "elsewhere").mkdir()
    write(root / "elsewhere/g.jpg")
    (root / "train/dog/linked").symlink_to(root / "elsewhere")
    source = FolderSource(str(root / "train"))
    found = [os.path.relpath(name, str(root / "train")) for name in names(source)]
    assert found == ["cat/a.jpg", "cat/b.png", "cat/more/deep/f.jpg", "dog/c.JPEG", "dog/linked/g.jpg"]
    np.testing.assert_array_equal(source.labels, [0, 0, 0, 1, 1])


def test_hidden_and_other_files_are_ignored(root):
    write(root / "train/cat/.hidden.jpg")
    write(root / "train/.thumbnails/h.jpg")
    write(root / "train/beside.jpg")
    (root / "train/cat/notes.txt").write_text("words")
    assert len(FolderSource(str(root / "train"))) == 3


def test_names_that_are_not_utf8_are_read_all_the_same(root):
    os.rename(str(root / "train/cat/a.jpg"), os.fsencode(str(root / "train/cat")) + b"/\xff.jpg")
    source = FolderSource(str(root / "train"))
    assert source.read(1).shape == (3, 4, 6)
    assert source.name(1).endswith("cat/\\xff.jpg")


def test_a_file_that_cannot_be_opened_or_decoded_is_named(root):
    source = FolderSource(str(root / "train"))
    (root / "train/cat/a.jpg").unlink()
    (root / "train/cat/b.png").write_text("words")
    with pytest.raises(UnreadableImage, match=r"cat/a\.jpg: No such file or directory$"):
        source.read(0)
    with pytest.raises(UnreadableImage, match=r"cat/b\.png: neither JPEG nor PNG$"):
        source.read(1)


def test_a_source_can_be_sent_to_another_process(root):
    source = pickle.loads(pickle.dumps(FolderSource(str(root / "train"))))
    assert torch.equal(source.read(1), FolderSource(str(root / "train")).read(1))


def test_the_paths_of_imagenet_fit_into_little_memory(monkeypatch):
    """1.28 million names of ImageNet's form. Measured: 59 MB kept, where a list of str takes 112 MB."""
    monkeypatch.setattr(data.sources, "class_folders", lambda *_: [f"n{n:08}" for n in range(1000)])
    monkeypatch.setattr(
        data.sources,
        "_image_paths",
        lambda folder, name, *_: (b"%s/%s_%d.JPEG" % (name, name, number) for number in range(10000, 11281)),
    )
    monkeypatch.setattr(data.sources, "_around", lambda folder: frozenset())
    tracemalloc.start()
    source = FolderSource("/imagenet/train")
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(source) == 1_281_000
    assert source.name(1_280_999) == "/imagenet/train/n00000999/n00000999_11280.JPEG"
    assert kept < 70e6
    assert peak < 150e6


def test_the_digits_are_the_original_ones():
    """Class counts as the repository of the data set lists them; ink from 0 to 16 becomes 0 to 255."""
    splits = [DigitsSource("train"), DigitsSource("validation")]
    labels = np.concatenate([source.labels for source in splits])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    image = splits[0].read(0)
    assert image.shape == (3, 8, 8)
    assert image.dtype == torch.uint8
    levels = torch.unique(torch.stack([splits[0].read(index) for index in range(100)])).tolist()
    assert levels == [round(ink * 255 / 16 + 1e-9) for ink in range(17)]


def test_the_split_of_the_digits_never_changes():
    """Figures of different runs and versions compare only on the same split, hence the checksums."""
    checksums = {}
    for split in ("train", "validation"):
        source = DigitsSource(split)
        pixels = b"".join(source.read(index).numpy().tobytes() for index in range(len(source)))
        checksums[split] = zlib.crc32(pixels + source.labels.astype("<i8").tobytes())
    assert checksums == {"train": 2426950686, "validation": 2731348197}


def test_the_split_of_the_digits_is_stratified_and_whole():
    train, validation = DigitsSource("train"), DigitsSource("validation")
    assert (len(train), len(validation)) == (1437, 360)
    assert set(names(train)).isdisjoint(names(validation))
    assert set(names(train)) | set(names(validation)) == {f"digits/{number}" for number in range(1797)}
    shares = np.bincount(validation.labels) / np.bincount(np.concatenate([train.labels, validation.labels]))
    assert abs(shares - 0.2).max() < 1 / 174  # one image of the smallest class


def test_a_good_recipe_opens_both_splits(root):
    train = open_source(recipe(root, train_images=3), 2, "train")
    validation = open_source(recipe(root, validation_images=2), 2, "validation")
    assert (len(train), len(validation)) == (3, 2)
    assert train.classes == validation.classes
    assert len(open_source(Data(source="digits"), 10, "validation")) == 360


def test_expected_counts_are_of_the_folders_and_do_not_bind_the_digits():
    """A recipe for a folder, tried on the embedded digits by one override."""
    assert len(open_source(Data(source="digits", train_images=1281167), 10, "train")) == 1437


def test_a_validation_folder_can_do_without_training_images(root):
    (root / "train").rename(root / "gone")
    assert len(open_source(recipe(root), 2, "validation")) == 2


def test_each_error_of_a_recipe_says_its_remedy_in_one_line(root):
    (root / "none").mkdir()
    write(root / "few/cat/a.jpg")
    write(root / "other/cat/a.jpg")
    write(root / "other/emu/a.jpg")
    (root / "hollow/cat").mkdir(parents=True)
    cases = [
        (Data(), 2, "train", "data.root is not set; name the folder of the images: data.root=/path/to/images"),
        (recipe("/nowhere"), 2, "train", "/nowhere: no such folder; correct data.root"),
        (recipe(root, train_folder="x"), 2, "train",
         f"{root}: no folder 'x'; set data.train_folder to the folder of the train images"),
        (recipe(root, validation_folder="x"), 2, "validation",
         f"{root}: no folder 'x'; set data.validation_folder to the folder of the validation images"),
        (recipe(root, train_folder="none"), 2, "train",
         f"{root}/none: no class folders; it must hold one folder of images per class"),
        (recipe(root, train_folder="hollow"), 1, "train",
         f"{root}/hollow/cat: no .jpg, .jpeg or .png files in this class folder; fill it or remove it"),
        (recipe(root), 1000, "train", f"{root}/train: 2 classes, but model.classes is 1000; set model.classes=2"),
        (Data(source="digits"), 1000, "train",
         "data.source=digits: 10 classes, but model.classes is 1000; set model.classes=10"),
        (recipe(root, train_images=1281167), 2, "train",
         f"{root}/train: 3 images, but data.train_images is 1281167; "
         "complete the images or set data.train_images=3"),
        (recipe(root, validation_images=50000), 2, "validation",
         f"{root}/val: 2 images, but data.validation_images is 50000; "
         "complete the images or set data.validation_images=2"),
        (recipe(root, validation_folder="few"), 2, "validation",
         f"{root}/train/dog: this class is not in {root}/few; "
         "training and validation need the same class folders"),
        (recipe(root, validation_folder="other"), 2, "validation",
         f"{root}/other/emu: this class is not in {root}/train; "
         "training and validation need the same class folders"),
    ]  # fmt: skip
    for section, classes, split, message in cases:
        with pytest.raises(DataError) as caught:
            open_source(section, classes, split)
        assert str(caught.value) == message


def shards(root, **options):
    return Data(source="shards", root=str(root), **options)


@pytest.fixture
def packed(tmp_path):
    """Five training and four validation images of two classes, in shards."""
    write_shards(tmp_path / "train", (3, 2))
    write_shards(tmp_path / "val", (4,))
    return tmp_path


def test_a_recipe_opens_shards(packed):
    for root in (packed, f"file://{packed}", f"file://{packed}/"):
        train = open_source(shards(root, train_images=5, shuffle_window=1), 2, "train")
        validation = open_source(shards(root, validation_images=4), 2, "validation")
        assert isinstance(train, ShardsSource)
        assert (len(train), len(validation)) == (5, 4)
        assert train.order(0, 0).tolist() in ([0, 1, 2, 3, 4], [3, 4, 0, 1, 2])
        assert validation.name(0).startswith(f"{str(root).rstrip('/')}/val/part-0.tar/")


def test_the_recipes_window_is_the_sources(packed):
    orders = [open_source(shards(packed, shuffle_window=window), 2, "train").order(0, 0) for window in (1, 5)]
    np.testing.assert_array_equal(orders[1], data.base.permutation(0, 0, 5))
    assert orders[0].tolist() != orders[1].tolist()


def test_validation_shards_can_do_without_training_shards(packed):
    (packed / "train").rename(packed / "gone")
    for root in (packed, f"file://{packed}"):
        assert len(open_source(shards(root), 2, "validation")) == 4


def test_each_error_of_a_recipe_of_shards_says_its_remedy_in_one_line(packed):
    write_shards(packed / "three", (4,), classes=3)
    write_shards(packed / "named", (4,))
    manifest = packed / "named/shards.json"
    manifest.write_text(manifest.read_text().replace('["0", "1"]', '["0", "dog"]'))
    (packed / "empty").mkdir()
    url = f"file://{packed}"
    cases = [
        (Data(source="shards"), 2, "train", "data.root is not set; name the folder of the images: "
         "data.root=/path/to/images"),
        (shards("/nowhere"), 2, "train", "/nowhere: no such folder; correct data.root"),
        (shards(packed, train_folder="x"), 2, "train",
         f"{packed}: no folder 'x'; set data.train_folder to the folder of the train images"),
        (shards(packed, train_folder="empty"), 2, "train", f"{packed}/empty/shards.json: No such file or directory; "
         "make it: python -m tools.shards index FOLDER"),
        (shards(url, train_folder="empty"), 2, "train", f"{url}/empty/shards.json: no such file; "
         "make it: python -m tools.shards index FOLDER"),
        (shards(packed), 1000, "train", f"{packed}/train: 2 classes, but model.classes is 1000; set model.classes=2"),
        (shards(packed, train_images=6), 2, "train", f"{packed}/train: 5 images, but data.train_images is 6; "
         "complete the images or set data.train_images=5"),
        (shards(packed, validation_folder="three"), 3, "validation",
         f"{packed}/three: 3 classes, but {packed}/train has 2; both need the same classes"),
        (shards(packed, validation_folder="named"), 2, "validation",
         f"{packed}/named: label 1 is 'dog', but in {packed}/train it is '1'; both need the same classes"),
    ]  # fmt: skip
    for section, classes, split, message in cases:
        with pytest.raises(DataError) as caught:
            open_source(section, classes, split)
        assert str(caught.value) == message


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
    found = [os.path.relpath(name, str(root / "train")) for name in names(source)]
    assert found == ["cat/a.jpg", "cat/b.png", "dog/away/f.jpg", "dog/c.JPEG"]
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
    assert note.endswith("; convert them if they belong to the data")
    assert "dog/more/c.bmp" in note and "\n" not in note


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge"])
def test_only_regular_files_are_images(root, kind):
    """A pipe would be waited for until somebody writes to it; /dev/zero never ends."""
    path = root / "train/cat/a.jpg"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(2**31 + 1)
    said = {"folder": "Is a directory", "huge": "2,147,483,649 bytes, above the limit of 2,147,483,648"}
    with pytest.raises(UnreadableImage, match=rf"cat/a\.jpg: {said.get(kind, 'not a regular file')}$"):
        FolderSource(str(root / "train")).read(0)
