"""Any source is packed: images in memory without loss, in a mixture or in their own order."""

import json

import pytest
import torch

from data.base import permutation
from data.digits import DigitsSource
from data.folder import FolderSource
from data.shards import ShardsSource
from data.sources import class_names, open_source
from recipe import loading
from recipe.config import Data
from tests.conftest import QUICKSTART
from tests.data.image_sets import draw, write_class_folders, write_idx
from tests.data.tar_shards import run, write_shards
from tests.world import fork_server
from tools import packing


def pack(capsys, *arguments, workers=1):
    return run(capsys, "pack", *arguments, "--images-per-shard", 25, "--workers", workers)


def read_all(source):
    return [source.read(index) for index in range(len(source))]


def assert_same_images(source, expected):
    """Pixels, labels and names of classes, in the same order."""
    assert source.classes == expected.classes
    assert source.labels.tolist() == expected.labels.tolist()
    for one, other in zip(read_all(source), read_all(expected)):
        assert torch.equal(one, other)


@pytest.fixture
def fashion(tmp_path):
    """Sixty grey images as a data set of torchvision: the words of a recipe."""
    folder = write_idx(tmp_path / "idx", packed=True, train=draw(60), validation=draw(30, seed=1))
    return (
        "--config",
        QUICKSTART,
        "data.source=torchvision",
        "data.dataset=FashionMNIST",
        f"data.root={folder}",
        "data.train_images=60",
        "data.validation_images=30",
    )


def packed_from(capsys, out, recipe, *options, workers=1):
    """Pack into a folder; its source, read in order."""
    config = recipe[:2]
    keys = recipe[2:]
    code, data, errors = pack(capsys, *config, *options, out, *keys, workers=workers)
    assert (code, errors) == (0, []) and data["skipped"] == 0
    return ShardsSource(str(out), 2**31)


def test_images_in_memory_are_packed_without_loss_in_their_own_order(fashion, tmp_path, capsys):
    recipe = loading.load(QUICKSTART, fashion[2:])
    for split, options in (("train", ()), ("validation", ("--split", "validation"))):
        expected = open_source(recipe.data, 10, split)
        source = packed_from(capsys, tmp_path / split, fashion, "--keep-order", *options)
        assert_same_images(source, expected)
        assert source.order(5, 3).tolist() == permutation(5, 3, len(expected)).tolist()
        assert [shard["images"] for shard in manifest(tmp_path / split)] in ([25, 25, 10], [25, 5])
        names = [source.name(index).rpartition("-")[2] for index in range(len(source))]
        assert names == [
            f"{expected.name(index).rpartition('/')[2]}.png" for index in range(len(source))
        ]
        assert all(source.encoded(index)[25] == 0 for index in range(len(source))), (
            "grey is stored as grey"
        )


def manifest(folder):
    return json.loads((folder / "shards.json").read_text())["shards"]


def test_without_the_option_images_lie_in_a_mixture(fashion, tmp_path, capsys):
    source = packed_from(capsys, tmp_path / "mixed", fashion)
    expected = open_source(loading.load(QUICKSTART, fashion[2:]).data, 10, "train")
    assert len(set(source.labels[:25].tolist())) > 5
    order = [int(source.name(index).rpartition("/")[2].partition("-")[0]) for index in range(60)]
    assert sorted(order) == list(range(60)) != order
    for index, number in enumerate(order):
        assert torch.equal(source.read(index), expected.read(number))
        assert source.labels[index] == expected.labels[number]


def test_folders_are_packed_in_order_with_their_bytes(tmp_path, capsys):
    write_class_folders(tmp_path, train=draw(60, colours=True))
    folder = FolderSource(str(tmp_path / "train"))
    code, _, _ = pack(capsys, "--keep-order", tmp_path / "train", tmp_path / "shards")
    source = ShardsSource(str(tmp_path / "shards"), 100)
    assert code == 0
    assert_same_images(source, folder)
    assert [source.encoded(index) for index in range(60)] == [
        folder.encoded(index) for index in range(60)
    ]


def test_shards_are_packed_anew(fashion, tmp_path, capsys):
    """From a mixture into another one, of which each file keeps its bytes."""
    first = packed_from(capsys, tmp_path / "first" / "train", fashion)
    again = ("--config", QUICKSTART, "data.source=shards", f"data.root={tmp_path / 'first'}")
    second = packed_from(capsys, tmp_path / "second", again, "--keep-order")
    assert_same_images(second, first)


def is_sorted(folder):
    """Whether labels of shards are known to follow the names of the classes."""
    return class_names(Data(source="shards", root=str(folder)), "train").sorted


def test_shards_say_whether_the_classes_of_their_source_are_numbered_by_name(
    fashion, tmp_path, capsys
):
    """Only then timm numbers them in an order of its own.

    Data sets and shards of others have theirs.
    """
    packed_from(capsys, tmp_path / "fashion" / "train", fashion)
    assert not is_sorted(tmp_path / "fashion")
    write_class_folders(tmp_path / "images", train=draw(60), validation=draw(30, seed=1))
    folders = ("--config", QUICKSTART, "data.source=folder", f"data.root={tmp_path / 'images'}")
    again = ("--config", QUICKSTART, "data.source=shards", f"data.root={tmp_path / 'by recipe'}")
    packed_from(capsys, tmp_path / "by recipe" / "train", folders)
    packed_from(capsys, tmp_path / "validation" / "train", folders, "--split", "validation")
    packed_from(capsys, tmp_path / "again" / "train", again)
    assert pack(capsys, tmp_path / "images" / "train", tmp_path / "by folder" / "train")[0] == 0
    for place in ("by recipe", "validation", "again", "by folder"):
        assert is_sorted(tmp_path / place)
    write_shards(tmp_path / "strange" / "train", (20,), classes=10)
    strange = ("--config", QUICKSTART, "data.source=shards", f"data.root={tmp_path / 'strange'}")
    packed_from(capsys, tmp_path / "repacked" / "train", strange)
    assert not is_sorted(tmp_path / "repacked")


def test_images_that_come_along_are_packed(tmp_path, capsys):
    recipe = ("--config", QUICKSTART)
    source = packed_from(
        capsys, tmp_path / "digits", recipe, "--keep-order", "--split", "validation"
    )
    assert_same_images(source, DigitsSource("validation"))


def test_longer_sides_become_smaller(tmp_path, capsys):
    recipe = (
        "--config",
        QUICKSTART,
        "data.source=glyphs",
        "data.glyph_size=40",
        "data.train_images=30",
        "data.validation_images=10",
        "data.glyph_difficulty=0",
    )
    source = packed_from(capsys, tmp_path / "glyphs", recipe, "--short-side", 20)
    assert {image.shape for image in read_all(source)} == {(3, 20, 20)}
    assert source.encoded(0).startswith(b"\xff\xd8")


def test_colours_and_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path, capsys, monkeypatch
):
    """The source travels to the workers whole."""
    context = fork_server()  # which has loaded torch
    monkeypatch.setattr(packing.parent_death, "context", lambda method: context)
    recipe = (
        "--config",
        QUICKSTART,
        "data.source=glyphs",
        "data.glyph_size=16",
        "data.train_images=60",
        "data.validation_images=10",
    )
    found = []
    for workers in (1, 2):
        source = packed_from(
            capsys, tmp_path / str(workers), recipe, "--keep-order", workers=workers
        )
        found.append({path.name: path.read_bytes() for path in (tmp_path / str(workers)).iterdir()})
    assert found[0] == found[1]
    expected = open_source(loading.load(QUICKSTART, recipe[2:]).data, 10, "train")
    assert_same_images(source, expected)
    assert any(not torch.equal(image[0], image[1]) for image in read_all(source))


def test_other_pixels_of_the_same_names_are_other_images(fashion, tmp_path, capsys):
    """Of files only names count; a set in memory has a digest, and drawn images are looked at."""
    out = tmp_path / "out"
    packed_from(capsys, out, fashion)
    assert pack(capsys, *fashion[:2], out, *fashion[2:])[1]["kept"] == 3
    changed = draw(60)
    changed.images[41, 3, 3] ^= 1
    write_idx(tmp_path / "idx", packed=True, train=changed)
    code, _, (error,) = pack(capsys, *fashion[:2], out, *fashion[2:])
    assert code == 2 and "packed from other images or with other options" in error
    glyphs = (
        "--config",
        QUICKSTART,
        tmp_path / "drawn",
        "data.source=glyphs",
        "data.train_images=20",
    )
    assert pack(capsys, *glyphs)[0] == 0
    assert pack(capsys, *glyphs, "data.glyph_difficulty=1")[0] == 2


def test_shards_of_the_version_before_there_was_an_order_to_keep_are_continued(tmp_path):
    """The digest of their plan, recorded from that version."""
    source = FolderSource(str(write_class_folders(tmp_path, train=draw(20)) / "train"))
    assert packing._digest(source, packing.Options()) == RECORDED
    kept = packing._digest(source, packing.Options(keep_order=True))
    assert kept != RECORDED


RECORDED = "51c9663a52da76643fa68bf78ad1b7b396cf02a098fc882d96a3f319012015fc"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (
            ("--keep-order", "--seed", "1", "{images}", "{out}"),
            "--seed mixes the images, and --keep-order leaves",
        ),
        (
            ("--split", "train", "{images}", "{out}"),
            "--split chooses among the images of a recipe; give --config FILE",
        ),
        (
            ("--config", "{recipe}", "data.source=digits"),
            "data.source=digits: is no folder; name the folder of the sh",
        ),
        (
            ("--config", "{recipe}", "--imagenet-train", "x.tar", "{out}"),
            "pack FOLDER DEST, pack --imagenet-train",
        ),
        (
            ("--config", "{out}/none.yaml", "{out}"),
            "{out}/none.yaml: No such file or directory; name an e",
        ),
        (
            ("--config", "{recipe}", "{out}", "data.sourse=digits"),
            "command line: data.sourse: unknown key; did you m",
        ),
        (("--config", "{recipe}", "{out}", "data.source=folder"), "data.root is not set"),
        (("--config", "{recipe}", "s3://bucket"), "s3://bucket: shards are packed on this machine"),
    ],
)
def test_what_cannot_be_packed_is_one_line(words, fault, tmp_path, capsys):
    places = {"images": tmp_path / "images", "out": tmp_path / "out", "recipe": QUICKSTART}
    code, _, errors = pack(capsys, *(word.format(**places) for word in words))
    assert code == 2 and len(errors) == 1
    assert errors[0].startswith(fault.format(**places))
    assert not [*tmp_path.rglob("*.tar")]
