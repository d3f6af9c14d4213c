"""What is not finite, on one rank of several: agreed on by all, left out or the end of the run, and named."""

import functools
import json
import math
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


def train(folder, size, *overrides, code=0, sabotage=None):
    """The lines of rank 0 about a step; all ranks end with that code, and rank 0 alone speaks of gradients."""
    ended = ranks.train(size, *overrides, f"run.output={folder}", sabotage=sabotage)
    assert [rank.code for rank in ended] == [code] * size, ended
    assert not [line for rank in ended[1:] for line in rank.errors if "finite" in line]
    return [line for line in ended[0].errors if line.startswith("step")]


def logged(folder, field):
    """The values of a field of the `train` events."""
    events = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [event[field] for event in events if event["event"] == "train"]


def assert_same_weights(folder, other):
    ours, theirs = (weights.read(str(each)).tensors for each in (folder, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow  # the next test compares weights after such steps with one process, too
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_on_one_replica_is_left_out_by_all(tmp_path, value):
    """With the bits of a run in one process in which the same step was left out."""
    both, single = tmp_path / "both", tmp_path / "single"
    train(both, 2, sabotage=Poison(value, (FIRST,)))
    assert logged(both, "skipped_steps")[-1] == 1
    train(single, 1, sabotage=Poison(value, (FIRST,), who=0))
    assert_same_weights(both, single)


def stop_at(step, rank):
    ranks.before_step(step, functools.partial(signal.raise_signal, signal.SIGTERM))


def test_steps_that_stay_so_end_the_run_which_names_step_layer_and_scale_and_keeps_the_state_before(tmp_path):
    """The newest checkpoint is of step 6, with the weights of the last good one, as a run has them that ends there.

    A dynamic loss scale is halved for each update that is left out, on all ranks alike, and is not blamed then.
    """
    good, lost = tmp_path / "good", tmp_path / "lost"
    poison = Poison(math.inf, range(FIRST, 99))
    dynamic = ("precision.dynamic_loss_scale=true", "precision.loss_scale=128", "precision.max_skipped_steps=3")
    train(good, 1, *dynamic, code=75, sabotage=functools.partial(stop_at, FIRST))
    (line,) = train(lost, 2, *dynamic, "log.every_steps=1", code=1, sabotage=poison)
    assert line.startswith("step 8: the last 4 updates had gradients that are not finite")
    assert f"({LAYER}); the weights are those of step {FIRST}" in line
    assert "the loss scale has fallen to 8, so it is not too high; lower schedule.peak" in line
    assert logged(lost, "loss_scale")[FIRST - 1 :] == [128, 64, 32, 16, 8]
    assert_same_weights(lost, good)


@pytest.mark.slow  # test_loop.py proves it on one process
def test_a_rate_that_is_far_too_high_ends_the_run(tmp_path):
    overrides = ("optimizer.name=sgd", "schedule.peak=1000", "log.every_steps=1")
    (line,) = train(tmp_path / "run", 2, *overrides, code=1)
    assert "diverged" in line or "not finite" in line
