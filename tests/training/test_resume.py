"""A run that is stopped, killed or damaged and started again ends as the undisturbed run does, bit for bit.

The recipe draws in every way a run can draw: dropout, stochastic depth, stochastic rounding, augmentation, mixing; it
keeps both averages, and its second epoch has larger images. It has 10 steps in 2 epochs of 5, a log line every 4, an
evaluation every 5, a checkpoint every 3: stops fall within epochs, within log windows, and between two checkpoints.
"""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

import train
from engines.torch_engine import TorchEngine
from parallel.parent_death import bound_to_parent, die_with_parent
from recipe import loading
from tests.conftest import QUICKSTART, ROOT, TINY
from tests.tensors import flat
from training import loop, monitor
from training.checkpoint import CheckpointFolder
from training.metrics import TIMING_FIELDS, Metrics
from training.run import run

STEPS = 10
OVERRIDES = (
    *TINY,
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "model.image_size=8",
    "batch.global=240",
    "batch.micro=120",
    "run.epochs=2",
    "log.every_steps=4",
    "checkpoint.every_epochs=0.6",
    "data.augment=randaugment",
    "data.mixup=0.2",
    "data.cutmix=0.85",
    "data.image_sizes=[[0, 8], [1, 12]]",
    "average.step_decay=0.9",
    "average.epoch_decay=0.97",
)


class Outcome:
    """What a finished run leaves: everything but times and what follows from their number of digits."""

    def __init__(self, folder):
        content = CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)
        self.engine = content["engine"]
        times = dict.fromkeys(("seconds", "paused", "waited", "metrics_bytes"))
        self.progression = {**content["progression"], **times}
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.events = [
            {key: value for key, value in json.loads(line).items() if key not in TIMING_FIELDS} for line in lines
        ]

    def tensors(self):
        """{"part/name": (dtype, bytes)} of the engine's state."""
        return {name: (tensor.dtype, tensor.numpy().tobytes()) for name, tensor in flat(self.engine).items()}

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]

    def assert_same(self, other):
        assert self.events == other.events
        assert self.progression == other.progression
        assert self.tensors() == other.tensors()


@pytest.fixture(autouse=True, scope="module")
def _no_measuring():
    """The machine's peak enters the utilisation alone, a timing field."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, _one_thread, _no_measuring):
    """The outcome of the run that nothing happens to, and that this is a run worth comparing."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(loading.load(QUICKSTART, [*OVERRIDES, f"run.output={folder}"]))
    outcome = Outcome(folder)
    steps = {kind: [event["step"] for event in outcome.of(kind)] for kind in ("checkpoint", "train", "eval", "end")}
    assert steps == {"checkpoint": [3, 6, 9, 10], "train": [4, 8, 10], "eval": [5, 10], "end": [10]}
    assert all(event["skipped_steps"] == 0 for event in outcome.of("train"))
    return outcome


def outcome(tmp_path):
    return Outcome(tmp_path / "run")


def test_a_run_can_be_stopped_after_every_single_step(session, undisturbed, tmp_path):
    for step in range(1, STEPS):
        said = session(*OVERRIDES, stop_at=step)
        assert (f"resuming at step {step - 1} of {STEPS}" in said) == (step > 1)
    session(*OVERRIDES)
    outcome(tmp_path).assert_same(undisturbed)


def test_times_that_are_only_told_change_nothing(session, undisturbed, tmp_path, monkeypatch):
    """As if every pace, wait and peak were measured on a machine that stands still for hours between two looks."""
    clock = itertools.accumulate(itertools.cycle((1e-6, 3600.0, 7.0)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for module in (loop, monitor):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1.0)
    said = session(*OVERRIDES, "data.workers=1")
    assert "input-bound" in said
    outcome(tmp_path).assert_same(undisturbed)


def test_a_damaged_newest_checkpoint_costs_time_only_and_how_it_is_computed_may_change(session, undisturbed, tmp_path):
    """The one before is taken, and said so; the steps between the two are done again, in other ways."""
    session(*OVERRIDES, stop_at=5)
    newest = tmp_path / "run" / "checkpoints" / "step-00000005.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    said = session(*OVERRIDES, "data.workers=2", "batch.evaluation=7", "parallel.stages=2")
    assert f"{newest}: damaged" in said and f"resuming at step 3 of {STEPS}" in said
    assert outcome(tmp_path).tensors() == undisturbed.tensors()


@pytest.mark.slow
def test_another_seed_gives_another_outcome(session, undisturbed, tmp_path):
    """So equality above says something."""
    session(*OVERRIDES, "run.seed=1")
    assert outcome(tmp_path).tensors() != undisturbed.tensors()


# Processes that are killed. A fork server that has imported what takes seconds starts one in a fraction of that.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch", "torchvision", "timm", "pydantic", "pytest"])

# Operations whose n-th call can be the last thing that a process does.
_MOMENTS = {
    "step": (TorchEngine, "train_step"),
    "evaluation batch": (TorchEngine, "evaluate_step"),
    "event": (Metrics, "write"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "removal": (Path, "unlink"),
}


def _command(folder, moment=None, number=0):
    """train.py in a process of its own, which kills itself before the `number`-th call of `moment`."""
    die_with_parent()
    torch.set_num_threads(1)
    TorchEngine.peak_flops = lambda engine: 1e12
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    if moment:
        owner, name = _MOMENTS[moment]
        function, calls = getattr(owner, name), itertools.count(1)

        def deadly(*arguments, **keywords):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        setattr(owner, name, deadly)
    sys.exit(train.main(["--config", str(QUICKSTART), *OVERRIDES, f"run.output={folder}"]))


def start_process(folder, *moment):
    process = _PROCESSES.Process(target=_command, args=(folder, *moment))
    process.start()
    return process


def finish(folder):
    process = start_process(folder)
    process.join()
    assert (process.exitcode, (folder.parent / "err").read_text()) == (0, "")


# Each session is killed at a moment of another kind. Comments say where that is in the run.
KILLS = [
    ("step", 2),  # before there is anything to resume from
    ("fsync", 2),  # the first checkpoint, at step 3, is written but not yet on the disk
    ("rename", 2),  # it is on the disk under its temporary name (the first rename is the environment's)
    ("fsync", 4),  # it has its name, its manifest has not
    ("event", 1),  # it counts, but its event is not written
    ("evaluation batch", 2),  # within the evaluation at step 5
    ("step", 3),  # before step 6, with the log line of step 4 and the evaluation behind the checkpoint
    ("removal", 2),  # step 3 is being removed after step 9 was saved: its manifest is gone, the file is not
    ("fsync", 3),  # step 10 has its name, the folder is not on the disk
    ("event", 5),  # all is done but the last word
]


def test_a_run_can_be_killed_at_any_moment(undisturbed, tmp_path):
    """SIGKILL, ten times in one run, at moments that are chosen to hurt."""
    folder = tmp_path / "run"
    for moment in KILLS:
        process = start_process(folder, *moment)
        process.join()
        assert process.exitcode == -signal.SIGKILL, moment
    assert not any(json.loads(line)["event"] == "end" for line in (folder / "metrics.jsonl").read_text().splitlines())
    finish(folder)
    outcome(tmp_path).assert_same(undisturbed)


def lines_of(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_until(condition, process):
    while not condition():
        assert process.exitcode is None, "the run ended before it came to that"
        time.sleep(0.0005)


def kill_once(condition, process):
    wait_until(condition, process)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow  # the one above kills at more moments, from within
def test_a_run_can_be_killed_from_outside_six_times(undisturbed, tmp_path):
    """When its metrics grow, when a temporary file shows that it saves, and when it has only just started."""
    folder = tmp_path / "run"
    saving = lambda: list((folder / "checkpoints").glob("*.tmp"))  # noqa: E731
    for lines in (1, 2, 4):
        kill_once(lambda lines=lines: lines_of(folder) >= lines, start_process(folder))
        kill_once(lambda lines=lines: saving() or lines_of(folder) > lines + 3, start_process(folder))
    finish(folder)
    outcome(tmp_path).assert_same(undisturbed)


@pytest.mark.slow
def test_the_command_with_workers_survives_a_long_series_of_kills(tmp_path):
    """`python train.py` on two threads with two workers, 8 kills and terminations at random moments of its run."""
    recipe = [*OVERRIDES, "run.epochs=4", "run.threads=2", "data.workers=2", "batch.micro=60"]

    def start(folder):
        command = [sys.executable, "train.py", "--config", QUICKSTART, *recipe, f"run.output={folder}"]
        return subprocess.Popen(bound_to_parent(command), cwd=ROOT, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "undisturbed").wait() == 0
    folder = tmp_path / "run"
    moments = torch.Generator().manual_seed(0)
    for _ in range(8):
        process, before = start(folder), lines_of(folder)
        lines, polls, terminate = (int(torch.randint(n, (), generator=moments)) for n in (6, 1000, 3))
        while process.poll() is None and lines_of(folder) in range(before, before + 1 + lines):
            time.sleep(0.001)
        for _ in range(polls):
            lines_of(folder)
        process.send_signal(signal.SIGKILL if terminate else signal.SIGTERM)
        assert process.wait() in (-signal.SIGKILL, -signal.SIGTERM, 75)
    assert start(folder).wait() == 0
    Outcome(folder).assert_same(Outcome(tmp_path / "undisturbed"))
