"""Programs in .pt2 files of torch.export, run operator by operator.

torch.export.load unpickles parts of an archive and evaluates texts in it: a stranger's file could
run code. Here operators are those of `_OPERATORS`, weights are bytes, and other members, such as
sample inputs, are never opened.

Source of the format: torch/_export/serde/schema.py, version 8.
"""

from __future__ import annotations

import io
import math
import zipfile
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Set, Tuple

import torch

from common.files import stored_plainly
from common.json_io import parse_json

_SCHEMA = 8  # of torch's archives, since torch 2.5
_PREFIX = "torch.ops.aten."
# What models/ consists of; none reads or writes a file.
_OPERATORS = {
    "add.Tensor",
    "addcmul.default",
    "batch_norm.default",
    "conv2d.default",
    "group_norm.default",
    "linear.default",
    "mean.dim",
    "mul.Tensor",
    "neg.default",
    "pad.default",
    "rsqrt.default",
    "sigmoid.default",
    "silu.default",
    "silu_.default",
    "square.default",
    "sub.Tensor",
    "sum.dim_IntList",
    "to.dtype",
    "unsqueeze.default",
    "view.default",
}
_CHECK = f"{_PREFIX}_assert_tensor_metadata.default"  # computes nothing
# Numbers in torch's schema.
_DTYPES = {
    1: torch.uint8,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    13: torch.bfloat16,
}
_MEMORY_FORMATS = {1: torch.contiguous_format, 2: torch.channels_last, 4: torch.preserve_format}
_KEYWORD = 2  # kind of an argument
_Read = Callable[[str], bytes]  # content of a member of the archive
_Tensors = Dict[str, torch.Tensor]


class NotRun(ValueError):
    """A program is torch's, but has an operator, or an argument of one, that is not run here."""


class _Value(str):
    """Name of an argument that is computed, or stored."""


class _Call(NamedTuple):
    """One operator.

    arguments, keywords: numbers and the like, or a `_Value` for a tensor.
    result: name of the tensor that it computes.
    unneeded: names of tensors that no later call needs.
    """

    operator: Callable
    arguments: List[Any]
    keywords: Dict[str, Any]
    result: str
    unneeded: Set[str]

    def used(self) -> Set[str]:
        """Return the names of the tensors that it computes with."""
        arguments = (*self.arguments, *self.keywords.values())
        return {argument for argument in arguments if isinstance(argument, _Value)}


def load(content: bytes) -> Tuple[Dict[str, str], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the texts and the program of a .pt2 file.

    Args:
        content: of the file.

    Returns:
        Texts by name, and a function of one tensor.

    Raises:
        NotRun: see there.
        Exception: of nearly any kind, for what torch.export.save does not write.
    """
    # Names of members begin with a folder, which may be called anything.
    archive = zipfile.ZipFile(io.BytesIO(content))
    if not stored_plainly(archive, len(content)):
        raise ValueError("its members are compressed, which torch's never are")
    members = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(name.startswith("data/aotinductor/") for name in members):
        raise ValueError("it holds compiled code")

    def read(name: str) -> bytes:
        """Return the content of the member `name`."""
        if name not in members:
            raise ValueError(f"{name} is missing")
        return archive.read(members[name])

    texts = {}
    for name in members:
        if name.startswith("extra/"):
            texts[name[len("extra/") :]] = read(name).decode()
    return texts, _function(read)


def _function(read: _Read) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the program in an archive as a function of its input, without gradients."""
    content = parse_json(read("models/model.json"))
    version = content["schema_version"]["major"]
    if version != _SCHEMA:
        raise ValueError(f"version {version} of torch's format; {_SCHEMA} is read")
    # The program's values: its input, what is stored, and its output.
    stored = {**_stored_tensors(read, "weights"), **_stored_tensors(read, "constants")}
    module = content["graph_module"]
    input_name, constants = _inputs(module["signature"]["input_specs"], stored)
    (output,) = module["graph"]["outputs"]
    result = output["as_tensor"]["name"]
    # Its calls. Each frees what no later one needs, or all activations would stay in memory.
    nodes = [node for node in module["graph"]["nodes"] if node["target"] != _CHECK]
    calls = [_call(node) for node in nodes]
    _note_unneeded(calls, kept={result, input_name, *constants})

    def run(tensor: torch.Tensor) -> torch.Tensor:
        """Return the result for an input `tensor`."""
        values = {**constants, input_name: tensor}
        for call in calls:
            arguments = [_resolved(argument, values) for argument in call.arguments]
            keywords = {key: _resolved(value, values) for key, value in call.keywords.items()}
            values[call.result] = call.operator(*arguments, **keywords)
            for name in call.unneeded:
                del values[name]
        return values[result]

    return torch.no_grad()(run)


def _inputs(specs: Sequence[dict], stored: _Tensors) -> Tuple[str, _Tensors]:
    """Return the name of the program's one input, and the stored tensors by their names there."""
    # What is stored has one name in the archive, and another in the graph.
    inputs = []
    constants = {}
    for spec in specs:
        ((kind, about),) = spec.items()
        # Others are parameters, buffers and constants, which name what is stored.
        if kind == "user_input":
            inputs.append(about["arg"]["as_tensor"]["name"])
        else:
            constants[about["arg"]["name"]] = stored[about[f"{kind}_name"]]
    (input_name,) = inputs
    return input_name, constants


def _note_unneeded(calls: Sequence[_Call], kept: Set[str]) -> None:
    """Note in each call what no later one needs; values that are `kept` are never freed."""
    # From the end: what no later call has used by then, this one is the last to need.
    needed = set(kept)
    for call in reversed(calls):
        used = call.used()
        # Its last user frees a tensor; its maker does, if nobody uses it.
        call.unneeded.update({call.result, *used} - needed)
        needed |= used


def _resolved(argument: Any, values: _Tensors) -> Any:
    """Return the tensor that an argument names, or the argument."""
    return values[argument] if isinstance(argument, _Value) else argument


def _call(node: dict) -> _Call:
    """Return the call that a node of the graph describes; raise NotRun for other operators."""
    target = node["target"]
    name = target[len(_PREFIX) :] if target.startswith(_PREFIX) else ""
    if name not in _OPERATORS:
        raise NotRun(f"operator {target!r} is none that is run here")
    # Only a name of the list is looked up in torch: no file reaches anything else there.
    operator, overload = name.split(".")
    arguments = []
    keywords = {}
    for entry in node["inputs"]:
        value = _argument(entry["arg"])
        if entry["kind"] == _KEYWORD:
            keywords[entry["name"]] = value
        else:
            arguments.append(value)
    (output,) = node["outputs"]
    return _Call(
        operator=getattr(getattr(torch.ops.aten, operator), overload),
        arguments=arguments,
        keywords=keywords,
        result=output["as_tensor"]["name"],
        unneeded=set(),
    )


def _argument(entry: dict) -> Any:
    """Return the argument of a call; raise NotRun for a kind that no model has."""
    ((kind, value),) = entry.items()
    if kind == "as_tensor":
        return _Value(value["name"])
    if kind == "as_none":
        return None
    if kind == "as_scalar_type":
        return _DTYPES[value]
    if kind == "as_memory_format":
        return _MEMORY_FORMATS[value]
    if kind in ("as_int", "as_float", "as_bool", "as_string", "as_ints"):
        return value
    raise NotRun(f"an argument {kind!r} is none that is run here")


def _stored_tensors(read: _Read, folder: str) -> _Tensors:
    """Return the program's weights or constants by name; those that share memory there do so here.

    Raises ValueError where they are pickled, or larger than what is stored.
    """
    table = parse_json(read(f"data/{folder}/model_{folder}_config.json"))["config"]
    storages: _Tensors = {}
    tensors = {}
    for name, about in table.items():
        meta = about["tensor_meta"]
        if about["use_pickle"] or meta is None:
            raise ValueError(f"{name} is pickled, which could run code")
        # Several tensors may be views of one file.
        file = about["path_name"]
        if file not in storages:
            data = bytearray(read(f"data/{folder}/{file}"))
            storages[file] = torch.frombuffer(data, dtype=_DTYPES[meta["dtype"]])
        storage = storages[file]
        sizes = [size["as_int"] for size in meta["sizes"]]
        strides = [stride["as_int"] for stride in meta["strides"]]
        if math.prod(sizes) > len(storage):
            raise ValueError(f"{name} is larger than what is stored of it")
        tensors[name] = storage.as_strided(sizes, strides, meta["storage_offset"]["as_int"])
    return tensors
