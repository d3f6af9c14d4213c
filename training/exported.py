"""Programs that tools.export wrote: .onnx, run by onnxruntime, and .pt2 (`torch_program.py`).

They run on the CPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from common.errors import CheckpointError, first_line
from data.batches import MicroBatch
from recipe import loading
from recipe.config import Model
from training import torch_program
from training.weights import TRAINED, names_in_json

ONNX = ".onnx"
PROGRAM = ".pt2"
INPUT = "images"  # names in an .onnx file
OUTPUT = "logits"
# Keys of `model` that a program does not depend on.
_OF_TRAINING = ("init_from", "init_weights", "train", "dropout", "drop_path", "norm_momentum")
_NEEDED = ("recipe", "weights")  # names in the metadata
_FATAL = 4  # onnxruntime's level of log lines


class Program(NamedTuple):
    """An exported program.

    metadata: texts by name, see docs/export.md.
    logits: runs the program, uint8 [N, 3, H, W] -> float32 [N, classes].
    """

    metadata: Dict[str, str]
    logits: Callable[[torch.Tensor], torch.Tensor]


class ExportedModel:
    """An exported program that predicts as an engine does.

    path: of the file.
    recipe: YAML text of the run that trained it.
    which: `trained`, or the name of an average.
    classes: names by label; None where the file has none.
    order: of class folders, see `weights.class_order`.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, program: Program):
        self.path = path
        self.recipe: Optional[str] = program.metadata["recipe"]
        self.which = program.metadata["weights"]
        self.classes: Optional[List[str]] = names_in_json(
            program.metadata.get("classes", "null"),
            path,
        )
        self.order: Optional[str] = program.metadata.get("order")
        self._program = program
        self._model = loading.loads(self.recipe, str(path)).model

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Return logits of the valid images.

        Args:
            batch: images in any memory format.

        Returns:
            float32 [valid, classes].

        Raises:
            CheckpointError: the program fails, or its result has another shape or dtype.
        """
        # Programs were made for images in the order of their axes; readers put channels last.
        try:
            logits = self._program.logits(batch.images.contiguous())
        except Exception as error:  # a damaged program may compute anything
            fault = f"its program fails: {first_line(error)}"
            raise CheckpointError(f"{self.path}: {fault}") from None
        expected = [len(batch.images), self._model.classes]
        shape = list(logits.shape)
        if shape != expected or logits.dtype != torch.float32:
            fault = f"its program gives {logits.dtype} {shape}, not float32 {expected}"
            raise CheckpointError(f"{self.path}: {fault}")
        return logits[: batch.valid]

    def check(self, section: Model) -> None:
        """Raise CheckpointError for another model, images or classes than the program was made for.

        Args:
            section: `model` of the recipe that the program is used with.
        """
        wanted = section.model_dump(exclude=set(_OF_TRAINING))
        exported = self._model.model_dump(exclude=set(_OF_TRAINING))
        # Another family has other keys: its name comes first, and differs.
        for key, value in exported.items():
            if value != wanted.get(key):
                fault = f"was exported with model.{key} {value}, not {wanted.get(key)}"
                raise CheckpointError(f"{self.path}: {fault}; export it again with that")

    def close(self) -> None:
        """Do nothing: an engine in its place has processes to end."""


def read(path: str, which: Optional[str] = None) -> ExportedModel:
    """Return the program in a file.

    Args:
        path: of the file.
        which: the average that it must have; None or `trained`: any weights.

    Raises:
        CheckpointError: it is no program that tools.export wrote, its weights are others, or the
            package that runs it is missing.
    """
    file = Path(path)
    try:
        program = opened(file.suffix, file.read_bytes())
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: {reason}; name a file that tools.export wrote") from None
    except ImportError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # nearly everything is raised about files that are not ours
        fault = f"no program that tools.export wrote: {first_line(error)}"
        raise CheckpointError(f"{path}: {fault}") from None
    model = ExportedModel(file, program)
    if which not in (None, TRAINED, model.which):
        fault = f"has no {which}: it was exported with --weights {model.which}"
        raise CheckpointError(f"{path}: {fault}; ask for {TRAINED}")
    return model


def opened(suffix: str, content: bytes) -> Program:
    """Return the program in a file's content, ready to run.

    Args:
        suffix: of the file's name.
        content: of the file.

    Raises:
        ImportError: the package that runs it is missing.
        Exception: of any kind, where it is no program.
    """
    # Any other suffix is read as torch's, whose reader refuses what it does not know.
    program = _open_onnx(content) if suffix == ONNX else Program(*torch_program.load(content))
    for name in _NEEDED:
        if name not in program.metadata:
            raise ValueError(f"its metadata has no {name}")
    return program


def _open_onnx(content: bytes) -> Program:
    """Return an ONNX program.

    No library of operators is ever loaded, and no file beside this one is read, as tools.export
    writes none.
    """
    # Looked up before either is imported: one alone is of no use.
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            fault = f"the package {package} is not installed"
            raise ImportError(f"{fault}; pip install onnx onnxruntime")
    import onnx
    import onnxruntime

    # Not from the path, where onnx would also read files beside this one.
    proto = onnx.load_from_string(content)
    if _names_files(proto):
        raise ValueError("some of its numbers are in other files")
    options = onnxruntime.SessionOptions()
    # As many threads as torch has: onnxruntime counts the cores of the host, quota or not.
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _FATAL  # what it logs it also raises
    session = onnxruntime.InferenceSession(
        content,
        options,
        providers=["CPUExecutionProvider"],
        enable_fallback=0,
    )

    def logits(images: torch.Tensor) -> torch.Tensor:
        """Run the program on `images`."""
        (output,) = session.run([OUTPUT], {INPUT: images.numpy()})
        return torch.from_numpy(output)

    return Program({entry.key: entry.value for entry in proto.metadata_props}, logits)


def _names_files(message: Any) -> bool:
    """Return whether a tensor within a message of ONNX has its numbers in a file."""
    if message.DESCRIPTOR.name == "TensorProto":
        return bool(message.external_data) or message.data_location != message.DEFAULT
    # Tensors also lie in attributes and graphs within others, so all messages are searched.
    for field, value in message.ListFields():
        if field.message_type is None:
            continue  # a number or text
        messages = value if hasattr(value, "add") else (value,)  # repeated, or a single one
        if any(_names_files(inner) for inner in messages):
            return True
    return False
