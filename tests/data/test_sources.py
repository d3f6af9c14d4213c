"""Sources: which images in which order, the fixed split of the digits, and errors with remedies."""

import os
import pickle
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from common.errors import ConfigError, DataError
from data.base import UnreadableImage
from data.digits import DigitsSource
from data.folder import FolderSource
from data.sources import open_source
from recipe.config import Data
from tests.data.tar_shards import write_shards


def write(path, colour=(1, 2, 3)):
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "PNG" if path.suffix.lower() == ".png" else "JPEG"
    Image.new("RGB", (6, 4), colour).save(path, kind)


@pytest.fixture
def root(tmp_path):
    """Two classes, three training and two validation images."""
    write(tmp_path / "train/cat/b.png", (9, 8, 7))
    for name in ("train/cat/a.jpg", "train/dog/c.JPEG", "val/cat/d.png", "val/dog/e.png"):
        write(tmp_path / name)
    return tmp_path


def recipe(root, source="folder", **options):
    return Data(source=source, root=str(root), **options)


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
    assert source.notes == (
        f"{root}/train: left out files that are not named .jpg, .jpeg or .png: 1; the first: cat/notes.txt",
        f"{root}/train: left out images beside the class folders: 1; the first: beside.jpg",
    )
    expected = ["cat/a.jpg", "cat/b.png", "cat/more/deep/f.jpg", "dog/c.JPEG", "dog/linked/g.jpg"]
    assert names(source, root / "train") == expected
    assert source.labels.dtype == np.int64 and source.labels.tolist() == [0, 0, 0, 1, 1]
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert torch.equal(
            one.read(1), torch.tensor([9, 8, 7], dtype=torch.uint8)[:, None, None].expand(3, 4, 6)
        )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_text("words"), "neither JPEG nor PNG"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (
            lambda path: (path.touch(), os.truncate(path, 2**31 + 1)),
            "2,147,483,649 bytes, above the limit of .*",
        ),
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


def test_links_that_lead_back_and_other_kinds_of_images_are_left_out_and_counted(root):
    """Links to a folder around them, by way of another folder, to all classes, to what is around
    those; to itself."""
    (root / "train/cat/again").symlink_to(root / "train/cat")
    (root / "elsewhere").mkdir()
    (root / "train/dog/away").symlink_to(root / "elsewhere")
    write(root / "elsewhere/f.jpg")
    (root / "elsewhere/back").symlink_to(root / "train/dog")
    for name, target in (("all", "."), ("up", ".."), ("self", "self")):
        (root / "train" / name).symlink_to(target)
    left_out = ("cat/a.webp", "cat/b.WEBP", "dog/c.bmp", "dog/notes.txt", "cat/c", "cat/d.jpg.1")
    for name in (*left_out, "cat/.hidden.bmp", "cat/Thumbs.db"):
        (root / "train" / name).write_bytes(b"pixels")
    source = FolderSource(str(root / "train"))
    assert names(source, root / "train") == [
        "cat/a.jpg",
        "cat/b.png",
        "dog/away/f.jpg",
        "dog/c.JPEG",
    ]
    assert source.classes == ("cat", "dog")
    files, bmp, webp, links = (
        note.partition(f"{root}/train: left out ")[2] for note in source.notes
    )
    assert files.startswith("files that are not named .jpg, .jpeg or .png: 3; the first: ")
    assert bmp == "images that are not named .jpg, .jpeg or .png: 1 .bmp; the first: dog/c.bmp"
    assert webp.startswith(
        "images that are not named .jpg, .jpeg or .png: 2 .webp; the first: cat/"
    )
    assert links.startswith("links that lead back to a folder around them: 4; the first: ")


NOT_OF_THE_USER = ("lost+found", "@eaDir", "__MACOSX", "$RECYCLE.BIN", ".ipynb_checkpoints")


def test_one_rule_says_what_a_class_folder_is_for_auto_and_for_reading(root):
    """What notebooks, file systems and storage servers put beside the classes, or into them, is
    none of the user's."""
    for name in NOT_OF_THE_USER:
        write(root / "train" / name / "a.jpg")
        write(root / "train/cat" / name / "thumbnail.jpg")
    (root / "train/up").symlink_to("..")
    (root / "train/self").symlink_to("self")
    (root / "train/gone").symlink_to("nowhere")
    (root / "train/notes.txt").write_text("words")
    write(root / "elsewhere/e.jpg")
    (root / "train/emu").symlink_to(root / "elsewhere")
    source = FolderSource(str(root / "train"))
    assert source.classes == ("cat", "dog", "emu") and recipe(root).count_classes() == 3
    assert names(source, root / "train") == ["cat/a.jpg", "cat/b.png", "dog/c.JPEG", "emu/e.jpg"]
    system, links = (note.partition(f"{root}/train: left out ")[2] for note in source.notes)
    assert system.startswith("folders of file systems and storage servers: 8; the first: ")
    assert links.startswith("links that lead back to a folder around them: 1; the first: up")


def test_the_digits_are_the_original_ones_in_a_split_that_never_changes():
    """Class counts as the repository of the data set lists them; ink from 0 to 16 becomes 0 to 255.

    Figures of different runs and versions compare only on the same split, hence the checksums.
    """
    splits = train, validation = DigitsSource("train"), DigitsSource("validation")
    assert (len(train), len(validation)) == (1437, 360)
    counts = np.bincount(np.concatenate([train.labels, validation.labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    # one image of the smallest class
    assert abs(np.bincount(validation.labels) / counts - 0.2).max() < 1 / 174
    numbers = [
        int(split.name(index).partition("digits/")[2])
        for split in splits
        for index in range(len(split))
    ]
    assert sorted(numbers) == list(range(1797))
    images = torch.stack([train.read(index) for index in range(100)])
    assert torch.unique(images).tolist() == [round(ink * 255 / 16 + 1e-9) for ink in range(17)]
    checksums = []
    for source in splits:
        pixels = b"".join(source.read(index).numpy().tobytes() for index in range(len(source)))
        checksums.append(zlib.crc32(pixels + source.labels.astype("<i8").tobytes()))
    assert checksums == [2426950686, 2731348197]


def test_a_recipe_opens_both_splits_and_can_do_without_training_images(root):
    """The expected counts of a recipe for a folder do not bind the digits, which an override may
    choose."""
    assert len(open_source(Data(source="digits", train_images=1281167), 10, "train")) == 1437
    for split, counts in (("train", (3, 2)), ("val", (4,))):
        write_shards(root / "shards" / split, counts)
    for section, train, validation in (
        (recipe(root), 3, 2),
        (recipe(root / "shards", "shards", shuffle_window=1), 5, 4),
        (recipe(f"file://{root}/shards/", "shards", shuffle_window=1), 5, 4),
    ):
        section = section.model_copy(
            update={"train_images": train, "validation_images": validation}
        )
        source = open_source(section, 2, "train")
        assert (len(source), len(open_source(section, 2, "validation"))) == (train, validation)
        assert section.source == "folder" or source.order(0, 0).tolist() in (
            [0, 1, 2, 3, 4],
            [3, 4, 0, 1, 2],
        )
    for place, kind in ((root, "folder"), (root / "shards", "shards")):
        (place / "train").rename(place / "gone")
        assert len(open_source(recipe(place, kind), 2, "validation")) in (2, 4)


@pytest.mark.parametrize("validation", ["val", "val/more", "linked", "train/../val/"])
def test_validation_images_are_not_trained_on(root, validation):
    """By the folders' real places: class `val`, a folder in it, and one that a class of the
    training is a link to."""
    (root / "linked").symlink_to(root / "val")
    (root / "val/more/cat").mkdir(parents=True)
    section = recipe(root, train_folder=".", validation_folder=validation)
    fault = rf"^{root}: its class folder '(val|linked)' holds the validation images .*; set data\.train_folder to a"
    with pytest.raises(DataError, match=fault):
        open_source(section, 3, "train")
    with pytest.raises(ConfigError, match=r"model\.classes auto: .* holds the validation images"):
        section.count_classes()


def test_a_link_in_the_training_folder_leads_to_no_validation_images(root):
    (root / "train/val").symlink_to(root / "val")
    with pytest.raises(
        DataError,
        match=rf"^{root}/train: its class folder 'val' holds the validation images {root}/v",
    ):
        open_source(recipe(root), 3, "train")


def test_validation_images_may_be_the_training_images_or_lie_beside_a_folder_that_begins_alike(
    root,
):
    """Who names the training folder itself wants its score."""
    for validation in ("train", "train-2", ".hidden"):
        write(root / validation / "cat/a.jpg")
        assert len(open_source(recipe(root, validation_folder=validation), 2, "train")) == 3
    write(root / "train/.val/cat/a.jpg")
    assert len(open_source(recipe(root, validation_folder="train/.val"), 2, "train")) == 3


INDEX = "python -m tools.shards index FOLDER"
# Section but for the root, classes, split; fault and remedy of the error.
REFUSED = [
    ({}, 2, "train", "data.root is not set", "data.root=/path/to/images"),
    ({"root": "/nowhere"}, 2, "train", "/nowhere: no such folder", "data.root"),
    ({"train_folder": "x"}, 2, "train", "{root}: no folder 'x'", "data.train_folder"),
    ({"validation_folder": "x"}, 2, "validation", "{root}: no folder 'x'", "data.validation_folder"),
    ({"train_folder": "none"}, 2, "train", "{root}/none: no class folders", "one folder"),
    ({"train_folder": "hollow"}, 1, "train", "{root}/hollow/cat: no .jpg, .jpeg or .png", "fill it"),
    ({}, 1000, "train", "{root}/train: 2 classes, but model.classes is 1000", "set model.classes=2"),
    ({"source": "digits"}, 1000, "train", "data.source=digits: 10 classes, but", "set model.classes=10"),
    ({"train_images": 1281167}, 2, "train", "{root}/train: 3 images, but data.train_images is", "data.train_images=3"),
    ({"validation_folder": "more"}, 2, "validation", "{root}/more: 1 class without training images: emu", "same class"),
    ({"validation_folder": "other"}, 2, "validation", "{root}/other: 2 classes without training images: ant,", "same"),
    ({"validation_folder": "hollow"}, 2, "validation", "{root}/hollow: no .jpg, .jpeg or .png files in its", "fill"),
    ({}, 3, "validation", "{root}/train: 2 classes, but model.classes is 3", "set model.classes=2"),
    ({"train_folder": "none", "source": "shards"}, 2, "train", "{root}/none/shards.json: No such file", INDEX),
    ({"source": "shards", "root": "file://{root}"}, 2, "train", "file://{root}/train/shards.json: no such file", INDEX),
    ({"train_images": 5, "source": "shards", "train_folder": "two"}, 2, "train",
     "{root}/two: 4 images, but data.train_images is 5", "data.train_images=4"),
    ({"train_folder": "two", "validation_folder": "three", "source": "shards"}, 3, "validation",
     "{root}/two: 2 classes, but model.classes is 3", "set model.classes=2"),
    ({"train_folder": "two", "validation_folder": "three", "source": "shards"}, 2, "validation",
     "{root}/three: 1 class without training images: 2", "same class names"),
    ({"train_folder": "two", "validation_folder": "named", "source": "shards"}, 2, "validation",
     "{root}/named: 1 class without training images: dog", "same class names"),
]  # fmt: skip


def test_each_error_of_a_recipe_is_one_line_with_its_remedy(root):
    for folder in ("none", "hollow/cat"):
        (root / folder).mkdir(parents=True)
    for name in ("more/cat", "more/dog", "more/emu", "other/ant", "other/bee"):
        write(root / name / "a.jpg")
    for name, classes in (("two", 2), ("three", 3), ("named", 2)):
        write_shards(root / name, (4,), classes=classes)
    manifest = root / "named/shards.json"
    manifest.write_text(manifest.read_text().replace('["0", "1"]', '["0", "dog"]'))
    for number, (section, classes, split, fault, remedy) in enumerate(REFUSED):
        place = {"root": section.get("root", "{root}").format(root=root)} if number else {}
        with pytest.raises(DataError) as caught:
            open_source(Data(**{"source": "folder", **section, **place}), classes, split)
        fault = fault.format(root=root)
        message = str(caught.value)
        assert message.startswith(fault) and remedy in message[len(fault) :] and "\n" not in message
