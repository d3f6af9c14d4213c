"""Where events go, that telling them never ends the run, and the times that a run tells."""

import errno
import json
import sys
import threading

import pytest

from training import monitor
from training.loggers import Session
from training.metrics import Metrics
from training.monitor import (
    BarProgress,
    Clock,
    Monitor,
    Progress,
    create_progress,
    duration,
    pace,
    workers_needed,
)
from training.services import TensorBoardLogger


@pytest.fixture
def said():
    return []


@pytest.fixture
def watched(tmp_path, said):
    """watched(step=0): a monitor on metrics.jsonl and TensorBoard, its lines for people in `said`."""
    opened = []

    def open_monitor(step=0):
        metrics = Metrics(tmp_path / "metrics.jsonl", 0)
        tensorboard = logger(tmp_path, step)
        opened.append(Monitor(metrics, Progress(10, said.append), [tensorboard]))
        return opened[-1]

    yield open_monitor
    for one in opened:
        one.close()


def logger(folder, step):
    return TensorBoardLogger(Session("a run", {}, folder, step, None, print))


def scalars(folder):
    """{tag: [(step, value)]} of all TensorBoard files in a folder, as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_an_event_goes_to_metrics_tensorboard_and_people_and_a_resumed_run_is_shown_once(watched, tmp_path, said):
    """Numbers alone go to TensorBoard, exact in its float32; steps behind the checkpoint are dropped."""
    one = watched()
    one.event("train", 1, {"loss": 0.5, "file": "a.pt", "trust": {"stem": 0.25}}, "step 1, loss 0.5")
    one.event("train", 2, {"loss": 9.0}, "")
    one.event("checkpoint", 2, {"file": "b.pt"}, "")
    one.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"event": "train", "step": 1, "loss": 0.5, "file": "a.pt", "trust": {"stem": 0.25}},
        {"event": "train", "step": 2, "loss": 9.0},
        {"event": "checkpoint", "step": 2, "file": "b.pt"},
    ]
    assert said == ["step 1, loss 0.5"]
    resumed = watched(step=1)
    resumed.event("train", 2, {"loss": 2.5}, "")
    resumed.close()
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(1, 0.5), (2, 2.5)], "trust/stem": [(1, 0.25)]}


@pytest.mark.parametrize(
    ("error", "printed"), [(OSError(errno.ENOSPC, "No space left on device"), []), (ValueError("a bug"), [ValueError])]
)
def test_tensorboards_thread_keeps_quiet_about_a_full_disk_only(watched, monkeypatch, error, printed):
    """It hands the error on to the run, which prints one line; a traceback beside it would be noise."""
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda failure: reported.append(failure.exc_type))

    def fail():
        raise error

    one = watched()
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    one.close()
    assert reported == printed
    assert threading.excepthook.__name__ == "<lambda>"


def test_a_full_disk_reaches_the_run_through_tensorboard(tmp_path, said, capfd, small_disk):
    """Nothing is printed but what the run itself says."""
    tensorboard = logger(small_disk("16k"), 0)
    one = Monitor(Metrics(tmp_path / "metrics.jsonl", 0), Progress(9, said.append), [tensorboard])
    with pytest.raises(OSError) as caught:
        for step in range(100_000):
            one.event("train", step, {"loss": 1.0}, "")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError):
        one.close()
    assert capfd.readouterr().err == ""
    assert threading.excepthook != tensorboard._report


def test_whatever_fails_as_it_closes_all_else_is_closed(tmp_path):
    """The failure is still the run's to tell; each logger hears what the run ended with."""
    heard = []

    class Failing:
        def close(self, exit_code):
            heard.append(exit_code)
            raise OSError(errno.ENOSPC, "No space left on device")

    class Bar(Progress):
        def close(self):
            heard.append("bar")

    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(OSError, match="No space left"):
        Monitor(metrics, Bar(9), [Failing(), Failing()]).close(75)
    assert heard == ["bar", 75, 75]
    with pytest.raises(ValueError, match="closed"):
        metrics.position()


def test_progress_is_plain_lines_of_log_steps_or_a_bar_on_terminals(said, monkeypatch, capsys):
    """The bar counts from where the run resumed; paths and brackets are no markup to it."""
    plain = Progress(8, said.append)
    plain.tick(1)
    plain.advance(2, "loss 0.5")
    plain.say("evaluation")
    plain.say("")
    plain.close()
    assert said == ["step 2/8  loss 0.5", "evaluation"]
    assert type(create_progress(8, 0, 4)) is Progress
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = create_progress(8, 5, 4)
    assert type(bar) is BarProgress
    bar.tick(6)
    bar.say("left out: [bold]/data/[a].jpg[/bold]")
    bar.advance(7, "loss 0.5")
    bar.advance(8, "loss 0.25")
    bar.close()
    out = capsys.readouterr().out
    assert "left out: [bold]/data/[a].jpg[/bold]" in out
    assert "8/8" in out and "loss 0.25" in out
    assert "step 8/8  loss 0.25" in out and "step 7/8" not in out, "a line stays in each epoch"


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until `now[0]` is set."""
    time = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: time[0])
    return time


def test_the_rate_leaves_out_what_was_not_training_and_seconds_add_up_over_sessions(now):
    """60 images in 10 seconds of which 4 went into an evaluation: 60 / 6, work likewise. The next lap starts afresh.

    Waiting is a share of each lap: 1.5 of its 6 seconds, then 1 of 5. Clocks of host and device differ by a little.
    """
    clock = Clock(50.0, 20.0, 10.0)
    now[0] += 10
    clock.count(20, 200.0)
    clock.count(40, 1000.0)
    clock.pause(4.0)
    assert clock.lap(1.5) == (60 / 6, 1200 / 6, 0.25)
    now[0] += 5
    clock.count(10, 30.0)
    assert clock.lap(2.5) == (10 / 5, 30 / 5, 0.2)
    assert (clock.seconds(), clock.paused, clock.waited) == (65, 24, 12.5)
    now[0] += 5
    assert clock.lap(9.0)[2] == 1.0


@pytest.mark.parametrize(("workers", "share", "needed"), [(3, 0.25, 4), (2, 0.4, 4), (0, 0.8, 4), (1, 1.0, 1000)])
def test_the_workers_that_would_keep_up(workers, share, needed):
    """Three workers that are waited for a quarter of the time make in a second what is used in 3/4 of one: four would
    make it in that. A process that spends 4 seconds loading for each that it computes needs four."""
    assert workers_needed(workers, share) == needed


def test_durations_and_paces_are_read_by_people():
    times = {0: "0:00:00", 59.4: "0:00:59", 59.6: "0:01:00", 3661: "1:01:01", 360000: "100:00:00"}
    assert {seconds: duration(seconds) for seconds in times} == times
    rates = {1234.5: "1234 img/s", 12.34: "12 img/s", 1.249: "1.2 img/s", 0.0717: "0.072 img/s"}
    assert {rate: pace(rate) for rate in rates} == rates
