"""Programs that tools.export wrote: .onnx, run by onnxruntime, and .pt2, run by torch. On the CPU."""

from __future__ import annotations

import importlib.util
import io
import json
import zipfile
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from data.batches import MicroBatch
from recipe import loading
from recipe.config import Recipe
from recipe.errors import CheckpointError, first_line
from training.weights import TRAINED

ONNX, PROGRAM = ".onnx", ".pt2"
INPUT, OUTPUT = "images", "logits"  # names in an .onnx file
_INSIDE = ("image_size", "classes", "mean", "std")  # keys of the section `model` that a program was made for
_REQUIRED = ("recipe", "weights")

Logits = Callable[[torch.Tensor], torch.Tensor]  # uint8 [N, 3, H, W] -> float32 [N, classes]


class Program(NamedTuple):
    """What an exported file holds. metadata: texts by name, see docs/export.md. logits: runs it."""

    metadata: Dict[str, str]
    logits: Logits


class ExportedModel:
    """An exported program that predicts as an engine does.

    path: of the file. recipe: YAML text of the run it comes from. which: the weights of the run that it has. classes:
    their names, None where the file does not say. device: where it wants images.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, program: Program):
        self.path, self._program = path, program
        self.recipe: Optional[str] = program.metadata["recipe"]
        self.which = program.metadata["weights"]
        self.classes: Optional[List[str]] = json.loads(program.metadata.get("classes", "null"))

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Logits of the valid images of `batch`: float32 [valid, classes]."""
        return self._program.logits(batch.images.contiguous())[: batch.valid]

    def check(self, recipe: Recipe) -> None:
        """Raises CheckpointError for a recipe whose images or classes are not those that the program was made for."""
        own = loading.loads(self.recipe, str(self.path)).model
        for key in _INSIDE:
            made_for, asked = getattr(own, key), getattr(recipe.model, key)
            if made_for != asked:
                raise CheckpointError(
                    f"{self.path}: was exported with model.{key} {made_for}, not {asked}; export it again with that"
                )

    def close(self) -> None:
        """Nothing is held."""


def is_exported(path: str) -> bool:
    """Whether a file is, by its name, a program rather than weights."""
    return Path(path).suffix in (ONNX, PROGRAM)


def read(path: str, which: str = TRAINED) -> ExportedModel:
    """The program in a file.

    Args:
        which: `trained` for those that the file has, else the average that it must have.

    Raises:
        CheckpointError: nothing there, not readable, not written by tools.export, of other weights, or the package
            that runs it is missing.
    """
    place = Path(path)
    try:
        content = place.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; name a file that tools.export wrote") from None
    try:
        program = opened(place.suffix, content)
    except ImportError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # either library raises nearly everything about files that are not its own
        raise CheckpointError(f"{path}: no program that tools.export wrote: {first_line(error)}") from None
    model = ExportedModel(place, program)
    if which not in (TRAINED, model.which):
        raise CheckpointError(
            f"{path}: has no {which}: it was exported with --weights {model.which}; ask for {TRAINED}"
        )
    return model


def opened(suffix: str, content: bytes) -> Program:
    """The program in a file's content, ready to run.

    Raises:
        ImportError: the package that runs it is missing; the message says what to install.
        Exception: of any kind: it is no such program.
    """
    return _opened_onnx(content) if suffix == ONNX else _opened_program(content)


def _opened_onnx(content: bytes) -> Program:
    if importlib.util.find_spec("onnxruntime") is None:
        raise ImportError("the package onnxruntime is not installed; pip install onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # its warnings are about graphs that are not ours
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])

    def logits(images: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])

    return Program(_ours(dict(session.get_modelmeta().custom_metadata_map)), logits)


def _opened_program(content: bytes) -> Program:
    """Its texts are read before torch is given the file: that may run code of a file that is not ours."""
    if not hasattr(torch, "export"):
        raise ImportError(f"torch {torch.__version__} runs no exported programs; use that of requirements.txt")
    metadata = _ours(_texts(content))
    run = torch.export.load(io.BytesIO(content)).module()

    def logits(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return run(images)

    return Program(metadata, logits)


def _texts(content: bytes) -> Dict[str, str]:
    """The texts that a .pt2 file has beside the program, by name; it is a zip file, read and checked as such."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged} is damaged")
        named: List[Tuple[str, str]] = [(name.rpartition("/extra/")[2], name) for name in archive.namelist()]
        return {key: archive.read(name).decode() for key, name in named if key != name}


def _ours(metadata: Dict[str, str]) -> Dict[str, str]:
    """Raises ValueError for metadata that tools.export does not write."""
    for name in _REQUIRED:
        if name not in metadata:
            raise ValueError(f"its metadata has no {name}")
    return metadata
