"""What the loop tells of waiting for images: on each log line, and in the end."""

from tests.training.scripted import ScriptedEngine
from training.loop import Progression


def clock_by_steps(engine, monkeypatch, seconds=1.0):
    """Each step takes as long; nothing else takes any time."""
    monkeypatch.setattr("training.monitor.time.monotonic", lambda: 1000 + seconds * len(engine.steps))


def test_each_log_line_tells_what_share_of_its_time_images_were_waited_for(start, monkeypatch):
    """Steps of a second. Half a second of each of the first four is waiting, then none, then all."""
    engine = ScriptedEngine(waited=lambda steps: min(steps, 4) / 2 + max(steps - 8, 0))
    clock_by_steps(engine, monkeypatch)
    lines = []
    start(engine, "data.workers=3", say=lines.append)
    assert [event["data_wait"] for event in start.events("train")] == [0.5, 0.0, 1.0]
    shown = [line for line in lines if line.startswith("step ")]
    assert [line.partition(" wait ")[2].split()[0] for line in shown] == ["50%", "0%", "100%"]
    end = start.events("end")[0]
    assert (end["data_wait"], end["input_bound"], end["workers_needed"]) == (0.5, True, 6)
    assert any(line.startswith("input-bound: 50% of the training time") for line in "\n".join(lines).split("\n"))
    assert "data.workers=6 would keep up instead of 3" in lines[-1]


def test_a_run_that_hardly_waits_is_not_called_input_bound(start, monkeypatch):
    """Up to a tenth, as docs/data.md says."""
    engine = ScriptedEngine(waited=lambda steps: 0.09 * steps)
    clock_by_steps(engine, monkeypatch)
    lines = []
    start(engine, say=lines.append)
    end = start.events("end")[0]
    assert (round(end["data_wait"], 9), end["input_bound"], end["workers_needed"]) == (0.09, False, None)
    assert "input-bound" not in "".join(lines)


def test_waiting_adds_up_over_the_sessions_of_a_run(start, monkeypatch):
    """A session before took 10 seconds, of which 4 were not training and 3 waiting; this one waits for none of 6."""
    engine = ScriptedEngine()
    engine.steps = list(range(6))
    clock_by_steps(engine, monkeypatch)
    start(engine, progression=Progression(step=6, seconds=10.0, paused=4.0, waited=3.0))
    assert start.events("end")[0]["data_wait"] == 3.0 / 12
    saved = start.content()["progression"]
    assert (saved["seconds"], saved["paused"], saved["waited"]) == (16.0, 4.0, 3.0)


def test_a_run_that_waits_for_more_than_a_tenth_is(start, monkeypatch):
    engine = ScriptedEngine(waited=lambda steps: 0.11 * steps)
    clock_by_steps(engine, monkeypatch)
    start(engine)
    assert start.events("end")[0]["input_bound"]
