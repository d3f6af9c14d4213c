"""timm's weights on class folders: one command, with no key but the weights and the folder."""

import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import train
from tests.conftest import ROOT

CLASSES = ("blue", "green", "red", "white", "yellow")
COLOURS = ((0, 0, 255), (0, 200, 0), (255, 0, 0), (255, 255, 255), (255, 255, 0))


@pytest.fixture
def folder(tmp_path):
    """Five classes of noisy colours: 40 images for training and 20 for validation."""
    draws = np.random.default_rng(0)
    for split, images in (("train", 8), ("val", 4)):
        for name, colour in zip(CLASSES, COLOURS):
            place = tmp_path / "images" / split / name
            place.mkdir(parents=True)
            for number in range(images):
                pixels = np.clip(np.array(colour) + draws.integers(-60, 60, (64, 64, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.jpg")
    return tmp_path / "images"


def finetuned(folder, tmp_path, capsys, *overrides):
    """Output and events of the run from a classifier of 1,000 classes."""
    model = timm.create_model("tf_efficientnet_b0")
    torch.save(model.state_dict(), tmp_path / "b0.pth")
    weights = f"model.init_from=timm:tf_efficientnet_b0:{tmp_path}/b0.pth"
    recipe = str(ROOT / "configs" / "finetune_timm.yaml")
    command = ["--config", recipe, weights, f"data.root={folder}", f"run.output={tmp_path}/run", *overrides]
    assert train.main(command) == 0
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    return capsys.readouterr().out, events


def test_weights_fit_and_the_classifier_is_new(folder, tmp_path, capsys):
    out, events = finetuned(
        folder, tmp_path, capsys, "model.image_size=32", "run.epochs=1", "schedule.warmup_epochs=0.1", "data.workers=0"
    )
    assert "new: head.classifier.weight, head.classifier.bias" in out
    assert "model of timm's tf_efficientnet_b0: name efficientnet_b0, width 1.0, depth 1.0" in out
    assert "norm batch, norm_eps 0.001, padding same" in out
    assert "40 training and 20 validation images of 5 classes (folder)" in out
    assert events[-1]["event"] == "end"


@pytest.mark.slow
def test_a_command_with_weights_and_folder_alone_trains_to_its_end(folder, tmp_path, capsys):
    """At the model's own 224 px, ten epochs. What it learns from weights that were never trained says nothing."""
    out, events = finetuned(folder, tmp_path, capsys)
    assert "224 px" in out
    assert sum(event["event"] == "eval" for event in events) == 10 and events[-1]["event"] == "end"
