"""Programs that tools.export wrote: .onnx, run by onnxruntime, and .pt2, run operator by operator here. On the CPU.

torch.export.load unpickles parts of an archive and evaluates texts in it: a stranger's file could run code. Here
operators are those of `_OPERATORS`, weights are bytes, and other members, such as sample inputs, are never opened.
"""

from __future__ import annotations

import importlib.util
import io
import math
import zipfile
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import torch

from common.errors import CheckpointError, first_line
from common.files import stored_plainly
from common.json_io import parse_json
from data.batches import MicroBatch
from recipe import loading
from recipe.config import Recipe
from training.weights import TRAINED, names_in_json

ONNX, PROGRAM = ".onnx", ".pt2"
INPUT, OUTPUT = "images", "logits"  # names in an .onnx file
_INSIDE = ("image_size", "classes", "mean", "std")  # keys of the section `model` that a program was made for
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


class Program(NamedTuple):
    """An exported file. metadata: texts by name, see docs/export.md.
    logits: runs the program, uint8 [N, 3, H, W] -> float32 [N, classes]."""

    metadata: Dict[str, str]
    logits: Callable[[torch.Tensor], torch.Tensor]


class ExportedModel:
    """An exported program that predicts as an engine does.
    recipe: YAML text of its run. which: trained weights or an average. classes: names, None where there are none."""

    device = torch.device("cpu")

    def __init__(self, path: Path, found: Program):
        self.path, self._program = path, found
        self.recipe: Optional[str] = found.metadata["recipe"]
        self.which = found.metadata["weights"]
        self.classes: Optional[List[str]] = names_in_json(found.metadata.get("classes", "null"), path)
        self._model = loading.loads(self.recipe, str(path)).model

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Return logits of the valid images, float32 [valid, classes]. Raises CheckpointError: it gives none."""
        try:
            logits = self._program.logits(batch.images.contiguous())
        except Exception as error:  # a damaged program may compute anything
            raise CheckpointError(f"{self.path}: its program fails: {first_line(error)}") from None
        shape, found = [len(batch.images), self._model.classes], list(logits.shape)
        if found != shape or logits.dtype != torch.float32:
            raise CheckpointError(f"{self.path}: its program gives {logits.dtype} {found}, not float32 {shape}")
        return logits[: batch.valid]

    def check(self, recipe: Recipe) -> None:
        """Raises CheckpointError for a recipe whose images or classes are not those that the program was made for."""
        for key in _INSIDE:
            has, wanted = getattr(self._model, key), getattr(recipe.model, key)
            if has != wanted:
                fault = f"was exported with model.{key} {has}, not {wanted}"
                raise CheckpointError(f"{self.path}: {fault}; export it again with that")

    def close(self) -> None: ...


def read(path: str, which: Optional[str] = None) -> ExportedModel:
    """Return the program in a file. Args: which: the average that it must have; None or `trained`: any weights.
    Raises CheckpointError where there is none that tools.export wrote, its weights are others, or the package that runs
    it is missing."""
    place = Path(path)
    try:
        found = opened(place.suffix, place.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; name a file that tools.export wrote") from None
    except ImportError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # nearly everything is raised about files that are not ours
        raise CheckpointError(f"{path}: no program that tools.export wrote: {first_line(error)}") from None
    model = ExportedModel(place, found)
    if which not in (None, TRAINED, model.which):
        fault = f"has no {which}: it was exported with --weights {model.which}"
        raise CheckpointError(f"{path}: {fault}; ask for {TRAINED}")
    return model


def opened(suffix: str, content: bytes) -> Program:
    """Return the program in a file's content, ready to run.
    Raises ImportError where the package that runs it is missing, and exceptions of any kind where it is no program."""
    found = (_opened_onnx if suffix == ONNX else _opened_torch)(content)
    for name in ("recipe", "weights"):
        if name not in found.metadata:
            raise ValueError(f"its metadata has no {name}")
    return found


def _opened_onnx(content: bytes) -> Program:
    """No library of operators is ever loaded, and no file beside this one is read, as tools.export writes none."""
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"the package {package} is not installed; pip install onnx onnxruntime")
    import onnx
    import onnxruntime

    proto = onnx.load_from_string(content)
    if _names_files(proto):
        raise ValueError("some of its numbers are in other files")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4  # what it logs it also raises
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    metadata = {each.key: each.value for each in proto.metadata_props}
    return Program(metadata, lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0]))


def _names_files(message: Any) -> bool:
    """Whether a tensor within a message of ONNX has its numbers in a file."""
    if message.DESCRIPTOR.name == "TensorProto":
        return bool(message.external_data) or message.data_location != message.DEFAULT
    fields = (value for field, value in message.ListFields() if field.message_type is not None)
    return any(_names_files(each) for value in fields for each in (value if hasattr(value, "add") else (value,)))


class _Value(str):
    """Name of an argument that is computed, or stored."""


class _Call(NamedTuple):
    """One operator. result: the name of its value. done: names that no later call needs."""

    operator: Callable
    arguments: List[Any]
    keywords: Dict[str, Any]
    result: str
    done: Set[str]


def _opened_torch(content: bytes) -> Program:
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
    return Program(texts, _function(read))


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
