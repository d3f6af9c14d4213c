"""All benchmarks print how long they take and their progress, and have a quick form."""

import importlib
import json
import subprocess
import sys

import pytest

from benchmarks import claims
from tests.conftest import ROOT

_PARTS = ("benchmarks.loader_at_scale",)  # what a benchmark starts itself
_FILES = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "benchmarks").glob("*/__main__.py")]
_NAMES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in _FILES if "run(__file__)" in path.read_text()
]
BENCHMARKS = sorted(set(_NAMES) - set(_PARTS))


class Begun(Exception):
    """The benchmark has said what it says beforehand."""


@pytest.fixture(autouse=True)
def _not_quick_afterwards(monkeypatch):
    monkeypatch.setenv(claims._QUICK, "1")  # so that it is as before in the end
    monkeypatch.delenv(claims._QUICK)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_says_how_long_it_takes_and_has_a_quick_form(name, monkeypatch):
    said = []

    def say(text):
        said.append(text)
        raise Begun

    monkeypatch.setattr(claims, "_say", say)
    main = importlib.import_module(name).main
    for arguments, quick in ((["--quick"], True), ([], False)):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(Begun):
            main()
        assert claims.quick() is quick
    quick, whole = said
    assert quick.startswith("takes about ") and "--quick" not in quick
    assert whole.startswith("takes about ") and "; --quick: " in whole


@pytest.mark.parametrize("name", _PARTS)
def test_what_a_benchmark_starts_refuses_the_options_of_a_benchmark_in_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--quick"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_there_are_benchmarks():
    assert {"benchmarks.step", "benchmarks.fuzz.__main__", "benchmarks.exchange"} <= set(BENCHMARKS)
    assert len(BENCHMARKS) > 15


def test_quick_is_less(monkeypatch):
    assert (claims.less(10, 1), list(claims.turns(4))) == (10, [0, 1, 2, 3])
    monkeypatch.setenv(claims._QUICK, "1")
    assert (claims.less(10, 1), list(claims.turns(4)), list(claims.turns(1))) == (1, [0, 1], [0])


def test_progress_says_how_much_is_left(monkeypatch, capsys):
    """Four items of six seconds: a line after each; none where all is done within a moment."""
    now = [100.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    for _ in claims.progress("abcd", "item"):
        now[0] += 6
    assert capsys.readouterr().err.splitlines() == [
        "item 1 of 4: 6 s, about 18 s left",
        "item 2 of 4: 12 s, about 12 s left",
        "item 3 of 4: 18 s, about 6 s left",
        "item 4 of 4: 24 s, about 0 s left",
    ]
    assert list(claims.progress("abcd", "item")) == list("abcd")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["plan", "rounding"])
def test_a_quick_benchmark_marks_its_claims(name):
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    *lines, last = ended.stdout.splitlines()
    result = json.loads(last)
    assert result["quick"] is True
    assert lines[-1] == "quick: all figures are indicative only"
    marked = [line for line in lines if "goal " in line]
    assert len(marked) == len(result["claims"]) > 0
    assert all(line.endswith("(quick: indicative only)") for line in marked)
