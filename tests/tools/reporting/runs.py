"""Run folders for the tests of reports: put together line by line, or trained on a few images
within seconds."""

import json

import pytest

import train
from engines.torch_engine import TorchEngine
from recipe import loading
from tests.conftest import QUICKSTART, TINY


def train_event(step, **values):
    """A line of the log as training/loop.py writes it, 60 steps to the epoch, half a second
    each."""
    event = {
        "event": "train",
        "step": step,
        "epoch": step / 60,
        "loss": 2 / step,
        "top1": 0.5,
        "lr": 0.1,
    }
    event.update(
        gradient_norm=1.0, weight_norm=9.0, update_norm=0.1, skipped_steps=0, unreadable_images=0
    )
    event.update(loss_scale=128.0, images_per_second=48.0, mfu=0.3, data_wait=0.1, seconds=step / 2)
    event["trust"] = {f"blocks.{layer}.conv.weight": 0.01 * (layer + 1) for layer in range(3)}
    return {**event, **values}


def eval_event(step, top1=0.5, **values):
    return {
        "event": "eval",
        "step": step,
        "epoch": step / 60,
        "top1": top1,
        "top5": 0.9,
        "loss": 1.0,
        **values,
    }


def end_event(step, seconds, top1=0.5):
    return {
        "event": "end", "step": step, "top1": top1, "top5": 0.9, "best_top1": top1, "images": 24 * step,
        "images_per_second": 24 * step / seconds, "seconds": seconds, "data_wait": 0.1, "input_bound": False,
    }  # fmt: skip


def start(started="2026-01-02T03:04:05+00:00", **values):
    versions = {"revision": "abc", "python": "3.11.7", "torch": "2.14.1"}
    machine = {"cpus": 2, "threads": 1, "devices": []}
    return {"started": started, "command": ["train.py"], **versions, **machine, **values}


_ONE_START = (start(),)


def written(folder, events=(), overrides=(), starts=_ONE_START):
    """A run folder with these events; the recipe is the quickstart's with 24 images to the
    update."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = loading.load(QUICKSTART, [*TINY, "run.steps=600", *overrides])
    (folder / "config.yaml").write_text(loading.dump(recipe))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "environment.json").write_text(json.dumps({"starts": list(starts)}))
    return folder


def trained(folder, *overrides):
    """A finished run in `folder`, without the second that measuring the peak takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
        assert (
            train.main(["--config", str(QUICKSTART), *TINY, f"run.output={folder}", *overrides])
            == 0
        )
    return folder
