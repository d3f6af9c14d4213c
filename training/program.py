"""Programs of torch.export, run operator by operator from an archive's tables and plain numbers alone.

torch.export.load unpickles parts of an archive and evaluates texts in it: a stranger's file could run code. Here
operators are those of `_OPERATORS`, weights are bytes, and other members, such as sample inputs, are never opened.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any, Callable, Dict, List, NamedTuple, Set

import torch

from recipe.bounded import parse_json
from recipe.files import stored_plainly

_SCHEMA = 8  # of torch's archives, since torch 2.5
_PREFIX = "torch.ops.aten."
_OPERATORS = {
    "add.Tensor", "addcmul.default", "batch_norm.default", "conv2d.default", "group_norm.default", "linear.default",
    "mean.dim", "mul.Tensor", "neg.default", "pad.default", "rsqrt.default", "sigmoid.default", "silu.default",
    "silu_.default", "square.default", "sub.Tensor", "sum.dim_IntList", "to.dtype", "unsqueeze.default", "view.default",
}  # what models/ consists of; none reads or writes a file  # fmt: skip
_CHECK = "_assert_tensor_metadata.default"  # computes nothing
# Numbers in torch's schema.
_DTYPES = {1: torch.uint8, 5: torch.int64, 6: torch.float16, 7: torch.float32, 13: torch.bfloat16}
_MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
_KEYWORD = 2  # kind of an argument
_PLAIN = ("as_int", "as_float", "as_bool", "as_string", "as_ints")


class _Value(str):
    """Name of an argument that is computed, or stored."""


class _Call(NamedTuple):
    """One operator. result: the name of its value. done: names that no later call needs."""

    operator: Callable
    arguments: List[Any]
    keywords: Dict[str, Any]
    result: str
    done: Set[str]


class Archive:
    """The members of a .pt2 file, by their names within its one folder."""

    def __init__(self, content: bytes):
        """Raises ValueError, and errors of zipfile, for files that torch.export.save does not write."""
        self._archive = zipfile.ZipFile(io.BytesIO(content))
        if not stored_plainly(self._archive, len(content)):
            raise ValueError("its members are compressed, which torch's never are")
        self._members = {entry.filename.partition("/")[2]: entry for entry in self._archive.infolist()}
        if any(name.startswith("data/aotinductor/") for name in self._members):
            raise ValueError("it holds compiled code")

    def read(self, name: str) -> bytes:
        if name not in self._members:
            raise ValueError(f"{name} is missing")
        return self._archive.read(self._members[name])

    def texts(self) -> Dict[str, str]:
        """Return the texts beside the program, by name."""
        names = [name for name in self._members if name.startswith("extra/")]
        return {name[len("extra/") :]: self.read(name).decode() for name in names}


def function_of(archive: Archive) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of one tensor that an archive holds. Raises nearly everything where it holds something else."""
    content = parse_json(archive.read("models/model.json"))
    version = content["schema_version"]["major"]
    if version != _SCHEMA:
        raise ValueError(f"version {version} of torch's format; {_SCHEMA} is read")
    stored = {**_tensors(archive, "weights"), **_tensors(archive, "constants")}
    values, images = {}, []
    for spec in content["graph_module"]["signature"]["input_specs"]:
        ((kind, about),) = spec.items()
        if kind == "user_input":
            images.append(about["arg"]["as_tensor"]["name"])
        else:
            values[about["arg"]["name"]] = stored[about[f"{kind}_name"]]
    (given,) = images
    (output,) = content["graph_module"]["graph"]["outputs"]
    result = output["as_tensor"]["name"]
    calls = _calls(content["graph_module"]["graph"]["nodes"], {given, *values}, result)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        known = {**values, given: tensor}
        for call in calls:
            arguments = [known[each] if isinstance(each, _Value) else each for each in call.arguments]
            keywords = {key: known[each] if isinstance(each, _Value) else each for key, each in call.keywords.items()}
            known[call.result] = call.operator(*arguments, **keywords)
            for name in call.done:
                del known[name]
        return known[result]

    return run


def _calls(nodes: List[dict], known: Set[str], result: str) -> List[_Call]:
    """The calls in their order. Args: known: names of what is given; result: name of what is asked for."""
    found: List[_Call] = []
    for node in nodes:
        name = node["target"][len(_PREFIX) :] if node["target"].startswith(_PREFIX) else ""
        if name == _CHECK:
            continue
        if name not in _OPERATORS:
            raise ValueError(f"operator {node['target']!r} is none of a model")
        operator, overload = name.split(".")
        arguments = [_argument(each["arg"]) for each in node["inputs"] if each["kind"] != _KEYWORD]
        keywords = {each["name"]: _argument(each["arg"]) for each in node["inputs"] if each["kind"] == _KEYWORD}
        (returned,) = node["outputs"]
        call = getattr(getattr(torch.ops.aten, operator), overload)
        found.append(_Call(call, arguments, keywords, returned["as_tensor"]["name"], set()))
    needed = {result}
    for call in reversed(found):
        used = {each for each in (*call.arguments, *call.keywords.values()) if isinstance(each, _Value)}
        call.done.update({call.result, *used} - needed - known)
        needed |= used
    return found


def _argument(given: dict) -> Any:
    ((kind, value),) = given.items()
    if kind == "as_tensor":
        return _Value(value["name"])
    if kind == "as_none":
        return None
    if kind == "as_scalar_type":
        return _DTYPES[value]
    if kind == "as_memory_format":
        return _MEMORY_FORMATS[value]
    if kind not in _PLAIN:
        raise ValueError(f"an argument {kind!r} is none of a model's")
    return value


def _tensors(archive: Archive, folder: str) -> Dict[str, torch.Tensor]:
    """The weights or constants of the program, by name; those that share memory there share it here."""
    table = parse_json(archive.read(f"data/{folder}/model_{folder}_config.json"))["config"]
    flat: Dict[str, torch.Tensor] = {}
    found = {}
    for name, about in table.items():
        if about["use_pickle"] or about["tensor_meta"] is None:
            raise ValueError(f"{name} is pickled, which could run code")
        place, meta = about["path_name"], about["tensor_meta"]
        if place not in flat:
            content = archive.read(f"data/{folder}/{place}")
            flat[place] = torch.frombuffer(bytearray(content), dtype=_DTYPES[meta["dtype"]])
        sizes, strides = ([each["as_int"] for each in meta[key]] for key in ("sizes", "strides"))
        if math.prod(sizes) > len(flat[place]):
            raise ValueError(f"{name} is larger than what is stored of it")
        found[name] = flat[place].as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    return found
