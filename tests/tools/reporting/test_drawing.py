"""Lines keep what matters when they are thinned out, and lie where their events lie."""

import math

import numpy as np

from tools.reporting.drawing import COLOURS, Clock, run_style, thinned, unit_of


def test_no_spike_or_gap_is_lost_and_no_more_is_drawn_than_asked_for():
    values = np.random.default_rng(0).normal(size=100_000)
    spikes = {17: 50.0, 54_321: -60.0, 99_998: 70.0}
    for place, value in spikes.items():
        values[place] = value
    kept = thinned(values, 600)
    assert len(kept) <= 600 and kept == sorted(set(kept))
    assert set(spikes) <= set(kept) and {0, 99_999} <= set(kept)
    assert thinned(values[:600], 600) == list(range(600))
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


def test_time_has_a_unit_of_its_size():
    units = [unit_of(seconds)[0] for seconds in (0, 119, 120, 7200, 1e7)]
    assert units == ["seconds", "seconds", "minutes", "hours", "days"]
