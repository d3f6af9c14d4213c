"""Traces of a schedule whose times are known: all is written, and a perfect schedule reaches the
ideal."""

import json
import os
import sys

import pytest
from matplotlib.image import imread

from engines.timeline import Span
from training.timeline import efficiency, ideal, write


def gpipe(micro_batches, stages, step=0, replica=0, late=0):
    """Even stages: forward passes take a second, backward ones two; then an exchange of five and an
    update of one.

    late: seconds between the last forward and the first backward pass.
    """
    turn = micro_batches + stages - 1
    for stage in range(stages):
        spans = [("forward", n, stage + n, stage + n + 1) for n in range(micro_batches)]
        starts = [turn + late + 2 * (stages - 1 - stage + n) for n in range(micro_batches)]
        spans += [("backward", n, start, start + 2) for n, start in enumerate(starts)]
        spans += [
            ("exchange", -1, 3 * turn + late, 3 * turn + late + 5),
            ("update", -1, 3 * turn + 5, 3 * turn + 6),
        ]
        for kind, number, *times in spans:
            yield Span(replica, stage, replica * stages + stage, kind, number, step, *times)


@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (8, 2), (3, 7)])
def test_even_stages_reach_the_ideal_exactly(micro_batches, stages):
    """Whole numbers of seconds: no rounding. What follows the last backward pass does not count."""
    expected = micro_batches / (micro_batches + stages - 1)
    assert efficiency([*gpipe(micro_batches, stages)]) == ideal(micro_batches, stages) == expected
    assert ideal(micro_batches, stages, 2) == 2 * micro_batches / (2 * micro_batches + stages - 1)


def test_waiting_costs_efficiency_and_replica_0_counts():
    late = [*gpipe(8, 2, late=3), *gpipe(3, 2, replica=1)]
    assert (
        efficiency(late) == 24 / 30 < efficiency([*gpipe(8, 2), *gpipe(3, 2, replica=1)]) == 24 / 27
    )


@pytest.mark.parametrize(
    ("replicas", "steps", "rows"), [(1, (2, 1), 2), (4, (1,), 8), (5, (1,), 2)]
)
def test_the_trace_holds_every_span_and_the_picture_the_first_step_in_few_rows(
    tmp_path, replicas, steps, rows
):
    ranks = [(replica, step) for step in steps for replica in range(replicas)]
    spans = [span for replica, step in ranks for span in gpipe(2 + step, 2, step, replica)]
    # Whoever has the old files open keeps them: new ones take their names.
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("trace.json", "timeline.png"):
        (tmp_path / "a" / "b" / name).write_text("old")
        os.link(tmp_path / "a" / "b" / name, tmp_path / name)
    line = write(tmp_path / "a" / "b", spans, stages=2)
    assert {(tmp_path / name).read_text() for name in ("trace.json", "timeline.png")} == {"old"}
    efficient = sum((2 + step) / (3 + step) for step in steps) / len(steps)
    # The bound is that of the first step: it has 3 micro batches, whatever a step of the recipe
    # has.
    assert f"pipeline efficiency {efficient:.2f} of 1, ideal 3 / (3 + 1) = 0.75" in line
    events = json.loads((tmp_path / "a" / "b" / "trace.json").read_text())["traceEvents"]
    found = [
        (
            each["pid"],
            each["tid"],
            each["cat"],
            *each["args"].values(),
            each["ts"],
            each["ts"] + each["dur"],
        )
        for each in events
        if each["ph"] == "X"
    ]
    about = (
        (s.replica, s.rank, s.kind, s.step, s.stage, s.micro_batch, s.start, s.end) for s in spans
    )
    assert sorted(found) == sorted((*place, start * 1e6, end * 1e6) for *place, start, end in about)
    assert {"replica 0", "stage 1 (rank 1)"} <= {
        each["args"]["name"] for each in events if each["ph"] == "M"
    }
    picture = imread(tmp_path / "a" / "b" / "timeline.png")[:, :, :3] * 255
    assert abs(len(picture) / 140 - (1.3 + 0.52 * rows)) < 0.02  # inches
    blue, orange = (
        (abs(picture - ink).max(2) < 0.5).sum() for ink in ((0, 114, 178), (240, 163, 10))
    )
    assert orange > 1.8 * blue > 0.1 * picture.shape[1]  # backward passes take twice the time


def test_without_matplotlib_there_is_a_trace_and_a_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = write(tmp_path, [*gpipe(2, 2)], stages=2)
    assert (
        "trace.json (no picture: " in line
        and "; pip install matplotlib); pipeline efficiency" in line
    )
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
