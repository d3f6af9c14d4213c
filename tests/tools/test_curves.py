"""Curves are drawn from what a run wrote, also from one that was cut off while it wrote."""

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
