"""Writes a trained model for other programs:

    python -m tools.export CHECKPOINT [--format safetensors|onnx|torch] [--output FILE] [--json] [section.key=value ...]

CHECKPOINT is a run folder, a checkpoint or weights, as evaluate.py takes them. The content is compared with the model
before it is written: docs/export.md. Exit codes: 0 done, 1 failed (nothing is written), 2 the input is wrong.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import argparse
import importlib.util
import io
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

from recipe import loading
from recipe.errors import DONE, FAILED, ConfigError, DataError
from recipe.files import write
from tools import output
from training.command import Parser, add_choice_of_weights, fail, one_line

if TYPE_CHECKING:
    import torch

    from models.stages import BlockList
    from recipe.config import Recipe
    from training.weights import StoredWeights

LIMIT = 1e-4  # largest difference of a logit
_BATCHES = (1, 2, 5)
_SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}


@one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_intermixed_args(arguments)
    path = _checked(options)
    # Imported late: a wrong command line is refused before torch is loaded.
    import torch

    from training import weights

    stored = weights.read(options.checkpoint, options.weights, options.best)
    recipe = weights.recipe_of(stored, options.config, options.overrides)
    suffix = _SUFFIXES[options.format]
    if path is None:
        average = "" if stored.which == weights.TRAINED else f"-{stored.which}"
        path = (weights.run_folder_of(stored.path) or Path()) / "export" / f"{recipe.run.name}{average}{suffix}"
        output.check(path)
    model = _built(stored, recipe)
    with torch.no_grad():
        content, opset = _WRITERS[options.format](model, recipe, _metadata(stored, recipe))
        logits = _reader(suffix, content, recipe)
        images, reason = _images(recipe, sum(_BATCHES))
        differences = torch.cat([(logits(batch) - model(batch)).abs() for batch in images.split(_BATCHES)])
    difference = differences.max().item()
    if not difference <= LIMIT:  # nor if it is not a number
        fault = f"a logit differs by {difference:.2g} from the model's, more than {LIMIT:g}"
        return fail(f"{path}: not written: {fault}", FAILED)
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content, durable=True)
    about = {
        "format": options.format,
        "file": str(path),
        "bytes": len(content),
        "opset": opset,
        "checkpoint": str(stored.path),
        "weights": stored.which,
        "image_size": recipe.model.image_size,
        "classes": recipe.model.classes,
        "class_names": bool(weights.class_names(stored, recipe)),
        "images": "random" if reason else "validation",
        "no_validation_images": reason,
        "batches": _BATCHES,
        "difference": difference,
        "limit": LIMIT,
    }
    print(f"{stored.path}, {stored.which} weights -> {path}: {len(content) / 1e6:.1f} MB, float32")
    if suffix != ".safetensors":
        size = recipe.model.image_size
        print(f"images uint8 [batch, 3, {size}, {size}], RGB -> logits float32 [batch, {recipe.model.classes}]")
    if reason:
        print(f"no validation images: {reason}")
    print(f"read again, on {sum(_BATCHES)} {about['images']} images: largest difference of a logit {difference:.2g}")
    print(f"score it: python evaluate.py --checkpoint {shlex.quote(str(path))}")
    if options.json:
        print(json.dumps(about, allow_nan=False))
    return DONE


def _parser() -> Parser:
    parser = Parser(prog="python -m tools.export", description="Write a trained model for other programs.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="run folder, checkpoint or weights file")
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=tuple(_SUFFIXES),
        help="safetensors: weights under timm's names (default); onnx, torch: programs from pixels to logits",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: export/NAME.SUFFIX in the run, or here")
    add_choice_of_weights(parser)
    parser.add_argument("--config", metavar="FILE", help="recipe; default: the one that the run was trained by")
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _checked(options: argparse.Namespace) -> Path | None:
    """The file that the options name. Raises ConfigError for what cannot be read or written."""
    path, suffix = options.output, _SUFFIXES[options.format]
    if path and path.suffix != suffix:
        raise ConfigError(f"{path}: --format {options.format} writes a {suffix} file; name it {path.stem}{suffix}")
    if path:
        output.check(path)
    if Path(options.checkpoint).suffix in (_SUFFIXES["onnx"], _SUFFIXES["torch"]):
        raise ConfigError(f"{options.checkpoint}: a program, no weights; name the run or weights that it was made of")
    for package in ("onnx", "onnxscript", "onnxruntime") if options.format == "onnx" else ():
        if importlib.util.find_spec(package) is None:
            packages = "pip install onnx onnxscript onnxruntime"
            raise ConfigError(f"--format onnx: the package {package} is not installed; {packages}")
    return path


def _built(stored: StoredWeights, recipe: Recipe) -> BlockList:
    """The model that evaluation uses, float32, on the CPU."""
    from engines import state
    from models.families import build
    from training import weights

    model = build(recipe.model, recipe.run.seed).eval().requires_grad_(False)
    tensors, _ = weights.fitted(stored, state.shapes(model), recipe.model, new_classifier=False)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def _metadata(stored: StoredWeights, recipe: Recipe) -> dict[str, str]:
    """The metadata of a file, as texts: JSON where a value is no text."""
    from training import weights

    values = {name: getattr(recipe.model, name) for name in ("image_size", "mean", "std")}
    values["crop_fraction"] = recipe.data.crop_fraction
    names = weights.class_names(stored, recipe)
    if names:
        values["classes"] = names
    texts = {name: json.dumps(value) for name, value in values.items()}
    return {"recipe": loading.dump(recipe), "weights": stored.which, **texts}


def _safetensors(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> tuple[bytes, None]:
    """Weights under timm's names. Metadata are sorted: the library orders them differently each time."""
    from safetensors.torch import save

    from models.families import timm_name

    tensors = {timm_name(recipe.model, name): tensor.contiguous() for name, tensor in model.state_dict().items()}
    content = save(tensors, metadata)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # what follows stays aligned
    return len(text).to_bytes(8, "little") + text + content[8 + length :], None


def _example(recipe: Recipe) -> tuple:
    """Arguments and keywords of torch's exporters: two images, because a batch of one would become a constant."""
    import torch

    size = recipe.model.image_size
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    return (images,), {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}


def _onnx(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> tuple[bytes, int]:
    """The file's content and the version of its operators."""
    import onnx
    import torch

    from training import exported

    arguments, keywords = _example(recipe)
    names = {"input_names": [exported.INPUT], "output_names": [exported.OUTPUT]}
    program = torch.onnx.export(model, arguments, **keywords, **names, dynamo=True, verbose=False, external_data=False)
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    content = proto.SerializeToString()
    onnx.checker.check_model(content, full_check=True)
    return content, next(each.version for each in proto.opset_import if not each.domain)


def _program(model: BlockList, recipe: Recipe, metadata: dict[str, str]) -> tuple[bytes, None]:
    import torch

    arguments, keywords = _example(recipe)
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(model, arguments, **keywords), buffer, extra_files=metadata)
    return buffer.getvalue(), None


_WRITERS = {"safetensors": _safetensors, "onnx": _onnx, "torch": _program}


def _reader(suffix: str, content: bytes, recipe: Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function from images to logits, by a file's content as evaluate.py would read it."""
    from training import exported
    from training.weights import StoredWeights

    if suffix != _SUFFIXES["safetensors"]:
        return exported.opened(suffix, content).logits
    from safetensors.torch import load

    return _built(StoredWeights(Path("the file"), load(content), None, None), recipe)


def _images(recipe: Recipe, count: int) -> tuple[torch.Tensor, str | None]:
    """Images to compare on, and why they are random; None where they are the first validation images, repeated.

    Returns:
        uint8 [count, 3, size, size].
    """
    import torch

    from data.loader import EvaluationBatches
    from data.sources import open_source

    size = recipe.model.image_size
    data = recipe.data.model_copy(update={"workers": 0, "reader": "torch", "bad_images": "skip"})
    try:
        source = open_source(data, recipe.model.classes, "validation")
        batches = EvaluationBatches(source, data=data, image_size=size, batch=min(count, len(source)))
        batch = next(iter(batches))
        if not batch.valid:
            raise DataError(f"none of the first {min(count, len(source))} can be read")
    except DataError as error:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator), str(error)
    rows = torch.arange(count) % batch.valid
    return batch.images[rows].contiguous(), None
