"""Curves are drawn from what a run wrote, also from one that was cut off while it wrote."""

import pytest

from tools.curves import main

EVENTS = (
    '{"event": "train", "step": 1, "epoch": 0.5, "loss": 2.0, "top1": 0.1, "lr": 1.0, "gradient_norm": 1.0, '
    '"weight_norm": 3.0, "update_norm": null}\n'
    '{"event": "eval", "step": 1, "epoch": 0.5, "loss": 1.5, "top1": 0.2}\n'
)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(EVENTS)
    return tmp_path


def test_a_run_is_drawn_into_a_picture(run, capsys):
    picture = run / "pictures" / "curves.png"
    assert main([str(run), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == str(picture)


def test_what_cannot_be_drawn_is_refused_in_one_line(run, tmp_path, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("garbage\n" + EVENTS)
    for arguments, message in (
        ([tmp_path / "broken"], "metrics.jsonl:1: not a line of metrics"),
        ([run, "--output", tmp_path / "c.xyz"], "c.xyz: no kind of picture"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and message in lines[0]
