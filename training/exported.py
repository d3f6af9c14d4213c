"""Programs that tools.export wrote: .onnx, run by onnxruntime, and .pt2, run by torch. On the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from data.batches import MicroBatch
from recipe import loading
from recipe.config import Recipe
from recipe.errors import CheckpointError, first_line
from training import program
from training.weights import TRAINED, names_in_json

ONNX, PROGRAM = ".onnx", ".pt2"
INPUT, OUTPUT = "images", "logits"  # names in an .onnx file
_INSIDE = ("image_size", "classes", "mean", "std")  # keys of the section `model` that a program was made for


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


def is_exported(path: str) -> bool:
    """Whether a file is, by its name, a program rather than weights."""
    return Path(path).suffix in (ONNX, PROGRAM)


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
    found = Program(*(_opened_onnx if suffix == ONNX else program.opened)(content))
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
