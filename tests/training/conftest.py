"""Runs of the loop alone, and checkpoint folders."""

import contextlib
import functools
import json
import signal

import pytest
import torch

from engines.torch_engine import TorchEngine
from recipe import loading
from recipe.batch import Lengths
from tests import ranks
from tests.conftest import QUICKSTART
from tests.tensors import assert_bitwise_equal
from tests.training.scripted import EMPTY
from training.checkpoint import CheckpointFolder
from training.continuation import Continuation
from training.loop import Stopped, Trainer
from training.metrics import Metrics
from training.monitor import Monitor
from training.profiling import MemoryHistory, Recordings
from training.progression import Progression
from training.run import run

SIX_STEPS_AN_EPOCH = (
    "batch.global=24",
    "run.steps=12",
    "log.every_steps=4",
    "schedule.peak=3",
    "schedule.power=2",
    "schedule.final_ratio=1e-5",
    "schedule.warmup_steps=2",
)


@pytest.fixture
def session(tmp_path, monkeypatch, capsys):
    """session(*overrides, stop_at=None): a session of a run in this process, which SIGTERM stops at
    a step (from 1).

    Returns what it said. The machine's peak, which enters the utilisation alone, is not measured.
    """
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)

    def start(*overrides, stop_at=None):
        recipe = loading.load(QUICKSTART, [f"run.output={tmp_path / 'run'}", *overrides])
        capsys.readouterr()
        with monkeypatch.context() as patch:
            # so that it is put back
            patch.setattr(TorchEngine, "train_step", TorchEngine.train_step)
            ranks.before_step(stop_at, functools.partial(signal.raise_signal, signal.SIGTERM))
            with pytest.raises(Stopped) if stop_at else contextlib.nullcontext():
                run(recipe)
        return capsys.readouterr().out

    return start


@pytest.fixture
def start(tiny, tmp_path):
    """start(engine, *overrides): trains by the loop, 6 steps an epoch; returns the events."""

    def train(
        engine,
        *overrides,
        progression=None,
        say=lambda line: None,
        flops_per_image=lambda epoch: 1e6,
        batches=(EMPTY,) * 100,
        evaluation=(EMPTY,),
        steps_per_epoch=6,
        memory=None,
    ):
        recipe = tiny(*SIX_STEPS_AN_EPOCH, *overrides)
        lengths = Lengths(
            steps_per_epoch=steps_per_epoch, dropped=0, total=recipe.run.steps, warmup=2
        )
        monitor = Monitor(Metrics(tmp_path / "metrics.jsonl", 0), (), say)
        checkpoints = CheckpointFolder(tmp_path / "checkpoints", recipe.checkpoint.keep_last, True)
        about = (
            checkpoints,
            monitor,
            progression or Progression(),
            flops_per_image,
            ["cat", "dog"],
        )
        history = MemoryHistory(recipe.log, tmp_path / "memory.pickle", "cpu", say)
        file = tmp_path / "profile.json.gz"
        recordings = Recordings(recipe.log.profile, file, engine, monitor=monitor, history=history)
        about += (tmp_path / "trace", recordings, memory or Continuation())
        try:
            Trainer(recipe, lengths, engine, evaluation, *about).run(iter(batches))
        finally:
            monitor.close()
        return events()

    def events(*kinds):
        found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [event for event in found if not kinds or event["event"] in kinds]

    saved = CheckpointFolder(tmp_path / "checkpoints", 9, True)
    train.events = events
    train.steps = lambda *kinds: [event["step"] for event in events(*kinds)]
    train.saved = lambda: [manifest.step for manifest in saved.manifests(warn=pytest.fail)]
    train.content = lambda: saved.load_newest(warn=pytest.fail)
    return train


def content(step):
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(step)).to(torch.float16)
    return {
        "engine": {"weights": {"w": weights}},
        "progression": {"step": step, "loss": 0.1 * step, "scores": {}},
    }


def states(step, count):
    for replica in range(count):
        generator = torch.Generator().manual_seed(100 * step + replica)
        yield {"residual": torch.randn(2000, generator=generator), "sent": torch.tensor(replica)}


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def names(*steps, replicas=0):
    """Names of the files of checkpoints."""
    own = [f"step-{step:08d}.{kind}" for step in steps for kind in ("json", "pt")]
    return sorted(
        [*own, *(f"step-{step:08d}.replica-{n:04d}.pt" for step in steps for n in range(replicas))]
    )


def manifest(checkpoints, step):
    return checkpoints.path(step).with_suffix(".json")


@pytest.fixture
def folder(tmp_path):
    """folder(keep_last=2, keep_best=False): the run's checkpoint folder, as a new process would
    open it."""
    return lambda keep_last=2, keep_best=False: CheckpointFolder(
        tmp_path / "checkpoints", keep_last, keep_best
    )


@pytest.fixture(params=[0, 3], ids=["no replicas", "three replicas"])
def replicas(request):
    """How many replicas have a file of their own."""
    return request.param


@pytest.fixture
def save(folder, replicas):
    """save(*steps, **how): a checkpoint of each step, top1 from `scores` by step; the folder."""

    def saved(*steps, checkpoints=None, scores=None, **how):
        checkpoints = checkpoints or folder(**{"keep_last": max(len(steps), 2), **how})
        for step in steps:
            checkpoints.save(step, content(step), (scores or {}).get(step), states(step, replicas))
        return checkpoints

    return saved


@pytest.fixture
def newest(folder, replicas):
    """newest(checkpoints=None): the step of the newest whole checkpoint, compared bit for bit; and
    the warnings."""

    def loaded(checkpoints=None):
        given = []
        checkpoints = checkpoints or folder()
        found = checkpoints.load_newest(given.append, with_replicas=True)
        assert not any("\n" in line for line in given)
        if found is None:
            return None, given
        step = found["progression"]["step"]
        assert found["progression"] == content(step)["progression"]
        assert_bitwise_equal(found["engine"], content(step)["engine"])
        assert checkpoints.replica_count(step) == replicas
        for replica, state in enumerate(states(step, replicas)):
            assert_bitwise_equal(checkpoints.replica_state(step, replica), state)
        return step, given

    return loaded
