"""A run folder holds one recipe's run and one process at a time."""

import contextlib
import errno
import json
import math
import os
import subprocess
import sys

import pytest

from common import cores
from common.errors import CheckpointError, ConfigError
from recipe import loading
from training import run_folder
from training.run_folder import RunFolder


@pytest.fixture
def opened(tiny, tmp_path):
    """opened(*overrides): the opened run folder of the tiny recipe."""
    folders = []

    def open_folder(*overrides):
        folders.append(RunFolder(tiny(f"run.output={tmp_path / 'run'}", *overrides)))
        return folders[-1]

    yield open_folder
    for folder in folders:
        folder.close()


@pytest.fixture
def begun(opened):
    """The folder of a run that has left its first log line; from then on it belongs to its
    recipe."""
    folder = opened()
    folder.metrics.write_text('{"event": "train"}\n')
    folder.close()
    return folder


def test_a_new_folder_is_made_with_its_parents_and_describes_what_runs_in_it(
    opened, tmp_path, tiny
):
    for starts in (1, 2):
        folder = opened("run.name=deep", f"run.output={tmp_path}/a/b/run")
        folder.close()
        assert loading.load(folder.path / "config.yaml") == tiny(
            "run.name=deep", f"run.output={tmp_path}/a/b/run"
        )
        noted = json.loads((folder.path / "environment.json").read_text())["starts"]
        assert len(noted) == starts and noted[0]["python"] == ".".join(
            map(str, sys.version_info[:3])
        )
        assert {"torch", "timm", "numpy", "revision", "devices", "command", "started"} <= set(
            noted[0]
        )
        assert noted[0]["processor"] == cores.processor()
    for text in (
        "{",
        '{"starts": [1]}',
        '{"starts": [{"threads": "2"}]}',
    ):
        # damage does not stop a run
        (folder.path / "environment.json").write_text(text)
        assert folder.first_threads() is None


@pytest.mark.parametrize(
    ("override", "difference"),
    [
        ("batch.global=48", "batch.global is 24 there, 48 here"),
        ("run.epochs=1", "run.epochs is null there, 1.0 here"),
    ],
)
def test_the_run_of_another_recipe_is_refused_and_left_alone(opened, begun, override, difference):
    before = {path.name: path.read_bytes() for path in begun.path.iterdir()}
    with pytest.raises(
        CheckpointError,
        match=rf"recipe: {difference}; .*run.output=FOLDER .*model.init_from=\S*run ",
    ):
        opened(override)
    assert {path.name: path.read_bytes() for path in begun.path.iterdir()} == before
    begun.metrics.unlink()
    (begun.path / "checkpoints").mkdir()  # either of the two makes the folder its recipe's
    with pytest.raises(CheckpointError, match="another recipe"):
        opened(override)


def test_where_and_how_it_is_computed_may_change(opened, begun):
    for overrides in (
        ("data.workers=3", "batch.evaluation=7", "data.bad_images=skip"),
        (
            "run.device=cpu",
            "parallel.stages=2",
            "checkpoint.keep_last=5",
            "checkpoint.keep_best=false",
        ),
        (
            "log.every_steps=7",
            "log.tensorboard=true",
            "log.trace=2",
            "log.wandb=true",
            "log.mlflow=true",
        ),
        ("log.profile=2", "log.memory=true", "run.loss_limit=1e9"),
        ("engine.compile=true", "engine.memory_format=channels_last", "engine.kernels=triton"),
        ("run.device=ipu", "ipu.partials=float"),
    ):
        opened(*overrides).close()


def test_an_automatic_micro_batch_is_the_one_that_the_run_began_with(opened, begun):
    """The run's number is no other recipe for `auto`, and another number is."""
    opened("batch.micro=auto").close()
    with pytest.raises(CheckpointError, match=r"batch.micro is 12 there, 24 here"):
        opened("batch.micro=24")


def test_a_recipe_that_failed_before_it_trained_may_be_corrected_in_place(opened):
    opened("model.norm_groups=3").close()
    folder = opened("model.norm_groups=4")
    assert loading.load(folder.path / "config.yaml").model.norm_groups == 4


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_file_system_is_a_new_folder(opened, tmp_path, resume):
    """It holds a folder of its own."""
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    with contextlib.closing(
        opened(f"run.output={tmp_path}/disk", f"run.resume={resume}")
    ) as folder:
        assert (folder.path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("make", "below", "words"),
    [
        (lambda place: (place / "train").mkdir(parents=True), "", "holds files that are no run"),
        (lambda place: place.write_text("mine"), "", "a file is in the way; choose a folder"),
        (
            lambda place: place.write_text("mine"),
            "/deeper",
            "a file is in the way; choose a folder",
        ),
        (
            lambda place: [
                (place / name).mkdir(parents=True) for name in ("checkpoints", "config.yaml")
            ],
            "",
            "never",
        ),
    ],
)
def test_a_folder_that_cannot_be_a_new_run_is_refused_and_left_alone(
    opened, tmp_path, make, below, words
):
    make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=words):
        opened(f"run.output={tmp_path}/run{below}", "run.resume=never")
    assert sorted(tmp_path.rglob("*")) == before


_HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"


def test_a_folder_in_use_by_another_process_is_refused_and_free_once_that_is_gone(opened, begun):
    """Also while a worker lives, as for seconds after its parent was killed: it has inherited the
    open file."""
    folder = opened()
    command = [sys.executable, "-c", _HOLDER, folder.path / "lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sleep", "60"], pass_fds=[folder._lock.fileno()]) as worker:
        folder.close()
        with subprocess.Popen(command, **pipes) as holder:
            holder.stdout.readline()
            with pytest.raises(
                ConfigError,
                match=r"in use by another process; wait for it or give run.output=FOLDER",
            ):
                opened()
            holder.kill()
        opened()
        worker.kill()


def test_a_report_that_looks_at_the_lock_for_an_instant_keeps_no_run_out(
    opened, begun, monkeypatch
):
    lock = run_folder.fcntl.lockf
    refused = [errno.EAGAIN, errno.EACCES]

    def lockf(*arguments):
        if refused:
            raise OSError(refused.pop(), "locked")
        lock(*arguments)

    monkeypatch.setattr(run_folder.fcntl, "lockf", lockf)
    opened()
    assert not refused


def test_a_file_system_without_locks_is_called_that_and_may_be_used(opened, begun, monkeypatch):
    """As Lustre without flock, or NFS without its lock server, answers."""

    def lockf(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_folder.fcntl, "lockf", lockf)
    with pytest.raises(
        ConfigError, match=r"cannot be locked, .* no locks .*\(No locks available\).*run.lock=false"
    ):
        opened()
    opened("run.lock=false")


TRAIN = {"event": "train", "step": 8}
END = {"event": "end", "step": 8, "top1": 0.5, "seconds": 9}


@pytest.mark.parametrize(
    ("last", "finished"),
    [
        (END, True),
        (TRAIN, False),
        ([1], False),
        ({"event": "end"}, False),
        *(
            ({**END, **odd}, False)
            for odd in ({"top1": "all"}, {"top1": math.nan}, {"seconds": None})
        ),
    ],
)
def test_a_run_is_finished_once_its_last_event_is_a_whole_end(opened, last, finished):
    folder = opened()
    assert folder.finished() is None
    folder.metrics.write_text(f"{json.dumps(TRAIN)}\n{json.dumps(last)}\n")
    assert folder.finished() == (last if finished else None)
    folder.metrics.write_text(f"{json.dumps(TRAIN)}\n{json.dumps(last)[:-3]}")
    assert folder.finished() is None


def test_what_auto_resolved_to_is_no_other_recipe(opened):
    """A run of several replicas that took topk, begun with `exchange.method: auto`."""
    folder = opened("exchange.method=topk")
    (folder.path / "checkpoints").mkdir()
    opened("exchange.method=auto").close()
    with pytest.raises(CheckpointError, match=r"exchange\.method is topk there, dense here"):
        opened("exchange.method=dense")
