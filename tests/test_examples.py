"""The programs of examples/ learn, in one process and in two."""

import contextlib
import importlib
import io
import re
import runpy
import subprocess
import sys

import pytest

from tests import world
from tests.conftest import ROOT

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def run_main(rank, size, name):
    """Return the accuracy that an example reaches as one of several ranks."""
    return importlib.import_module(f"examples.{name}").main()


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["own_loop", "ddp_hook"])
def test_a_loop_learns_on_two_ranks(name):
    accuracies = world.run(2, run_main, name, connect=False, TORCHELASTIC_RUN_ID="examples")
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1]
    assert accuracies[0] > 0.9


def succeed(*command):
    """Run a Python program at the repository's root, and return what it prints."""
    command = [sys.executable, *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_loop_learns_in_one_process():
    assert float(re.search(r"top-1 ([\d.]+) %", succeed("-m", "examples.own_loop"))[1]) > 85


def run_own_model(rank, size, *overrides):
    """Return what the example prints as a program."""
    from engines.torch_engine import TorchEngine

    # measuring takes a second, and enters the utilisation alone
    TorchEngine.peak_flops = lambda engine: 1e12
    sys.argv = ["own_model", *overrides]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as end:
        runpy.run_module("examples.own_model", run_name="__main__")
    assert end.value.code == 0
    return printed.getvalue()


@pytest.mark.multiprocess
def test_a_model_of_ones_own_trains_by_a_recipe(tmp_path):
    run = tmp_path / "run"
    overrides = ("run.steps=44", "schedule.warmup_epochs=1", "log.tensorboard=false")
    (printed,) = world.run(1, run_own_model, f"run.output={run}", *overrides, connect=False)
    assert float(re.search(r"done: top1 ([\d.]+)%", printed)[1]) > 70
    assert "name: perceptron" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_named_on_a_page(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 90
    assert f"`examples/{name}.py`" in (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def test_there_are_three_examples():
    assert EXAMPLES == ["ddp_hook", "own_loop", "own_model"]
