"""A trained model as a file for other programs, compared with the model before it is written.

See docs/export.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import torch
from safetensors.torch import load, save

from common import progress
from common.command import fail
from common.errors import DONE, FAILED, ConfigError, DataError, first_line
from common.files import check_file, write
from common.json_io import json_text
from data.loader import EvaluationBatches
from data.sources import SOURCES
from engines import state
from models.base import BlockList
from models.families import build, timm_name
from recipe import loading
from recipe.config import Data, Model, Recipe
from recipe.settled import image_size
from training import classes, exported, weights
from training.classes import Known
from training.torch_program import NotRun
from training.weights import StoredWeights

_LIMIT = 1e-4  # largest difference of a logit: programs add in another order than torch
_BATCHES = (1, 2, 5)  # images in those that are compared
_PROGRAMS = (".onnx", ".pt2")  # suffixes of files that compute; the others hold weights


class _Comparison(NamedTuple):
    """The written content beside the model.

    images: how many.
    why_random: and not those of validation; empty if they are not.
    difference: the largest of a logit.
    """

    images: int
    why_random: str
    difference: float

    @property
    def kind(self) -> str:
        """Return which images were compared: of `validation`, or `random` ones."""
        return "random" if self.why_random else "validation"


@torch.no_grad()
def export(options: argparse.Namespace, path: Path | None, suffix: str) -> int:
    """Export a model.

    Args:
        options: of tools.export.
        path: of the file; None: in the run folder, or here.
        suffix: of the file.

    Returns:
        The exit code.
    """
    stored, recipe = weights.opened(
        options.checkpoint,
        options.weights,
        options.best,
        config=options.config,
        overrides=options.overrides,
    )
    for note in stored.notes:
        print(note)
    if path is None:
        path = _default_path(stored, recipe.run.name, suffix)
        check_file(path)
    # The content as it would be written must give the logits of the model.
    model = _built(stored, recipe.model, recipe.run.seed)
    known = _known(stored, recipe)
    with progress.lines(lambda: f"exporting {recipe.model.name}"):
        metadata = _metadata(stored, recipe, known.names)
        content = _WRITERS[options.format](model, recipe.model, metadata)
        reader = _reader(suffix, content, recipe)
        comparison = _compare(model, reader, recipe.model, recipe.data)
    difference = comparison.difference
    if not difference <= _LIMIT:  # nor if it is not a number
        fault = f"a logit differs by {difference:.2g} from the model's, more than {_LIMIT:g}"
        return fail(f"{path}: not written: {fault}", FAILED)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content, durable=True)
    size = len(content)
    print(f"{stored.path}, {stored.which} weights -> {path}: {size / 1e6:.1f} MB, float32")
    print("\n".join(_lines(known, recipe.model, comparison, is_program=suffix in _PROGRAMS)))
    if options.json:
        file = {"format": options.format, "file": str(path), "bytes": size}
        print(json_text({**file, **_about(stored, recipe.model, comparison)}))
    return DONE


def _lines(
    known: Known,
    model: Model,
    comparison: _Comparison,
    is_program: bool,
) -> list[str]:
    """Return lines on a file: its classes, how to call it, and how it was compared.

    Args:
        known: classes of the model.
        model: section of the recipe.
        comparison: with the model.
        is_program: not weights alone, which take and give nothing.
    """
    lines = []
    if known.note:
        lines.append(known.note)
    if is_program:
        lines.append(_signature(model))
    if comparison.why_random:
        lines.append(f"no validation images: {comparison.why_random}")
    images = f"{comparison.images} {comparison.kind} images"
    difference = f"largest difference of a logit {comparison.difference:.2g}"
    lines.append(f"read again, on {images}: {difference}")
    return lines


def _default_path(stored: StoredWeights, name: str, suffix: str) -> Path:
    """Return the path of the file in the run folder, or here. name: of the run."""
    folder = weights.run_folder_of(stored.path) or Path()
    # So that averages of a run do not replace each other.
    average = "" if stored.which == weights.TRAINED else f"-{stored.which}"
    return folder / "export" / f"{name}{average}{suffix}"


def _about(stored: StoredWeights, model: Model, comparison: _Comparison) -> dict[str, Any]:
    """Return the export as data, but for the file."""
    return {
        "checkpoint": str(stored.path),
        "weights": stored.which,
        "image_size": model.image_size,
        "classes": model.classes,
        "images": comparison.kind,
        "no_validation_images": comparison.why_random or None,
        "difference": comparison.difference,
    }


def _signature(model: Model) -> str:
    """Return what a program takes and gives."""
    size = model.image_size
    images = f"images uint8 [batch, 3, {size}, {size}], RGB"
    return f"{images} -> logits float32 [batch, {model.classes}]"


def _compare(
    model: BlockList,
    logits: Callable[[torch.Tensor], torch.Tensor],
    section: Model,
    data: Data,
) -> _Comparison:
    """Compare the logits of a file with those of the model, on batches of several sizes.

    Args:
        model: on the CPU.
        logits: of the file, float32 [batch, classes] from images uint8 [batch, 3, size, size].
        section: of the recipe, on the model.
        data: section of the recipe, for validation images.
    """
    count = sum(_BATCHES)
    why_random = ""
    try:
        images = _validation_images(section, data, count)
    except DataError as error:
        why_random = str(error)
        images = _random_images(image_size(section), count)
    # An exported program must take batches of any size.
    differences = []
    for batch in images.split(_BATCHES):
        differences.append((logits(batch) - model(batch)).abs())
    return _Comparison(count, why_random, torch.cat(differences).max().item())


def _built(stored: StoredWeights, section: Model, seed: int) -> BlockList:
    """Build the model that evaluation uses, float32, on the CPU."""
    model = build(section, seed).eval().requires_grad_(False)
    tensors, _ = weights.fitted(stored, state.shapes(model), section, new_classifier=False)
    # Runs may store float16.
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def _known(stored: StoredWeights, recipe: Recipe) -> Known:
    """Return the classes of the model.

    They have no names where neither the file nor the data has them.
    """
    try:
        return classes.of_model(stored, recipe.data, recipe.model.classes)
    except DataError:
        return Known(())


def _metadata(stored: StoredWeights, recipe: Recipe, names: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a file, as texts: JSON where a value is no text."""
    # A program that reads weights alone needs these to prepare images as training did.
    texts = {
        "recipe": loading.dump(recipe),
        "weights": stored.which,
        "image_size": json.dumps(recipe.model.image_size),
        "mean": json.dumps(recipe.model.mean),
        "std": json.dumps(recipe.model.std),
        "crop_fraction": json.dumps(recipe.data.crop_fraction),
        "crop_mode": json.dumps(recipe.data.crop_mode),
        "crop_rounding": json.dumps(recipe.data.crop_rounding),
        "interpolation": json.dumps(recipe.data.interpolation),
    }
    if names:
        texts["classes"] = json.dumps(list(names))
    else:
        # Whoever reads the file beside other images must know whose order the labels have.
        texts["order"] = weights.class_order(stored)
    return texts


def _safetensors(model: BlockList, section: Model, metadata: dict[str, str]) -> bytes:
    """Return the weights under timm's names.

    The format is 8 bytes with the length of a JSON header, the header, and the tensors.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[timm_name(section, name)] = tensor.contiguous()
    content = save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    # The library orders metadata differently each time: sorted, the same model is the same file.
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # what follows stays aligned
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _example(section: Model) -> torch.Tensor:
    """Return images to trace a model with: two, because a batch of one would become a constant."""
    size = image_size(section)
    return torch.zeros(2, 3, size, size, dtype=torch.uint8)


def _dynamic_batch() -> tuple[dict[int, Any], ...]:
    """Return which dimensions of the images torch's exporters leave open: the batch."""
    return ({0: torch.export.Dim("batch")},)


@contextlib.contextmanager
def _one_line(format: str) -> Iterator[None]:
    """Make a ConfigError of whatever torch's exporters raise, which do not take every model.

    Args:
        format: of the command line.
    """
    try:
        yield
    except Exception as error:  # of any kind: they run the model on stand-ins of tensors
        # The exporter for ONNX wraps what is wrong in general advice.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        fault = f"torch does not export this model ({first_line(cause)})"
        raise ConfigError(f"--format {format}: {fault}; use --format safetensors") from error


def _onnx(model: BlockList, section: Model, metadata: dict[str, str]) -> bytes:
    """Return the model as an ONNX program. Raises ConfigError for one that torch does not take."""
    import onnx

    with _one_line("onnx"):
        program = torch.onnx.export(
            model,
            (_example(section),),
            dynamic_shapes=_dynamic_batch(),
            input_names=[exported.INPUT],
            output_names=[exported.OUTPUT],
            dynamo=True,
            verbose=False,
            # One file: evaluate.py refuses a program whose numbers are in others.
            external_data=False,
        )
    assert program is not None  # only the older exporter returns none
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    content = proto.SerializeToString()
    # The full check also infers all shapes, which the exporter has noted.
    onnx.checker.check_model(content, full_check=True)
    return content


def _program(model: BlockList, section: Model, metadata: dict[str, str]) -> bytes:
    """Return the model as a program of torch.export. Raises ConfigError as `_onnx` does."""
    with _one_line("torch"):
        program = torch.export.export(
            model,
            (_example(section),),
            dynamic_shapes=_dynamic_batch(),
        )
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=metadata)
    return buffer.getvalue()


_WRITERS = {"safetensors": _safetensors, "onnx": _onnx, "torch": _program}


def _reader(
    suffix: str,
    content: bytes,
    recipe: Recipe,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from images to logits, by a file's content as evaluate.py would read it.

    Raises ConfigError for a program with an operator that evaluate.py does not run.
    """
    if suffix == ".safetensors":
        stored = StoredWeights(Path("the file"), load(content), None, None)
        return _built(stored, recipe.model, recipe.run.seed)
    try:
        return exported.opened(suffix, content).logits
    except NotRun as error:  # models of timm may have any operator
        raise ConfigError(
            f"--format torch: evaluate.py does not run such a program ({error}); use --format onnx or safetensors"
        ) from None


def _validation_images(section: Model, data: Data, count: int) -> torch.Tensor:
    """Return the first validation images, repeated, uint8 [count, 3, size, size].

    Raises DataError if there are none.
    """
    # In this process, as a few images are not worth workers; DALI may not be installed here.
    changes = {"workers": 0, "reader": "torch", "bad_images": "skip"}
    data = data.model_copy(update=changes)
    source = SOURCES.of(data)(data, section.classes, "validation")  # whatever its classes
    size = min(count, len(source))
    pixels = image_size(section)
    batches = EvaluationBatches(source, data=data, image_size=pixels, batch=size)
    batch = next(iter(batches))
    if not batch.valid:
        raise DataError(f"none of the first {size} can be read")
    # There may be fewer images, or some that cannot be read.
    return batch.images[torch.arange(count) % batch.valid].contiguous()


def _random_images(size: int, count: int) -> torch.Tensor:
    """Return random images, always the same, uint8 [count, 3, size, size]."""
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, size, size)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
