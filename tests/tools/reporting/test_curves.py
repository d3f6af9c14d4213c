"""Figures show what the events say; plotly itself checks that it knows all that they are made
of."""

import copy
import math

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.tools.reporting.runs import eval_event, start, train_event, written
from tools.reporting import curves, run

LINES = [train_event(6 * n) for n in range(1, 41)] + [
    eval_event(60 * n, top1=n / 10) for n in range(1, 5)
]


@pytest.fixture
def read(tmp_path):
    def make(events=LINES, name="run", **more):
        return run.read(written(tmp_path / name, events, **more))

    return make


def checked(figures):
    """The figures by key, once plotly's own classes took them, over each abscissa: they refuse what
    it has not."""
    for figure in figures:
        for over in ("epoch", "step", "time"):
            data = copy.deepcopy(figure.data)
            for trace in data:
                if isinstance(trace["x"], dict):
                    assert len(trace["x"][over]) == len(
                        trace["z"][0] if "z" in trace else trace["y"]
                    )
                    trace["x"] = trace["x"][over]
            go.Figure(data=data, layout=figure.layout)
    return {figure.key: figure for figure in figures}


def test_a_run_is_drawn_with_a_colour_for_each_quantity(read):
    found = checked(curves.draw([read()], ["run"]).figures)
    norms = ["weight_norm", "gradient_norm", "update_norm"]
    assert list(found) == ["loss", "top1", "lr", *norms, "images_per_second", "mfu", "data_wait"]
    training, validation = found["loss"].data
    assert training["y"][:3] == [pytest.approx(2 / step, rel=1e-4) for step in (6, 12, 18)]
    assert training["x"] == {
        "epoch": [pytest.approx(n / 10) for n in range(1, 41)],
        "step": [6 * n for n in range(1, 41)],
        # 120 s are shown in minutes.
        "time": [pytest.approx(3 * n / 60, rel=1e-4) for n in range(1, 41)],
    }
    assert validation["x"]["step"] == [60, 120, 180, 240]
    assert found["top1"].data[1]["y"] == [0.1, 0.2, 0.3, 0.4]
    assert training["line"] != validation["line"] and validation["mode"] == "lines+markers"
    assert (
        found["loss"].layout["yaxis"]["type"]
        == found["weight_norm"].layout["yaxis"]["type"]
        == "log"
    )
    assert found["lr"].layout["yaxis"]["type"] == "linear"


def test_quantities_that_are_missing_or_never_change_are_omitted_and_named(read):
    bare = [
        {key: value for key, value in event.items() if not key.endswith("_norm")} for event in LINES
    ]
    assert curves.draw([read(bare)], ["run"]).left_out == [
        *(
            f"norm of the {name} (not in metrics.jsonl)"
            for name in ("weights", "gradient", "update")
        ),
        "gradient noise scale (not in metrics.jsonl)",
        "loss scale (128 throughout)",
        "skipped updates (0 throughout)",
        "unreadable images (0 throughout)",
    ]
    assert curves.draw([read([])], ["run"]).figures == []
    events = [train_event(6, loss_scale=128.0), train_event(12, loss_scale=64.0, skipped_steps=3)]
    found = checked(curves.draw([read(events)], ["run"]).figures)
    assert found["loss_scale"].data[0]["y"] == [128, 64] and found["skipped_steps"].data[0][
        "y"
    ] == [0, 3]


def test_a_value_without_neighbours_is_a_point(read):
    """A line shows nothing of it: a single evaluation, a log line between two that are not
    finite."""
    events = [
        train_event(6),
        train_event(12, loss=None),
        train_event(18, loss=2.0),
        train_event(24, loss=None),
    ]
    found = checked(curves.draw([read([*events, eval_event(24)])], ["run"]).figures)
    training, validation = found["loss"].data
    assert (validation["mode"], validation["marker"]["size"]) == ("lines+markers", 6)
    assert (training["mode"], training["marker"]["size"]) == ("lines+markers", [6, 0, 6, 0])
    assert found["lr"].data[0]["mode"] == "lines"


def test_a_noise_scale_that_is_not_told_from_zero_is_left_out(read):
    scales = [(300.0, 60.0), (2259.0, 5384.0), (400.0, 100.0), (500.0, 100.0)]
    events = [
        train_event(6 * number, noise_scale={"images": images, "error": error})
        for number, (images, error) in enumerate(scales, start=1)
    ]
    found = checked(curves.draw([read(events)], ["run"]).figures)
    assert found["noise_scale"].data[0]["y"] == [300, None, 400, 500]
    drawn = curves.draw([read([events[1]])], ["run"])
    assert "gradient noise scale (not told from zero)" in drawn.left_out
    assert "noise_scale" not in checked(drawn.figures)


def test_runs_are_drawn_in_the_same_figures_each_in_its_colour(read):
    """Names are text to plotly, which reads some HTML."""
    short = read(LINES[:10], "short", overrides=["batch.global=48"])
    averaged = read([*LINES, eval_event(300, epoch_average={"top1": 0.6, "loss": 0.9})], "averaged")
    found = checked(curves.draw([short, read(), averaged], ["<b>a</b> & %{x}", "b", "c"]).figures)
    assert {"weight_norm", "gradient_norm", "update_norm"} <= set(found)
    colours = {}
    for figure in found.values():
        named = [trace["name"] for trace in figure.data if trace["showlegend"]]
        assert len(named) == len(set(named)), "one entry in the legend for each run"
        for trace in figure.data:
            colours.setdefault(trace["name"], set()).add(trace["line"]["color"])
    assert {name: len(each) for name, each in colours.items()} == {
        "&lt;b&gt;a&lt;/b&gt; &amp; %{x}": 1,
        "b": 1,
        "c": 1,
    }
    assert (
        len(set.union(*colours.values())) == 3
        and len({curves.run_style(order)[:2] for order in range(36)}) == 36
    )
    assert len(found["loss"].data) == 1 + 2 + 3


def test_gaps_stay_gaps_and_later_sessions_are_marked(read):
    events = [
        train_event(24 * n, loss=None if n == 3 else 1.0, gradient_norm=None) for n in range(1, 6)
    ]
    drawn = curves.draw([read(events)._replace(starts=[start(step=0), start(step=96)])], ["run"])
    found = checked(drawn.figures)
    assert found["loss"].data[0]["y"] == [1, 1, None, 1, 1]
    assert {"weight_norm", "update_norm"} <= set(found) and "gradient_norm" not in found
    assert found["loss"].marks == [{"epoch": 1.6, "step": 96, "time": 48.0}]


def test_a_session_with_other_images_is_marked_in_epochs_of_its_own_length(read):
    """data.changed_images=accept: 60 steps an epoch until step 96, 48 from there on."""
    events = [train_event(24 * n, **({"epoch": n / 2} if n > 4 else {})) for n in range(1, 7)]
    of_run = read([*events[:4], eval_event(96), *events[4:]])._replace(
        starts=[start(step=0), start(step=48), start(step=96)]
    )
    marks = checked(curves.draw([of_run], ["run"]).figures)["loss"].marks
    assert [mark["epoch"] for mark in marks] == [0.8, 2.0]
    assert run.steps_per_epoch(of_run) == 48


def trust_ratios(*runs):
    return curves.draw(runs, ["a", "b"][: len(runs)]).layers


def test_trust_ratios_are_drawn_by_layer_and_by_their_median(read):
    one = read()
    trust, heat = trust_ratios(one)
    checked([trust, heat])
    assert [trace["y"][0] for trace in trust.data] == [0.03, 0.02, 0.01]
    assert heat.data[0]["y"] == ["blocks.0.conv", "blocks.1.conv", "blocks.2.conv"]
    assert [10 ** row[0] for row in heat.data[0]["z"]] == pytest.approx(
        [0.01, 0.02, 0.03], rel=0.002
    )
    (medians,) = trust_ratios(one, one)
    checked([medians])
    assert [trace["y"][0] for trace in medians.data] == [0.02, 0.02]


def test_trust_ratios_that_are_not_finite_or_not_there_leave_gaps_or_nothing(read):
    values = ({"a.weight": None, "b.weight": 0.0}, {"a.weight": 1.0, "b.weight": 2.0})
    trust, heat = trust_ratios(read([train_event(1, trust=each) for each in values]))
    assert heat.data[0]["z"] == [[None, 0.0], [None, pytest.approx(0.301)]]
    checked([trust, heat])
    assert trust_ratios(read([train_event(1, trust={})])) == []
    assert [figure.key for figure in trust_ratios(read(LINES[:1]))] == ["trust"]
    names = [f"blocks.{stage}.conv.weight" for stage in range(175)]
    heat = trust_ratios(
        read([train_event(n, trust=dict.fromkeys(names, 0.1)) for n in range(1, 500)])
    )[1]
    assert (
        len(heat.data[0]["z"]) == 175
        and 120 <= len(heat.data[0]["z"][0]) <= 240
        and heat.layout["height"] <= 1000
    )


def test_no_spike_or_gap_is_lost_and_no_more_is_drawn_than_asked_for():
    values = np.random.default_rng(0).normal(size=100_000)
    spikes = {17: 50.0, 54_321: -60.0, 99_998: 70.0}
    for place, value in spikes.items():
        values[place] = value
    kept = curves.thinned(values, 600)
    assert len(kept) <= 600 and kept == sorted(set(kept))
    assert set(spikes) <= set(kept) and {0, 99_999} <= set(kept)
    assert curves.thinned(values[:600], 600) == list(range(600))
    values = [1.0] * 10_000
    values[5000] = math.nan
    assert 5000 in curves.thinned(values, 100)
    assert len(curves.thinned([math.nan] * 10_000, 100)) <= 100


@pytest.mark.parametrize(
    ("lines", "thinned"),
    # with the validation a figure has two lines, of 3,000 points each
    [
        (3000, False),
        (3001, True),
    ],
)
def test_thinned_lines_are_announced(read, lines, thinned):
    events = [train_event(n) for n in range(1, lines + 1)] + [eval_event(lines)]
    drawn = curves.draw([read(events)], ["run"])
    loss = checked(drawn.figures)["loss"].data[0]
    assert drawn.thinned == thinned == (len(loss["y"]) < lines)
