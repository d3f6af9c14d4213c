"""Traces of schedules whose times are known: all is written, and perfect schedules reach the ideal."""

import json
import math

import pytest
from matplotlib.image import imread

from engines.timeline import Span
from training.timeline import efficiency, ideal, write

BLUE, ORANGE, DARK = (0, 114, 178), (240, 163, 10), (77, 77, 77)
LIGHT_BLUE = tuple(round(value + (255 - value) * 0.65 / 2) for value in BLUE)


def gpipe(micro_batches, stage, stages):
    numbers = range(micro_batches)
    return [*(("forward", stage, number) for number in numbers), *(("backward", stage, number) for number in numbers)]


def one_forward_one_backward(micro_batches, stage, stages):
    """Narayanan et al., 2104.04473, figure 4."""
    warmup = min(stages - stage - 1, micro_batches)
    forward, backward = ([(kind, stage, n) for n in range(micro_batches)] for kind in ("forward", "backward"))
    pairs = [step for pair in zip(forward[warmup:], backward) for step in pair]
    return forward[:warmup] + pairs + backward[micro_batches - warmup :]


def all_chunks_forward(micro_batches, rank, ranks):
    """Interleaved, two stages per rank: groups of `ranks` micro batches, all forward passes before the backward."""
    order = [
        (stage, group + number)
        for group in range(0, micro_batches, ranks)
        for stage in (rank, rank + ranks)
        for number in range(ranks)
    ]
    other = {rank: rank + ranks, rank + ranks: rank}
    backward = [("backward", other[stage], number) for stage, number in order]
    return [("forward", stage, number) for stage, number in order] + backward


def traced(orders, forward=1, backward=2, step=0, replica=0, unit=1, end=0):
    """Spans of ranks that do their work in the given order, each as soon as its input is there."""
    last = max(stage for order in orders for _, stage, _ in order)
    done, free, places, spans = {}, [0] * len(orders), [0] * len(orders), []
    while len(done) < sum(map(len, orders)):
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, number = order[places[rank]]
                source = (kind, stage - 1 if kind == "forward" else stage + 1, number)
                if 0 <= source[1] <= last and source not in done:
                    break
                start = max(free[rank], done.get(source, 0))
                free[rank] = done[kind, stage, number] = start + (forward if kind == "forward" else backward)
                places[rank] += 1
                place = (replica, stage, replica * len(orders) + rank)
                spans.append(Span(*place, kind, number, step, start * unit, free[rank] * unit))
    behind = max(free)
    if end:
        for rank in range(len(orders)):
            place = (replica, rank, replica * len(orders) + rank)
            spans.append(Span(*place, "exchange", -1, step, behind * unit, (behind + end) * unit))
            spans.append(Span(*place, "update", -1, step, (behind + end) * unit, (behind + end + 1) * unit))
    return spans


def pipeline(schedule, micro_batches, stages, **how):
    return traced([schedule(micro_batches, stage, stages) for stage in range(stages)], **how)


@pytest.mark.parametrize("schedule", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize(("micro_batches", "stages"), [(1, 1), (8, 2), (32, 4), (3, 7)])
def test_even_stages_reach_the_ideal_exactly(schedule, micro_batches, stages):
    """Whole numbers of seconds: no rounding, and both sides are the same fraction."""
    spans = pipeline(schedule, micro_batches, stages, end=5)
    assert efficiency(spans) == ideal(micro_batches, stages) == micro_batches / (micro_batches + stages - 1)


@pytest.mark.parametrize(("micro_batches", "ranks"), [(2, 2), (8, 4), (12, 3)])
def test_interleaved_stages_wait_less(micro_batches, ranks):
    spans = traced([all_chunks_forward(micro_batches, rank, ranks) for rank in range(ranks)])
    assert efficiency(spans) == ideal(micro_batches, ranks, virtual=2) > ideal(micro_batches, ranks)
    assert ideal(micro_batches, ranks, 2) == 2 * micro_batches / (2 * micro_batches + ranks - 1)


def test_waiting_costs_efficiency_and_what_follows_the_last_backward_pass_does_not():
    even = pipeline(gpipe, 8, 2)
    assert efficiency(pipeline(gpipe, 8, 2, end=100)) == efficiency(even)
    late = [span._replace(start=span.start + 3, end=span.end + 3) if span.kind == "backward" else span for span in even]
    assert efficiency(late) == 2 * 8 * 3 / (2 * (9 * 3 + 3))
    slow = [
        span._replace(end=span.start + 0.5) if span.stage == 0 and span.kind == "forward" else span for span in even
    ]
    assert efficiency(slow) == (2 * 8 * 3 - 8 * 0.5) / (2 * 9 * 3)


def test_efficiency_is_that_of_the_first_replica_in_one_step():
    spans = pipeline(gpipe, 8, 2)
    others = [span._replace(replica=1, rank=span.rank + 2, end=span.start + 0.1) for span in spans]
    assert efficiency(spans + others) == ideal(8, 2)
    with pytest.raises(AssertionError, match="one step"):
        efficiency([*spans, spans[0]._replace(step=1)])


def test_the_trace_holds_every_span(tmp_path):
    """As Chrome's trace viewer reads it: complete events in microseconds, and the names of processes and threads."""
    spans = [
        span._replace(start=1e6 + span.start, end=1e6 + span.end)  # a clock that was not started with the run
        for step in (2, 3)
        for replica in (0, 1)
        for span in pipeline(one_forward_one_backward, 4, 2, step=step, replica=replica, unit=0.25, end=1)
    ]
    spans.append(Span(0, 0, 0, "load", -1, 2, 1e6 - 0.5, 1e6))
    write(tmp_path, spans, micro_batches=4, stages=2)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    read = []
    for event in events:
        about, start = event["args"], event["ts"] / 1e6 + 1e6 - 0.5
        who = event["pid"], about["stage"], event["tid"]
        what = event["cat"], about["micro_batch"], about["step"]
        read.append(Span(*who, *what, start, start + event["dur"] / 1e6))
    assert sorted(read) == sorted(spans)  # exact: all times are multiples of a quarter
    assert {event["name"] for event in events} >= {"forward 0", "backward 3", "exchange", "update", "load"}
    names = {
        (event["name"], event["pid"], event.get("tid")): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    assert names["process_name", 1, None] == "replica 1"
    assert names["thread_name", 1, 3] == "stage 1 (rank 3)"
    assert len(events) + len(names) == len(trace["traceEvents"]) == 2 * 2 * 2 * (8 + 2) + 1 + 2 + 4 * 2


def runs(line, colours):
    """The colours along a line of pixels, each as often as a run of it comes; a pixel at an edge is a mixture."""
    found, before = [], None
    for pixel in line:
        colour = tuple(round(255 * float(value)) for value in pixel[:3])
        if colour in colours and colour != before:
            found.append(colour)
        before = colour
    return found


def bands(picture):
    """The rows of boxes, from above: of each a line of pixels close to its lower border, free of numbers."""
    computing = (abs(picture[:, :, :3] * 255 - BLUE).max(2) < 0.5) | (
        abs(picture[:, :, :3] * 255 - ORANGE).max(2) < 0.5
    )
    rows = [number for number, share in enumerate(computing.mean(1)) if share > 0.1]
    ends = [row for row, following in zip(rows, [*rows[1:], math.inf]) if following > row + 1]
    return [picture[end - 6] for end in ends]


def test_the_picture_shows_a_box_per_pass(tmp_path):
    """Boxes have white borders, so that each is a run of its own along a line through the row.

    Images are loaded all the time, which hides none of them.
    """
    spans = pipeline(one_forward_one_backward, 8, 3, unit=0.01, end=4)
    spans += [Span(0, stage, stage, "load", -1, 0, 0.0, 0.3) for stage in range(3)]
    write(tmp_path, spans, micro_batches=8, stages=3)
    lines = bands(imread(tmp_path / "timeline.png"))
    assert len(lines) == 3
    for stage, line in enumerate(lines):
        order = one_forward_one_backward(8, stage, 3)
        expected = [BLUE if kind == "forward" else ORANGE for kind, _, _ in order]
        assert runs(line, (BLUE, ORANGE, DARK)) == [*expected, DARK]
        forward, backward = ((abs(line[:, :3] * 255 - colour).max(1) < 0.5).sum() for colour in (BLUE, ORANGE))
        assert backward / forward == pytest.approx(2, abs=0.1)  # as the times, but for a pixel or two of border


def test_the_picture_is_of_the_first_step_and_of_few_rows(tmp_path):
    def drawn(replicas, steps):
        spans = [
            span
            for step in steps
            for replica in range(replicas)
            for span in pipeline(gpipe, 2 + step, 2, step=step, replica=replica)
        ]
        line = write(tmp_path, spans, micro_batches=2, stages=2)
        return line, [runs(line, (BLUE, ORANGE)) for line in bands(imread(tmp_path / "timeline.png"))]

    assert drawn(1, (3, 1, 2))[1] == [[BLUE] * 3 + [ORANGE] * 3] * 2
    assert len(drawn(4, (1,))[1]) == 4 * 2
    assert len(drawn(5, (1,))[1]) == 2
    found = drawn(1, (0, 2))[0]
    mean = (2 / 3 + 4 / 5) / 2
    assert found == (
        f"timeline of steps 0 to 2: {tmp_path}/trace.json, timeline.png; "
        f"pipeline efficiency {mean:.2f} of 1, ideal 2 / (2 + 1) = 0.67"
    )


def test_very_many_micro_batches_are_shown_at_the_beginning_and_the_end(tmp_path):
    """A thousand boxes side by side would be a blur."""
    write(tmp_path, pipeline(gpipe, 500, 2, end=1), micro_batches=500, stages=2)
    for line in bands(imread(tmp_path / "timeline.png")):
        found = runs(line, (BLUE, ORANGE, DARK))
        assert found == [BLUE] * found.count(BLUE) + [ORANGE] * found.count(ORANGE) + [DARK]
        assert 10 < found.count(BLUE) < 60 and 10 < found.count(ORANGE) < 60


def test_interleaved_stages_of_a_rank_share_a_row_in_two_shades(tmp_path):
    line = write(tmp_path, traced([all_chunks_forward(4, r, 2) for r in (0, 1)]), micro_batches=4, stages=2, virtual=2)
    assert line.endswith("pipeline efficiency 0.89 of 1, ideal 8 / (8 + 1) = 0.89")
    for pixels in bands(imread(tmp_path / "timeline.png")):
        assert runs(pixels, (BLUE, LIGHT_BLUE)) == [BLUE, BLUE, LIGHT_BLUE, LIGHT_BLUE] * 2
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "stages 1, 3 (rank 1)" in [event["args"].get("name") for event in trace]


def test_one_stage_works_the_folder_is_made_and_missing_ranks_are_noticed(tmp_path):
    folder = tmp_path / "runs" / "one"
    line = write(folder, pipeline(gpipe, 4, 1, step=7, end=1), micro_batches=4, stages=1)
    assert line.startswith(f"timeline of step 7: {folder}/trace.json, timeline.png; ")
    assert line.endswith("pipeline efficiency 1.00 of 1, ideal 4 / (4 + 0) = 1.00")
    assert len(bands(imread(folder / "timeline.png"))) == 1
    with pytest.raises(AssertionError, match="spans of 2 ranks of replica 0, not of 4"):
        write(tmp_path, pipeline(gpipe, 4, 2), micro_batches=4, stages=4)
