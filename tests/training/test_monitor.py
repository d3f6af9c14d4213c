"""Where events go, what happens where they cannot be written, and the times that a run reports."""

import json

from common.text import duration
from training import monitor
from training.loggers import Session
from training.metrics import Metrics
from training.monitor import Clock, Monitor, pace, workers_needed
from training.services import TensorBoardLogger


def test_an_event_goes_to_metrics_tensorboard_and_terminal_and_a_resumed_run_is_shown_once(
    tmp_path,
):
    """Only numbers go to TensorBoard, exact in its float32; steps behind the checkpoint are
    dropped."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said = []
    events = [
        {"event": "train", "step": 1, "loss": 0.5, "file": "a.pt", "trust": {"stem": 0.25}},
        {"event": "train", "step": 2, "loss": 9.0},
        {"event": "train", "step": 2, "loss": 2.5},
    ]
    for step, own in ((0, events[:2]), (1, events[2:])):
        tensorboard = TensorBoardLogger(
            Session("a run", {}, tmp_path, step=step, earlier=None, say=print)
        )
        session = Monitor(Metrics(tmp_path / "metrics.jsonl", 10**6), [tensorboard], said.append)
        for event in own:
            about = {key: value for key, value in event.items() if key not in ("event", "step")}
            session.event("train", event["step"], about, "step 1" if event["step"] == 1 else "")
        session.close()
    assert [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ] == events
    assert said == ["step 1"]
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = {
        tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]
    }
    assert scalars == {"train/loss": [(1, 0.5), (2, 2.5)], "trust/stem": [(1, 0.25)]}


def test_the_rate_leaves_out_what_was_not_training_and_seconds_add_up_over_sessions(monkeypatch):
    """60 images in 10 seconds of which 4 went into an evaluation: 60 / 6, work likewise.

    The next lap starts afresh.

    Waiting is a share of each lap: 1.5 of its 6 seconds, then 1 of 5. Clocks of host and device
    differ by a little.
    """
    now = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: now[0])
    clock = Clock(50.0, 20.0, 10.0)
    now[0] += 10
    clock.images = 60
    clock.operations = 1200.0
    clock.paused += 4
    assert clock.lap(1.5) == (60 / 6, 1200 / 6, 0.25)
    now[0] += 5
    clock.images = 10
    clock.operations = 30.0
    assert clock.lap(2.5) == (10 / 5, 30 / 5, 0.2)
    assert (clock.seconds(), clock.paused, clock.waited) == (65, 24, 12.5)
    now[0] += 5
    assert clock.lap(9.0)[2] == 1.0


def test_the_workers_that_would_keep_up():
    """Three workers that are waited for a quarter of the time make in a second what is used in 3/4
    of one: four would make it in that. A process that spends 4 seconds loading for each that it
    computes needs four."""
    assert [workers_needed(*case) for case in ((3, 0.25), (2, 0.4), (0, 0.8), (1, 1.0))] == [
        4,
        4,
        4,
        1000,
    ]


def test_durations_and_paces_are_readable():
    times = {0: "0:00:00", 59.4: "0:00:59", 59.6: "0:01:00", 3661: "1:01:01", 360000: "100:00:00"}
    assert {seconds: duration(seconds) for seconds in times} == times
    rates = {1234.5: "1234 img/s", 12.34: "12 img/s", 1.249: "1.2 img/s", 0.0717: "0.072 img/s"}
    assert {rate: pace(rate) for rate in rates} == rates
