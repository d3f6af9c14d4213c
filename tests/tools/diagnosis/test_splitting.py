"""A step's parts from measured times: they add up, and they are those from which the times were
made; how they look."""

import math

import pytest

from engines.timeline import Span
from tools.diagnosis import rendering, splitting
from tools.diagnosis.splitting import PARTS, Passes, Times


def times(
    lengths,
    own=None,
    stages=1,
    accumulation=4,
    virtual=1,
    exchange=(),
    update=0.5,
    waited=0.25,
    extra=0.0,
):
    """Times of steps without noise: each replica's pass of such length in each step, then exchange
    and update."""
    steps = len(next(iter(lengths.values())))
    slowest = [max(values[step] for values in lengths.values()) for step in range(steps)]
    without = [length + update for length in slowest]
    memory = [whole + exchange[0] for whole in without] if exchange else without
    trained = [whole + waited + extra for whole in memory]
    found = Passes(
        own or {replica * stages: values for replica, values in lengths.items()}, lengths
    )
    shape = (accumulation, stages, virtual)
    return Times(
        *shape,
        trained,
        [waited] * steps,
        memory,
        without if exchange else [],
        [update] * steps,
        found,
    )


def parts(**seconds):
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


TWO_STAGES = {"lengths": {0: [6.5, 6.5]}, "own": {0: [3.0, 3.0], 1: [5.0, 5.0]}, "stages": 2}
TWO_REPLICAS = {
    "lengths": {0: [4.0, 4.0, 4.0], 1: [5.0, 5.0, 5.0]},
    "exchange": (2.0,),
    "extra": 0.125,
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (TWO_REPLICAS, {"compute": 4.5, "exchange": 2.0, "straggling": 0.5, "rest": 0.125}),
        # An exchange that seems to take less than nothing.
        ({"lengths": {0: [4.0], 1: [4.0]}, "exchange": (-0.5,)}, {"compute": 4.0, "rest": -0.5}),
        (TWO_STAGES, {"compute": 4.0, "imbalance": 1.0, "bubble": 1.5}),
    ],
)
def test_parts_are_those_that_were_put_in_and_add_up(given, expected):
    measured = times(**given)
    found = splitting.parts(measured)
    assert found == pytest.approx(parts(input=0.25, update=0.5, **expected))
    assert list(found) == list(PARTS) == list(rendering.PARTS)
    assert math.fsum(found.values()) == pytest.approx(measured.as_trained[0])


def scaled(measured, accumulation):
    return splitting.scaled(splitting.parts(measured), measured, accumulation)


def test_a_longer_step_has_more_of_what_comes_with_each_micro_batch():
    # The second replica is always the slower one, so its lead grows with the step.
    expected = parts(compute=18.0, input=1.0, exchange=2.0, straggling=2.0, update=0.5, rest=0.5)
    assert scaled(times(**TWO_REPLICAS), 16) == pytest.approx(expected)
    # An update that took longer when it was measured by itself: that error does not grow.
    found = scaled(times({0: [4.0, 4.0]})._replace(update=[0.75, 0.75]), 64)
    assert (found["update"], found["rest"]) == (0.75, -0.25)
    # Replicas that are slow in turn, on average neither is: chance grows with the root of the micro
    # batches.
    in_turn = times({0: [4.0, 5.0], 1: [5.0, 4.0]})
    assert scaled(in_turn, 16)["straggling"] == pytest.approx(1.0)
    assert scaled(in_turn, 4) == pytest.approx(splitting.parts(in_turn))


def test_a_pipeline_fills_once_however_long_the_step():
    """4 micro batches on 2 even stages take 5 turns of 1 s, 16 take 17: both are one turn longer
    than the work. A wait beyond that comes with each micro batch."""
    even = {0: [4.0, 4.0], 1: [4.0, 4.0]}
    found = scaled(times({0: [5.0, 5.0]}, own=even, stages=2), 16)
    assert found["compute"] + found["imbalance"] + found["bubble"] == pytest.approx(17.0)
    assert scaled(times({0: [5.4, 5.4]}, own=even, stages=2), 16)["bubble"] == pytest.approx(
        1.0 + 4 * 0.4
    )


def doubts(measured):
    return splitting.doubts(measured, splitting.parts(measured))


def test_parts_that_add_up_and_repeat_are_not_doubted():
    assert doubts(times(**TWO_REPLICAS)) == doubts(times(**TWO_STAGES)) == []
    # Waiting for images may vary: a far disk does.
    steady = times({0: [4.0] * 4})
    assert (
        doubts(steady._replace(as_trained=[5.0, 9.0, 6.0, 12.0], waited=[0.5, 4.5, 1.5, 7.5])) == []
    )


@pytest.mark.parametrize(
    ("measured", "reasons"),
    [
        # 4 + 0.5 + 0.25 seconds of parts that were measured while the machine was busy, in a step
        # of 3.275.
        (times({0: [4.0] * 4})._replace(as_trained=[3.275] * 4), ["add up to 145 % of a step"]),
        (times({0: [4.0] * 4}, extra=2.0), ["30 % of a step is in no part"]),
        (
            times({0: [4.0] * 4})._replace(from_memory=[2.0, 4.0, 5.0, 9.0]),
            ["steps with images in memory vary: half of 4 take between 3.5 s and 6 s"],
        ),
        (
            times({0: [4.0] * 4})._replace(as_trained=[2.25, 4.75, 4.75, 9.25]),
            ["steps vary: half of 4 take between 3.88 s and 5.62 s"],
        ),
        (
            times({0: [4.0] * 5}, exchange=(1.0,))._replace(
                without_exchange=[3.5, 4.5, 5.5, 5.6, 4.0]
            ),
            ["differ by less than they vary"],
        ),
    ],
)
def test_what_does_not_add_up_or_repeat_is_doubted(measured, reasons):
    found = doubts(measured)
    assert len(found) == len(reasons), found
    for reason, words in zip(found, reasons):
        assert words in reason


def test_straggling_is_the_deviation_over_replicas_and_steps():
    """Lengths 4 and 5, over their mean: 0.5 / 4.5, whether replicas or steps differ; only chance
    averages out."""
    lasting = times({0: [4.0, 4.0], 1: [5.0, 5.0]})
    chance = times({0: [4.0, 5.0], 1: [5.0, 4.0]})
    for measured, longer in ((lasting, 0.5), (chance, 0.25)):
        assert splitting.straggling(measured, 4) == pytest.approx(0.5 / 4.5)
        assert splitting.straggling(measured, 16) == pytest.approx(longer / 4.5)


def test_spans_become_seconds_of_ranks_and_replicas():
    """Two replicas of two stages, two steps; exchange and update are no passes."""
    spans = []
    for step in (3, 4):
        for rank, (start, end) in enumerate(((0, 2), (1, 3), (0, 3), (2, 6))):
            who = (rank // 2, rank % 2, rank)
            middle = (start + end) / 2
            spans.append(Span(*who, "load", 0, step, start - 0.5, start))
            spans.append(Span(*who, "forward", 0, step, start, middle))
            spans.append(Span(*who, "backward", 0, step, middle, end))
            spans.append(Span(*who, "update", -1, step, 8.0, 9.0))
    found = splitting.passes(spans, stages=2)
    assert found.by_rank == {0: [2.5, 2.5], 1: [2.5, 2.5], 2: [3.5, 3.5], 3: [4.5, 4.5]}
    assert found.by_replica == {0: [3.5, 3.5], 1: [6.5, 6.5]}


def test_a_rank_is_compared_with_those_of_its_stage():
    own = {0: [1.0, 1.0], 1: [4.0, 4.0], 2: [1.0, 1.5], 3: [4.0, 4.0]}
    rows = splitting.ranks(Passes(own, {}), 2, ["a", "a", "b", "b"])
    assert [row.lag for row in rows] == pytest.approx([-0.2, 0.0, 0.25, 0.0])
    assert splitting.slowest(rows) == (2, 1, 0, "b", 1.25, 0.25, 0.25)
    assert (
        splitting.slowest(splitting.ranks(Passes({0: [1.0], 1: [4.0]}, {}), 2, ["a", "a"])) is None
    )


def test_the_bar_is_as_wide_as_asked_for_and_has_the_parts_in_their_shares():
    bar = rendering.bar(
        parts(compute=1 / 3, update=1 / 3, bubble=1 / 7, straggling=0.001, rest=-0.2), 79
    )
    assert len(bar) == 79 and "r" not in bar
    bar = rendering.bar(parts(compute=0.5, input=0.25, exchange=0.125, rest=0.125), 80)
    assert bar == "C" * 40 + "I" * 20 + "X" * 10 + "r" * 10
