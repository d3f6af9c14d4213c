"""Writes a trained model for other programs:

    python -m tools.export CHECKPOINT [--format safetensors|onnx|torch] [--output FILE] [--json]
                           [section.key=value ...]

CHECKPOINT is a run folder, a checkpoint or weights, as evaluate.py takes them. The content is
compared with the model before it is written: docs/export.md. Exit codes: 0 done, 1 failed (nothing
is written), 2 the input is wrong.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run

    run(__file__)

from pathlib import Path
from typing import Sequence

from common.command import Parser, add_choice_of_weights, one_line
from common.errors import ConfigError
from common.files import check_file
from tools import packages

_SUFFIXES = {"safetensors": ".safetensors", "onnx": ".onnx", "torch": ".pt2"}
_ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


@one_line()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        The exit code.
    """
    options = _parser().parse_intermixed_args(arguments)
    path = options.output
    suffix = _SUFFIXES[options.format]
    # Faults of the command line are told before torch is loaded.
    if path and path.suffix != suffix:
        raise ConfigError(
            f"{path}: --format {options.format} writes a {suffix} file; name it {path.stem}{suffix}"
        )
    if path:
        check_file(path)
    # Without them the model would be loaded and built in vain.
    if options.format == "onnx":
        packages.check("--format onnx", *_ONNX_PACKAGES)
    from tools import exporting  # loads torch

    return exporting.export(options, path, suffix)


def _parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="python -m tools.export",
        description="Write a trained model for other programs.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="run folder, checkpoint or weights file",
    )
    parser.add_argument(
        "--format",
        default="safetensors",
        choices=tuple(_SUFFIXES),
        help="safetensors: weights under timm's names (default); onnx, torch: programs from pixels to logits",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="default: export/NAME.SUFFIX in the run, or here",
    )
    add_choice_of_weights(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="recipe; default: the one that the run was trained by",
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object in one line")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a key of the recipe",
    )
    return parser
