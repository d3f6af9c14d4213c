"""Damaged programs, metadata and devkits.

They are parts of whole files, packed anew so that no checksum hides them.
"""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np
import torch

from benchmarks import QUICKSTART
from data.batches import MicroBatch
from recipe import loading
from tools import imagenet
from training import classes, exported, weights

_MEMBER = b"member "  # before the name and the content of a zip file's member
_BARE = b"bare "  # before an ONNX program without metadata
_WHOLE_ZIP = "whole.zip"
_OVERRIDES = ("model.classes=3", "model.image_size=16", "data.source=folder")
_LARGEST_IMAGE = 64  # pixels of a side; damaged recipes may name sizes that take long


class _Means(torch.nn.Module):
    """The least that is a model: the means of colours, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [batch, 3], of `images`, uint8 [batch, 3, 16, 16]."""
        return torch.nn.functional.linear(images.float().mean((2, 3)), self.weight)


def _described() -> Dict[str, str]:
    """Return the metadata that describe the model in a file."""
    recipe = loading.load(QUICKSTART, _OVERRIDES)
    return {
        "recipe": loading.dump(recipe),
        "weights": "trained",
        "classes": json.dumps(["r", "g", "b"]),
    }


def torch_programs(folder: Path) -> List[bytes]:
    """Return a .pt2 program, and those of its members that are read.

    Args:
        folder: to work in; the program is kept there.
    """
    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    program = torch.export.export(_Means(), (images,))
    stream = io.BytesIO()
    torch.export.save(program, stream, extra_files=_described())
    ends = (".json", ".pt", "weight_0", "/recipe", "/weights", "/classes")
    return with_members(folder, stream.getvalue(), ends)


def with_members(folder: Path, whole: bytes, ends: Tuple[str, ...]) -> List[bytes]:
    """Return a zip file and some of its members, each behind its name.

    Args:
        folder: in which the zip file is kept for `with_member`.
        whole: the zip file.
        ends: of the members' names.

    Returns:
        The zip file once and each member three times, so that most damage is to members.
    """
    (folder / _WHOLE_ZIP).write_bytes(whole)
    members = []
    with zipfile.ZipFile(folder / _WHOLE_ZIP) as archive:
        for name in archive.namelist():
            if name.endswith(ends):
                members.append(_MEMBER + name.encode() + b"\n" + archive.read(name))
    return [whole, *(members * 3)]


def with_member(data: bytes, folder: Path) -> bytes:
    """Return a zip file that holds damaged bytes.

    Args:
        data: the zip file itself, or one of its members behind its name.
        folder: in which `with_members` has kept the whole zip file.

    Returns:
        `data`, or the zip file of the folder with the member that `data` has.
    """
    if not data.startswith(_MEMBER):
        return data
    changed, _, damaged = data[len(_MEMBER) :].partition(b"\n")
    stream = io.BytesIO()
    with zipfile.ZipFile(folder / _WHOLE_ZIP) as whole, zipfile.ZipFile(stream, "w") as archive:
        for name in whole.namelist():
            content = damaged if name.encode() == changed else whole.read(name)
            archive.writestr(name, content)
    return stream.getvalue()


def onnx_programs(folder: Path) -> List[bytes]:
    """Return an ONNX program, and the same without the metadata, which are most of its bytes.

    Args:
        folder: to work in, which is not needed.
    """
    import onnx

    # The means of colours, weighed, as in _Means.
    helper = onnx.helper
    kinds = onnx.TensorProto
    cast = helper.make_node("Cast", ["images"], ["float"], to=kinds.FLOAT)
    mean = helper.make_node("ReduceMean", ["float", "axes"], ["means"], keepdims=0)
    multiply = helper.make_node("MatMul", ["means", "weight"], ["logits"])
    images = helper.make_tensor_value_info("images", kinds.UINT8, ["batch", 3, 16, 16])
    logits = helper.make_tensor_value_info("logits", kinds.FLOAT, ["batch", 3])
    axes = helper.make_tensor("axes", kinds.INT64, [2], [2, 3])
    weight = helper.make_tensor("weight", kinds.FLOAT, [3, 3], [1, 0, 0, 0, 1, 0, 0, 0, 1])
    graph = helper.make_graph(
        nodes=[cast, mean, multiply],
        name="means",
        inputs=[images],
        outputs=[logits],
        initializer=[axes, weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    # Damage to a whole file is mostly damage to its metadata, damage to this one to the graph.
    bare = model.SerializeToString()
    helper.set_model_props(model, _described())
    return [model.SerializeToString(), _BARE + bare]


def read_onnx(data: bytes, folder: Path) -> None:
    """Read an ONNX program and use it.

    Args:
        data: a whole file, or one without its metadata, which are put there whole; either may be
            damaged.
        folder: to work in.

    Raises:
        UserError: the program is refused.
    """
    if data.startswith(_BARE):
        import onnx

        described = [
            onnx.StringStringEntryProto(key=key, value=value) for key, value in _described().items()
        ]
        metadata_alone = onnx.ModelProto(metadata_props=described).SerializeToString()
        # What follows in a message of protobuf is merged with what comes before.
        data = data[len(_BARE) :] + metadata_alone
    path = folder / "damaged.onnx"
    path.write_bytes(data)
    read_program(path)


def read_program(path: Path) -> None:
    """Open a program, compare it with its recipe, and ask it for one image.

    Args:
        path: of the file, which may be damaged.

    Raises:
        UserError: the program is refused.
    """
    model = exported.read(str(path))
    recipe = weights.recipe_of(model, None, ())
    model.check(recipe.model)
    size = recipe.model.image_size or 16
    if size > _LARGEST_IMAGE:
        return
    numbers = torch.zeros(1, dtype=torch.int64)
    image = MicroBatch(
        images=torch.zeros(1, 3, size, size, dtype=torch.uint8),
        labels=numbers,
        indices=numbers,
        valid=1,
        number=0,
        step=0,
        unreadable=(),
    )
    model.predict_step(image)


def metadata(folder: Path) -> List[bytes]:
    """Return the header of a safetensors file of one tensor.

    Args:
        folder: to work in, which is not needed.
    """
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return [json.dumps({"__metadata__": _described(), "a": tensor}).encode()]


def read_metadata(path: Path) -> None:
    """Read recipe and classes of a safetensors file.

    Args:
        path: of the header alone, which may be damaged; it is made a file with its length and the
            tensor's 24 bytes.

    Raises:
        UserError: the file is refused.
    """
    header = path.read_bytes()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    stored = weights.read(str(path))
    recipe = weights.recipe_of(stored, None, ())
    classes.of_model(stored, recipe.data, recipe.model.classes)


def devkits(folder: Path) -> List[bytes]:
    """Return the meta.mat of a devkit of two classes and a group.

    Args:
        folder: to work in, which is not needed.
    """
    # Its types are a package of their own, which is not installed.
    from scipy.io import savemat  # type: ignore[import-untyped]

    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", object), ("num_children", "u1")]
    classes_and_group = [(1, "n01440764", 0), (2, "n01443537", 0), (1001, "n00001740", 2)]
    synsets = np.array(classes_and_group, dtype=kinds)
    stream = io.BytesIO()
    savemat(stream, {"synsets": synsets[:, None]})
    return [stream.getvalue()]


def read_devkit(data: bytes, folder: Path) -> None:
    """Read the classes of a devkit.

    Args:
        data: its meta.mat, which may be damaged.
        folder: to work in.

    Raises:
        UserError: the devkit is refused.
    """
    path = folder / "kit.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("ILSVRC2012_devkit_t12/data/meta.mat")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    imagenet._devkit(str(path))
