"""The command: exit codes, one line of complaint that names place and remedy, and nothing
overwritten."""

import json
import shlex
import shutil
import subprocess
import sys

import pytest

from recipe import loading
from tests.conftest import QUICKSTART, ROOT
from tests.train_command import DONE, WRONG_INPUT, before_step, command, files, newest, stopped

__all__ = ["before_step", "command", "stopped"]  # fixtures


def test_a_run_ends_with_0_prints_what_it_did_and_is_not_done_twice(command):
    command.folder = command.folder.with_name("it's a $HOME")  # which a shell would read otherwise
    code, out, errors = command("log.trace=2")
    assert (code, errors) == (DONE, [])
    assert out[0].startswith("engine auto: ")
    assert out[1] == f"run quickstart in {command.folder}, on cpu"
    assert out[3] == "1,437 training and 360 validation images of 10 classes (digits)"
    assert out[4] == "24 = 24 micro x 1 accumulation x 1 replica (1 device)"
    assert "done: top1 " in "".join(out[-3:-1])
    commands = [shlex.split(text) for text in out[-1].partition("next: ")[2].split(" | ")]
    folder = str(command.folder)
    assert commands[0] == ["python", "evaluate.py", "--checkpoint", folder, "--best"]
    assert commands[1:] == [
        ["python", "-m", f"tools.{name}", folder] for name in ("report", "export")
    ]
    for name in (
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "trace/timeline.png",
    ):
        assert (command.folder / name).exists()
    spans = json.loads((command.folder / "trace" / "trace.json").read_text())["traceEvents"]
    passes = [
        (each["args"]["step"], each["name"])
        for each in spans
        if each.get("cat") in ("forward", "backward")
    ]
    assert sorted(passes) == [
        (step, f"{kind} 0") for step in (1, 2) for kind in ("backward", "forward")
    ]
    before = files(command.folder)
    code, (line,), errors = command("log.trace=2")  # again
    assert (code, errors) == (DONE, [])
    assert "this run is finished: top1" in line and "run.output=FOLDER" in line
    assert files(command.folder) == before


def test_a_recipe_that_cannot_be_run_is_refused_with_its_place_and_a_remedy(command, tmp_path):
    for override, words in (
        (
            "batch.micro=7",
            "batch.global 24 is not a multiple of 7 micro x 1 replica = 7; nearest: 21 or 28",
        ),
        ("batch.global=2400", "batch.global 2400 is more than the 1437 training images"),
        (
            "model.classes=9",
            "data.source=digits: 10 classes, but model.classes is 9; set model.classes=10",
        ),
        ("parallel.replicas=2", "parallel.replicas 2 needs 2 processes"),
    ):
        assert words in command.refuses("batch.micro=12", override)
    elastic = ("parallel.elastic=true", "exchange.order=tree", "parallel.minimum=2")
    assert "parallel.minimum 2 is more than 1 replica; lower it, or start more" in command.refuses(
        *elastic
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {QUICKSTART}\noptimizer: {{momentun: 0.9}}\n")
    assert command.refuses(recipe=recipe).startswith(f"{recipe}: optimizer.momentun: unknown key; ")
    assert command.refuses(recipe=tmp_path / "none.yaml").startswith(
        f"{tmp_path / 'none.yaml'}: No such file"
    )


def test_a_checkpoint_of_another_run_is_refused(command, stopped, tmp_path):
    """Swapped in with its manifest.

    Also where its tensors fit: it would silently be another run's end.
    """
    stopped(3)
    stopped(3, "run.seed=1", f"run.output={tmp_path / 'other'}")
    for path in (tmp_path / "other" / "checkpoints").glob("step-00000003.*"):
        shutil.copy(path, command.folder / "checkpoints" / path.name)
    line = command.refuses()
    assert line.startswith(
        f"{newest(command.folder)}: of another run: run.seed is 1 there, 0 here; "
    )


def test_a_run_whose_only_checkpoint_is_gone_is_refused(command, stopped):
    """A single file without a manifest may be one that was cut off, but for the event in
    metrics.jsonl."""
    stopped(1)
    checkpoints = command.folder / "checkpoints"
    for path in checkpoints.glob("step-*.json"):
        path.unlink()
    line = command.refuses()
    assert line.startswith(f"{checkpoints}: the checkpoint of step 1, ")
    shutil.rmtree(checkpoints)
    assert not any(line.startswith("resuming") for line in command()[1])


NO_TORCH = """
import sys
class Blocker:
    def find_spec(name, path=None, target=None):
        assert name != "torch", "torch is loaded"
sys.meta_path.insert(0, Blocker)
from common.command import finish
import importlib
command = importlib.import_module(sys.argv[1])
finish(lambda: command.main(sys.argv[2:]))
"""


def without_torch(name, *arguments):
    command = [sys.executable, "-c", NO_TORCH, name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_plan_of_the_quickstart_is_printed_without_loading_torch(tmp_path):
    recipe = ("batch.global=48", "batch.micro=12", "run.epochs=40")
    ended = without_torch("train", "--dry-run", f"run.output={tmp_path / 'run'}", *recipe)
    assert (ended.returncode, ended.stderr) == (DONE, "")
    assert "48 = 12 micro x 4 accumulation x 1 replica (1 device)" in ended.stdout
    assert (
        "1160 steps = 40 epochs x 29 steps" in ended.stdout
        and "45 images left over" in ended.stdout
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("train", "run.seed=1", "belongs to another recipe: run.seed is 0 there, 1 here"),
        ("tools.launch", "run.resume=never", "already holds a run and run.resume is never"),
    ],
)
def test_the_folder_of_another_run_is_refused_before_torch_is_loaded(
    tmp_path, name, override, words
):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(loading.dump(loading.load(QUICKSTART)))
    ended = without_torch(name, "--config", QUICKSTART, f"run.output={folder}", override)
    assert ended.returncode == WRONG_INPUT
    assert (
        ended.stderr.startswith(f"{folder} ")
        and words in ended.stderr
        and ended.stderr.count("\n") == 1
    )
