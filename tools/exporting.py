"""A trained model as a file for other programs, compared with the model before it is written (docs/export.md)."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Callable, Sequence

import torch
from safetensors.torch import load, save

from common.command import fail
from common.errors import DONE, FAILED, DataError
from common.files import write
from common.json_io import json_text
from data.loader import EvaluationBatches
from data.sources import SOURCES
from engines import state
from models.base import BlockList
from models.families import build, timm_name
from recipe import loading
from recipe.config import Recipe
from tools import output
from training import classes, exported, progress, weights
from training.classes import Known
from training.weights import StoredWeights

_LIMIT = 1e-4  # largest difference of a logit
_BATCHES = (1, 2, 5)


@torch.no_grad()
def export(options: argparse.Namespace, path: Path | None, suffix: str) -> int:
    """Export by the options of tools.export; returns the exit code. Args: path: None: in the run folder, or here."""
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
        average = "" if stored.which == weights.TRAINED else f"-{stored.which}"
        path = (weights.run_folder_of(stored.path) or Path()) / "export" / f"{recipe.run.name}{average}{suffix}"
        output.check(path)
    model, size, number = _built(stored, recipe), recipe.model.image_size, sum(_BATCHES)
    known = _known(stored, recipe)
    with progress.lines(lambda: f"exporting {recipe.model.name}"):
        content = _WRITERS[options.format](model, recipe, _metadata(stored, recipe, known.names))
        logits = _reader(suffix, content, recipe)
        images, reason = _images(recipe, number)
        differences = torch.cat([(logits(batch) - model(batch)).abs() for batch in images.split(_BATCHES)])
    difference = differences.max().item()
    if not difference <= _LIMIT:  # nor if it is not a number
        fault = f"a logit differs by {difference:.2g} from the model's, more than {_LIMIT:g}"
        return fail(f"{path}: not written: {fault}", FAILED)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content, durable=True)
    about = {
        "format": options.format,
        "file": str(path),
        "bytes": len(content),
        "checkpoint": str(stored.path),
        "weights": stored.which,
        "image_size": size,
        "classes": recipe.model.classes,
        "images": "random" if reason else "validation",
        "no_validation_images": reason,
        "difference": difference,
    }
    print(f"{stored.path}, {stored.which} weights -> {path}: {len(content) / 1e6:.1f} MB, float32")
    if known.note:
        print(known.note)
    if suffix != ".safetensors":
        print(f"images uint8 [batch, 3, {size}, {size}], RGB -> logits float32 [batch, {recipe.model.classes}]")
    if reason:
        print(f"no validation images: {reason}")
    print(f"read again, on {number} {about['images']} images: largest difference of a logit {difference:.2g}")
    if options.json:
        print(json_text(about))
    return DONE


def _built(stored: StoredWeights, recipe: Recipe) -> BlockList:
    """The model that evaluation uses, float32, on the CPU."""
    model = build(recipe.model, recipe.run.seed).eval().requires_grad_(False)
    tensors, _ = weights.fitted(stored, state.shapes(model), recipe.model, new_classifier=False)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def _known(stored: StoredWeights, recipe: Recipe) -> Known:
    """The classes of the model; without names where neither the file nor the data has them."""
    try:
        return classes.of_model(stored, recipe.data, recipe.model.classes)
    except DataError:
        return Known(())


def _metadata(stored: StoredWeights, recipe: Recipe, names: Sequence[str]) -> dict[str, str]:
    """The metadata of a file, as texts: JSON where a value is no text."""
    values = {name: getattr(recipe.model, name) for name in ("image_size", "mean", "std")}
    values["crop_fraction"] = recipe.data.crop_fraction
    if names:
        values["classes"] = list(names)
    texts = {name: json.dumps(value) for name, value in values.items()}
    return {"recipe": loading.dump(recipe), "weights": stored.which, **texts}


def _safetensors(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> bytes:
    """Weights under timm's names. Metadata are sorted: the library orders them differently each time."""
    tensors = {timm_name(recipe.model, name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    content = save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # what follows stays aligned
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def _example(recipe: Recipe) -> tuple:
    """Arguments and keywords of torch's exporters: two images, because a batch of one would become a constant."""
    size = recipe.model.image_size
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    return (images,), {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}


def _onnx(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> bytes:
    import onnx

    arguments, keywords = _example(recipe)
    names = {"input_names": [exported.INPUT], "output_names": [exported.OUTPUT]}
    program = torch.onnx.export(model, arguments, **keywords, **names, dynamo=True, verbose=False, external_data=False)
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    content = proto.SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    return content


def _program(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> bytes:
    arguments, keywords = _example(recipe)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, arguments, **keywords), buffer, extra_files=metadata)
    return buffer.getvalue()


_WRITERS = {"safetensors": _safetensors, "onnx": _onnx, "torch": _program}


def _reader(suffix: str, content: bytes, recipe: Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from images to logits, by a file's content as evaluate.py would read it."""
    if suffix != ".safetensors":
        return exported.opened(suffix, content).logits
    return _built(StoredWeights(Path("the file"), load(content), None, None), recipe)


def _images(recipe: Recipe, count: int) -> tuple[torch.Tensor, str | None]:
    """The first validation images, repeated, uint8 [count, 3, size, size]; or random ones, and why."""
    size = recipe.model.image_size
    data = recipe.data.model_copy(update={"workers": 0, "reader": "torch", "bad_images": "skip"})
    try:
        source = SOURCES.of(data)(data, recipe.model.classes, "validation")  # whatever its classes
        batches = EvaluationBatches(source, data=data, image_size=size, batch=min(count, len(source)))
        batch = next(iter(batches))
        if not batch.valid:
            raise DataError(f"none of the first {min(count, len(source))} can be read")
    except DataError as error:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator), str(error)
    return batch.images[torch.arange(count) % batch.valid].contiguous(), None
