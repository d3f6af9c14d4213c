"""A run folder holds one recipe's run and one process at a time."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from recipe import loading
from recipe.errors import CheckpointError, ConfigError
from tests.conftest import QUICKSTART
from training import run_folder
from training.run_folder import RunFolder, check_owner, starts


@pytest.fixture
def opened(tiny, tmp_path):
    """opened(*overrides): the run folder of the tiny recipe, opened; closed after the test."""
    folders = []

    def open_folder(*overrides):
        folders.append(RunFolder(tiny(f"run.output={tmp_path / 'run'}", *overrides)))
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


def begin(folder):
    """What the first log line leaves; from then on the folder belongs to its recipe."""
    folder.metrics.write_text('{"event": "train"}\n')
    folder.close()


def test_a_new_folder_is_made_with_its_parents_and_describes_what_runs_in_it(opened, tmp_path, tiny, monkeypatch):
    folder = opened("run.name=deep", f"run.output={tmp_path}/a/b/run")
    assert loading.load(folder.path / "config.yaml") == tiny("run.name=deep", f"run.output={tmp_path}/a/b/run")
    environment = json.loads((folder.path / "environment.json").read_text())["starts"][0]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "timm", "numpy", "revision", "devices", "command", "started"} <= set(environment)
    monkeypatch.chdir(tmp_path)
    RunFolder(tiny("run.name=mine")).close()
    assert (tmp_path / "runs" / "mine" / "config.yaml").exists()


def test_each_start_is_noted_and_damaged_notes_do_not_stop_a_run(opened):
    for number in (1, 2, 3):
        folder = opened()
        begin(folder)
        assert len(starts(folder.path)) == number
    for text in ("{", '{"starts": [1]}', '{"starts": [7, {"threads": "2"}]}'):
        (folder.path / "environment.json").write_text(text)
        assert folder.first_threads() is None
        before = len(starts(folder.path))
        folder = opened()
        begin(folder)
        assert len(starts(folder.path)) == before + 1
    (folder.path / "environment.json").write_text('{"starts": [{"threads": 3}]}')
    assert folder.first_threads() == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.dropout=0.3", r"model.dropout is \S+ there, 0.3 here"),
        ("batch.global=48", r"batch.global is 24 there, 48 here"),
        ("run.epochs=1", r"run.epochs is null there, 1.0 here"),
    ],
)
def test_the_run_of_another_recipe_is_refused_and_left_alone(opened, override, said):
    folder = opened()
    begin(folder)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(
        CheckpointError, match=rf"run belongs to another recipe: {said}; .*run.output=FOLDER .*model.init_from=\S*run "
    ):
        opened(override)
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    folder.metrics.unlink()
    (folder.path / "checkpoints").mkdir()  # either of the two makes the folder its recipe's
    with pytest.raises(CheckpointError, match="another recipe"):
        opened(override)


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.workers=3", "data.prefetch=7", "batch.evaluation=7"),
        ("run.device=cpu", "parallel.stages=2", "log.tensorboard=true"),
        ("checkpoint.keep_last=5", "checkpoint.keep_best=false", "data.root=/elsewhere"),
        ("data.bad_images=skip",),
        ("log.every_steps=7", "log.trust_ratios=false", "log.trace=2", "log.wandb=true", "log.mlflow=true"),
        ("engine.compile=true", "engine.memory_format=channels_last", "engine.kernels=triton"),
        ("ipu.partials=float", "ipu.executable_cache=/cache", "ipu.prefetch_depth=4"),
    ],
)
def test_where_and_how_it_is_computed_may_change(opened, overrides):
    """That unreadable images are left out is among it: an error advises it, and no image was left out before."""
    begin(opened())
    assert opened(*overrides).metrics.exists()


def test_a_recipe_that_failed_before_it_trained_may_be_mended_in_place(opened):
    """Nothing but its own description is there: the folder now describes the mended one."""
    opened("model.norm_groups=3").close()
    folder = opened("model.norm_groups=4")
    assert loading.load(folder.path / "config.yaml").model.norm_groups == 4


def test_resume_never_takes_an_empty_folder_and_refuses_a_used_one(opened, tmp_path):
    (tmp_path / "run").mkdir()
    begin(opened("run.resume=never"))
    with pytest.raises(ConfigError, match=r"already holds a run and run.resume is never; .*run.output=FOLDER"):
        opened("run.resume=never")


def test_a_folder_that_is_no_run_is_refused_and_left_alone(opened, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that are no run"):
        opened()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_the_folders_place_is_refused_and_left_alone(opened, tmp_path, below):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="a file is in the way; choose a folder"):
        opened(f"run.output={tmp_path}/run{below}")
    assert (tmp_path / "run").read_text() == "mine"


_HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_folder_in_use_by_another_process_is_refused_and_free_once_that_is_gone(opened):
    folder = opened()
    begin(folder)
    before = (folder.path / "environment.json").read_bytes()
    lock = folder.path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(ConfigError, match=r"in use by another process; wait for it or give run.output=FOLDER"):
        opened()
    assert (folder.path / "environment.json").read_bytes() == before
    holder.kill()
    holder.communicate()
    opened()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_called_that_and_may_be_used(opened, monkeypatch, number):
    """As Lustre without flock, or NFS without its lock server, answers."""

    def lockf(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "lockf", lockf)
    with pytest.raises(ConfigError, match=r"cannot be locked, as its file system has no locks") as caught:
        opened()
    assert os.strerror(number) in str(caught.value) and "run.lock=false" in str(caught.value)
    assert "another process;" not in str(caught.value)
    begin(opened("run.lock=false"))
    opened("run.lock=false")
    monkeypatch.undo()
    opened("run.lock=true")


@pytest.mark.parametrize("lose", ["removed", "replaced", "renamed"])
def test_a_folder_that_is_no_longer_the_one_that_was_opened_is_noticed(opened, lose):
    folder = opened()
    folder.check()
    folder.path.rename(folder.path.with_name("elsewhere"))
    if lose != "renamed":
        shutil.rmtree(folder.path.with_name("elsewhere"))
    if lose == "replaced":  # the kernel may give the new folder the old one's number where nothing keeps that one open
        folder.path.mkdir()
    with pytest.raises(OSError, match="no longer what this run opened there") as caught:
        folder.check()
    assert caught.value.filename == str(folder.path)


def test_the_lock_ends_with_the_training_process_not_with_its_workers(opened):
    """A worker process lives for seconds after its parent was killed; a restart must not be refused for that.

    Here a child that inherited the open file outlives the close of the folder.
    """
    folder = opened()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[folder._lock.fileno()])
    begin(folder)
    probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    try:
        for kind in ("lockf", "flock"):
            command = [sys.executable, "-c", probe.replace("lockf", kind), folder.path / "lock"]
            assert subprocess.run(command).returncode == 0
    finally:
        child.kill()
        child.wait()


TRAIN, END = {"event": "train", "step": 8}, {"event": "end", "step": 8, "top1": 0.5, "seconds": 9}


@pytest.mark.parametrize(
    ("last", "finished"),
    [
        (END, True), (TRAIN, False), ([1], False), (7, False), ({"event": "end"}, False),
        *(({**END, **odd}, False) for odd in ({"top1": "all"}, {"top1": math.nan}, {"top1": 2}, {"top1": None})),
        *(({**END, **odd}, False) for odd in ({"seconds": math.inf}, {"seconds": -1}, {"seconds": None})),
    ],
)  # fmt: skip
def test_a_run_is_finished_once_its_last_event_is_a_whole_end(opened, last, finished):
    folder = opened()
    assert folder.finished() is None
    folder.metrics.write_text(f"{json.dumps(TRAIN)}\n{json.dumps(last)}\n")
    assert folder.finished() == (last if finished else None)
    folder.metrics.write_text(f"{json.dumps(TRAIN)}\n{json.dumps(last)[:-3]}")
    assert folder.finished() is None


def test_a_start_that_was_cut_off_while_it_wrote_its_recipe_is_no_stranger(opened, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("lock", "config.yaml.tmp"):
        (tmp_path / "run" / name).write_text("")
    assert (opened().path / "config.yaml").exists()


def test_what_auto_came_to_is_no_other_recipe(tmp_path):
    """A run of several replicas that took topk, begun with `exchange.method: auto`."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    overrides = ("exchange.method=topk", f"run.output={folder}")
    (folder / "config.yaml").write_text(loading.dump(loading.load(QUICKSTART, overrides)))
    check_owner(loading.load(QUICKSTART, ("exchange.method=auto", f"run.output={folder}")))
    with pytest.raises(CheckpointError, match=r"exchange\.method is topk there, dense here"):
        check_owner(loading.load(QUICKSTART, ("exchange.method=dense", f"run.output={folder}")))
