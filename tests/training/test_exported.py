"""Programs instead of weights: what they predict, and refusals that name the file and the reason.

The programs here are made by hand, each by its own library: the mean of each colour is its logit.
"""

import importlib.util
import json

import pytest
import torch

from data.batches import MicroBatch
from recipe import loading
from recipe.errors import CheckpointError
from training import exported

SUFFIXES = (exported.ONNX, exported.PROGRAM)
CLASSES = ("model.classes=3", "model.image_size=16", "data.source=folder")


class Means(torch.nn.Module):
    def forward(self, images):
        return images.float().mean((2, 3))


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


def write_program(path, metadata):
    if not hasattr(torch, "export"):
        pytest.skip("this torch has no torch.export")
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    program = torch.export.export(Means(), (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path, extra_files=metadata)


@pytest.fixture
def recipe(tiny):
    return tiny(*CLASSES)


@pytest.fixture
def write(tmp_path, recipe):
    """write(suffix, **metadata): a program that tools.export could have written; without what is None."""

    def make(suffix, **metadata):
        given = {
            "recipe": loading.dump(recipe),
            "weights": "trained",
            "classes": json.dumps(["r", "g", "b"]),
            **metadata,
        }
        path = tmp_path / f"means{suffix}"
        writers = {exported.ONNX: write_onnx, exported.PROGRAM: write_program}
        writers[suffix](path, {key: value for key, value in given.items() if value is not None})
        return path

    return make


def batch(rows, valid):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 3, 16, 16), dtype=torch.uint8, generator=generator)
    numbers = torch.arange(rows)
    return MicroBatch(images.to(memory_format=torch.channels_last), numbers, numbers, valid, 0, 0, ())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_program_gives_logits_of_the_images_that_are_no_padding(write, recipe, suffix):
    """Whatever their number, and where channels lie last in memory. Means of 256 numbers up to 255: exact to 1e-4."""
    model = exported.read(str(write(suffix)))
    assert (model.which, model.classes) == ("trained", ["r", "g", "b"])
    assert loading.loads(model.recipe, "file") == recipe
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
        ("model.classes=4", "model.classes 3, not 4"),
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
def test_programs_of_others_are_refused(write, monkeypatch, suffix, missing):
    """A .pt2 before torch opens it, which could run what it holds."""
    path = write(suffix, **{missing: None})
    if suffix == exported.PROGRAM:
        monkeypatch.setattr(torch.export, "load", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value) == f"{path}: no program that tools.export wrote: its metadata has no {missing}"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("damage", ["empty", "text", "cut"])
def test_damaged_files_are_refused_in_one_line(write, capfd, suffix, damage):
    path = write(suffix)
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"hello", "cut": content[: len(content) // 2]}[damage])
    with pytest.raises(CheckpointError) as refusal:
        exported.read(str(path))
    assert str(refusal.value).startswith(f"{path}: no program that tools.export wrote: ")
    assert capfd.readouterr().err == ""


def test_a_bit_that_changed_in_a_torch_program_is_found(write):
    """Zip files have checksums; .onnx files have none."""
    path = write(exported.PROGRAM)
    content = bytearray(path.read_bytes())
    content[content.index(b"graph_module")] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"no program that tools.export wrote: \S+ is damaged|Bad CRC"):
        exported.read(str(path))


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


def _into(tensor, location):
    tensor.ClearField("float_data")
    tensor.data_location = tensor.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location


@pytest.mark.parametrize(
    ("location", "place"),
    [
        ("inside.bin", "initializer"),
        ("../outside.bin", "constant"),
        ("/etc/hostname", "branch"),
        ("link.bin", "initializer"),
    ],
)
def test_numbers_in_other_files_are_refused(write, tmp_path, monkeypatch, location, place):
    """onnxruntime reads those below the working directory; tools.export never writes any."""
    onnx = pytest.importorskip("onnx")
    path = write(exported.ONNX)
    content = onnx.load(str(path))
    graph, tensor = content.graph, content.graph.initializer[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inside.bin").write_bytes(tensor.raw_data or bytes(16))
    (tmp_path / "link.bin").symlink_to("/etc/hostname")
    _into(tensor, location)
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


@pytest.mark.parametrize(
    ("name", "program"), [("a.onnx", True), ("b.pt2", True), ("c.pt", False), ("onnx", False), ("d.safetensors", False)]
)
def test_programs_are_known_by_their_names(name, program):
    assert exported.is_exported(name) == program
