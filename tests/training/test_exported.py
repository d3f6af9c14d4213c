"""Programs instead of weights: predictions, refusals that name file and reason, and no code that
runs.

The programs are made by hand, each by its own library: the mean of each colour is its logit.
"""

import functools
import importlib.util
import io
import json
import os
import zipfile

import pytest
import torch

from common.errors import CheckpointError
from data.batches import MicroBatch
from recipe import loading
from tests.conftest import QUICKSTART, TINY
from training import exported

SUFFIXES = (exported.ONNX, exported.PROGRAM)
CLASSES = ("model.classes=3", "model.image_size=16", "data.source=folder")
RECIPE = loading.dump(loading.load(QUICKSTART, [*TINY, *CLASSES]))
IMAGES = torch.full((2, 3, 16, 16), 7, dtype=torch.uint8)
MODEL = "archive/models/model.json"
WEIGHTS = "archive/data/weights/"


class Means(torch.nn.Module):
    """A parameter, a buffer that is stored as a constant, and an operator with keywords, which
    change no bit."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, images):
        return torch.nn.functional.linear(images.float().mean((2, 3)), self.weight) + self.shift


MEANS = """
<ir_version: 10, opset_import: ["" : 20]>
means (uint8[batch, 3, 16, 16] images) => (float[batch, 3] logits) <int64[2] axes = {2, 3}> {
    pixels = Cast <to = 1> (images)
    logits = ReduceMean <keepdims = 0> (pixels, axes)
}
"""


def write_onnx(path, metadata):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model(MEANS)
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, str(path))


@functools.lru_cache
def torch_program():
    """A whole .pt2 file: {name: bytes}."""
    if not hasattr(torch, "export"):
        pytest.skip("this torch has no torch.export")
    made = torch.export.export(Means(), (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    buffer = io.BytesIO()
    torch.export.save(made, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def write(tmp_path):
    """write(suffix, change=None, compression=zipfile.ZIP_STORED, **metadata): a file like those of
    tools.export.

    change: returns other members of a .pt2. metadata: None leaves an entry out.
    """

    def make(suffix, change=lambda members: members, compression=zipfile.ZIP_STORED, **metadata):
        path = tmp_path / f"means{suffix}"
        metadata = {
            "recipe": RECIPE,
            "weights": "trained",
            "classes": json.dumps(["r", "g", "b"]),
            **metadata,
        }
        metadata = {key: value for key, value in metadata.items() if value is not None}
        if suffix == exported.ONNX:
            write_onnx(path, metadata)
        else:
            extra = {f"archive/extra/{key}": value.encode() for key, value in metadata.items()}
            with zipfile.ZipFile(path, "w", compression) as archive:
                for name, content in change({**torch_program(), **extra}).items():
                    archive.writestr(name, content)
        return path

    return make


def batch(images, valid):
    numbers = torch.arange(len(images))
    return MicroBatch(
        images.to(memory_format=torch.channels_last),
        numbers,
        numbers,
        valid=valid,
        number=0,
        step=0,
        unreadable=(),
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_program_gives_logits_of_the_images_that_are_no_padding(write, tiny, suffix):
    """Of any number, and where channels lie last in memory.

    Means of 256 numbers up to 255: exact to 1e-4.
    """
    path = str(write(suffix, weights="step_average"))
    model = exported.read(path, "step_average")
    assert (model.which, model.classes, model.recipe) == ("step_average", ["r", "g", "b"], RECIPE)
    for rows, valid in ((1, 1), (4, 3)):
        images = torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8)
        logits = model.predict_step(batch(images, valid))
        torch.testing.assert_close(
            logits, images[:valid].double().mean((2, 3)).float(), rtol=0, atol=1e-4
        )
    with pytest.raises(CheckpointError, match=r"has no epoch_average: .* --weights step_average"):
        exported.read(path, "epoch_average")
    model.check(
        tiny(*CLASSES, "batch.evaluation=7", "model.dropout=0.5", "model.train=classifier").model
    )
    for override, other in (
        ("model.image_size=32", "image_size 16, not 32"),
        ("model.width=1", "width 0.25, not 1.0"),
        ("model.name=efficientnet_b1", "name efficientnet_b0, not efficientnet_b1"),
    ):
        with pytest.raises(
            CheckpointError, match=rf"was exported with model\.{other}; export it again"
        ):
            model.check(tiny(*CLASSES, override).model)


def refusal_of(path):
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    beginning = f"{path}: no program that tools.export wrote: "
    assert str(refusal.value).startswith(beginning)
    return str(refusal.value)[len(beginning) :]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("damage", ["recipe", "weights", "text"])
def test_damaged_files_and_programs_of_others_are_refused_in_one_line(write, capfd, suffix, damage):
    """Metadata that is missing, or all else; benchmarks/fuzz tries other damage."""
    path = write(suffix, **{damage: None})
    if damage == "text":
        path.write_bytes(b"hello")
    assert refusal_of(path) and (
        damage == "text" or refusal_of(path) == f"its metadata has no {damage}"
    )
    assert capfd.readouterr().err == ""


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    """On the IPU's Python both packages are missing."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"anything")
    for package in ("onnx", "onnxruntime"):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, missing=package: name != missing or None
        )
        with pytest.raises(
            CheckpointError, match=rf"onnx: the package {package} is not installed; pip install"
        ):
            exported.read(str(path))


def test_numbers_in_other_files_are_refused(write):
    """Also within a branch. onnxruntime reads those below the working directory; tools.export never
    writes any."""
    onnx = pytest.importorskip("onnx")
    path = write(exported.ONNX)
    content = onnx.load(str(path))
    graph = content.graph
    tensor = content.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = tensor.EXTERNAL
    entry = tensor.external_data.add()
    entry.key = "location"
    entry.value = "inside.bin"
    inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
    del graph.initializer[:]
    graph.node.append(
        onnx.helper.make_node("If", ["axes"], ["other"], then_branch=inner, else_branch=inner)
    )
    path.write_bytes(content.SerializeToString())
    assert refusal_of(path) == "some of its numbers are in other files"


class Payload:
    """Unpickled by the usual means, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def edited(members, name, change):
    """The members with what `change` makes of one that is JSON."""
    content = json.loads(members[name])
    change(content)
    return {**members, name: json.dumps(content).encode()}


def test_no_part_of_a_file_runs_code(write, tmp_path):
    """Sample inputs and sizes that torch.export.load would unpickle or evaluate are never
    opened."""
    marker = tmp_path / "marker"
    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer)

    def hostile(content):
        values = content["graph_module"]["graph"]["tensor_values"].values()
        size = next(size for value in values for size in value["sizes"][:1] if "as_expr" in size)
        size["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(marker)!r})"

    sample = {"archive/data/sample_inputs/model.pt": buffer.getvalue()}
    path = write(exported.PROGRAM, lambda members: {**edited(members, MODEL, hostile), **sample})
    assert torch.equal(exported.read(str(path))._program.logits(IMAGES), Means()(IMAGES))
    assert not marker.exists()
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert marker.exists()


def with_operator(target, **arguments):
    def change(content):
        inputs = [
            {"name": name, "arg": argument, "kind": 1} for name, argument in arguments.items()
        ]
        content["graph_module"]["graph"]["nodes"][-1].update(target=target, inputs=inputs)

    return lambda members: edited(members, MODEL, change)


def with_weight(pickled=False, **about):
    def change(table):
        weight = table["config"]["weight"]
        weight["use_pickle"] = pickled
        weight["tensor_meta"].update(about)

    return lambda members: edited(members, f"{WEIGHTS}model_weights_config.json", change)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (
            with_operator(
                "torch.ops.aten.from_file.default", filename={"as_string": "/etc/passwd"}
            ),
            "none that is",
        ),
        (
            with_operator("torch.ops.aten.add.Tensor", self={"as_graph": {}}),
            "an argument 'as_graph' is none",
        ),
        (
            lambda members: {**members, "archive/data/aotinductor/model/model.so": b""},
            "it holds compiled code",
        ),
        (with_weight(pickled=True), "weight is pickled, which could run code"),
        (
            with_weight(sizes=[{"as_int": 1 << 40}], strides=[{"as_int": 0}]),
            "weight is larger than what is stored",
        ),
        (with_weight(storage_offset={"as_int": 1 << 20}), "out of bounds"),
        (
            lambda members: {**members, MODEL: b"[" * 200_000},
            "lists and objects are nested too deeply",
        ),
        (
            lambda members: {name: members[name] for name in members if name != MODEL},
            "models/model.json is missing",
        ),
        (
            {"compression": zipfile.ZIP_DEFLATED},
            "its members are compressed, which torch's never are",
        ),
    ],
)
def test_what_is_no_model_is_refused_before_it_is_run(write, how, reason):
    """A compressed file could swell a thousandfold as it is read; torch stores all members as they
    are."""
    assert reason in refusal_of(
        write(exported.PROGRAM, **(how if isinstance(how, dict) else {"change": how}))
    )


def test_a_program_that_gives_something_else_is_one_line(write):
    value = {"as_tensor": {"name": "mean"}}
    path = write(
        exported.PROGRAM,
        with_operator("torch.ops.aten.unsqueeze.default", self=value, dim={"as_int": 0}),
    )
    with pytest.raises(
        CheckpointError, match=r"gives torch.float32 \[1, 2, 3\], not float32 \[2, 3\]"
    ):
        exported.read(str(path)).predict_step(batch(IMAGES, 2))
