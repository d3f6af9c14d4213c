"""Shared by all benchmarks: the command line, sides that take turns, and the report: table, claims, a JSON object."""

from __future__ import annotations

import argparse
import math
import operator
import os
import statistics
import sys
import time
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    TypeVar,
    Union,
)

import torch

from common.command import Parser
from common.json_io import json_text
from tools import formats

_QUICK = "BENCHMARK_QUICK"
_SECONDS = 5.0  # between two lines of progress
_STUDENT = 2.776  # two-sided 95 % of Student's t with 4 degrees of freedom
_Any = TypeVar("_Any")
_Key = TypeVar("_Key", bound=Hashable)
_COMPARISONS: Dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


# The command line ---------------------------------------------------------------------------------


def parser(description: Optional[str]) -> Parser:
    """Return a parser with --json and --quick, to which a benchmark adds its own options.

    Args:
        description: of the benchmark, which --help prints.
    """
    command = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument(
        "--json", action="store_true", help="print the result as one JSON object, as the last line"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="fewer turns, of fewer things: figures are indicative only",
    )
    return command


def begin(
    command: Union[Parser, str, None],
    takes: Union[str, Callable[[argparse.Namespace], str]],
    quick: Union[str, Callable[[argparse.Namespace], str]],
    where: str = "on two cores, longer beside other work",
) -> argparse.Namespace:
    """Read the command line and print how long the benchmark takes.

    Args:
        command: the parser, or the description of a benchmark without options of its own.
        takes: time of the whole benchmark without other work, or a function of the options that
            returns it.
        quick: time with --quick, or such a function.
        where: the machine on which it takes so long.

    Returns:
        The options.
    """
    reader = command if isinstance(command, Parser) else parser(command)
    options = reader.parse_args()
    if options.quick and getattr(options, "write", False):
        reader.error("--write renews pages of whole measurements: give it without --quick")
    whole = takes(options) if callable(takes) else takes
    part = quick(options) if callable(quick) else quick
    os.environ.pop(_QUICK, None)
    if options.quick:
        os.environ[_QUICK] = "1"  # in the environment for the processes that are started from here
        _say(f"takes about {part} ({where})")
    else:
        _say(f"takes about {whole} ({where}); --quick: {part}")
    return options


def quick() -> bool:
    """Return whether --quick was given, to this process or to the one that started it."""
    return _QUICK in os.environ


def less(whole: _Any, part: _Any) -> _Any:
    """Return `part` with --quick, else `whole`."""
    return part if quick() else whole


# Time and turns -----------------------------------------------------------------------------------


def progress(items: Sequence[_Any], what: str) -> Iterator[_Any]:
    """Yield the items; every few seconds print to stderr how many are done, and what time is left.

    Where all of them take less than that, nothing is printed.

    Args:
        items: each is done when the next one is asked for.
        what: name of an item.
    """
    start = time.monotonic()
    last_line = start
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        spent = now - start
        is_last = done == len(items)
        if now - last_line >= _SECONDS or (is_last and spent >= _SECONDS):
            last_line = now
            left = spent / done * (len(items) - done)
            _say(f"{what} {done} of {len(items)}: {spent:.0f} s, about {left:.0f} s left")


def _say(text: str) -> None:
    """Print a line to stderr."""
    print(text, file=sys.stderr, flush=True)


def seconds(side: Callable[..., object], *number: int) -> float:
    """Return how many seconds one call of a side takes.

    Args:
        side: what is timed.
        number: of the round, where the side takes it: see `in_turn`.
    """
    start = time.perf_counter()
    side(*number)
    return time.perf_counter() - start


def in_turn(
    sides: Mapping[_Key, Any],
    rounds: int,
    measure: Callable[[Any, int], Any] = seconds,
    what: Optional[str] = "turn",
) -> Dict[_Key, List[Any]]:
    """Measure sides in turn, round by round, after a round that does not count.

    Args:
        sides: by name; every other round measures them in reverse order.
        rounds: that count; with --quick at most two.
        measure: called with a side and the number of the round, 0 being the one that does not
            count.
        what: name of a round in the progress; None prints none.

    Returns:
        What `measure` returned for each side, in the order of the rounds.
    """
    results: Dict[_Key, List[Any]] = {name: [] for name in sides}
    numbers = range(1 + less(rounds, min(rounds, 2)))
    forwards = list(sides)
    for number in progress(numbers, what) if what else numbers:
        # The order alternates: else a machine that slows down would always hurt the same side.
        names = reversed(forwards) if number % 2 else forwards
        for name in names:
            results[name].append(measure(sides[name], number))
    return {name: values[1:] for name, values in results.items()}


# Rows and claims ----------------------------------------------------------------------------------


def ratios(over: Sequence[float], under: Sequence[float]) -> List[float]:
    """Return the quotients of two sides, turn by turn.

    Args:
        over: the dividends.
        under: the divisors.
    """
    return [dividend / divisor for dividend, divisor in zip(over, under)]


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the quotients of two sides.

    Args:
        over: the dividends, turn by turn.
        under: the divisors.
    """
    return statistics.median(ratios(over, under))


def interval_of_difference(variance: float) -> float:
    """Return half of the two-sided 95 % interval of the difference of two means of three runs.

    Args:
        variance: of the difference, the sum of the variances of both means.
    """
    return _STUDENT * math.sqrt(variance)


def milliseconds(seconds: Sequence[float], per: str = "") -> dict:
    """Return columns of a row: median, least and most of some times.

    Args:
        seconds: the times.
        per: what follows `ms` in the name of the median's column.
    """
    return {
        f"ms{per}": 1e3 * statistics.median(seconds),
        "fastest": 1e3 * min(seconds),
        "slowest": 1e3 * max(seconds),
    }


def claim(name: str, repetitions: Sequence[float], unit: str, goal: str) -> dict:
    """Return a claim about a figure.

    Args:
        name: of the claim.
        repetitions: the figure, measured several times in this run; the claim's value is their
            median.
        unit: of the figure.
        goal: e.g. "<= 4" or ">= 1.2".
    """
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
    """Return a claim that does not hold because there is no figure.

    Args:
        name: of the claim.
        unit: of the figure.
        goal: as for `claim`.
        reason: why there is none.
    """
    return {
        "name": name,
        "value": None,
        "unit": unit,
        "goal": goal,
        "holds": False,
        "spread": [None, None],
        "reason": reason,
    }


# The report ---------------------------------------------------------------------------------------


def result(benchmark: str, rows: Sequence[dict], claims: Sequence[dict], about: dict) -> dict:
    """Return the object that --json prints.

    Args:
        benchmark: its name.
        rows: of the table.
        claims: made by `claim` and `unmeasured`.
        about: where it was measured, as from `machine`.
    """
    return {
        "benchmark": benchmark,
        "machine": about,
        "quick": quick(),
        "rows": list(rows),
        "claims": list(claims),
    }


def report(
    benchmark: str,
    rows: Sequence[dict],
    claims: Sequence[dict],
    as_json: bool,
    about: Optional[dict] = None,
) -> None:
    """Print the table, the claims, and where they were measured.

    Args:
        benchmark: its name.
        rows: of the table; their keys are the columns, and a row may lack some.
        claims: made by `claim` and `unmeasured`.
        as_json: print all as one object in the end.
        about: where it was measured; None: on this machine, now.
    """
    if about is None:
        about = machine()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    rows = [{column: row.get(column) for column in columns} for row in rows]
    if rows:
        _print_table(rows)
    print()
    mark = " (quick: indicative only)" if quick() else ""
    for judged in claims:
        low, high = judged["spread"]
        figure = f"{cell(judged['value'])} {judged['unit']} ({cell(low)} to {cell(high)})"
        print(f"{judged['name']}: {figure}; goal {judged['goal']}: {_verdict(judged)}{mark}")
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    if quick():
        print("quick: all figures are indicative only")
    if as_json:
        print(json_text(result(benchmark, rows, claims, about)))


def machine() -> dict:
    """Return processor, cores, threads, torch and date: conditions of the figures."""
    # Imported here: it needs packages whose absence benchmarks.gpu_suite must be able to report.
    from tools.diagnosis.machine import about

    return about(torch.device("cpu"))


def _print_table(rows: Sequence[dict]) -> None:
    """Print rows with the same keys; text is flush left, numbers are flush right."""
    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    is_text = [isinstance(value, str) for value in rows[0].values()]
    for line in lines:
        cells = [
            text.ljust(width) if flush_left else text.rjust(width)
            for text, width, flush_left in zip(line, widths, is_text)
        ]
        print("  ".join(cells).rstrip())


def cell(value: object) -> str:
    """Return a `value` of a table as text; - where there is none."""
    if value is None:
        return "-"
    return formats.number(value) if isinstance(value, float) else str(value)


def markdown(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown.

    Args:
        head: names of the columns.
        lines: values of the columns, by line.
    """
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, rule, *lines))


def claims_table(claims: Sequence[dict], form: str = "{:.4g} ({:.4g} to {:.4g})") -> str:
    """Return claims as a table in Markdown: name, value and spread, goal, whether it holds.

    Args:
        claims: made by `claim` and `unmeasured`.
        form: of value, least and most.
    """
    lines = []
    for judged in claims:
        value = judged["value"]
        figure = "-" if value is None else form.format(value, *judged["spread"])
        lines.append((judged["name"], figure, judged["goal"], _verdict(judged)))
    return markdown(("claim", "value", "goal", ""), lines)


def _verdict(judged: dict) -> str:
    """Return whether a claim holds, in words; with the reason where there is no figure."""
    if judged["holds"]:
        return "holds"
    return f"does not hold: {judged['reason']}" if "reason" in judged else "does not hold"
