"""Damaged programs, metadata and devkits: parts of whole files, packed anew so that no checksum hides them."""

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

_MEMBER = b"member "
_OVERRIDES = ("model.classes=3", "model.image_size=16", "data.source=folder")


class _Means(torch.nn.Module):
    """The least that is a model: the means of colours, weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(images.float().mean((2, 3)), self.weight)


def _described() -> Dict[str, str]:
    recipe = loading.load(QUICKSTART, _OVERRIDES)
    return {"recipe": loading.dump(recipe), "weights": "trained", "classes": json.dumps(["r", "g", "b"])}


def torch_programs(folder: Path) -> List[bytes]:
    stream = io.BytesIO()
    program = torch.export.export(_Means(), (torch.zeros(2, 3, 16, 16, dtype=torch.uint8),))
    torch.export.save(program, stream, extra_files=_described())
    return with_members(folder, stream.getvalue(), (".json", ".pt", "weight_0", "/recipe", "/weights", "/classes"))


def with_members(folder: Path, whole: bytes, ends: Tuple[str, ...]) -> List[bytes]:
    """A zip file, which is kept in the folder, and those of its members whose names end so, after their names."""
    (folder / "whole.zip").write_bytes(whole)
    with zipfile.ZipFile(folder / "whole.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(ends)]
        return [whole] + [_MEMBER + name.encode() + b"\n" + archive.read(name) for name in names] * 3


def with_member(data: bytes, folder: Path) -> bytes:
    """A whole zip file: `data`, or that in the folder with the member that `data` has."""
    if not data.startswith(_MEMBER):
        return data
    name, _, content = data[len(_MEMBER) :].partition(b"\n")
    with zipfile.ZipFile(folder / "whole.zip") as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for each, own in members.items():
            archive.writestr(each, content if each.encode() == name else own)
    return stream.getvalue()


def onnx_programs(folder: Path) -> List[bytes]:
    import onnx

    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=kinds.FLOAT),
        helper.make_node("ReduceMean", ["float", "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info("images", kinds.UINT8, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", kinds.FLOAT, ["batch", 3])],
        [
            helper.make_tensor("axes", kinds.INT64, [2], [2, 3]),
            helper.make_tensor("weight", kinds.FLOAT, [3, 3], [1, 0, 0, 0, 1, 0, 0, 0, 1]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    bare = model.SerializeToString()
    helper.set_model_props(model, _described())
    return [model.SerializeToString(), b"bare " + bare]


def read_onnx(data: bytes, folder: Path) -> None:
    """A whole file, or all of one but the metadata: these are the most of its bytes."""
    if data.startswith(b"bare "):
        import onnx

        described = [onnx.StringStringEntryProto(key=key, value=value) for key, value in _described().items()]
        # What follows in a message of protobuf is merged with what comes before.
        data = data[len(b"bare ") :] + onnx.ModelProto(metadata_props=described).SerializeToString()
    path = folder / "damaged.onnx"
    path.write_bytes(data)
    read_program(path)


def read_program(path: Path) -> None:
    """Opened, compared with its recipe, and asked for one image."""
    model = exported.read(str(path))
    recipe = weights.recipe_of(model, None, ())
    model.check(recipe.model)
    size, none = recipe.model.image_size or 16, torch.zeros(1, dtype=torch.int64)
    if size <= 64:
        model.predict_step(MicroBatch(torch.zeros(1, 3, size, size, dtype=torch.uint8), none, none, 1, 0, 0, ()))


def metadata(folder: Path) -> List[bytes]:
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return [json.dumps({"__metadata__": _described(), "a": tensor}).encode()]


def read_metadata(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(24))
    stored = weights.read(str(path))
    recipe = weights.recipe_of(stored, None, ())
    classes.of_model(stored, recipe.data, recipe.model.classes)


def devkits(folder: Path) -> List[bytes]:
    """The meta.mat of a devkit of two classes and a group."""
    from scipy.io import savemat

    kinds = [("ILSVRC2012_ID", "f8"), ("WNID", object), ("num_children", "u1")]
    rows = np.array([(1, "n01440764", 0), (2, "n01443537", 0), (1001, "n00001740", 2)], dtype=kinds)
    stream = io.BytesIO()
    savemat(stream, {"synsets": rows[:, None]})
    return [stream.getvalue()]


def read_devkit(data: bytes, folder: Path) -> None:
    path = folder / "kit.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("ILSVRC2012_devkit_t12/data/meta.mat")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    imagenet._devkit(str(path))
