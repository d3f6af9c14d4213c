"""Files in docs/results, which git tracks: benchmarks change them with --write only, and otherwise compare."""

import difflib
import os
from pathlib import Path
from typing import Mapping

from benchmarks import ROOT
from common.command import Parser


def add_option(parser: Parser) -> None:
    """Add --write to the command line of a benchmark.

    Args:
        parser: of the benchmark.
    """
    parser.add_argument(
        "--write", action="store_true", help="renew the files in docs/results, which git tracks"
    )


def compare(texts: Mapping[Path, str]) -> None:
    """Print how files would change.

    Args:
        texts: by file, what --write would write.
    """
    for path, text in texts.items():
        name = os.path.relpath(path, ROOT)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before == text:
            print(f"{name} is as --write would write it")
            continue
        print(f"{name} would change with --write:")
        changes = difflib.unified_diff(
            before.splitlines(),
            text.splitlines(),
            fromfile=name,
            tofile=f"{name} with --write",
            lineterm="",
        )
        print(*changes, sep="\n")
