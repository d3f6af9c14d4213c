"""Shared by all benchmarks: the command line, sides that take turns, and the report: table, claims, a JSON object."""

from __future__ import annotations

import argparse
import operator
import os
import statistics
import sys
import time
from typing import Any, Callable, Dict, Hashable, Iterable, Iterator, List, Mapping, Optional, Sequence, TypeVar

import torch

from common.command import Parser
from common.json_io import json_text
from tools import formats

_QUICK = "BENCHMARK_QUICK"
_SECONDS = 5.0  # between two lines of progress
_Any = TypeVar("_Any")
_Key = TypeVar("_Key", bound=Hashable)
_COMPARISONS = {"<=": operator.le, ">=": operator.ge}


def parser(description: Optional[str]) -> Parser:
    """A command line with --json and --quick, to which a benchmark adds its own options."""
    made = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print the result as one JSON object, as the last line")
    made.add_argument("--quick", action="store_true", help="fewer turns, of fewer things: figures are indicative only")
    return made


def begin(
    command: Parser | str | None,
    takes: str | Callable[[argparse.Namespace], str],
    quick: str,
    where: str = "on two cores, longer beside other work",
) -> argparse.Namespace:
    """Read the command line and print how long the benchmark takes.

    Args: takes: time of the whole benchmark without other work, or a function of the options. quick: that of --quick.
    """
    made = command if isinstance(command, Parser) else parser(command)
    options = made.parse_args()
    takes = takes(options) if callable(takes) else takes
    os.environ.pop(_QUICK, None)
    if options.quick:
        os.environ[_QUICK] = "1"  # in the environment for the processes that are started from here
    hint = "" if options.quick else f"; --quick: {quick}"
    _say(f"takes about {quick if options.quick else takes} {where}{hint}")
    return options


def quick() -> bool:
    """Whether --quick was given, to this process or to the one that started it."""
    return _QUICK in os.environ


def less(whole: _Any, part: _Any) -> _Any:
    """`part` with --quick, else `whole`."""
    return part if quick() else whole


def progress(items: Sequence[_Any], what: str) -> Iterator[_Any]:
    """The items; every few seconds prints to stderr how many are done and how much time is left."""
    began = said = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - said >= _SECONDS or (done == len(items) and now - began >= _SECONDS):
            said, left = now, (now - began) / done * (len(items) - done)
            _say(f"{what} {done} of {len(items)}: {now - began:.0f} s, about {left:.0f} s left")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def seconds(side: Callable[..., object], *number: int) -> float:
    """Seconds of a call of a side, by default with the number of the round."""
    start = time.perf_counter()
    side(*number)
    return time.perf_counter() - start


def in_turn(
    sides: Mapping[_Key, Any], rounds: int, measure: Callable[[Any, int], _Any] = seconds, what: Optional[str] = "turn"
) -> Dict[_Key, List[_Any]]:
    """measure(side, number) of each side in each round, after a round that does not count; the order alternates.

    With --quick there are two at most. Args: what: name of a round in the progress; None prints none.
    """
    found: Dict[_Key, List[_Any]] = {name: [] for name in sides}
    numbers = range(1 + less(rounds, min(rounds, 2)))
    for number in progress(numbers, what) if what else numbers:
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(measure(sides[name], number))
    return {name: values[1:] for name, values in found.items()}


def ratios(over: Sequence[float], under: Sequence[float]) -> List[float]:
    """Quotients turn by turn."""
    return [one / other for one, other in zip(over, under)]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the quotients turn by turn."""
    return statistics.median(ratios(over, under))


def milliseconds(seconds: Sequence[float], per: str = "") -> dict:
    """Columns of a row: median, least and most of some times."""
    median = 1e3 * statistics.median(seconds)
    return {f"ms{per}": median, "fastest": 1e3 * min(seconds), "slowest": 1e3 * max(seconds)}


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


def unmeasured(name: str, unit: str, goal: str, reason: str) -> dict:
    """A claim that does not hold because there is no figure."""
    return {
        "name": name,
        "value": None,
        "unit": unit,
        "goal": goal,
        "holds": False,
        "spread": [None, None],
        "reason": reason,
    }


def result(benchmark: str, rows: Sequence[dict], claims: Sequence[dict], about: dict) -> dict:
    """The object that --json prints."""
    return {"benchmark": benchmark, "machine": about, "quick": quick(), "rows": list(rows), "claims": list(claims)}


def report(
    benchmark: str, rows: Sequence[dict], claims: Sequence[dict], as_json: bool, about: Optional[dict] = None
) -> None:
    """Print `rows` (their keys are the columns), the claims, and where it was measured (machine())."""
    about = machine() if about is None else about
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{column: row.get(column) for column in columns} for row in rows]
    if rows:
        _print_table(rows)
    print()
    for each in claims:
        value, low, high = map(cell, (each["value"], *each["spread"]))
        print(
            f"{each['name']}: {value} {each['unit']} ({low} to {high}); "
            f"goal {each['goal']}: {_judged(each)}{less('', ' (quick: indicative only)')}"
        )
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if quick():
        print("quick: all figures are indicative only")
    if as_json:
        print(json_text(result(benchmark, rows, claims, about)))


def machine() -> dict:
    """Processor, cores, threads, torch and date: conditions of the figures."""
    from tools.diagnosis.machine import about

    return about(torch.device("cpu"))


def _print_table(rows: Sequence[dict]) -> None:
    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    left = [isinstance(value, str) for value in rows[0].values()]
    for line in lines:
        cells = (text.ljust(width) if flush else text.rjust(width) for text, width, flush in zip(line, widths, left))
        print("  ".join(cells).rstrip())


def cell(value: object) -> str:
    """A value of a table as text; - where there is none."""
    if value is None:
        return "-"
    return formats.number(value) if isinstance(value, float) else str(value)


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *lines))


def _judged(made: dict) -> str:
    return "holds" if made["holds"] else f"does not hold{': ' if 'reason' in made else ''}{made.get('reason', '')}"


def claims_table(claims: Sequence[dict], form: str = "{:.4g} ({:.4g} to {:.4g})") -> str:
    """Claims as Markdown: name, value and spread by `form`, goal, whether it holds."""
    lines = [
        (
            each["name"],
            "-" if each["value"] is None else form.format(each["value"], *each["spread"]),
            each["goal"],
            _judged(each),
        )
        for each in claims
    ]
    return markdown(("claim", "value", "goal", ""), lines)
