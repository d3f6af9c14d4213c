"""Traces of schedules whose times are known: all is written, and perfect schedules reach the ideal."""

import json

import pytest
from matplotlib.image import imread

from engines.timeline import Span
from training.timeline import efficiency, ideal, write

BLUE, ORANGE = (0, 114, 178), (240, 163, 10)


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


def traced(schedule, micro_batches, ranks, step=0, replica=0, unit=1, end=0):
    """Spans of ranks that work in the order of a schedule, each pass as soon as its input is there.

    Forward passes take one unit, backward ones two; then the exchange `end` units and the update one.
    """
    orders = [schedule(micro_batches, rank, ranks) for rank in range(ranks)]
    last = max(stage for order in orders for _, stage, _ in order)
    done, free, places, spans = {}, [0] * ranks, [0] * ranks, []

    def add(rank, stage, kind, number, start, end):
        spans.append(Span(replica, stage, replica * ranks + rank, kind, number, step, start * unit, end * unit))

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
    for rank in range(ranks if end else 0):
        add(rank, rank, "exchange", -1, max(free), max(free) + end)
        add(rank, rank, "update", -1, max(free) + end, max(free) + end + 1)
    return spans


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (8, 2), (3, 7)])
def test_even_stages_reach_the_ideal_exactly(schedule, micro_batches, stages):
    """Whole numbers of seconds: no rounding. What follows the last backward pass does not count."""
    spans = traced(schedule, micro_batches, stages, end=5)
    assert efficiency(spans) == ideal(micro_batches, stages) == micro_batches / (micro_batches + stages - 1)


@pytest.mark.parametrize(("micro_batches", "ranks"), [(2, 2), (12, 3)])
def test_interleaved_stages_wait_less(micro_batches, ranks):
    found = efficiency(traced(interleaved, micro_batches, ranks))
    assert found == ideal(micro_batches, ranks, 2) == 2 * micro_batches / (2 * micro_batches + ranks - 1)


def test_waiting_costs_efficiency_and_replica_0_counts():
    even = traced(gpipe, 8, 2)
    late = [span._replace(start=span.start + 3, end=span.end + 3) if span.kind == "backward" else span for span in even]
    assert efficiency(late) == 24 / 30 < efficiency([*even, *traced(gpipe, 3, 2, replica=1)]) == 24 / 27


def test_the_trace_holds_every_span_with_its_times(tmp_path):
    spans = [span for replica in (0, 1) for span in traced(gpipe, 4, 2, replica=replica, unit=0.5, end=1)]
    write(tmp_path, spans, micro_batches=4, stages=2)
    trace = json.loads((tmp_path / "trace.json").read_text())
    found = {
        (each["pid"], each["tid"], each["cat"], each["args"]["micro_batch"], each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each["ph"] == "X"
    }
    expected = {(s.replica, s.rank, s.kind, s.micro_batch, s.start * 1e6, s.end * 1e6) for s in spans}
    assert found == expected and len(expected) == len(spans)
    names = {each["args"].get("name") for each in trace["traceEvents"] if each["ph"] == "M"}
    assert {"replica 0", "replica 1", "stage 0 (rank 0)", "stage 1 (rank 3)"} <= names


def runs(line, colours):
    """The colours along a line of pixels, each as often as a run of it comes; a pixel at an edge is a mixture."""
    found, before = [], None
    for pixel in line:
        colour = tuple(round(255 * float(value)) for value in pixel[:3])
        if colour in colours and colour != before:
            found.append(colour)
        before = colour
    return found


def bands(path):
    """The rows of boxes, from above: of each the colours along its lower border, which is free of numbers."""
    picture = imread(path)[:, :, :3]
    computing = sum((abs(picture * 255 - colour).max(2) < 0.5) for colour in (BLUE, ORANGE))
    rows = [number for number, share in enumerate(computing.mean(1)) if share > 0.1]
    ends = [row for row in rows if row + 1 not in rows]
    return [runs(picture[end - 6], (BLUE, ORANGE)) for end in ends]


def test_the_picture_shows_a_box_per_pass(tmp_path):
    """Images are loaded all the time, which hides none of them."""
    spans = traced(one_forward_one_backward, 8, 3, unit=0.01, end=4)
    spans += [Span(0, stage, stage, "load", -1, 0, 0.0, 0.3) for stage in range(3)]
    write(tmp_path, spans, micro_batches=8, stages=3)
    colours = {"forward": BLUE, "backward": ORANGE}
    orders = [one_forward_one_backward(8, stage, 3) for stage in range(3)]
    assert bands(tmp_path / "timeline.png") == [[colours[kind] for kind, *_ in order] for order in orders]


@pytest.mark.parametrize(("replicas", "steps", "rows"), [(1, (2, 1), 2), (4, (1,), 8), (5, (1,), 2)])
def test_the_picture_is_of_the_first_step_and_of_few_rows(tmp_path, replicas, steps, rows):
    ranks = [(replica, step) for step in steps for replica in range(replicas)]
    spans = [span for replica, step in ranks for span in traced(gpipe, 2 + step, 2, step=step, replica=replica)]
    line = write(tmp_path / "a" / "b", spans, micro_batches=2, stages=2)
    assert bands(tmp_path / "a" / "b" / "timeline.png") == [[BLUE] * 3 + [ORANGE] * 3] * rows
    efficient = sum((2 + step) / (3 + step) for step in steps) / len(steps)
    assert f"pipeline efficiency {efficient:.2f} of 1, ideal 2 / (2 + 1) = 0.67" in line
    with pytest.raises(AssertionError, match="spans of 2 ranks of replica 0, not of 4"):
        write(tmp_path, spans, micro_batches=2, stages=4)
