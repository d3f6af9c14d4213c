"""Programs of torch.export, run operator by operator from an archive's tables and plain numbers alone.

torch.export.load unpickles parts of an archive and evaluates texts in it: a stranger's file could run code. Here
operators are those of `_OPERATORS`, weights are bytes, and other members, such as sample inputs, are never opened.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any, Callable, Dict, List, NamedTuple, Set, Tuple

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
_CHECK = f"{_PREFIX}_assert_tensor_metadata.default"  # computes nothing
# Numbers in torch's schema.
_DTYPES = {1: torch.uint8, 5: torch.int64, 6: torch.float16, 7: torch.float32, 13: torch.bfloat16}
_MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
_KEYWORD = 2  # kind of an argument
_Read = Callable[[str], bytes]  # content of a member of the archive


class _Value(str):
    """Name of an argument that is computed, or stored."""


class _Call(NamedTuple):
    """One operator. result: the name of its value. done: names that no later call needs."""

    operator: Callable
    arguments: List[Any]
    keywords: Dict[str, Any]
    result: str
    done: Set[str]


def opened(content: bytes) -> Tuple[Dict[str, str], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the texts of a .pt2 file by name, and its program as a function of one tensor.
    Raises nearly everything for files that torch.export.save does not write."""
    archive = zipfile.ZipFile(io.BytesIO(content))
    if not stored_plainly(archive, len(content)):
        raise ValueError("its members are compressed, which torch's never are")
    members = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(name.startswith("data/aotinductor/") for name in members):
        raise ValueError("it holds compiled code")

    def read(name: str) -> bytes:
        if name not in members:
            raise ValueError(f"{name} is missing")
        return archive.read(members[name])

    texts = {name[len("extra/") :]: read(name).decode() for name in members if name.startswith("extra/")}
    return texts, _function(read)


def _function(read: _Read) -> Callable[[torch.Tensor], torch.Tensor]:
    content = parse_json(read("models/model.json"))
    version = content["schema_version"]["major"]
    if version != _SCHEMA:
        raise ValueError(f"version {version} of torch's format; {_SCHEMA} is read")
    stored = {**_tensors(read, "weights"), **_tensors(read, "constants")}
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
    nodes = [node for node in content["graph_module"]["graph"]["nodes"] if node["target"] != _CHECK]
    calls = [_call(node) for node in nodes]
    needed = {result, given, *values}  # after the call at hand
    for call in reversed(calls):
        used = {each for each in (*call.arguments, *call.keywords.values()) if isinstance(each, _Value)}
        call.done.update({call.result, *used} - needed)
        needed |= used

    def run(tensor: torch.Tensor) -> torch.Tensor:
        known = {**values, given: tensor}
        for call in calls:
            arguments = [known[each] if isinstance(each, _Value) else each for each in call.arguments]
            keywords = {key: known[each] if isinstance(each, _Value) else each for key, each in call.keywords.items()}
            known[call.result] = call.operator(*arguments, **keywords)
            for name in call.done:
                del known[name]
        return known[result]

    return torch.no_grad()(run)


_ARGUMENTS = {
    "as_tensor": lambda value: _Value(value["name"]),
    "as_none": lambda value: None,
    "as_scalar_type": _DTYPES.__getitem__,
    "as_memory_format": _MEMORY_FORMATS.__getitem__,
    **dict.fromkeys(("as_int", "as_float", "as_bool", "as_string", "as_ints"), lambda value: value),
}


def _call(node: dict) -> _Call:
    name = node["target"][len(_PREFIX) :] if node["target"].startswith(_PREFIX) else ""
    if name not in _OPERATORS:
        raise ValueError(f"operator {node['target']!r} is none of a model")
    operator, overload = name.split(".")
    arguments = [_argument(each["arg"]) for each in node["inputs"] if each["kind"] != _KEYWORD]
    keywords = {each["name"]: _argument(each["arg"]) for each in node["inputs"] if each["kind"] == _KEYWORD}
    (returned,) = node["outputs"]
    function = getattr(getattr(torch.ops.aten, operator), overload)
    return _Call(function, arguments, keywords, returned["as_tensor"]["name"], set())


def _argument(given: dict) -> Any:
    ((kind, value),) = given.items()
    if kind not in _ARGUMENTS:
        raise ValueError(f"an argument {kind!r} is none of a model's")
    return _ARGUMENTS[kind](value)


def _tensors(read: _Read, folder: str) -> Dict[str, torch.Tensor]:
    """The weights or constants of the program, by name; those that share memory there share it here."""
    table = parse_json(read(f"data/{folder}/model_{folder}_config.json"))["config"]
    flat: Dict[str, torch.Tensor] = {}
    found = {}
    for name, about in table.items():
        if about["use_pickle"] or about["tensor_meta"] is None:
            raise ValueError(f"{name} is pickled, which could run code")
        place, meta = about["path_name"], about["tensor_meta"]
        if place not in flat:
            flat[place] = torch.frombuffer(bytearray(read(f"data/{folder}/{place}")), dtype=_DTYPES[meta["dtype"]])
        sizes, strides = ([each["as_int"] for each in meta[key]] for key in ("sizes", "strides"))
        if math.prod(sizes) > len(flat[place]):
            raise ValueError(f"{name} is larger than what is stored of it")
        found[name] = flat[place].as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    return found
