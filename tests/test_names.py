"""Names of files and classes that cannot be encoded, steer terminals, or mean something in tables
and pictures."""

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import evaluate
import train
from common.text import listed
from data.folder import FolderSource
from data.shards import ShardsSource
from tests.conftest import QUICKSTART, ROOT, TINY
from tools import export, report, shards

NAMES = (b"$x^{$", b"=cmd\x1b[31m", b"caf\xe9")  # in the order of their labels
PRINTED = ("$x^{$", "=cmd\\x1b[31m", "caf\\xe9")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two training images and one to validate with of each class, and a bad one; their folder."""
    folder = tmp_path_factory.mktemp("images")
    for split, name, number in [
        *((b"train", name, n) for name in NAMES for n in (0, 1)),
        *((b"val", name, 0) for name in NAMES),
    ]:
        place = os.path.join(os.fsencode(folder), split, name)
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, b"%d\xff.png" % number), "wb") as stream:
            Image.fromarray(np.full((8, 8, 3), 90 * number, np.uint8)).save(stream, "PNG")
    (folder / "train" / os.fsdecode(NAMES[2]) / "bad\x1b.png").write_bytes(b"words")
    return folder


@pytest.fixture(scope="module")
def run(images, tmp_path_factory, _one_thread):
    folder = tmp_path_factory.mktemp("runs") / "run"
    overrides = (
        "model.classes=3",
        "batch.global=7",
        "batch.micro=7",
        "run.steps=2",
        "schedule.warmup_steps=1",
    )
    place = (
        "data.source=folder",
        "data.bad_images=skip",
        f"data.root={images}",
        f"run.output={folder}",
    )
    # As a terminal that takes UTF-8 and nothing else; pytest's own stream may take anything here.
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="strict")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", said)
        assert train.main(["--config", str(QUICKSTART), *TINY, *overrides, *place]) == 0
    said.flush()
    lines = said.buffer.getvalue().decode().splitlines()
    assert f"left out: {images}/train/caf\\xe9/bad\\x1b.png: neither JPEG nor PNG" in lines
    return folder


def test_a_line_has_five_names():
    assert listed("abcde") == "a, b, c, d, e" and listed("abcdefg") == "a, b, c, d, e and 2 more"


def test_sources_give_names_that_can_be_printed(images, tmp_path):
    source = FolderSource(str(images / "train"))
    assert source.classes == PRINTED
    assert source.name(0) == f"{images}/train/$x^{{$/0\\xff.png"
    assert source.read(0).shape == (3, 8, 8)
    command = ("pack", images / "train", tmp_path, "--workers", 1, "--skip-bad")
    assert shards.main([str(part) for part in command]) == 0
    assert ShardsSource(str(tmp_path), 1).classes == PRINTED


def test_scores_table_picture_report_and_export_are_made(run, images, capsys):
    """capsys, too, takes UTF-8 only."""
    assert evaluate.main(["--checkpoint", str(run)]) == 0
    lines = capsys.readouterr().out
    assert "\x1b" not in lines and any(name in lines for name in PRINTED)
    classes = (run / "evaluation" / "classes.csv").read_text(encoding="utf-8")
    assert all(name in classes for name in ("$x^{$", "'=cmd\\x1b[31m", "caf\\xe9"))
    with Image.open(run / "evaluation" / "confusion.png") as picture:
        assert picture.width > 300
    assert report.main([str(run), "--json"]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "caf\\xe9" in page and "\x1b" not in page
    assert export.main([str(run), "--format", "safetensors", "--json"]) == 0
    (file,) = (run / "export").glob("*.safetensors")
    capsys.readouterr()
    image = images / "val" / os.fsdecode(NAMES[2]) / "0\udcff.png"
    assert evaluate.main(["--checkpoint", str(file), "--images", str(image)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{images}/val/caf\\xe9/0\\xff.png: ")
    assert "\x1b" not in said and all(name in said for name in PRINTED)


def test_other_names_are_printed_on_a_stdout_that_takes_ascii_only():
    code = "from common import command; command._open_streams(); print('caf\\xe9', '\\udce9')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    assert ended.stdout == b"caf\\xe9 \\udce9\n"
