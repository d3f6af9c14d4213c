"""Curves are drawn from what a run wrote, also from one that was cut off while it wrote."""

import errno
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tools import output
from tools.curves import main

EVENTS = (
    '{"event": "train", "step": 1, "epoch": 0.5, "loss": 2.0, "top1": 0.1, "lr": 1.0, "gradient_norm": 1.0, '
    '"weight_norm": 3.0, "update_norm": null}\n'
    '{"event": "eval", "step": 1, "epoch": 0.5, "loss": 1.5, "top1": 0.2}\n'
)


def test_a_run_is_drawn_into_a_picture_and_what_cannot_be_drawn_is_one_line(tmp_path, call):
    (tmp_path / "metrics.jsonl").write_text(EVENTS)
    picture = tmp_path / "pictures" / "curves.png"
    assert call(main, tmp_path, "--output", picture) == (0, [str(picture)], [])
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, _, (error,) = call(main, tmp_path, "--output", tmp_path / "c.xyz")
    assert code == 2 and "c.xyz: no kind of picture" in error
    (tmp_path / "metrics.jsonl").write_text("garbage\n" + EVENTS)
    code, _, (error,) = call(main, tmp_path)
    assert code == 2 and "metrics.jsonl:1: not a line of metrics" in error


def test_an_old_picture_stays_until_the_new_one_is_whole(tmp_path, call, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(EVENTS)
    picture = tmp_path / "curves.png"
    picture.write_text("old")

    def half(self, stream, **_):
        Path(stream).write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", half)
    code, _, (error,) = call(main, tmp_path, "--output", picture)
    assert code == 1 and str(picture) in error
    assert picture.read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_a_single_value_is_a_point_since_a_line_of_one_shows_nothing(tmp_path, call, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text(EVENTS)
    figures = []
    empty = output.figure
    monkeypatch.setattr(
        output, "figure", lambda *arguments: figures.append(empty(*arguments)) or figures[-1]
    )
    assert call(main, tmp_path, "--output", tmp_path / "curves.png")[0] == 0
    drawn = [line for axis in figures[0].axes for line in axis.lines if len(line.get_xdata())]
    assert len(drawn) == 7, "loss and top-1 of both, the rate, two norms"
    assert {line.get_marker() for line in drawn} == {"o"}


@pytest.mark.parametrize(
    ("limits", "scale", "labels"),
    [
        ((0.5, 8), "log", ["0.5", "1", "2", "5"]),
        ((1.3e-3, 1.9e-3), "log", None),  # no power of ten in it, and none of its halves
        ((1e-6, 1e6), "log", ["1e-06", "0.001", "1", "1000", "1e+06"]),
        ((0.0, 0.95), "linear", None),
    ],
)
def test_an_axis_has_two_to_six_labels_that_do_not_overlap(tmp_path, limits, scale, labels):
    """Six: the locator of linear axes adds one for the end."""
    figure = output.figure(tmp_path / "a.png", (3.9, 3.4))
    panel = figure.subplots()
    panel.set_xscale(scale)
    panel.set_xlim(*limits)
    output.few_ticks(panel.xaxis)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    ticks = [*panel.xaxis.get_major_ticks(), *panel.xaxis.get_minor_ticks()]
    shown = [
        tick.label1
        for tick in ticks
        if tick.label1.get_text() and limits[0] <= tick.get_loc() <= limits[1]
    ]
    assert 2 <= len(shown) <= 6
    boxes = sorted(
        (each.get_window_extent(renderer).extents[[0, 2]] for each in shown), key=lambda box: box[0]
    )
    assert all(one[1] < next_[0] for one, next_ in zip(boxes, boxes[1:]))
    assert labels is None or [each.get_text() for each in shown] == labels
