"""tools.export: what is written gives the model's logits, to programs that never saw this
repository."""

import contextlib
import functools
import io
import json
import sys

import numpy as np
import pytest
import safetensors
import safetensors.torch
import timm
import torch
from PIL import Image

import evaluate
from common.errors import ConfigError
from data.digits import DigitsSource
from engines import state
from models.efficientnet import build, timm_name
from recipe import loading
from tests.conftest import QUICKSTART, TINY
from tests.pictures import write_pictures
from tests.tools.reporting.runs import trained
from tools import export, exporting
from training import exported
from training.checkpoint import load
from training.classes import of_model
from training.weights import read

DONE = 0
FAILED = 1
WRONG_INPUT = 2
FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}
# timm's own b0: depthwise, expansion 6, batch normalisation; small images and few classes make it
# quick.
B0 = (
    "model.name=efficientnet_b0", "model.width=null", "model.depth=null", "model.dropout=0.2", "model.group_size=1",
    "model.expansion=6", "model.norm=batch", "model.padding=same", "model.norm_eps=1e-3", "model.image_size=64",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, _one_thread):
    """A run of one epoch of four steps, half weights, with an average over steps; its folder and
    end event."""
    overrides = ("batch.global=359", "batch.micro=359", "run.steps=4", "average.step_decay=0.5")
    folder = trained(tmp_path_factory.mktemp("runs") / "my run", *overrides)
    return folder, json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def files(run):
    """The run in each format, where the command puts it: {format: path}, and the lines that it
    printed."""
    paths = {
        format: run[0] / "export" / f"quickstart{suffix}" for format, suffix in FORMATS.items()
    }
    printed = {}
    for format in FORMATS:
        out = io.StringIO()
        err = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert export.main([str(run[0]), "--format", format, "--json"]) == DONE
        assert err.getvalue() == "", "nor do the exporters say anything"
        printed[format] = out.getvalue().splitlines()
    return paths, printed


@pytest.fixture
def command(call):
    """command(*arguments): exit code, lines of stdout, lines of stderr."""
    return functools.partial(call, export.main)


@pytest.fixture(scope="module")
def digits():
    """Validation scans, uint8 [7, 3, 16, 16], as evaluation shows them."""
    source = DigitsSource("validation")
    scans = torch.stack([source.read(index) for index in range(7)]).float()
    return torch.nn.functional.interpolate(scans, size=(16, 16)).round().to(torch.uint8)


@pytest.fixture(scope="module")
def expected(run, digits):
    """Logits of the run's weights, in float64."""
    content = load(run[0] / "checkpoints" / "step-00000004.pt")
    model = build(loading.loads(content["recipe"], "checkpoint").model, 0).double().eval()
    model.load_state_dict(
        {name: tensor.double() for name, tensor in content["engine"]["weights"].items()}
    )
    with torch.no_grad():
        return model(digits).float()


def random_weights(path, *overrides):
    torch.save(build(loading.load(QUICKSTART, [*TINY, *overrides]).model, 1).state_dict(), path)
    return path


@pytest.mark.parametrize("format", FORMATS)
def test_what_was_written_its_check_and_its_metadata_are_reported(run, files, format):
    path = files[0][format]
    *_, checked, data = files[1][format]
    about = json.loads(data)
    assert about["file"] == str(path) and about["no_validation_images"] is None
    assert (about["bytes"], about["images"]) == (path.stat().st_size, "validation")
    assert 0 <= about["difference"] <= (0 if format == "safetensors" else 1e-4)
    assert f"{about['difference']:.2g}" in checked
    if format == "safetensors":
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata()
    else:
        metadata = exported.opened(path.suffix, path.read_bytes()).metadata
    recipe = loading.loads(metadata.pop("recipe"), "file")
    assert recipe == loading.load(run[0] / "config.yaml") and metadata.pop("weights") == "trained"
    sizes = {"image_size": 16, "mean": list(recipe.model.mean), "std": list(recipe.model.std)}
    classes = [str(digit) for digit in range(10)]
    crop = {
        "crop_fraction": 0.933,
        "crop_mode": "center",
        "crop_rounding": "nearest",
        "interpolation": "bilinear",
    }
    found = {name: json.loads(text) for name, text in metadata.items()}
    assert found == {**sizes, "classes": classes, **crop}


def test_evaluation_of_an_export_gives_the_runs_scores_and_guesses(
    run, files, tmp_path, monkeypatch, call
):
    """Without --config, each in a place of its own.

    The loss is the mean of 360 images; float32 sums in another order differ by 1e-6 of it. Shares
    of classes agree to the tenth of a percent that is printed.
    """
    folder, end = run
    monkeypatch.chdir(tmp_path)
    scan = tmp_path / "a digit.png"
    Image.fromarray(DigitsSource("validation").read(0).permute(1, 2, 0).numpy()).save(scan)

    def evaluated(path, *arguments):
        code, lines, _ = call(evaluate.main, "--checkpoint", path, *arguments)
        assert code == DONE
        return "\n".join(lines)

    evaluated(folder, "--output", tmp_path / "own")
    own = json.loads((tmp_path / "own" / "scores.json").read_text())
    guesses = evaluated(folder, "--images", scan)
    assert guesses.count("%") == 5
    for path in files[0].values():
        assert (
            f"{path}, trained weights: top1 {end['top1']:.2%}  top5 {end['top5']:.2%}"
            in evaluated(path)
        )
        scores = json.loads((folder / f"evaluation-{path.name}" / "scores.json").read_text())
        assert (scores["file"], scores["images"]) == (str(path), 360)
        assert (scores["top1"], scores["top5"]) == (own["top1"], own["top5"])
        assert scores["loss"] == pytest.approx(own["loss"], rel=1e-5)
        assert evaluated(path, "--images", scan) == guesses
    code, _, (error,) = call(
        evaluate.main, "--checkpoint", path, "--images", scan, "model.image_size=24"
    )
    assert code == WRONG_INPUT and "was exported with model.image_size 16, not 24" in error


def test_an_export_scores_images_by_the_names_of_their_classes(run, files, tmp_path, call):
    """Folders 7, 3 and of another name: a program has labels 7 and 3 for them, not 1 and 0, as the
    run itself has."""
    source = DigitsSource("validation")
    for name, label in (("3", 3), ("7", 7), ("x", 1)):
        (tmp_path / "val" / name).mkdir(parents=True)
        for index in np.flatnonzero(source.labels == label)[:5].tolist():
            pixels = source.read(index).permute(1, 2, 0).numpy()
            Image.fromarray(pixels).save(tmp_path / "val" / name / f"{index}.png")
    place = (
        "data.source=folder",
        f"data.root={tmp_path}",
        "data.workers=0",
        "--output",
        tmp_path / "out",
    )
    tables = []
    for path in (run[0], *files[0].values()):
        code, lines, _ = call(evaluate.main, "--checkpoint", path, *place)
        assert code == DONE and lines[0].endswith(
            "left out 5 images of 1 class that the model does not know: x"
        )
        assert lines[1].endswith("has no validation images of 8 classes: 0, 1, 2, 4, 5 and 3 more")
        tables.append((tmp_path / "out/classes.csv").read_text())
    assert tables == [tables[0]] * 4
    images = {line.split(",")[0]: line.split(",")[1] for line in tables[0].splitlines()[1:]}
    assert images == {str(digit): "5" if digit in (3, 7) else "0" for digit in range(10)}


def test_onnxruntime_alone_gives_the_models_logits(files, digits, expected):
    """Another implementation of every operator, against float64; both round in float32, so 1e-4 at
    logits of about 1. Batches of any size."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(
        str(files[0]["onnx"]), providers=["CPUExecutionProvider"]
    )
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == (
        "images",
        "tensor(uint8)",
        ["batch", 3, 16, 16],
    )
    assert (logits.name, logits.type, logits.shape) == ("logits", "tensor(float)", ["batch", 10])
    for batch in (digits[:1], digits[:3], digits):
        actual = session.run(None, {"images": batch.numpy()})[0]
        np.testing.assert_allclose(actual, expected[: len(batch)].numpy(), rtol=0, atol=1e-4)


def test_the_torch_program_needs_nothing_of_this_repository(files, digits, expected, monkeypatch):
    """Its modules cannot be imported meanwhile.

    Float32 against float64: 1e-4 at logits of about 1.
    """
    for name in [*sys.modules]:
        if name.partition(".")[0] in (
            "common",
            "models",
            "recipe",
            "training",
            "engines",
            "data",
            "optim",
            "tools",
        ):
            monkeypatch.setitem(sys.modules, name, None)
    texts = {"recipe": "", "classes": "", "image_size": ""}
    program = torch.export.load(files[0]["torch"], extra_files=texts).module()
    for batch in (digits[:1], digits[:3], digits):
        torch.testing.assert_close(program(batch), expected[: len(batch)], rtol=0, atol=1e-4)
    assert json.loads(texts["classes"]) == [str(digit) for digit in range(10)]
    assert json.loads(texts["image_size"]) == 16 and "image_size: 16" in texts["recipe"]


def test_exported_weights_are_the_runs_in_float32_and_the_same_bytes_each_time(
    run, files, command, tmp_path
):
    """Half weights have the same values in float32.

    The library alone would order the metadata otherwise each time.
    """
    weights = load(run[0] / "checkpoints" / "step-00000004.pt")["engine"]["weights"]
    tensors = safetensors.torch.load_file(files[0]["safetensors"])
    assert tensors.keys() == {timm_name(name) for name in weights}
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float16 and tensors[timm_name(name)].dtype == torch.float32
        assert torch.equal(tensors[timm_name(name)], tensor.float())
    again = tmp_path / "again.safetensors"
    assert command(run[0], "--format", "safetensors", "--output", again)[0] == DONE
    assert again.read_bytes() == files[0]["safetensors"].read_bytes()


def test_timm_loads_exported_weights_by_its_own_names(tmp_path, command):
    """Strictly, into timm's model of the same architecture, whose forward pass is then the
    reference.

    The statistics of the batch normalisation are drawn, so that each must be in its place. Both sum
    the same products in float32; only the preprocessing differs, by one rounding of each pixel.
    """
    recipe = loading.load(QUICKSTART, B0)
    ours = build(recipe.model, 1).eval()
    generator = torch.Generator().manual_seed(0)
    for name, buffer in state.persistent_buffers(ours).items():
        buffer.copy_(
            torch.rand(buffer.shape, generator=generator) + (0.5 if name.endswith("var") else -0.5)
        )
    torch.save(ours.state_dict(), tmp_path / "ours.pth")
    path = tmp_path / "b0.safetensors"
    assert command(tmp_path / "ours.pth", "--config", QUICKSTART, "--output", path, *B0)[0] == DONE
    model = timm.create_model("tf_efficientnet_b0", num_classes=10).eval()
    model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    images = torch.randint(0, 256, (3, 3, 64, 64), dtype=torch.uint8, generator=generator)
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (recipe.model.mean, recipe.model.std)
    )
    with torch.no_grad():
        actual = ours(images)
        expected = model((images / 255 - mean) / std)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_an_average_is_named_in_the_file_and_when_it_is_scored(run, command, tmp_path, call):
    code, lines, _ = command(run[0], "--weights", "step_average")
    path = run[0] / "export" / "quickstart-step_average.safetensors"
    assert code == DONE and lines[0].startswith(
        f"{run[0] / 'checkpoints' / 'step-00000004.pt'}, step_average weights"
    )
    _, lines, _ = call(
        evaluate.main, "--checkpoint", path, "--weights", "trained", "--output", tmp_path
    )
    assert f"{path}, step_average weights: top1 {run[1]['step_average']['top1']:.2%}" in "\n".join(
        lines
    )
    assert json.loads((tmp_path / "scores.json").read_text())["weights"] == "step_average"


@pytest.mark.parametrize("there", [False, True])
def test_what_has_no_images_is_checked_on_random_ones_and_says_why(command, tmp_path, there):
    path = tmp_path / "m.safetensors"
    root = tmp_path / "images"
    weights = tmp_path / "w.pth"
    overrides = (
        *TINY,
        "data.source=folder",
        f"data.root={root}",
        "model.classes=2",
        "data.bad_images=skip",
    )
    random_weights(weights, "model.classes=2")
    for folder in ("train/a", "train/b", "val/a", "val/b") if there else ():
        (root / folder).mkdir(parents=True)
        (root / folder / "no picture.jpg").write_bytes(b"")
    code, lines, _ = command(
        weights, "--config", QUICKSTART, "--output", path, "--json", *overrides
    )
    about = json.loads(lines[-1])
    assert (code, about["images"]) == (DONE, "random")
    assert ("none of the first 2 can be read" if there else f"{root}") in about[
        "no_validation_images"
    ]
    assert f"no validation images: {about['no_validation_images']}" in lines


@pytest.mark.parametrize("format", ["safetensors", pytest.param("torch", marks=pytest.mark.slow)])
def test_an_export_without_names_has_the_order_of_the_weights_it_was_made_of(
    command, tmp_path, format
):
    """Another program's order is timm's; its images are elsewhere as it is exported."""
    path = tmp_path / f"m{FORMATS[format]}"
    root = tmp_path / "images"
    overrides = (*TINY, "data.source=folder", f"data.root={root}", "model.classes=3")
    weights = random_weights(tmp_path / "w.pth", "model.classes=3")
    assert (
        command(weights, "--config", QUICKSTART, "--format", format, "--output", path, *overrides)[
            0
        ]
        == DONE
    )
    write_pictures(root, ("1", "2", "10"), train=1)
    stored = exported.read(str(path)) if format == "torch" else read(str(path))
    data = loading.loads(stored.recipe, "the file").data
    assert (
        of_model(stored, data, 3).names
        == of_model(read(str(weights)), data, 3).names
        == ("1", "2", "10")
    )


@pytest.mark.parametrize("wrong", [1.1e-4, float("nan")])
def test_a_file_that_computes_something_else_is_not_written(
    run, command, tmp_path, monkeypatch, wrong
):
    """One logit of the five in the last batch; the earlier file stays."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"of before")
    reader = exporting._reader

    def a_little_off(*arguments):
        def logits(images):
            found = reader(*arguments)(images).clone()
            found[-1, 3] += wrong * (len(images) == 5)
            return found

        return logits

    monkeypatch.setattr(exporting, "_reader", a_little_off)
    code, lines, (error,) = command(run[0], "--output", path)
    assert (code, lines) == (FAILED, [])
    assert (
        error.startswith(f"{path}: not written: a logit differs by ")
        and "more than 0.0001" in error
    )
    assert path.read_bytes() == b"of before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ("nowhere", "nowhere: no such file or folder; name a run folder"),
        ("RUN --weights epoch_average", "has no epoch_average; it has trained, step_average"),
        ("RUN --output m.pt2", "m.pt2: --format onnx writes a .onnx file; name it m.onnx"),
        (
            "nowhere --output /proc/m.onnx",
            "/proc/m.onnx: cannot be written: No such file or directory; name another",
        ),
        ("RUN modl.width=1", "command line: modl: unknown key; did you mean model?"),
        ("RUN model.width=0.5", "the model's is [16, 3, 3, 3]; name weights of"),
        ("RUN/config.yaml", "config.yaml: not weights"),
        ("without onnxruntime", "the package onnxruntime is not installed; pip install onnx"),
    ],
)
def test_refusals_are_one_line(run, command, monkeypatch, arguments, fault):
    if "without" in arguments:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
        arguments = "RUN"
    given = (argument.replace("RUN", str(run[0])) for argument in arguments.split())
    code, lines, (error,) = command("--format", "onnx", *given)
    assert (code, lines) == (WRONG_INPUT, []) and fault in error


def test_a_model_whose_operators_are_not_run_here_is_no_program_of_torch(command, tmp_path):
    """Most models of timm have others than EfficientNets; they can be had in the other formats."""
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    torch.save(timm.create_model("resnet10t", num_classes=10).state_dict(), tmp_path / "w.pth")
    path = tmp_path / "m.pt2"
    keys = ("model.classes=10", "model.image_size=32", f"data.root={tmp_path}")
    weights = f"timm:resnet10t.c3_in1k:{tmp_path / 'w.pth'}"
    code, _, (error,) = command(weights, "--format", "torch", "--output", path, *keys)
    assert code == WRONG_INPUT and not path.exists()
    assert (
        "(operator 'torch.ops.aten.relu.default' is none that is run here); use --format onnx or safe"
        in error
    )


@pytest.mark.parametrize("format", ["onnx", "torch"])
def test_a_model_that_torch_does_not_export_is_refused_in_one_line(tiny, monkeypatch, format):
    class Branching(torch.nn.Module):
        def forward(self, images):
            return images if images.sum() > 0 else images + 1

    def refuse(*arguments, **keywords):
        """What torch.onnx.export does after ten seconds."""
        raise RuntimeError("Failed to export the model.\nNext steps: ...") from ValueError(
            "data-dependent"
        )

    monkeypatch.setattr(torch.onnx, "export", refuse)
    with pytest.raises(ConfigError) as caught:
        exporting._WRITERS[format](Branching().eval(), tiny().model, {})
    line = str(caught.value)
    assert line.startswith(f"--format {format}: torch does not export this model (")
    assert line.endswith("); use --format safetensors") and "data-dependent" in line


DEPTHWISE = "model.norm=batch model.group_size=1 model.expansion=6 model.padding=torch"
SLOW = (
    (format, norm)
    for format in ("onnx", "torch")
    for norm in ("model.norm=layer", "model.proxy_norm=true")
)


@pytest.mark.parametrize(
    ("format", "overrides"),
    [("torch", DEPTHWISE), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_every_normalisation_can_be_exported_as_a_program(tmp_path, command, format, overrides):
    """The command itself compares; random weights, whose logits are about 1."""
    weights = random_weights(tmp_path / "w.pth", *overrides.split())
    arguments = (
        "--config",
        QUICKSTART,
        "--format",
        format,
        "--output",
        tmp_path / f"m{FORMATS[format]}",
    )
    assert command(weights, *arguments, *TINY, *overrides.split())[::2] == (DONE, [])
