"""A plan refuses what its run would refuse: before torch is loaded, and before there is a
folder."""

import sys

import pytest

import train
from recipe.loading import load
from tests.conftest import QUICKSTART
from training import preflight

WRONG_INPUT = 2


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_missing_weights_are_refused_and_no_folder_is_left(dry, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    run = tmp_path / "run"
    for weights, fault in (
        ("none", "no such file or folder"),
        ("timm:efficientnet_b0:none", "no such file or folder"),
        ("empty", "no checkpoint in this folder"),
    ):
        prefix, colon, name = weights.rpartition(":")
        place = f"{prefix}{colon}{tmp_path / name}"
        overrides = (
            f"model.init_from={place}",
            f"run.output={run}",
            "batch.micro=auto",
            "model.norm=group",
        )
        assert train.main(["--config", str(QUICKSTART), *overrides, *dry]) == WRONG_INPUT
        line = capsys.readouterr().err
        assert line.startswith(
            f"model.init_from: {tmp_path / name}: {fault}; name a run folder, a checkpoint or a "
        )
        assert not run.exists()


def test_a_run_that_is_resumed_needs_no_weights_to_start_from(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-00000002.json").touch()
    preflight.check(load(QUICKSTART, ["model.init_from=/none", f"run.output={tmp_path}"]))
    # which timm downloads
    preflight.check(load(QUICKSTART, ["model.init_from=timm:efficientnet_b0"]))
    preflight.check(load(QUICKSTART, [f"model.init_from={tmp_path}"]))
    (tmp_path / "checkpoints" / "step-00000002.pt").touch()
    preflight.check(load(QUICKSTART, [f"model.init_from={tmp_path / 'checkpoints'}"]))


def test_a_mirror_whose_package_is_missing_is_refused_and_others_are_not_connected(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for url in ("s3://bucket/run", "simplecache::s3://bucket/run"):
        with pytest.raises(
            preflight.ConfigError,
            match=rf"^checkpoint\.mirror: {url}: Install s3fs .*; pip install ",
        ):
            preflight.check(load(QUICKSTART, [f"checkpoint.mirror={url}"]))
    with pytest.raises(preflight.ConfigError, match="Protocol not known: nowhere; "):
        preflight.check(load(QUICKSTART, ["checkpoint.mirror=nowhere://bucket/run"]))
    monkeypatch.setattr("fsspec.url_to_fs", None)
    for url in ("/folder", "memory://bucket/run"):
        preflight.check(load(QUICKSTART, [f"checkpoint.mirror={url}"]))


def test_what_else_cannot_begin(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for override, words in (
        (
            "parallel.stages=2 parallel.split=[blocks.9.9] log.tensorboard=false",
            "parallel.split: blocks.9.9 is not a block; the blocks are ",
        ),
        (
            "parallel.recompute=[blocks.9] log.tensorboard=false",
            "parallel.recompute: blocks.9 is not a block; the blocks are preprocess, stem, ",
        ),
        (
            "model.train=[head,preprocess] log.tensorboard=false",
            "model.train: preprocess is not a block; the blocks are classifier, stem, blocks.0.0, ",
        ),
        (
            "parallel.stages=40 log.tensorboard=false",
            "parallel.stages: 40 parts are more than the ",
        ),
        ("log.wandb=true log.tensorboard=false", "log.wandb: the package wandb is not installed; "),
    ):
        with pytest.raises(preflight.ConfigError) as caught:
            preflight.check(load(QUICKSTART, override.split()))
        assert str(caught.value).startswith(words)
    named = [
        "parallel.recompute=[head]",
        "model.train=[classifier,stem,blocks.6,blocks.6.0,head.classifier]",
    ]
    preflight.check(load(QUICKSTART, [*named, "log.tensorboard=false"]))
