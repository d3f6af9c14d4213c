"""What the loop reports of waiting for images: on each log line, and at the end."""

import pytest

from tests.training.scripted import ScriptedEngine
from training.loop import Progression


@pytest.fixture
def clock_by_steps(monkeypatch):
    """clock_by_steps(engine): each step takes a second; nothing else takes any time."""
    return lambda engine: monkeypatch.setattr("training.monitor.time.monotonic", lambda: 1000 + len(engine.steps))


def test_each_log_line_has_the_share_of_its_time_that_images_were_waited_for(start, clock_by_steps):
    """Half a second of each of the first four steps is waiting, then none, then all."""
    engine = ScriptedEngine(waited=lambda steps: min(steps, 4) / 2 + max(steps - 8, 0))
    clock_by_steps(engine)
    lines = []
    start(engine, "data.workers=3", say=lines.append)
    assert [event["data_wait"] for event in start.events("train")] == [0.5, 0.0, 1.0]
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.partition(" wait ")[2].split()[0] for line in shown] == ["50%", "0%", "100%"]
    (end,) = start.events("end")
    assert (end["data_wait"], end["input_bound"], end["workers_needed"]) == (0.5, True, 6)
    assert (
        "input-bound: 50% of the training time" in lines[-1]
        and "data.workers=6 would keep up instead of 3" in lines[-1]
    )


@pytest.mark.parametrize(("share", "bound"), [(0.09, False), (0.11, True)])
def test_a_run_is_input_bound_above_a_tenth(start, clock_by_steps, share, bound):
    """As docs/data.md says."""
    engine, lines = ScriptedEngine(waited=lambda steps: share * steps), []
    clock_by_steps(engine)
    start(engine, say=lines.append)
    (end,) = start.events("end")
    assert (round(end["data_wait"], 9), end["input_bound"], end["workers_needed"] is None) == (share, bound, not bound)
    assert ("input-bound" in "".join(lines)) == bound


def test_waiting_adds_up_over_the_sessions_of_a_run(start, clock_by_steps):
    """A session before took 10 seconds, of which 4 were not training and 3 waiting; this one waits for none of 6."""
    engine = ScriptedEngine()
    engine.steps = list(range(6))
    clock_by_steps(engine)
    start(engine, progression=Progression(step=6, seconds=10.0, paused=4.0, waited=3.0))
    assert start.events("end")[0]["data_wait"] == 3.0 / 12
    saved = start.content()["progression"]
    assert (saved["seconds"], saved["paused"], saved["waited"]) == (16.0, 4.0, 3.0)
