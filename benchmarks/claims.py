"""What every benchmark prints: a table and its claims for people; with --json one object as the last line."""

from __future__ import annotations

import argparse
import datetime
import json
import operator
import os
import platform
import statistics
import sys
from typing import Callable, Sequence

import torch

from recipe.errors import WRONG_INPUT, UserError

_COMPARISONS = {"<=": operator.le, ">=": operator.ge}


def wants_json(description: str | None) -> bool:
    """Reads the command line, on which --json is all there may be."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, as the last line")
    return parser.parse_args().json


def run(main: Callable[[], None]) -> None:
    """A benchmark that this machine may not be fit for: ends with one line then, and the code for wrong input."""
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(WRONG_INPUT)


def claim(name: str, repetitions: Sequence[float], unit: str, goal: str) -> dict:
    """A claim's value is the median over the repetitions of this run; `goal` is e.g. "<= 4" or ">= 1.2"."""
    comparison, bound = goal.split()
    value = statistics.median(repetitions)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "goal": goal,
        "holds": _COMPARISONS[comparison](value, float(bound)),
        "spread": [min(repetitions), max(repetitions)],
    }


def report(benchmark: str, rows: Sequence[dict], claims: Sequence[dict], as_json: bool) -> None:
    """Prints `rows` (all with the same keys, the columns), what is claimed, and where it was measured."""
    about = machine()
    _print_table(rows)
    print()
    for each in claims:
        low, high = each["spread"]
        verdict = "holds" if each["holds"] else "does not hold"
        print(
            f"{each['name']}: {each['value']:.4g} {each['unit']} ({low:.4g} to {high:.4g}); "
            f"goal {each['goal']}: {verdict}"
        )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if as_json:
        result = {"benchmark": benchmark, "machine": about, "rows": list(rows), "claims": list(claims)}
        print(json.dumps(result, allow_nan=False))


def machine() -> dict:
    """What the figures depend on besides the program."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()  # Arm's cpuinfo names no model


def _print_table(rows: Sequence[dict]) -> None:
    """Text to the left, numbers to the right."""
    lines = [list(rows[0]), *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines)]
    left = [isinstance(value, str) for value in rows[0].values()]
    for line in lines:
        cells = (
            cell.ljust(width) if to_left else cell.rjust(width) for cell, width, to_left in zip(line, widths, left)
        )
        print("  ".join(cells).rstrip())


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
