"""A run is resumed with the images that it began with, or not without being told to; other threads get a line."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from engines.torch_engine import TorchEngine
from recipe import loading
from recipe.errors import CheckpointError
from tests.conftest import QUICKSTART, TINY
from tools import shards
from training.checkpoint import CheckpointFolder
from training.loop import Stopped
from training.run import run

OVERRIDES = ("model.classes=2", "batch.global=4", "batch.micro=4", "run.steps=4", "checkpoint.every_epochs=1")


@pytest.fixture
def images(tmp_path):
    """Six training and two validation images of two classes."""
    for split, count in (("train", 3), ("val", 1)):
        for kind in "ab":
            for number in range(count):
                path = tmp_path / "images" / split / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)).save(path)
    return tmp_path / "images"


@pytest.fixture
def session(images, tmp_path, monkeypatch, capsys):
    """session(*overrides, stop=False): one session of the run, stopped by SIGTERM after a step; what it said."""
    step = TorchEngine.train_step

    def stopped(engine, *arguments, **keywords):
        signal.raise_signal(signal.SIGTERM)
        return step(engine, *arguments, **keywords)

    def start(*overrides, stop=False):
        place = ("data.source=folder", f"data.root={images}", f"run.output={tmp_path / 'run'}")
        recipe = loading.load(QUICKSTART, [*TINY, *OVERRIDES, *place, *overrides])
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
            if stop:
                patch.setattr(TorchEngine, "train_step", stopped)
                with pytest.raises(Stopped):
                    run(recipe)
            else:
                run(recipe)
        return capsys.readouterr().out

    return start


@pytest.mark.parametrize(
    ("change", "which"),
    [
        (lambda root: shutil.copy(root / "train/a/0.png", root / "train/a/9.png"), "training"),
        (lambda root: (root / "train/a/0.png").rename(root / "train/a/5.png"), "training"),
        (lambda root: (root / "train/a/0.png").rename(root / "train/b/5.png"), "training"),
        (lambda root: shutil.copy(root / "val/a/0.png", root / "val/a/9.png"), "validation"),
        (
            lambda root: [(root / split / "b").rename(root / split / "c") for split in ("train", "val")],
            "training and validation",
        ),
    ],
    ids=["one more", "another name", "another label", "to validate with", "another class"],
)
def test_other_images_are_refused_unless_they_are_accepted(session, images, tmp_path, change, which):
    session(stop=True)
    change(images)
    with pytest.raises(CheckpointError) as refused:
        session()
    assert str(refused.value) == (
        f"{tmp_path}/run/checkpoints/step-00000001.pt: saved with other {which} images than {images} has now (other "
        "names, labels or shards); bring those back, or go on with these by data.changed_images=accept"
    )
    said = session("data.changed_images=accept", stop=True)
    assert "resuming at step 1 of 4" in said
    assert "going on with other images than before (data.changed_images=accept)" in said
    assert "other images" not in session()  # from then on these are the run's


def test_the_same_images_elsewhere_are_the_same(session, images, tmp_path):
    session(stop=True)
    images.rename(tmp_path / "moved")
    said = session(f"data.root={tmp_path / 'moved'}")
    assert "resuming at step 1 of 4" in said and "images than" not in said


def test_shards_that_were_packed_anew_are_other_images(session, images, tmp_path, capsys):
    def pack(*how):
        shutil.rmtree(tmp_path / "shards", ignore_errors=True)
        for split in ("train", "val"):
            command = ("pack", images / split, tmp_path / "shards" / split, "--workers", 1, *how)
            assert shards.main([str(part) for part in command]) == 0

    packed = ("data.source=shards", f"data.root={tmp_path / 'shards'}")
    pack()
    session(*packed, stop=True)
    pack()
    assert "resuming at step 1" in session(*packed, stop=True)
    pack("--seed", 1)
    with pytest.raises(CheckpointError, match="saved with other training and validation images than"):
        session(*packed)


def test_a_run_without_a_digest_is_resumed(session, images, tmp_path, monkeypatch):
    """As older versions saved them."""
    save = CheckpointFolder.save

    def older(folder, step, content, *arguments):
        del content["progression"]["images_digest"]
        return save(folder, step, content, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", older)
        session(stop=True)
    (images / "train/a/0.png").rename(images / "train/a/5.png")
    said = session()
    assert "resuming at step 1 of 4" in said and "other images" not in said


def test_another_number_of_threads_gets_a_line(session, tmp_path):
    assert "threads" not in session(stop=True)
    assert "thread" not in session(stop=True)
    notes = tmp_path / "run" / "environment.json"
    content = json.loads(notes.read_text())
    content["starts"][0]["threads"] = torch.get_num_threads() + 6
    notes.write_text(json.dumps(content))
    assert (
        "1 thread here, 7 when the run began: sums may round differently in their last bits; OMP_NUM_THREADS=7 "
        "computes as before"
    ) in session(stop=True)
