"""Lines keep what matters when they are thinned out, and lie where their events lie."""

import math

import numpy as np
import pytest

from tools.reporting.drawing import COLOURS, Clock, in_words, run_style, thinned, unit_of


@pytest.mark.parametrize("count", [0, 1, 5, 99, 100])
def test_short_lines_are_drawn_whole(count):
    assert thinned([0.0] * count, 100) == list(range(count))


def test_no_spike_is_lost_and_no_more_is_drawn_than_asked_for():
    values = np.random.default_rng(0).normal(size=100_000)
    spikes = {17: 50.0, 54_321: -60.0, 99_998: 70.0}
    for place, value in spikes.items():
        values[place] = value
    kept = thinned(values, 600)
    assert len(kept) <= 600 and kept == sorted(set(kept))
    assert set(spikes) <= set(kept) and {0, 99_999} <= set(kept)


def test_gaps_stay_gaps():
    values = [1.0] * 10_000
    values[5000] = math.nan
    assert 5000 in thinned(values, 100)
    assert len(thinned([math.nan] * 10_000, 100)) <= 100


def test_thirty_six_runs_look_different_and_the_first_six_without_their_colour():
    looks = [run_style(order) for order in range(36)]
    assert len({(style.colour, style.dash) for style in looks}) == 36
    assert len({style.dash for style in looks[:6]}) == len({style.symbol for style in looks[:6]}) == len(COLOURS) == 6


def test_a_step_is_placed_at_the_newest_log_line_before_it():
    clock = Clock({"step": [10, 15, 20], "seconds": [3.0, math.nan, 7.0]})
    assert [clock.at(step) for step in (5, 10, 19, 20, 99)] == [None, 3.0, 3.0, 7.0, 7.0]


@pytest.mark.parametrize(
    ("seconds", "unit"), [(0, "seconds"), (119, "seconds"), (120, "minutes"), (7200, "hours"), (1e7, "days")]
)
def test_time_has_a_unit_of_its_size(seconds, unit):
    assert unit_of(seconds)[0] == unit


def test_a_line_is_described_in_words():
    words = in_words("training", [2.0, math.nan, 0.5, 1.0], [1, 2, 3, 4])
    assert words == "training: 2 at first, 1 at last, between 0.5 (epoch 3) and 2 (epoch 1)."
    assert in_words("x", [math.nan], [1]) == "x: none finite."
