"""evaluate.py: the scores of training, tables and picture beside the run, guesses by name, useful
refusals."""

import csv
import json
import os
import re
import sys

import pytest
import safetensors.torch
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch.nn import functional as F

import evaluate
import train
from data.digits import DigitsSource
from engines.torch_engine import TorchEngine
from tests.conftest import QUICKSTART, TINY
from tests.data.test_decode import png
from tests.pictures import write_pictures
from training import scoring
from training.checkpoint import load

DONE = 0
FAILED = 1
WRONG_INPUT = 2
AVERAGES = ("average.step_decay=0.5", "average.epoch_decay=0.5")


@pytest.fixture(scope="module")
def run(tmp_path_factory, _one_thread):
    """A finished run of two epochs of four steps with both averages, and its end event."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    overrides = [*TINY, *AVERAGES, "batch.global=359", "batch.micro=359", f"run.output={folder}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)
        assert train.main(["--config", str(QUICKSTART), *overrides]) == DONE
    return folder, events(folder)[-1]


def events(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scores_in(folder):
    return json.loads((folder / "evaluation" / "scores.json").read_text())


def test_a_line_says_where_training_images_are_scored(command, tmp_path):
    images = write_pictures(tmp_path / "images", train=6, val=1)
    sizes = ("model.classes=2", "batch.global=2", "batch.micro=2", "run.steps=4")
    places = (f"data.root={images}", f"run.output={tmp_path / 'run'}", "data.validation_share=0.6")
    assert (
        train.main(["--config", str(QUICKSTART), *TINY, *sizes, "data.source=folder", *places])
        == DONE
    )
    line = "the model was trained on images that are scored: scores say nothing about others"
    for override, is_said in (
        ("data.validation_share=0.6", False),
        ("data.validation_share=0.7", True),
        ("data.validation_share=0.5", False),
        ("data.validation_share=0", False),
        ("data.validation_share=0 data.validation_folder=train", True),
    ):
        code, lines, _ = command("--checkpoint", tmp_path / "run", *override.split())
        assert (code, line in lines) == (DONE, is_said), override


@pytest.fixture
def command(capsys, undrawn_confusion):
    """command(*arguments): exit code, lines of stdout, lines of stderr."""

    def call(*arguments):
        capsys.readouterr()
        code = evaluate.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            "CUDA out of memory. Tried to allocate 2 GiB",
            "out of memory; lower .*batch.evaluation.*, then rerun the same",
        ),
        (
            "DataLoader worker (pid(s) 7) exited unexpectedly",
            "a process that loads images was killed, .* data.workers",
        ),
        ("an operator failed", None),
    ],
)
@pytest.mark.parametrize("images", [(), ("--images", "a.png")])
def test_faults_of_the_machine_are_one_line(command, monkeypatch, error, line, images):
    def opened(options):
        raise RuntimeError(error)

    monkeypatch.setattr(evaluate, "_opened", opened)
    arguments = ("--checkpoint", "run", *images)
    if line is None:
        with pytest.raises(RuntimeError, match=error):
            command(*arguments)
        return
    code, _, (found,) = command(*arguments)
    assert code == FAILED and re.match(line, found)


@pytest.mark.parametrize("weights", ["trained", "step_average", "epoch_average"])
def test_it_finds_the_scores_of_training(run, command, weights):
    """An average is float32, and must not be rounded to the run's float16.

    The batch size matters to 1e-6 at most.
    """
    folder, end = run
    last = [event for event in events(folder) if event["event"] == "eval"][-1]
    assert len({last["loss"], last["step_average"]["loss"], last["epoch_average"]["loss"]}) == 3
    expected = last if weights == "trained" else end[weights]
    code, lines, errors = command("--checkpoint", folder, "--weights", weights)
    assert (code, errors) == (DONE, [])
    assert (
        f"{weights} weights: top1 {expected['top1']:.2%}  top5 {expected['top5']:.2%}" in lines[0]
    )
    scores = scores_in(folder)
    assert (scores["top1"], scores["top5"]) == (expected["top1"], expected["top5"])
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert (scores["weights"], scores["images"], scores["unreadable"]) == (weights, 360, 0)
    losses = []
    for override in ("batch.evaluation=7", "model.image_size=24"):
        # any resolution, where other numbers come out
        assert command("--checkpoint", folder, "--weights", weights, override)[0] == DONE
        losses.append(scores_in(folder)["loss"])
    assert losses[0] == pytest.approx(scores["loss"], 1e-6) and losses[1] != losses[0]


def test_table_and_picture_are_written_beside_the_run_or_elsewhere(
    run, command, tmp_path, undrawn_confusion, monkeypatch
):
    folder, end = run
    monkeypatch.setattr(scoring, "draw_confusion", undrawn_confusion)
    command("--checkpoint", folder)
    # Whoever has the old files open keeps them: new ones take their names.
    for name in ("classes.csv", "confusion.png", "scores.json"):
        os.link(folder / "evaluation" / name, tmp_path / name)
    _, lines, _ = command("--checkpoint", folder)
    assert [path.stat().st_nlink for path in tmp_path.iterdir()] == [1, 1, 1]
    with open(folder / "evaluation" / "classes.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert sum(int(row["images"]) for row in rows) == 360 and len(rows) == 10
    right = sum(float(row["top1"]) * int(row["images"]) for row in rows)
    assert right / 360 == pytest.approx(end["top1"])
    assert lines[3].split()[0] == rows[0]["class"], "the worst class is shown first"
    scores = scores_in(folder)
    by_class = {row["class"]: row for row in scores["classes"]}
    assert scores["macro_recall"] == pytest.approx(sum(float(row["top1"]) for row in rows) / 10)
    assert scores["macro_f1"] == pytest.approx(
        sum(row["f1"] or 0 for row in by_class.values()) / 10
    )
    assert lines[1] == (
        f"macro: precision {scores['macro_precision']:.1%}  recall {scores['macro_recall']:.1%}  "
        f"F1 {scores['macro_f1']:.1%}; calibration error {scores['calibration_error']:.1%}"
    )
    with Image.open(folder / "evaluation" / "confusion.png") as picture:
        assert min(picture.size) > 300
    elsewhere = tmp_path / "a" / "b"
    assert command("--checkpoint", folder, "--best", "--output", elsewhere)[0] == DONE
    assert {path.name for path in elsewhere.iterdir()} == {
        "classes.csv",
        "confusion.png",
        "scores.json",
    }


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_scored(
    run, command, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(scoring, "score", pytest.fail)
    code, lines, errors = command("--checkpoint", run[0], "--output", tmp_path / "file" / "scores")
    assert (code, lines) == (WRONG_INPUT, [])
    remedy = "name another folder by --output"
    assert errors == [f"{tmp_path}/file/scores: cannot be written: Not a directory; {remedy}"]


@pytest.mark.parametrize("reason", ["without matplotlib", "with too many classes"])
def test_scores_are_written_where_no_picture_can_be(
    run, command, tmp_path, undrawn_confusion, monkeypatch, reason
):
    """That of an earlier evaluation, in the same folder, goes."""
    arguments = ("--checkpoint", run[0], "--output", tmp_path)
    assert command(*arguments)[0] == DONE
    before = (tmp_path / "scores.json").read_text()
    if reason == "without matplotlib":
        monkeypatch.setattr(scoring, "draw_confusion", undrawn_confusion)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        said = "no picture of the confusion: import of matplotlib.figure halted; None in sys.modules; pip install matpl"
    else:
        monkeypatch.setattr(scoring, "MOST_DRAWN", 9)
        said = "no picture of the confusion: 10 classes are more than can be seen in one"
    (tmp_path / "scores.json").unlink()
    code, lines, errors = command(*arguments)
    assert (code, errors) == (DONE, [])
    assert lines[-2].startswith(said)
    assert lines[-1] == f"all classes and scores: {tmp_path}/classes.csv, scores.json"
    assert {path.name for path in tmp_path.iterdir()} == {"classes.csv", "scores.json"}
    assert (tmp_path / "scores.json").read_text() == before


def test_images_are_classified_by_name(run, command, tmp_path):
    """Five shares of the softmax, best first. Overrides may stand behind the images."""
    path = tmp_path / "some.png"
    Image.fromarray(DigitsSource("validation").read(0).permute(1, 2, 0).numpy()).save(path)
    arguments = ("--checkpoint", run[0], "--images", path)
    code, lines, _ = command(*arguments, path)
    assert code == DONE and lines[0] == lines[1] and lines[0].startswith(f"{path}: ")
    shares = [
        float(share) for share in re.findall(r"\d (\d+\.\d)%", lines[0].partition(f"{path}: ")[2])
    ]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and sum(shares) <= 100.3
    assert command(*arguments, "data.crop_fraction=0.5")[1] != lines[:1]
    assert command(*arguments, "batch.evaluation=7")[1] == lines[:1]


def test_folders_are_classified_in_batches_into_a_table(run, command, tmp_path):
    """The rows are those of the images one by one; an unreadable one is left out where the recipe
    says so."""
    source = DigitsSource("validation")
    for index in range(9):
        pixels = source.read(index).permute(1, 2, 0).numpy()
        path = tmp_path / "images" / ("=odd" if index % 2 else "even") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    table = tmp_path / "tables" / "guesses.csv"
    arguments = ("--checkpoint", run[0], "--images", tmp_path / "images", "--table", table)
    code, lines, errors = command(*arguments, "batch.evaluation=4", "data.workers=2")
    assert (code, lines, errors) == (DONE, [f"{table}: 9 images"], [])
    with open(table, newline="") as stream:
        rows = list(csv.DictReader(stream))
    files = sorted(str(path) for path in (tmp_path / "images").rglob("*.png"))
    assert [row["file"] for row in rows] == files
    assert list(rows[0]) == ["file", "class", "probability"] + [
        f"{kind}_{place}" for place in range(2, 6) for kind in ("class", "probability")
    ]
    _, one_by_one, _ = command("--checkpoint", run[0], "--images", *files)
    for row, line in zip(rows, one_by_one):
        assert line.startswith(
            f"{row['file']}: {row['class']} {float(row['probability']):.1%}, {row['class_2']} "
        )
    (tmp_path / "images" / "broken.jpg").write_bytes(b"no image")
    code, lines, (error,) = command(*arguments)
    assert code == WRONG_INPUT and "broken.jpg" in error and error.endswith("data.bad_images=skip")
    with open(table, newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 9, (
            "the table of before was replaced by half of one"
        )
    code, lines, errors = command(*arguments, "data.bad_images=skip")
    assert (code, errors, len(lines)) == (DONE, [], 2)
    assert "broken.jpg: " in lines[0] and lines[0].endswith("; left out")
    assert lines[1] == f"{table}: 9 images; 1 unreadable left out"


def test_a_table_without_images_is_refused(run, command, tmp_path):
    with pytest.raises(SystemExit) as exit:
        command("--checkpoint", run[0], "--table", tmp_path / "t.csv")
    assert exit.value.code == WRONG_INPUT


def test_a_table_that_cannot_be_written_is_refused_before_the_model_is_opened(tmp_path, capsys):
    (tmp_path / "file").touch()
    for table, fault in (
        (tmp_path, "is a folder; name a file in it by --table"),
        (
            tmp_path / "file" / "t.csv",
            "cannot be written: Not a directory; name another file by --table",
        ),
    ):
        code = evaluate.main(
            ["--checkpoint", "runs/none", "--images", "a.jpg", "--table", str(table)]
        )
        assert (code, capsys.readouterr().err.strip()) == (WRONG_INPUT, f"{table}: {fault}")


def test_a_folder_for_scores_beside_images_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        evaluate.main(["--checkpoint", "runs/none", "--images", "a.jpg", "--output", str(tmp_path)])
    assert exit.value.code == WRONG_INPUT and "go into --table FILE.csv" in capsys.readouterr().err


def test_exported_weights_need_a_recipe_and_give_the_same_scores(run, command, tmp_path):
    folder, end = run
    content = load(folder / "checkpoints" / "step-00000008.pt")
    path = tmp_path / "exported.safetensors"
    out = ("--output", tmp_path / "out")
    safetensors.torch.save_file(content["engine"]["weights"], path)
    code, _, (error,) = command("--checkpoint", path)
    assert code == WRONG_INPUT and error.startswith(f"{path}: ") and "--config FILE" in error
    code, lines, _ = command("--checkpoint", path, "--config", folder / "config.yaml", *out)
    assert (
        code == DONE
        and "does not name its classes" in lines[0]
        and f"top1 {end['top1']:.2%}" in lines[1]
    )
    safetensors.torch.save_file(content["engine"]["weights"], path, {"recipe": content["recipe"]})
    assert command("--checkpoint", path, *out)[1][:2] == lines[:2]


def test_weights_of_timm_are_scored_by_their_name_as_timm_scores_them(command, tmp_path):
    """Against timm's model on the images of timm's own transform.

    A pixel may differ by a level, the loss by little.
    """
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    weights = "resnet10t.c3_in1k"
    folder = write_pictures(tmp_path / "images", "abcde", size=100, val=1)
    torch.manual_seed(0)
    theirs = timm.create_model("resnet10t", num_classes=5).eval()
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    name = f"timm:{weights}:{tmp_path / 'weights.pth'}"
    given = (f"data.root={folder}", "model.classes=5", "data.workers=0", "batch.evaluation=5")
    code, lines, errors = command("--checkpoint", name, "--output", tmp_path / "scores", *given)
    assert (code, errors) == (DONE, [])
    assert lines[0].startswith(
        f"images as timm's {weights}: model.image_size=224, model.mean=[0.485, "
    )
    found = json.loads((tmp_path / "scores" / "scores.json").read_text())

    keys = resolve_data_config(
        pretrained_cfg=timm.get_pretrained_cfg(weights).to_dict(), use_test_size=True
    )
    transform = create_transform(**keys, is_training=False)
    files = sorted((folder / "val").glob("*/*.png"))
    images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    labels = torch.arange(5)
    with torch.no_grad():
        expected = F.cross_entropy(theirs(images), labels).item()
    assert found["images"] == 5
    assert found["loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--checkpoint", "RUN", "--images", "nowhere.png"),
            "nowhere.png: No such file or directory; name an image",
        ),
        (
            ("--checkpoint", "RUN", "--images", "/dev/zero"),
            "/dev/zero: not a regular file; name an image",
        ),
        (("--checkpoint", "RUN/checkpoints/step-00000008.pt", "--best"), "name one"),
        (
            ("--checkpoint", "RUN", "--images", "LARGE"),
            "large.png: 1 x 178956970 pixels of this kind take 4,831,838,1",
        ),
        (
            ("--checkpoint", "RUN", "--images", "RUN/config.yaml"),
            "config.yaml: neither JPEG nor PNG",
        ),
        (
            ("--checkpoint", "RUN", "model.width=0.5"),
            r"stem.conv_stem.weight is \[8, 3, 3, 3\], the model's is \[16",
        ),
        (
            ("--checkpoint", "nowhere.pt2"),
            "nowhere.pt2: No such file or directory; name a file that tools.export",
        ),
    ],
)
def test_refusals_are_one_line(run, command, arguments, said, tmp_path):
    (tmp_path / "large.png").write_bytes(png(1, 178_956_970, 8, 0, [b"\0" * 9]))
    arguments = [argument.replace("LARGE", str(tmp_path / "large.png")) for argument in arguments]
    code, lines, errors = command(*(argument.replace("RUN", str(run[0])) for argument in arguments))
    assert (code, lines, len(errors)) == (WRONG_INPUT, [], 1), errors
    assert re.search(said, errors[0])
