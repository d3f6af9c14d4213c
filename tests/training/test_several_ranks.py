"""Whole runs in several ranks learn and write what one process does, also if their number
changes."""

import contextlib
import functools
import io
import json
import math
import os
import signal

import pytest

import evaluate
import train
from data.base import permutation
from data.folder import FolderSource
from engines.torch_engine import TorchEngine
from parallel.speeds import Speeds
from tests import ranks
from tests.conftest import QUICKSTART
from tests.pictures import write_pictures
from tests.training.test_resume import Outcome
from training.metrics import read_events

pytestmark = pytest.mark.multiprocess

DONE = 0
FAILED = 1
WRONG_INPUT = 2
STOPPED = 75
TWO_STAGES = ("parallel.stages=2", "parallel.split=[blocks.3.0]")
# The noise scale is a sum over processes, whose last bits depend on how many there are.
SMALL = (*ranks.SMALL, "log.noise_scale=false")


def in_this_process(*overrides, stop_at=None):
    """train.py with ranks.RECIPE, which SIGTERM stops at a step (from 1): exit code, lines, and
    lines of stderr."""
    out = io.StringIO()
    errors = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(
        errors
    ), pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
        patch.setattr(TorchEngine, "train_step", TorchEngine.train_step)  # so that it is put back
        ranks.before_step(stop_at, functools.partial(signal.raise_signal, signal.SIGTERM))
        code = train.main(["--config", str(QUICKSTART), *ranks.RECIPE, *overrides])
    return ranks.Ended(code, out.getvalue().splitlines(), errors.getvalue().splitlines(), 0.0)


def train_to_the_end(size, *overrides):
    """The lines of the main rank.

    All end with 0, the others in silence. A single one is this process.
    """
    ended = [in_this_process(*overrides)] if size == 1 else ranks.train(size, *overrides)
    assert [rank.code for rank in ended] == [DONE] * size, ended
    assert [(rank.errors, rank.out if number else []) for number, rank in enumerate(ended)] == [
        ([], [])
    ] * size
    return ended[0].out


def signal_at(step, who, rank):
    if rank == who:
        ranks.before_step(step, functools.partial(signal.raise_signal, signal.SIGTERM))


def train_until(step, who, size, *overrides):
    """A session that ends because rank `who` gets a signal before that step.

    Several agree a step later.
    """
    if size == 1:
        ended = [in_this_process(*overrides, stop_at=step)]
    else:
        ended = ranks.train(size, *overrides, sabotage=functools.partial(signal_at, step, who))
    assert [rank.code for rank in ended] == [STOPPED] * size, ended
    saved = step + (size > 1)
    line = f"SIGTERM: saved at step {saved}; the same command resumes"
    assert [rank.errors for rank in ended] == [[line]] + [[]] * (size - 1)
    return saved


def assert_same_outcome(folder, other):
    """Every tensor of the newest checkpoint bit for bit, every event, and where the run is."""
    Outcome(folder).assert_same(Outcome(other))


@pytest.fixture(scope="module")
def single(tmp_path_factory, _one_thread):
    """The folder of the run in one process."""
    folder = tmp_path_factory.mktemp("single") / "run"
    lines = train_to_the_end(1, *SMALL, *TWO_STAGES, f"run.output={folder}")
    assert "one process computes all 2 stages itself, on one device" in lines
    outcome = Outcome(folder)
    assert len(outcome.of("eval")) == 2
    assert all(event["skipped_steps"] == 0 for event in outcome.of("train"))
    return folder


def test_four_ranks_write_what_one_process_does_and_print_that_a_run_is_finished(single, tmp_path):
    one = single
    four = tmp_path / "run"
    lines = train_to_the_end(4, *SMALL, *TWO_STAGES, f"run.output={four}")
    assert_same_outcome(four, one)
    ours, theirs = (
        {path.relative_to(folder) for path in folder.rglob("*")} for folder in (four, one)
    )
    assert ours == theirs
    assert (four / "config.yaml").read_text().replace(str(four), str(one)) == (
        one / "config.yaml"
    ).read_text()
    (start,) = json.loads((four / "environment.json").read_text())["starts"]
    assert (start["step"], start["replicas"], start["stages"]) == (0, 2, 2)
    assert lines[4] == "24 = 6 micro x 2 accumulation x 2 replicas (2 stages each: 4 devices)"
    before = {path: path.read_bytes() for path in four.rglob("*") if path.is_file()}
    (line,) = train_to_the_end(2, *SMALL, *TWO_STAGES, f"run.output={four}")
    assert line.startswith(f"{four}: this run is finished: top1 ")
    assert {path.name for path, content in before.items() if path.read_bytes() != content} == {
        "environment.json"
    }


def test_a_tree_ends_the_same_over_changed_topologies(single, tmp_path):
    """Stopped on two replicas of two stages, then in one process, then finished on four
    replicas."""
    place = (*SMALL, f"run.output={tmp_path / 'run'}")
    stopped = train_until(3, 3, 4, *TWO_STAGES, *place)
    stopped = train_until(stopped + 3, 0, 1, *place)
    assert f"resuming at step {stopped} of 10" in train_to_the_end(4, *place)
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert [(start["replicas"], start["stages"]) for start in starts] == [(2, 2), (1, 1), (4, 1)]
    assert starts[0]["step"] == 0 and starts[2]["step"] == stopped
    assert_same_outcome(tmp_path / "run", single)


# seconds a micro batch, line by line
TIMES = ([1.0, 1.0, 1.0], [1.0, 4.0, 1.0], [1.0, 4.0, 1.0], [3.0, 1.0, 1.0])


def give_times(rank):
    """The replicas' speeds are those of TIMES, in the place of measured ones."""
    times = iter(TIMES)
    follow = Speeds.follow

    def given(speeds, shares, seconds):
        assert len(seconds) == 3 and min(seconds) > 0
        return follow(speeds, shares, next(times))

    Speeds.follow = given


@pytest.mark.slow
def test_shares_that_follow_the_speeds_of_replicas_change_no_bit(tmp_path):
    """12 micro batches of 2 images; lines of the log after steps 2, 4, 6 and 8.

    The noise scale, too, has the bits of one process. What worker processes have loaded ahead is
    given up.
    """
    keys = (
        *ranks.SMALL,
        "batch.micro=2",
        "parallel.shares=measured",
        "log.every_steps=2",
        "data.workers=1",
    )
    train_to_the_end(1, *keys, f"run.output={tmp_path / 'one'}")
    ended = ranks.train(3, *keys, f"run.output={tmp_path / 'three'}", sabotage=give_times)
    assert [(rank.code, rank.errors) for rank in ended] == [(DONE, [])] * 3, ended
    said = [
        line
        for line in ended[0].out
        if line.startswith(("replica ", "micro batches of the replicas"))
    ]
    assert [line.split(":")[0] for line in said] == [
        "replica 1 has become slow", "micro batches of the replicas from here on",
        "replica 0 has become slow", "replica 1 is no longer slow", "micro batches of the replicas from here on",
    ]  # fmt: skip
    assert_same_outcome(tmp_path / "three", tmp_path / "one")


# 48 images of two classes, 24 a step in 6 micro batches of 4: the second replica meets those from
# the 12th on.
FOLDER = (
    "data.source=folder",
    "model.classes=2",
    "run.epochs=2",
    "batch.global=24",
    "batch.micro=4",
)


def damaged_images(folder, *places):
    """Images of which those at these places of the first epoch's order cannot be read; their
    names."""
    write_pictures(folder, train=24, val=4)
    source = FolderSource(str(folder / "train"))
    names = [source.name(int(index)) for index in permutation(0, 0, 48)[list(places)]]
    for name in names:
        os.truncate(name, 20)
    return names


def test_images_left_out_are_counted_and_named_as_by_one_process(tmp_path):
    names = damaged_images(tmp_path, 1, 14, 23, 30)
    overrides = (*FOLDER, "data.bad_images=skip", f"data.root={tmp_path}", "log.every_steps=1")
    expected = train_to_the_end(1, *overrides, f"run.output={tmp_path / 'one'}")
    left_out = [line for line in expected if line.startswith("left out: ")]
    assert [line.split(": ")[1] for line in left_out[:4]] == names  # in the first epoch of two
    lines = train_to_the_end(2, *overrides, f"run.output={tmp_path / 'two'}")
    assert [line for line in lines if line.startswith("left out: ")] == left_out
    assert [event["unreadable_images"] for event in Outcome(tmp_path / "one").of("train")] == [
        3,
        4,
        7,
        8,
    ]
    assert_same_outcome(tmp_path / "two", tmp_path / "one")


def test_an_image_that_one_rank_cannot_read_ends_all(tmp_path):
    (name,) = damaged_images(tmp_path, 14)
    other, reader = ranks.train(
        2, *FOLDER, f"data.root={tmp_path}", f"run.output={tmp_path / 'run'}"
    )
    assert (reader.code, other.code) == (WRONG_INPUT, FAILED)
    ((error,), (leaving,)) = reader.errors, other.errors
    assert (
        error.startswith(f"{name}: ")
        and leaving.startswith("rank 0")
        and leaving.endswith("leaving")
    )


LAYER = "blocks.3.0.conv_pw.weight"


def poison(rank):
    """From the fifth step on a parameter's gradient is infinite on rank 1."""
    train_step = TorchEngine.train_step

    def poisoned(engine, micro_batches, update, *arguments, **keywords):
        if update.step == 4 and rank == 1:
            dict(engine._model.named_parameters())[LAYER].register_hook(
                lambda gradient: gradient + math.inf
            )
        return train_step(engine, micro_batches, update, *arguments, **keywords)

    TorchEngine.train_step = poisoned


def test_gradients_that_stay_infinite_on_one_rank_end_the_run_and_the_layer_is_named(tmp_path):
    keys = ("precision.max_skipped_steps=3", "log.every_steps=1", f"run.output={tmp_path / 'run'}")
    ended = ranks.train(2, *ranks.SMALL, *keys, sabotage=poison)
    assert [rank.code for rank in ended] == [FAILED] * 2, ended
    (line,) = [line for rank in ended for line in rank.errors if "finite" in line]
    assert (
        line.startswith("step 8: the last 4 updates ")
        and f"({LAYER}); the weights are those of step 4; " in line
    )


def test_scores_between_two_means_of_local_steps_are_those_of_what_is_saved(tmp_path):
    """Four updates with means after each three: replicas are apart at the end. float32, so the mean
    is not rounded."""
    keys = (
        "exchange.method=local",
        "exchange.local_steps=3",
        "precision.weights=float32",
        "run.epochs=null",
    )
    train_to_the_end(
        2, *keys, "run.steps=4", "exchange.order=fast", f"run.output={tmp_path / 'run'}"
    )
    [last] = [event for event in read_events(tmp_path / "run")["eval"] if event["step"] == 4]
    assert evaluate.main(["--checkpoint", str(tmp_path / "run"), "run.device=cpu"]) == DONE
    scores = json.loads((tmp_path / "run" / "evaluation" / "scores.json").read_text())
    assert last["loss"] == pytest.approx(scores["loss"], rel=1e-5)
