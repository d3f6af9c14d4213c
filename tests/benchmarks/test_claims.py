"""All benchmarks print how long they take and their progress, have a quick form, and report claims
in one way."""

import importlib
import json
import re
import sys
from unittest import mock

import pytest

from benchmarks import claims, plan
from common.errors import WRONG_INPUT
from tests.conftest import ROOT

_FILES = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
_PARTS = [*(ROOT / "benchmarks").rglob("*.py")]
BENCHMARKS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in _FILES
    if "run(__file__)" in path.read_text()
)


class Begun(Exception):
    """The benchmark has printed how long it takes."""


@pytest.fixture(autouse=True)
def _not_quick_afterwards(monkeypatch):
    monkeypatch.setenv(claims._QUICK, "1")  # so that it is as before in the end
    monkeypatch.delenv(claims._QUICK)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_how_long_it_takes_and_has_a_quick_form(name, monkeypatch):
    main = importlib.import_module(name).main
    for arguments, hint in ((["--quick"], False), ([], True)):
        monkeypatch.setattr(claims, "_say", mock.Mock(side_effect=Begun))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Begun):
            main()
        (said,) = claims._say.call_args.args
        assert (
            said.startswith("takes about ")
            and ("; --quick: " in said) is hint is not claims.quick()
        )


@pytest.mark.parametrize(
    ("name", "whole", "quick"),
    [("photographs", "ten hours", "1 minute"), ("exchange_learning", "five hours", "3 minutes")],
)
def test_an_experiment_says_how_long_it_takes_itself(name, whole, quick, monkeypatch):
    main = importlib.import_module("benchmarks.evidence.__main__").main
    for option, said in (
        ([], f"takes about {whole}, .*; --quick: {quick}$"),
        (["--quick"], f"takes about {quick} "),
    ):
        monkeypatch.setattr(claims, "_say", mock.Mock(side_effect=Begun))
        monkeypatch.setattr(sys, "argv", ["evidence", name, *option])
        with pytest.raises(Begun):
            main()
        assert re.match(said, claims._say.call_args.args[0])


# The others change no file that git tracks.
WRITING = (
    "benchmarks.evidence.__main__", "benchmarks.exchange_learning", "benchmarks.gpu_suite", "benchmarks.staleness",
    "benchmarks.time_to_accuracy",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITING)
def test_what_git_tracks_is_written_with_an_option(name, monkeypatch):
    monkeypatch.setattr(claims, "_say", mock.Mock(side_effect=Begun))
    monkeypatch.setattr(sys, "argv", [name, "--write"])
    with pytest.raises(Begun):
        importlib.import_module(name).main()


@pytest.mark.parametrize(
    ("name", "other"),
    [*((name, "--quick") for name in WRITING), ("benchmarks.gpu_suite", "--dry-run")],
)
def test_what_is_measured_in_small_is_not_written(name, other, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which a dry run sets: it is as before in the end
    monkeypatch.setattr(sys, "argv", [name, "--write", other])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == WRONG_INPUT
    assert f"without {other}" in capsys.readouterr().err


def test_no_other_benchmark_knows_where_results_are():
    """`RESULTS` is docs/results."""
    named = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in _PARTS
    }
    knowing = {
        name for name, text in named.items() if re.search(r"\bRESULTS\b|[\"']docs[\"'/]", text)
    }
    # parts of those that write
    parts = {"benchmarks.__init__", "benchmarks.evidence.page", "benchmarks.evidence.runs"}
    assert knowing == parts | {
        "benchmarks.evidence.__main__",
        "benchmarks.gpu_suite",
        "benchmarks.time_to_accuracy",
    }


def test_progress_says_how_much_is_left(monkeypatch, capsys):
    """Four items of six seconds: a line after each; none where all is done within a moment."""
    now = [100.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    for _ in claims.progress("abcd", "item"):
        now[0] += 6
    first, *_, last = capsys.readouterr().err.splitlines()
    assert (first, last) == (
        "item 1 of 4: 6 s, about 18 s left",
        "item 4 of 4: 24 s, about 0 s left",
    )
    assert (list(claims.progress("abcd", "item")), capsys.readouterr().err) == (list("abcd"), "")


def test_sides_take_turns_in_alternating_order_and_the_first_turn_does_not_count(monkeypatch):
    sides = {name: name for name in "ab"}
    order = []
    turns = claims.in_turn(sides, 3, lambda side, number: order.append(side) or number)
    assert (turns, order) == ({"a": [1, 2, 3], "b": [1, 2, 3]}, list("abbaabba"))
    monkeypatch.setenv(claims._QUICK, "1")
    assert claims.in_turn(sides, 3, lambda side, number: number) == {"a": [1, 2], "b": [1, 2]}


def test_the_report_of_a_quick_benchmark_marks_its_claims_and_ends_with_one_object(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["plan", "--quick", "--json"])
    plan.main()
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert list(result) == ["benchmark", "machine", "quick", "rows", "claims"]
    assert (result["benchmark"], result["quick"]) == ("plan", True)
    assert lines[-1] == "quick: all figures are indicative only"
    marked = [line for line in lines if "goal " in line]
    assert len(marked) == len(result["claims"]) == 2
    assert all(line.endswith("(quick: indicative only)") for line in marked)
