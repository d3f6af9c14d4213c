"""Programs of torch.export without torch.export.load: the same bits, and no part of a file that runs code."""

import contextlib
import io
import json
import pickle
import resource
import zipfile

import pytest
import torch

import evaluate
from data.batches import MicroBatch
from models.efficientnet import build
from recipe import loading
from recipe.errors import CheckpointError
from tools import export
from training import exported

pytestmark = pytest.mark.skipif(not hasattr(torch, "export"), reason="this torch has no torch.export")


IMAGES = torch.full((2, 3, 16, 16), 7, dtype=torch.uint8)


class Small(torch.nn.Module):
    """A parameter, a buffer that is stored as a constant, and an operator with keywords."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(9.0).view(3, 3))
        self.register_buffer("shift", torch.ones(3), persistent=False)

    def forward(self, images):
        return torch.nn.functional.linear(images.float().mean((2, 3)), self.weight) + self.shift


@pytest.fixture
def recipe(tiny):
    return tiny("model.classes=3", "model.image_size=16", "data.source=folder")


@pytest.fixture
def members(recipe):
    """What a whole .pt2 file has: {name: bytes}."""
    made = torch.export.export(Small(), (IMAGES,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    buffer = io.BytesIO()
    torch.export.save(made, buffer, extra_files={"recipe": loading.dump(recipe), "weights": "trained"})
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def write(tmp_path):
    """write(members): a file of them."""

    def make(members):
        path = tmp_path / "small.pt2"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path

    return make


class Payload:
    """Unpickled by the usual means, it makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return __import__("os").mkdir, (str(self.marker),)


def as_torch_file(payload):
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


def edited(members, name, change):
    """The members with what `change` makes of one that is JSON."""
    content = json.loads(members[name])
    change(content)
    return {**members, name: json.dumps(content).encode()}


MODEL = "archive/models/model.json"
WEIGHTS, CONSTANTS = ("archive/data/weights/", "archive/data/constants/")
TABLES = {WEIGHTS: WEIGHTS + "model_weights_config.json", CONSTANTS: CONSTANTS + "model_constants_config.json"}


def _sample_inputs(members, payload):
    return {**members, "archive/data/sample_inputs/model.pt": as_torch_file(payload)}


def _pickled(folder, name, prefix):
    """A weight or constant that is pickled."""

    def make(members, payload):
        def change(table):
            table["config"][name].update(use_pickle=True, path_name=f"{prefix}0", tensor_meta=None)

        content = pickle.dumps(payload) if prefix == "opaque_obj_" else as_torch_file(payload)
        return {**edited(members, TABLES[folder], change), f"{folder}{prefix}0": content}

    return make


def _legacy(folder):
    return lambda members, payload: {**members, f"{folder}model.pt": as_torch_file(payload)}


def _expression(members, payload):
    def change(content):
        (size,) = [
            size
            for value in content["graph_module"]["graph"]["tensor_values"].values()
            for size in value["sizes"][:1]
            if "as_expr" in size
        ][:1]
        size["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(payload.marker)!r})"

    return edited(members, MODEL, change)


def _older_file(members, payload):
    names = ("serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt")
    model = json.loads(members[MODEL])
    texts = {f"extra_files/{name}": members[f"archive/extra/{name}"] for name in ("recipe", "weights")}
    return {
        "version": ".".join(str(model["schema_version"][key]) for key in ("major", "minor")).encode(),
        "serialized_exported_program.json": members[MODEL],
        **dict.fromkeys(names, as_torch_file(payload)),
        **texts,
    }


HOSTILE = {
    "sample inputs": (_sample_inputs, None),
    "a pickled weight": (_pickled(WEIGHTS, "weight", "weight_"), "weight is pickled, which could run code"),
    "a pickled constant": (_pickled(CONSTANTS, "shift", "tensor_"), "shift is pickled, which could run code"),
    "an opaque object": (_pickled(CONSTANTS, "shift", "opaque_obj_"), "shift is pickled, which could run code"),
    "all weights as one pickle": (_legacy(WEIGHTS), None),
    "all constants as one pickle": (_legacy(CONSTANTS), None),
    "an expression": (_expression, None),
    "a file of older torch": (_older_file, "its metadata has no recipe"),
}


@pytest.mark.filterwarnings("ignore")  # of torch's loader, about older files
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_part_of_a_file_runs_code(members, write, tmp_path, capsys, kind):
    """torch.export.load runs each of these. Here it is refused in one line, or never opened (None)."""
    hostile, refusal = HOSTILE[kind]
    marker = tmp_path / "marker"
    path = write(hostile(members, Payload(marker)))
    if refusal is None:
        assert torch.equal(exported.read(str(path))._program.logits(IMAGES), Small()(IMAGES))
    else:
        assert evaluate.main(["--checkpoint", str(path)]) == 2
        assert capsys.readouterr().err == f"{path}: no program that tools.export wrote: {refusal}\n"
    assert not marker.exists()
    with contextlib.suppress(Exception):  # what comes after the payload is not what it expects
        torch.export.load(str(path))
    assert marker.exists()


def _with_operator(target, **arguments):
    def change(content):
        node = content["graph_module"]["graph"]["nodes"][-1]
        inputs = [{"name": name, "arg": argument, "kind": 1} for name, argument in arguments.items()]
        node.update(target=target, inputs=inputs)

    return lambda members: edited(members, MODEL, change)


def _with_code(members):
    return {**members, "archive/data/aotinductor/model/model.so": b"\x7fELF"}


def _larger(members):
    def change(table):
        table["config"]["weight"]["tensor_meta"].update(sizes=[{"as_int": 1 << 40}], strides=[{"as_int": 0}])

    return edited(members, TABLES[WEIGHTS], change)


def _outside(members):
    def change(table):
        table["config"]["weight"]["tensor_meta"]["storage_offset"]["as_int"] = 1 << 20

    return edited(members, TABLES[WEIGHTS], change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with_operator("torch.ops.aten.from_file.default", filename={"as_string": "/etc/passwd"}), "none of a model"),
        (_with_operator("torch.os.system", command={"as_string": "true"}), "none of a model"),
        (_with_operator("torch.ops.aten.add.Tensor", self={"as_graph": {}}), "an argument 'as_graph' is none"),
        (_with_code, "it holds compiled code"),
        (_larger, "weight is larger than what is stored of it"),
        (_outside, "out of bounds"),
        (lambda members: {**members, MODEL: b"[" * 200_000}, "lists and objects are nested too deeply"),
        (lambda members: {name: members[name] for name in members if name != MODEL}, "models/model.json is missing"),
    ],
)
def test_what_is_no_model_is_refused_before_it_is_run(members, write, change, said):
    path = write(change(members))
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value).startswith(f"{path}: no program that tools.export wrote: ") and said in str(refusal.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [("unsqueeze.default", "gives torch.float32 [1, 2, 3], not float32 [2, 3]"), ("view.default", "fails: ")],
)
def test_a_program_that_fails_or_gives_something_else_is_said_in_one_line(members, write, target, said):
    value = {"as_tensor": {"name": "mean"}}
    path = write(_with_operator(f"torch.ops.aten.{target}", self=value, dim={"as_int": 0})(members))
    model = exported.read(str(path))
    none = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(CheckpointError) as refusal:
        model.predict_step(MicroBatch(IMAGES, none, none, 2, 0, 0, ()))
    assert str(refusal.value).startswith(f"{path}: its program ") and said in str(refusal.value)


def test_a_file_that_swells_is_refused_by_its_table_of_contents(members, write):
    """256 MB of text in 256 kB; torch stores all members as they are. Read, it would take more than that in memory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with archive.open("archive/extra/more", "w", force_zip64=True) as member:
            for _ in range(256):
                member.write(bytes(1 << 20))
    path = write(members)
    path.write_bytes(buffer.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="its members are compressed, which torch's never are"):
        exported.read(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 << 10


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.norm=layer", "model.proxy_norm=true"),
        ("model.norm=batch", "model.group_size=1", "model.expansion=6", "model.padding=torch"),
    ],
)
def test_every_kind_of_model_is_read_and_has_the_bits_of_torchs_own_loader(tiny, overrides):
    recipe = tiny("model.width=0.1", "model.depth=0.1", *overrides)
    model = build(recipe.model, 0).eval().requires_grad_(False)
    size = recipe.model.image_size
    images = torch.randint(0, 256, (3, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        content, _ = export._program(model, recipe, {"recipe": "", "weights": "trained"})
        expected = torch.export.load(io.BytesIO(content)).module()(images)
        assert torch.equal(exported.opened(exported.PROGRAM, content).logits(images), expected)
