"""Programs instead of weights: what they predict, refusals that name file and reason, and no code that runs.

The programs are made by hand, each by its own library: the mean of each colour is its logit. Those of torch.export are
run without torch.export.load, and give the same bits.
"""

import contextlib
import functools
import importlib.util
import io
import json
import pickle
import resource
import zipfile

import pytest
import torch

import evaluate
from data.batches import MicroBatch
from recipe import loading
from recipe.errors import CheckpointError
from tests.conftest import QUICKSTART, TINY
from training import exported

SUFFIXES = (exported.ONNX, exported.PROGRAM)
CLASSES = ("model.classes=3", "model.image_size=16", "data.source=folder")
RECIPE = loading.dump(loading.load(QUICKSTART, [*TINY, *CLASSES]))
IMAGES = torch.full((2, 3, 16, 16), 7, dtype=torch.uint8)
torch_export = pytest.mark.skipif(not hasattr(torch, "export"), reason="this torch has no torch.export")


class Means(torch.nn.Module):
    """A parameter, a buffer that is stored as a constant, and an operator with keywords, which change no bit."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, images):
        return torch.nn.functional.linear(images.float().mean((2, 3)), self.weight) + self.shift


def write_onnx(path, metadata):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=kinds.FLOAT),
        helper.make_node("ReduceMean", ["float", "axes"], ["logits"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info("images", kinds.UINT8, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", kinds.FLOAT, ["batch", 3])],
        [helper.make_tensor("axes", kinds.INT64, [2], [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, metadata)
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
def members():
    """What a whole .pt2 file of tools.export has: {name: bytes}."""
    return {**torch_program(), "archive/extra/recipe": RECIPE.encode(), "archive/extra/weights": b"trained"}


@pytest.fixture
def write_members(tmp_path):
    """write_members(members): a .pt2 file of them."""

    def make(members):
        path = tmp_path / "means.pt2"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return path

    return make


@pytest.fixture
def write(tmp_path, write_members):
    """write(suffix, **metadata): a program that tools.export could have written; without what is None."""

    def make(suffix, **metadata):
        given = {"recipe": RECIPE, "weights": "trained", "classes": json.dumps(["r", "g", "b"]), **metadata}
        given = {key: value for key, value in given.items() if value is not None}
        if suffix == exported.PROGRAM:
            extra = {f"archive/extra/{key}": value.encode() for key, value in given.items()}
            return write_members({**torch_program(), **extra})
        path = tmp_path / f"means{suffix}"
        write_onnx(path, given)
        return path

    return make


def batch(rows, valid):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator)
    numbers = torch.arange(rows)
    return MicroBatch(images.to(memory_format=torch.channels_last), numbers, numbers, valid, 0, 0, ())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_program_gives_logits_of_the_images_that_are_no_padding(write, suffix):
    """Whatever their number, and where channels lie last in memory. Means of 256 numbers up to 255: exact to 1e-4."""
    model = exported.read(str(write(suffix)))
    assert (model.which, model.classes) == ("trained", ["r", "g", "b"])
    assert model.recipe == RECIPE
    for rows, valid in ((1, 1), (5, 5), (4, 3)):
        asked = batch(rows, valid)
        logits = model.predict_step(asked)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, asked.images[:valid].double().mean((2, 3)).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_average_is_asked_for_by_the_name_that_the_file_has(write, suffix):
    path = str(write(suffix, weights="step_average"))
    assert exported.read(path).which == exported.read(path, "step_average").which == "step_average"
    with pytest.raises(CheckpointError, match="has no epoch_average: it was exported with --weights step_average"):
        exported.read(path, "epoch_average")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.image_size=32", "model.image_size 16, not 32"),
        ("model.mean=[0.5, 0.5, 0.5]", r"model.mean \(0.485, .*, not \(0.5, 0.5, 0.5\)"),
    ],
)
def test_what_is_inside_a_program_cannot_be_overridden(write, tiny, override, said):
    model = exported.read(str(write(exported.PROGRAM)))
    model.check(tiny(*CLASSES, "batch.evaluation=7", "data.root=/elsewhere"))
    with pytest.raises(CheckpointError, match=rf"means\.pt2: was exported with {said}; export it again with that"):
        model.check(tiny(*CLASSES, override))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("missing", ["recipe", "weights"])
def test_programs_of_others_are_refused(write, suffix, missing):
    path = write(suffix, **{missing: None})
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value) == f"{path}: no program that tools.export wrote: its metadata has no {missing}"


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [*((suffix, damage) for suffix in SUFFIXES for damage in ("text", "cut")), (exported.PROGRAM, "bit")],
)
def test_damaged_files_are_refused_in_one_line(write, capfd, suffix, damage):
    """Also one wrong bit in a .pt2: zip files have checksums, .onnx files have none."""
    path = write(suffix)
    content = path.read_bytes()
    bit = content.replace(b"graph_module", b"graph_modulf", 1)
    path.write_bytes({"text": b"hello", "cut": content[: len(content) // 2], "bit": bit}[damage])
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value).startswith(f"{path}: no program that tools.export wrote: ")
    assert capfd.readouterr().err == ""


def test_a_missing_file_or_package_is_named(tmp_path, monkeypatch):
    """On the IPU's Python both packages are missing."""
    path = tmp_path / "m.onnx"
    with pytest.raises(CheckpointError, match=r"m\.onnx: No such file or directory; name a file that"):
        exported.read(str(path))
    path.write_bytes(b"anything")
    for package in ("onnx", "onnxruntime"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, missing=package: None if name == missing else 1)
        with pytest.raises(CheckpointError, match=rf"onnx: the package {package} is not installed; pip install"):
            exported.read(str(path))


@pytest.mark.parametrize(
    ("location", "place"), [("inside.bin", "initializer"), ("../outside.bin", "constant"), ("/etc/hostname", "branch")]
)
def test_numbers_in_other_files_are_refused(write, tmp_path, monkeypatch, location, place):
    """onnxruntime reads those below the working directory; tools.export never writes any."""
    onnx = pytest.importorskip("onnx")
    path = write(exported.ONNX)
    content = onnx.load(str(path))
    graph, tensor = content.graph, content.graph.initializer[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inside.bin").write_bytes(tensor.raw_data or bytes(16))
    tensor.ClearField("float_data")
    tensor.data_location = tensor.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    if place == "constant":
        graph.node.insert(0, onnx.helper.make_node("Constant", [], ["axes"], value=tensor))
    elif place == "branch":
        inner = onnx.helper.make_graph([], "inner", [], [], [tensor])
        graph.node.append(onnx.helper.make_node("If", ["axes"], ["other"], then_branch=inner, else_branch=inner))
    if place != "initializer":
        del graph.initializer[:]
    path.write_bytes(content.SerializeToString())
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value) == (f"{path}: no program that tools.export wrote: some of its numbers are in other files")


def test_operators_of_others_are_not_looked_for(write):
    """Libraries of operators are loaded by name only by who asks for it: nothing here does."""
    onnx = pytest.importorskip("onnx")
    path = write(exported.ONNX)
    content = onnx.load(str(path))
    content.graph.node[0].domain = "evil"
    content.opset_import.append(onnx.helper.make_opsetid("evil", 1))
    path.write_bytes(content.SerializeToString())
    with pytest.raises(CheckpointError, match=r"no program that tools.export wrote: .*evil"):
        exported.read(str(path))


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


def _beside(name):
    """Another file of torch's in the archive."""
    return lambda members, payload: {**members, name: as_torch_file(payload)}


def _pickled(folder, name, prefix):
    """A weight or constant that is pickled."""

    def make(members, payload):
        def change(table):
            table["config"][name].update(use_pickle=True, path_name=f"{prefix}0", tensor_meta=None)

        content = pickle.dumps(payload) if prefix == "opaque_obj_" else as_torch_file(payload)
        return {**edited(members, TABLES[folder], change), f"{folder}{prefix}0": content}

    return make


def _expression(members, payload):
    def change(content):
        values = content["graph_module"]["graph"]["tensor_values"].values()
        size = next(size for value in values for size in value["sizes"][:1] if "as_expr" in size)
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
    "sample inputs": (_beside("archive/data/sample_inputs/model.pt"), None),
    "a pickled weight": (_pickled(WEIGHTS, "weight", "weight_"), "weight is pickled, which could run code"),
    "a pickled constant": (_pickled(CONSTANTS, "shift", "tensor_"), "shift is pickled, which could run code"),
    "an opaque object": (_pickled(CONSTANTS, "shift", "opaque_obj_"), "shift is pickled, which could run code"),
    "all weights as one pickle": (_beside(f"{WEIGHTS}model.pt"), None),
    "all constants as one pickle": (_beside(f"{CONSTANTS}model.pt"), None),
    "an expression": (_expression, None),
    "a file of older torch": (_older_file, "its metadata has no recipe"),
}


@torch_export
@pytest.mark.filterwarnings("ignore")  # of torch's loader, about older files
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_part_of_a_file_runs_code(members, write_members, tmp_path, capsys, kind):
    """torch.export.load runs each of these. Here it is refused in one line, or never opened (None)."""
    hostile, refusal = HOSTILE[kind]
    marker = tmp_path / "marker"
    path = write_members(hostile(members, Payload(marker)))
    if refusal is None:
        assert torch.equal(exported.read(str(path))._program.logits(IMAGES), Means()(IMAGES))
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


def _weight(**about):
    def change(table):
        table["config"]["weight"]["tensor_meta"].update(about)

    return lambda members: edited(members, TABLES[WEIGHTS], change)


LARGER = _weight(sizes=[{"as_int": 1 << 40}], strides=[{"as_int": 0}])
OUTSIDE = _weight(storage_offset={"as_int": 1 << 20})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_with_operator("torch.ops.aten.from_file.default", filename={"as_string": "/etc/passwd"}), "none of a model"),
        (_with_operator("torch.os.system", command={"as_string": "true"}), "none of a model"),
        (_with_operator("torch.ops.aten.add.Tensor", self={"as_graph": {}}), "an argument 'as_graph' is none"),
        (lambda members: {**members, "archive/data/aotinductor/model/model.so": b""}, "it holds compiled code"),
        (LARGER, "weight is larger than what is stored of it"),
        (OUTSIDE, "out of bounds"),
        (lambda members: {**members, MODEL: b"[" * 200_000}, "lists and objects are nested too deeply"),
        (lambda members: {name: members[name] for name in members if name != MODEL}, "models/model.json is missing"),
    ],
)
def test_what_is_no_model_is_refused_before_it_is_run(members, write_members, change, said):
    path = write_members(change(members))
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value).startswith(f"{path}: no program that tools.export wrote: ") and said in str(refusal.value)


@pytest.mark.parametrize(
    ("target", "said"),
    [("unsqueeze.default", "gives torch.float32 [1, 2, 3], not float32 [2, 3]"), ("view.default", "fails: ")],
)
def test_a_program_that_fails_or_gives_something_else_is_said_in_one_line(members, write_members, target, said):
    value = {"as_tensor": {"name": "mean"}}
    path = write_members(_with_operator(f"torch.ops.aten.{target}", self=value, dim={"as_int": 0})(members))
    model = exported.read(str(path))
    none = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(CheckpointError) as refusal:
        model.predict_step(MicroBatch(IMAGES, none, none, 2, 0, 0, ()))
    assert str(refusal.value).startswith(f"{path}: its program ") and said in str(refusal.value)


def test_a_file_that_swells_is_refused_by_its_table_of_contents(members, write_members):
    """128 MB of text in 128 kB; torch stores all members as they are. Read, it would take more than that in memory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with archive.open("archive/extra/more", "w", force_zip64=True) as member:
            for _ in range(128):
                member.write(bytes(1 << 20))
    path = write_members(members)
    path.write_bytes(buffer.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="its members are compressed, which torch's never are"):
        exported.read(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
