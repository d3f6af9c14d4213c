"""Commands lack a package: they say so in one line, before any work, or leave a picture out."""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import QUICKSTART
from tools import curves, doctor, packages, report, sweep
from tools.diagnosis import examination, rendering
from tools.planning import machine
from tools.sweeping.candidates import load_candidates
from tools.sweeping.definition import read
from tools.sweeping.folder import SweepFolder
from tools.sweeping.report import Report


@pytest.fixture
def without(monkeypatch):
    """without(package): it is not installed."""
    return lambda package: monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize(
    ("main", "arguments", "package"),
    [
        (report.main, ["nowhere"], "plotly"),
        (sweep.main, ["--config", "nowhere.yaml"], "optuna"),
        (curves.main, ["RUN"], "matplotlib"),
    ],
)
def test_a_command_that_needs_a_package_says_so_in_one_line(
    without, call, tmp_path, main, arguments, package
):
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "train", "step": 1, "epoch": 1.0, "loss": 1.0}\n'
    )
    without(package)
    code, lines, (error,) = call(main, *(text.replace("RUN", str(tmp_path)) for text in arguments))
    assert (code, lines) == (2, [])
    assert error.endswith(f": the package {package} is not installed; pip install {package}")


def test_the_remedy_names_all_packages_of_a_purpose(without):
    assert packages.lacking("onnx", "pytest") == ""
    without("pytest")
    assert (
        packages.lacking("onnx", "pytest")
        == "the package pytest is not installed; pip install onnx pytest"
    )


def test_the_doctor_writes_the_machine_without_a_picture(without, call, tmp_path, monkeypatch):
    findings = SimpleNamespace(machine="what was measured")
    monkeypatch.setattr(examination, "examine", lambda *arguments: findings)
    monkeypatch.setattr(rendering, "lines", lambda *arguments: [])
    monkeypatch.setattr(machine, "dump", lambda measured: measured)
    without("matplotlib")
    code, lines, errors = call(doctor.main, "--config", QUICKSTART, "--output", tmp_path / "doctor")
    assert (code, errors) == (0, [])
    assert (tmp_path / "doctor" / "machine.yaml").read_text() == "what was measured"
    assert [line for line in lines if line] == [
        "picture    none: the package matplotlib is not installed; pip install matplotlib",
        f"files      {tmp_path}/doctor/machine.yaml",
    ]


def test_a_sweep_ends_without_a_picture(without, tmp_path, capsys):
    file = tmp_path / "some.yaml"
    file.write_text(
        f"recipe: {QUICKSTART}\ntrials: 1\nspace: {{schedule.peak: {{choices: [1.0, 2.0]}}}}\n"
    )
    candidates = load_candidates(read(file))
    study = SimpleNamespace(records=list, importances=lambda: None)
    without("matplotlib")
    with contextlib.closing(SweepFolder(tmp_path / "found", candidates)) as folder:
        files = Report(candidates, study, folder).conclude()["files"]
    assert "picture" not in files and "leaderboard" in files
    line = (
        "no picture of the sweep: the package matplotlib is not installed; pip install matplotlib"
    )
    assert line in capsys.readouterr().out.splitlines()
