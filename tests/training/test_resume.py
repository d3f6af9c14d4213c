"""A run that is stopped, killed or damaged and started again ends as the undisturbed run does, bit
for bit.

The recipe draws in every way a run can draw, keeps both averages, and its second epoch has larger
images. It has 10 steps in 2 epochs of 5, a log line every 4, an evaluation every 5, a checkpoint
every 3.
"""

import functools
import itertools
import json
import os
import shutil
import signal
import threading
import time
import types
from pathlib import Path

import pytest

import evaluate
from common.errors import CheckpointError
from engines.base import NoiseScale
from engines.torch_engine import TorchEngine
from optim import schedule
from recipe import loading
from recipe.batch import lengths
from tests import ranks
from tests.conftest import QUICKSTART
from tests.tensors import flat
from tests.training.conftest import states
from training import loop, monitor
from training.checkpoint import CheckpointFolder
from training.metrics import TIMING_FIELDS, Metrics
from training.run import run

STEPS = 10
OVERRIDES = (*ranks.RECIPE, *ranks.SMALL, "batch.micro=12")


class Outcome:
    """All that a finished run leaves but times."""

    def __init__(self, folder):
        content = CheckpointFolder(folder / "checkpoints", 2, True).load_newest(warn=pytest.fail)
        self.engine = content["engine"]
        times = dict.fromkeys(("seconds", "paused", "waited", "metrics_bytes"))
        self.progression = {**content["progression"], **times}
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.events = [
            {key: value for key, value in json.loads(line).items() if key not in TIMING_FIELDS}
            for line in lines
        ]

    def tensors(self):
        """{"part/name": (dtype, bytes)} of the engine's state."""
        return {
            name: (tensor.dtype, tensor.numpy().tobytes())
            for name, tensor in flat(self.engine).items()
        }

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


def train(folder):
    run(loading.load(QUICKSTART, [*OVERRIDES, f"run.output={folder}"]))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, _one_thread, _no_measuring):
    """The outcome of the run that nothing happens to, and that this is a run worth comparing."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(folder)
    outcome = Outcome(folder)
    steps = {
        kind: [event["step"] for event in outcome.of(kind)]
        for kind in ("checkpoint", "train", "eval", "end")
    }
    assert steps == {"checkpoint": [3, 6, 9, 10], "train": [4, 8, 10], "eval": [5, 10], "end": [10]}
    assert all(event["skipped_steps"] == 0 for event in outcome.of("train"))
    return outcome


@pytest.fixture
def folder(tmp_path):
    """The run folder that `session` and `train` of a test share."""
    return tmp_path / "run"


def test_a_run_can_be_stopped_after_any_step(session, undisturbed, folder):
    before = 0
    for step in (1, 4, 5, 8):
        said = session(*OVERRIDES, stop_at=step)
        assert (f"resuming at step {before} of {STEPS}" in said) == (before > 0)
        before = step
    session(*OVERRIDES)
    Outcome(folder).assert_same(undisturbed)


def test_measured_times_change_nothing(session, undisturbed, folder, monkeypatch):
    """As on a machine that stands still for hours now and then."""
    clock = itertools.accumulate(itertools.cycle((1e-6, 3600.0, 7.0)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for module in (loop, monitor):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1.0)
    assert "input-bound" in session(*OVERRIDES)
    Outcome(folder).assert_same(undisturbed)


def test_a_damaged_newest_checkpoint_costs_time_only_and_how_it_is_computed_may_change(
    session, undisturbed, folder
):
    """The one before is taken, with a message; the steps between the two are done again, in other
    ways."""
    session(*OVERRIDES, stop_at=5)
    newest = folder / "checkpoints" / "step-00000005.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    said = session(*OVERRIDES, "data.workers=1", "batch.evaluation=17", "parallel.stages=2")
    assert f"{newest}: damaged" in said and f"resuming at step 3 of {STEPS}" in said
    assert Outcome(folder).tensors() == undisturbed.tensors()


GROWING = (
    *OVERRIDES,
    "batch.schedule=[[0,24],[60,48],[200,72]]",
    "exchange.order=fast",
    "log.every_steps=1",
)


def test_a_run_whose_batch_grows_goes_on_across_changes_and_has_the_rates_of_its_images(
    session, folder, tmp_path
):
    """Updates of 24 images up to step 3, then of 48: stopped at the change, and at two updates
    after it. Rates are those of a run without a schedule that has seen as many images."""
    whole = tmp_path / "whole"
    recipe = loading.load(QUICKSTART, [*GROWING, f"run.output={whole}"])
    run(recipe)
    for stop, saved in ((3, 3), (4, 5), (8, 9)):
        session(*GROWING, stop_at=stop)
        assert (folder / "checkpoints" / f"step-{saved:08d}.pt").exists()
    session(*GROWING)
    outcome = Outcome(folder)
    outcome.assert_same(Outcome(whole))
    rate = schedule.create(loading.load(QUICKSTART, OVERRIDES), lengths(recipe, 125))
    events = [(event["step"], event["batch"], event["lr"]) for event in outcome.of("train")]
    ends = (1, 2, 3, 5, 7, 9, 10)
    assert events == [
        (end, 24 * (end - first), rate(first)) for first, end in zip((0, *ends), ends)
    ]


def test_a_batch_that_followed_the_noise_scale_stays_as_large_after_a_resume(
    session, folder, monkeypatch
):
    """Doubled after the first epoch of 5 steps; the resumed session finds a smaller scale, which
    changes nothing."""
    growing = (*GROWING, "batch.schedule=noise", "batch.largest=48")
    for scale, stop in ((60.0, 6), (1.0, None)):
        monkeypatch.setattr(
            TorchEngine, "noise_scale", lambda engine, n=scale: (NoiseScale(n, 1.0, n, 1.0), {})
        )
        session(*growing, stop_at=stop)
    outcome = Outcome(folder)
    assert outcome.progression["growth"] == [[5, 2]]
    assert [(event["step"], event["batch"]) for event in outcome.of("train")] == [
        *((step, 24) for step in range(1, 6)), (7, 48), (9, 48), (10, 24),
    ]  # fmt: skip


# Operations whose n-th call can be the last thing that a process does.
MOMENTS = {
    "step": (TorchEngine, "train_step"),
    "evaluation batch": (TorchEngine, "evaluate_step"),
    "event": (Metrics, "write"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "removal": (Path, "unlink"),
}
# Each session is killed at a moment of another kind. Comments say where that is in the run.
KILLS = [
    ("step", 2),  # before there is anything to resume from
    ("fsync", 2),  # the first checkpoint, at step 3, is written but not yet on the disk
    # it is on the disk under its temporary name (two renames are those of the environment)
    ("rename", 3),
    ("fsync", 4),  # it has its name, its manifest has not
    ("event", 1),  # it counts, but its event is not written
    ("evaluation batch", 2),  # within the evaluation at step 5
    # before step 6, with the log line of step 4 and the evaluation behind the checkpoint
    ("step", 3),
    # step 3 is being removed after step 9 was saved: its manifest is gone, the file is not
    ("removal", 2),
    ("fsync", 3),  # step 10 has its name, the folder is not on the disk
    ("event", 5),  # all is done but the last event
]


def before_call(patch, moment, number, action):
    """Has action() called before the `number`-th call of a moment's operation."""
    owner, name = MOMENTS[moment]
    function = getattr(owner, name)
    calls = itertools.count(1)

    def disturbed(*arguments, **keywords):
        if next(calls) == number:
            action()
        return function(*arguments, **keywords)

    patch.setattr(owner, name, disturbed)


class Killed(BaseException):
    """Ends a session in this process; what the session does to its folder from then on is
    undone."""


def kill(folder, moment, number):
    """What SIGKILL leaves: the files as they are at that moment, without what Python has not handed
    to the system."""
    left = folder.with_name("left")

    def die():
        shutil.copytree(folder, left)
        raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        before_call(patch, moment, number, die)
        train(folder)
    shutil.rmtree(folder)
    left.rename(folder)


def test_a_run_can_be_killed_at_any_moment(undisturbed, folder):
    """Ten times in one run, at moments that are chosen to hurt."""
    for moment in KILLS:
        kill(folder, *moment)
    assert not any(
        json.loads(line)["event"] == "end"
        for line in (folder / "metrics.jsonl").read_text().splitlines()
    )
    train(folder)
    Outcome(folder).assert_same(undisturbed)


def lines_of(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_run_without_the_files_of_its_replicas_is_scored_and_not_resumed(
    session, folder, monkeypatch, capsys
):
    """They are made up beside an engine that has no such states; evaluate.py needs only its
    weights."""
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "replica_states", lambda engine: states(1, 3))
        session(*OVERRIDES, stop_at=2)
    with pytest.raises(
        CheckpointError, match="of other replicas: 3 replicas have a state of their own"
    ):
        session(*OVERRIDES)
    for path in (folder / "checkpoints").glob("*.replica-*"):
        path.unlink()
    assert evaluate.main(["--checkpoint", str(folder)]) == 0
    assert "top1" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no older checkpoint is whole either"):
        session(*OVERRIDES)


def dies_amid_the_run(rank, folder):
    """This process kills itself once its run has written two events."""

    def watch():
        while lines_of(folder) < 2:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def test_kill_nine_of_the_command_leaves_no_trace(undisturbed, folder):
    """A real one: of a process, in the midst of whatever it does."""
    overrides = (*OVERRIDES[len(ranks.RECIPE) :], f"run.output={folder}")
    (killed,) = ranks.train(
        1, *overrides, sabotage=functools.partial(dies_amid_the_run, folder=folder)
    )
    assert killed.code == -signal.SIGKILL
    train(folder)
    Outcome(folder).assert_same(undisturbed)
