"""What is not finite, on one rank of several: agreed on by all, left out or the end of the run, and named."""

import json
import math
import os
import signal

import pytest
import torch

from tests import ranks
from training import weights

pytestmark = pytest.mark.multiprocess
WHO, LAYER = 1, "blocks.3.0.conv_pw.weight"
FIRST = 4  # step, counted from 0, in which a gradient is not finite


class Poison:
    """Makes a parameter's gradient not finite on one rank in some steps; everything before it is left as it is."""

    def __init__(self, value, steps, who=WHO):
        self._value, self._steps, self._who = value, steps, who

    def __call__(self, rank):
        from engines.torch_engine import TorchEngine

        if rank != self._who:
            return
        train_step = TorchEngine.train_step

        def poisoned(engine, micro_batches, step, *arguments, **keywords):
            parameter = dict(engine._model.named_parameters()).get(LAYER)
            if step not in self._steps or parameter is None:
                return train_step(engine, micro_batches, step, *arguments, **keywords)
            hook = parameter.register_hook(lambda gradient: torch.full_like(gradient, self._value))
            try:
                return train_step(engine, micro_batches, step, *arguments, **keywords)
            finally:
                hook.remove()

        TorchEngine.train_step = poisoned


def events(folder, kind):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def tensors(folder):
    return weights.read(str(folder)).tensors


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_on_one_replica_is_left_out_by_all(tmp_path, value):
    """With the bits of a run in one process in which the same step was left out."""
    both, alone = tmp_path / "both", tmp_path / "alone"
    for ended in ranks.train(2, f"run.output={both}", sabotage=Poison(value, (FIRST,))):
        assert ended.code == 0, ended.errors
    assert events(both, "train")[-1]["skipped_steps"] == 1
    (ended,) = ranks.train(1, f"run.output={alone}", sabotage=Poison(value, (FIRST,), who=0))
    assert ended.code == 0, ended.errors
    ours, theirs = tensors(both), tensors(alone)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class StopAt:
    """Has the run told to stop in a step, counted from 1, after which it saves and ends."""

    def __init__(self, step):
        self._step = step

    def __call__(self, rank):
        ranks.before_step(self._step, lambda: os.kill(os.getpid(), signal.SIGTERM))


def test_steps_that_stay_so_end_the_run_which_names_step_and_layer_and_keeps_the_state_before(tmp_path):
    """The newest checkpoint is of step 6, with the weights of the last good one, as a run has them that ends there."""
    good, lost = tmp_path / "good", tmp_path / "lost"
    (ended,) = ranks.train(1, f"run.output={good}", sabotage=StopAt(FIRST))
    assert ended.code == 75, ended.errors
    poison = Poison(math.nan, range(FIRST, 99))
    both = ranks.train(2, f"run.output={lost}", "precision.max_skipped_steps=3", sabotage=poison)
    assert [ended.code for ended in both] == [1, 1]
    (line,) = [line for line in both[0].errors if line.startswith("step")]
    assert line.startswith("step 8: the last 4 updates had gradients that are not finite and were left out")
    assert f"({LAYER}); the weights are those of step {FIRST}; lower schedule.peak" in line
    assert not [line for line in both[1].errors if "finite" in line]
    ours, theirs = tensors(lost), tensors(good)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_loss_scale_that_collapses_is_told_with_what_it_came_to(tmp_path):
    """It is halved for each update that is left out, on all ranks alike, and is not blamed then."""
    poison = Poison(math.inf, range(FIRST, 99))
    dynamic = ("precision.dynamic_loss_scale=true", "precision.max_skipped_steps=3", "log.every_steps=1")
    both = ranks.train(2, f"run.output={tmp_path / 'run'}", *dynamic, "precision.loss_scale=128", sabotage=poison)
    assert [ended.code for ended in both] == [1, 1]
    scales = [event["loss_scale"] for event in events(tmp_path / "run", "train")]
    assert scales[FIRST - 1 :] == [128, 64, 32, 16, 8]
    (line,) = [line for line in both[0].errors if line.startswith("step")]
    assert "the loss scale has fallen to 8, so it is not too high; lower schedule.peak" in line


def test_a_rate_that_is_far_too_high_ends_the_run(tmp_path):
    both = ranks.train(
        2, f"run.output={tmp_path / 'run'}", "optimizer.name=sgd", "schedule.peak=1000", "log.every_steps=1"
    )
    assert [ended.code for ended in both] == [1, 1]
    (line,) = [line for line in both[0].errors if line.startswith("step")]
    assert "diverged" in line or "not finite" in line
