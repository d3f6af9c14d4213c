"""Each kind is added by one schema class and one file, in tests/additions, and trains; no other
file knows of it."""

import contextlib
import importlib
import io
import json
import subprocess
import sys

import pytest

from recipe import batch, checks, loading
from tests import world
from tests.conftest import QUICKSTART, ROOT, TINY
from tools import plan

ADDITIONS = {
    "optimizer": ("optimizer.name=sign", "optimizer.share=0.5", "schedule.peak=0.01"),
    "schedule": ("schedule.name=halving", "schedule.every=2", "schedule.peak=1"),
    "exchange": ("exchange.method=part", "exchange.part=0.25"),
    "source": ("data.source=stripes", "data.contrast=100"),
    "logger": ("log.losses=true",),
    "model": ("model.name=patches", "model.channels=8"),
}


def tiny(name):
    """The small recipe, of which another family of models has no width and depth."""
    foreign = ("model.width", "model.depth") if name == "model" else ()
    return [
        *(key for key in TINY if not key.startswith(foreign)),
        "run.steps=4",
        "log.every_steps=1",
    ]


def train_all(rank, size, folder):
    """Train the plain run and one with each addition, which this process imports; return the plan
    of another family."""
    import train
    from engines.torch_engine import TorchEngine

    # measuring takes a second, and enters the utilisation alone
    TorchEngine.peak_flops = lambda engine: 1e12
    for name, overrides in {"plain": (), **ADDITIONS}.items():
        if name != "plain":
            importlib.import_module(f"tests.additions.{name}")
        keys = [*tiny(name), *overrides, f"run.output={folder / name}"]
        assert train.main(["--config", str(QUICKSTART), *keys]) == 0
        if name == "exchange":
            check_the_exchange(keys)
    return plan_of(keys)  # of the model, which comes last


def check_the_exchange(keys):
    """A batch that grows goes with it, and a cut into stages binds it."""
    growing = loading.load(QUICKSTART, [*keys, "batch.schedule=[[0,24],[48,48]]"])
    batch.divide(growing)  # refuses what does not go together
    assert (
        checks.bound_to_cut(growing, 3) == "part adds 3 replicas' gradients as they lie in a stage"
    )
    assert checks.bound_to_cut(growing, 2) == ""


def plan_of(keys):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert plan.main(["--json", "--config", str(QUICKSTART), *keys]) == 0
    return json.loads(printed.getvalue().splitlines()[-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of a run by what was added to it, "plain" without; the family without width is
    planned, too."""
    folder = tmp_path_factory.mktemp("runs")
    (planned,) = world.run(1, train_all, folder, connect=False)
    assert planned["widest"] == [] and planned["model"]["parameters"] > 0
    return folder


@pytest.mark.slow
def test_all_of_them_train_on_two_replicas_and_are_scored_and_exported(tmp_path):
    """Each command imports the files itself; the launcher passes them on to its ranks."""
    words = [word for name in ADDITIONS for word in ("--import", f"tests/additions/{name}.py")]
    overrides = [override for name in ADDITIONS for override in ADDITIONS[name]]
    run = tmp_path / "run"
    recipe = ["--config", str(QUICKSTART), *tiny("model"), *overrides, f"run.output={run}"]
    launch = ["tools/launch.py", *words, "--stages", "1", "--replicas", "2", *recipe]
    assert "--import" not in command(*launch, "--dry-run").partition("launch")[0]
    command(*launch)
    assert len(losses(run)) == 4
    assert len((run / "losses.txt").read_text().splitlines()) == 4
    (line, *_) = command("evaluate.py", *words, "--checkpoint", str(run)).splitlines()
    assert "trained weights: top1" in line and "(40 images)" in line
    assert (run / "evaluation" / "scores.json").exists()
    command("-m", "tools.export", *words, str(run))
    assert list((run / "export").iterdir())
    # Without the file that adds it a kind is unknown, and the line says what may be missing.
    done = subprocess.run(
        [sys.executable, "evaluate.py", "--checkpoint", str(run)], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 2 and b"--import" in done.stderr


def command(*words):
    """Run a command of ours and return what it prints."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder):
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "end"
    return [(event["step"], event["loss"]) for event in events if event["event"] == "train"]


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_trains(runs, name):
    """The run is not the plain one, except that a logger only writes down what the plain one has,
    too."""
    found = losses(runs / name)
    assert len(found) == 4 and (found == losses(runs / "plain")) == (name == "logger")
    resolved = (runs / name / "config.yaml").read_text()
    for override in ADDITIONS[name]:
        assert f"{override.split('.')[1].split('=')[0]}: {override.split('=')[1]}" in resolved


def test_a_logger_has_the_losses_of_the_run(runs):
    lines = (runs / "logger" / "losses.txt").read_text().splitlines()
    assert [(int(step), float(loss)) for step, loss in map(str.split, lines)] == losses(
        runs / "logger"
    )
