"""A run is resumed with the images that it began with, or not without being told to; other threads get a line."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from recipe.errors import CheckpointError
from tests.conftest import TINY
from tools import shards
from training.checkpoint import CheckpointFolder

OVERRIDES = (
    *(*TINY, "model.classes=2", "batch.global=4", "batch.micro=4", "run.steps=4", "checkpoint.every_epochs=1"),
    "data.source=folder",
)


@pytest.fixture
def images(tmp_path):
    """Six training and two validation images of two classes."""
    for split, count in (("train", 3), ("val", 1)):
        for folder in (tmp_path / "images" / split / kind for kind in "ab"):
            folder.mkdir(parents=True)
            for number in range(count):
                path = folder / f"{number}.png"
                Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(path)
    return tmp_path / "images"


@pytest.mark.parametrize(
    ("change", "which"),
    [
        (lambda root: shutil.copy(root / "train/a/0.png", root / "train/a/9.png"), "training"),
        (lambda root: (root / "train/a/0.png").rename(root / "train/b/5.png"), "training"),
        (
            lambda root: [(root / split / "b").rename(root / split / "c") for split in ("train", "val")],
            "training and validation",
        ),
    ],
    ids=["one more", "another label", "another class"],
)
def test_other_images_are_refused_unless_they_are_accepted(session, images, tmp_path, change, which):
    place = (*OVERRIDES, f"data.root={images}")
    session(*place, stop_at=1)
    images.rename(tmp_path / "moved")  # the same images elsewhere are the same
    place = (*OVERRIDES, f"data.root={tmp_path / 'moved'}")
    said = session(*place, stop_at=2)
    assert "resuming at step 1 of 4" in said and "images than" not in said
    change(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=rf"step-00000002.pt: saved with other {which} images than ") as refused:
        session(*place)
    assert "data.changed_images=accept" in str(refused.value)
    said = session(*place, "data.changed_images=accept", stop_at=3)
    assert "resuming at step 2 of 4" in said and "other images than before" in said
    assert "other images" not in session(*place)  # from then on these are the run's


def test_shards_that_were_packed_anew_are_other_images(session, images, tmp_path):
    def pack(*how):
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)
        for split in ("train", "val"):
            command = ("pack", images / split, tmp_path / "shards" / split, "--workers", 1, *how)
            assert shards.main([str(part) for part in command]) == 0

    packed = (*OVERRIDES, "data.source=shards", f"data.root={tmp_path / 'shards'}")
    pack()
    session(*packed, stop_at=1)
    pack()
    assert "resuming at step 1" in session(*packed, stop_at=2)
    pack("--seed", 1)
    with pytest.raises(CheckpointError, match="saved with other training and validation images than"):
        session(*packed)


def test_a_run_of_an_older_version_without_a_digest_is_resumed(session, images, monkeypatch):
    place, save = (*OVERRIDES, f"data.root={images}"), CheckpointFolder.save

    def older(folder, step, content, *arguments):
        del content["progression"]["images_digest"]
        return save(folder, step, content, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", older)
        session(*place, stop_at=1)
    (images / "train/a/0.png").rename(images / "train/a/5.png")
    said = session(*place, stop_at=2)
    assert "resuming at step 1 of 4" in said and "other images" not in said


def test_the_recipe_sets_the_number_of_threads_and_another_number_gets_a_line(session, images):
    place = (*OVERRIDES, f"data.root={images}")
    try:
        session(*place, "run.threads=2", stop_at=1)
        assert torch.get_num_threads() == 2
        assert "thread" not in session(*place, "run.threads=2", stop_at=2)
        said = session(*place, "run.threads=1")
    finally:
        torch.set_num_threads(1)
    assert "1 thread here, 2 when the run began" in said and "run.threads=2" in said
