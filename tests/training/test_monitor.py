"""What a run tells, and that telling it never ends the run."""

import errno
import io
import json
import math
import os
import subprocess
import sys
import threading

import pytest

from training import monitor
from training.loggers import TensorBoardLogger
from training.monitor import (
    BarProgress,
    Clock,
    DataWait,
    Metrics,
    Monitor,
    Progress,
    create_progress,
    duration,
    pace,
    workers_needed,
)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def lines():
    return []


@pytest.fixture
def watched(tmp_path, lines):
    """watched(keep_bytes=0, step=0): a monitor on metrics.jsonl and TensorBoard, its lines for people in `lines`."""
    opened = []

    def open_monitor(keep_bytes=0, step=0):
        metrics = Metrics(tmp_path / "metrics.jsonl", keep_bytes)
        tensorboard = TensorBoardLogger(tmp_path / "tensorboard", step)
        opened.append(Monitor(metrics, Progress(10, lines.append), [tensorboard]))
        return opened[-1]

    yield open_monitor
    for one in opened:
        one.close()


def test_metrics_are_one_object_a_line_at_once_on_disk(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.write({"event": "train", "step": 1, "loss": 0.5})
    assert read(tmp_path / "metrics.jsonl") == [{"event": "train", "step": 1, "loss": 0.5}]
    metrics.close()


def test_a_resumed_run_cuts_metrics_back_and_goes_on_behind_them(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    metrics.write({"step": 1})
    position = metrics.position()
    metrics.write({"step": 2})
    metrics.close()
    assert position == len('{"step": 1}\n')
    metrics = Metrics(path, position)
    metrics.write({"step": "2 again"})
    metrics.close()
    assert read(path) == [{"step": 1}, {"step": "2 again"}]


def test_metrics_that_are_shorter_than_the_checkpoint_knows_are_not_padded(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    metrics = Metrics(path, 1000)
    metrics.write({"step": 2})
    metrics.close()
    assert read(path) == [{"step": 1}, {"step": 2}]


def test_the_position_is_on_the_disk_before_a_checkpoint_relies_on_it(tmp_path, monkeypatch):
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    metrics.write({"step": 1})
    assert synced == []
    assert [metrics.position()] == synced
    metrics.close()


def test_numbers_that_json_does_not_know_become_null(tmp_path):
    """Strict parsers refuse NaN and Infinity, which Python's would write."""
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.write({"loss": math.nan, "lr": math.inf, "trust": {"stem": -math.inf, "head": 0.5}, "step": 3})
    metrics.close()

    def refuse(constant):
        raise AssertionError(constant)

    text = (tmp_path / "metrics.jsonl").read_text()
    expected = {"loss": None, "lr": None, "trust": {"stem": None, "head": 0.5}, "step": 3}
    assert json.loads(text, parse_constant=refuse) == expected


def scalars(folder):
    """{tag: [(step, value)]} of all TensorBoard files in a folder, as TensorBoard would show them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_an_event_goes_to_metrics_tensorboard_and_people(watched, tmp_path, lines):
    """Numbers alone go to TensorBoard; 0.5 and 0.25 are exact in its float32."""
    one = watched()
    one.event("train", 4, {"loss": 0.5, "file": "a.pt", "trust": {"stem": 0.25}}, "step 4, loss 0.5")
    one.event("checkpoint", 4, {"file": "b.pt"}, "")
    one.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"event": "train", "step": 4, "loss": 0.5, "file": "a.pt", "trust": {"stem": 0.25}},
        {"event": "checkpoint", "step": 4, "file": "b.pt"},
    ]
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(4, 0.5)], "trust/stem": [(4, 0.25)]}
    assert lines == ["step 4, loss 0.5"]


def test_tensorboard_shows_a_resumed_run_once(watched, tmp_path):
    """Steps behind the checkpoint, written by the session that was cut off, are dropped."""
    first = watched()
    for step in (1, 2, 3):
        first.event("train", step, {"loss": float(step)}, "")
    first.close()
    second = watched(step=1)
    for step in (2, 3, 4):
        second.event("train", step, {"loss": step + 0.5}, "")
    second.close()
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]


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


def test_a_full_disk_reaches_the_run_through_tensorboard(tmp_path, lines, capfd):
    """On a real file system of 16 KiB; nothing is printed but what the run itself says."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs root and the right to mount")
    try:
        tensorboard = TensorBoardLogger(disk / "tensorboard", 0)
        one = Monitor(Metrics(tmp_path / "metrics.jsonl", 0), Progress(9, lines.append), [tensorboard])
        with pytest.raises(OSError) as caught:
            for step in range(100_000):
                one.event("train", step, {"loss": 1.0}, "")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(OSError):
            one.close()
        assert capfd.readouterr().err == ""
        assert threading.excepthook != tensorboard._report
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


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


def test_plain_progress_prints_log_steps_and_messages_only(lines):
    progress = Progress(8, lines.append)
    progress.tick(1)
    progress.advance(2, "loss 0.5")
    progress.say("evaluation")
    progress.say("")
    progress.close()
    assert lines == ["step 2/8  loss 0.5", "evaluation"]


def test_a_bar_shows_on_terminals_and_plain_lines_elsewhere(monkeypatch, capsys):
    plain = create_progress(8, 0)
    assert type(plain) is Progress
    plain.say("a line")
    assert capsys.readouterr().out == "a line\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    bar = create_progress(8, 0)
    assert type(bar) is BarProgress
    bar.close()


def test_the_bar_counts_from_where_the_run_resumed_and_leaves_messages_as_they_are(capsys):
    """Paths and brackets are no markup to it."""
    bar = BarProgress(8, 5)
    bar.tick(6)
    bar.say("left out: [bold]/data/[a].jpg[/bold]")
    bar.advance(7, "loss 0.5")
    bar.close()
    out = capsys.readouterr().out
    assert "left out: [bold]/data/[a].jpg[/bold]" in out
    assert "7/8" in out and "loss 0.5" in out


_PRINTER = """
import sys
from training import command
from training.monitor import create_progress
command._open_streams()
progress = create_progress(3, 0)
progress.say("first")
sys.stdin.readline()
for _ in range(3):
    progress.say("x" * 100)
print("went on", file=sys.stderr)
"""


def test_a_run_goes_on_when_nobody_reads_its_lines_any_more():
    """`train.py | tee log` and Ctrl-C: tee is gone before the run has saved."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", _PRINTER], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == "went on\n"
    process.stderr.close()
    assert process.wait() == 0


def test_other_failures_of_the_output_are_not_hidden(monkeypatch):
    """A log file on a full disk, say."""

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError):
        create_progress(3, 0).say("a line")


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until `now[0]` is set."""
    time = [100.0]
    monkeypatch.setattr(monitor.time, "monotonic", lambda: time[0])
    return time


def test_the_rate_leaves_out_what_was_not_training(now):
    """60 images in 10 seconds of which 4 went into an evaluation: 60 / 6, work likewise. The next lap starts afresh."""
    clock = Clock(0.0, 0.0)
    now[0] += 10
    clock.count(20, 200.0)
    clock.count(40, 1000.0)
    clock.pause(4.0)
    assert clock.lap() == (6, 60 / 6, 1200 / 6)
    now[0] += 5
    clock.count(10, 30.0)
    assert clock.lap() == (5, 10 / 5, 30 / 5)


def test_seconds_add_up_over_sessions(now):
    clock = Clock(50.0, 20.0)
    now[0] += 7
    clock.pause(3.0)
    assert (clock.seconds(), clock.paused()) == (57, 23)
    assert clock.lap()[0] == 4
    assert (clock.seconds(), clock.paused()) == (57, 23)


def test_waiting_is_a_share_of_each_lap_and_adds_up_over_sessions():
    """Told are the seconds of the session so far: 1 of the first 4, then 2 of the next 8."""
    wait = DataWait(10.0)
    assert (wait.lap(1.0, 4.0), wait.lap(3.0, 8.0)) == (0.25, 0.25)
    assert wait.seconds() == 13.0
    assert wait.lap(9.0, 5.0) == 1.0, "clocks of host and device differ by a little"


@pytest.mark.parametrize(
    ("workers", "share", "needed"), [(8, 0.5, 16), (3, 0.25, 4), (2, 0.4, 4), (0, 0.5, 1), (0, 0.8, 4), (1, 1.0, 1000)]
)
def test_the_workers_that_would_keep_up(workers, share, needed):
    """Three workers that are waited for a quarter of the time make in a second what is used in 3/4 of one: four would
    make it in that. A process that spends 4 seconds loading for each that it computes needs four."""
    assert workers_needed(workers, share) == needed


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.4, "0:00:59"), (59.6, "0:01:00"), (3661, "1:01:01"), (360000, "100:00:00")],
)
def test_durations_are_read_as_hours_minutes_seconds(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1234.5, "1234 img/s"), (12.34, "12 img/s"), (1.249, "1.2 img/s"), (0.0717, "0.072 img/s")],
)
def test_slow_rates_keep_two_digits(rate, text):
    assert pace(rate) == text
