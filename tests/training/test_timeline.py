"""Traces of schedules whose times are known: all is written, and perfect schedules reach the ideal."""

import json

import pytest
from matplotlib.image import imread

from engines.timeline import Span
from training.timeline import efficiency, ideal, write


def gpipe(micro_batches, stage, stages):
    return [(kind, stage, number) for kind in ("forward", "backward") for number in range(micro_batches)]


def one_forward_one_backward(micro_batches, stage, stages):
    """Narayanan et al., 2104.04473, figure 4."""
    warmup = min(stages - stage - 1, micro_batches)
    forward, backward = ([(kind, stage, n) for n in range(micro_batches)] for kind in ("forward", "backward"))
    pairs = [step for pair in zip(forward[warmup:], backward) for step in pair]
    return forward[:warmup] + pairs + backward[micro_batches - warmup :]


def interleaved(micro_batches, rank, ranks):
    """Two stages per rank: groups of `ranks` micro batches, all forward passes before the backward."""
    groups = range(0, micro_batches, ranks)
    order = [(stage, first + n) for first in groups for stage in (rank, rank + ranks) for n in range(ranks)]
    other = {rank: rank + ranks, rank + ranks: rank}
    forward = [("forward", stage, number) for stage, number in order]
    return forward + [("backward", other[stage], number) for stage, number in order]


def traced(schedule, micro_batches, ranks, step=0, replica=0):
    """Spans of ranks that work in the order of a schedule, each pass as soon as its input is there.

    Forward passes take one second, backward ones two; then come an exchange of five and an update of one.
    """
    orders = [schedule(micro_batches, rank, ranks) for rank in range(ranks)]
    last = max(stage for order in orders for _, stage, _ in order)
    done, free, places, spans = {}, [0] * ranks, [0] * ranks, []

    def add(rank, stage, kind, number, start, end):
        spans.append(Span(replica, stage, replica * ranks + rank, kind, number, step, start, end))

    while len(done) < sum(map(len, orders)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, number = order[places[rank]]
                source = (kind, stage - 1 if kind == "forward" else stage + 1, number)
                if 0 <= source[1] <= last and source not in done:
                    break
                start = max(free[rank], done.get(source, 0))
                free[rank] = done[kind, stage, number] = start + (1 if kind == "forward" else 2)
                places[rank] += 1
                add(rank, stage, kind, number, start, free[rank])
    for rank in range(ranks):
        add(rank, rank, "exchange", -1, max(free), max(free) + 5)
        add(rank, rank, "update", -1, max(free) + 5, max(free) + 6)
    return spans


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "ranks", "stages"),
    [
        *((schedule, *size, 1) for schedule in (gpipe, one_forward_one_backward) for size in ((1, 1), (8, 2), (3, 7))),
        *((interleaved, *size, 2) for size in ((2, 2), (12, 3))),
    ],
)
def test_even_stages_reach_the_ideal_exactly(schedule, micro_batches, ranks, stages):
    """Whole numbers of seconds: no rounding. What follows the last backward pass does not count."""
    expected = stages * micro_batches / (stages * micro_batches + ranks - 1)
    assert efficiency(traced(schedule, micro_batches, ranks)) == ideal(micro_batches, ranks, stages) == expected


def test_waiting_costs_efficiency_and_replica_0_counts():
    even = traced(gpipe, 8, 2)
    late = [span._replace(start=span.start + 3, end=span.end + 3) if span.kind == "backward" else span for span in even]
    assert efficiency(late) == 24 / 30 < efficiency([*even, *traced(gpipe, 3, 2, replica=1)]) == 24 / 27


@pytest.mark.parametrize(("replicas", "steps", "rows"), [(1, (2, 1), 2), (4, (1,), 8), (5, (1,), 2)])
def test_the_trace_holds_every_span_and_the_picture_the_first_step_in_few_rows(tmp_path, replicas, steps, rows):
    ranks = [(replica, step) for step in steps for replica in range(replicas)]
    spans = [span for replica, step in ranks for span in traced(gpipe, 2 + step, 2, step, replica)]
    line = write(tmp_path / "a" / "b", spans, micro_batches=2, stages=2)
    efficient = sum((2 + step) / (3 + step) for step in steps) / len(steps)
    assert f"pipeline efficiency {efficient:.2f} of 1, ideal 2 / (2 + 1) = 0.67" in line
    events = json.loads((tmp_path / "a" / "b" / "trace.json").read_text())["traceEvents"]
    found = [
        (each["pid"], each["tid"], each["cat"], *each["args"].values(), each["ts"], each["ts"] + each["dur"])
        for each in events
        if each["ph"] == "X"
    ]
    about = ((s.replica, s.rank, s.kind, s.step, s.stage, s.micro_batch, s.start, s.end) for s in spans)
    assert sorted(found) == sorted((*place, start * 1e6, end * 1e6) for *place, start, end in about)
    assert {"replica 0", "stage 1 (rank 1)"} <= {each["args"]["name"] for each in events if each["ph"] == "M"}
    picture = imread(tmp_path / "a" / "b" / "timeline.png")[:, :, :3] * 255
    assert abs(len(picture) / 140 - (1.3 + 0.52 * rows)) < 0.02  # inches
    blue, orange = ((abs(picture - ink).max(2) < 0.5).sum() for ink in ((0, 114, 178), (240, 163, 10)))
    assert orange > 1.8 * blue > 0.1 * picture.shape[1]  # backward passes take twice the time
