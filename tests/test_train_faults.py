"""train.py when its folder, its images, its disk or its memory fail, and when it is told to
stop."""

import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from parallel.parent_death import bound_to_parent
from tests.conftest import QUICKSTART, ROOT
from tests.pictures import write_pictures
from tests.tensors import assert_bitwise_equal
from tests.train_command import DONE, FAILED, SHORT, STOPPED, before_step, command, events, newest

__all__ = ["before_step", "command"]  # fixtures


@pytest.mark.parametrize(("remove", "step"), [("rm -rf {}", 4), ("rm -rf {}/*", 2)])
def test_a_folder_that_is_lost_ends_the_run(command, before_step, remove, step):
    """Also before the last step. Nothing is written in its place."""
    before_step(step, os.system, remove.format(command.folder))
    code, out, (error,) = command("log.tensorboard=false")
    assert code == FAILED and not any(line.startswith("done") for line in out)
    assert (
        error.startswith(str(command.folder)) and "removed, renamed, replaced or unmounted" in error
    )
    assert not command.folder.exists() or not list(command.folder.iterdir())


def test_a_file_system_that_is_unmounted_ends_the_run_and_nothing_is_written_below(
    command, before_step, small_disk
):
    mount = small_disk("8m")
    before_step(3, subprocess.run, ["umount", "--lazy", mount])
    for folder in (mount, mount / "run"):
        code, _, (error,) = command("log.tensorboard=false", output=folder)
        assert code == FAILED
        assert error.startswith(str(folder)) and "no longer what this run opened there" in error
        assert not list(mount.iterdir())
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], check=True)


def test_an_unreadable_image_is_refused_by_name_and_may_be_left_out_in_the_same_folder(
    command, tmp_path
):
    """26 images in steps of 26: each of the 3 epochs meets the one that cannot be read, and counts
    it."""
    root = write_pictures(tmp_path / "images", train=13, val=2)
    bad = root / "train" / "a" / "0.png"
    for path in (bad, root / "val" / "a" / "0.png"):
        path.write_bytes(b"")
    overrides = ["data.source=folder", f"data.root={root}", "model.classes=2", "log.every_steps=1"]
    overrides += ["batch.global=26", "batch.micro=13", "run.steps=3"]
    line = command.refuses(*overrides)
    assert line.startswith(f"{bad}: ") and "data.bad_images=skip" in line
    code, out, errors = command(*overrides, "data.bad_images=skip")
    assert (code, errors) == (DONE, [])
    assert [line for line in out if line.startswith("left out: ")] == [
        f"left out: {bad}: the file is empty"
    ] * 3
    assert [event["unreadable_images"] for event in events(command.folder, "train")] == [1, 2, 3]
    assert any("(3 images); 1 unreadable left out" in line for line in out)


def test_a_second_interrupt_exits_at_once_without_saving(command, before_step):
    before_step(3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    code, _, (error,) = command()
    assert code == FAILED
    assert "interrupted" in error and "to resume from the last checkpoint" in error
    assert newest(command.folder).name == "step-00000002.pt"


@pytest.mark.slow
def test_ctrl_c_in_a_pipeline_saves_though_nobody_reads_its_output_any_more(tmp_path):
    """As in `train.py | tee log`: the interrupt reaches both, and tee does not wait.

    Exit code 75 and one line.
    """
    command = [
        sys.executable,
        "train.py",
        "--config",
        QUICKSTART,
        *SHORT,
        f"run.output={tmp_path / 'run'}",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(bound_to_parent([*command, "run.steps=1000000"]), cwd=ROOT, **pipes)
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == STOPPED
    (step,) = re.fullmatch(r"SIGINT: saved at step (\d+);.*\n", error).groups()
    assert newest(tmp_path / "run").name == f"step-{int(step):08d}.pt"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried to allocate 36000000000000 bytes",
            "micro",
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "micro"),
        ("DataLoader worker (pid 71) is killed by signal: Killed.", "workers"),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(command, before_step, words, remedy):
    def fail():
        raise RuntimeError(words)

    before_step(2, fail)
    code, _, (error,) = command()
    assert code == FAILED and "memory" in error and remedy in error.partition("; lower ")[2]


def fill(disk, leaving):
    """Takes all room but `leaving` bytes."""
    free = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_bsize - leaving))


@pytest.mark.parametrize("leaving", [0, 64 << 10], ids=["metrics", "checkpoint"])
def test_a_full_disk_ends_the_run_with_1_and_a_run_with_room_resumes(
    command, before_step, small_disk, leaving
):
    """Before step 3 the disk fills up, so that not even a log line fits, or that but no
    checkpoint."""
    disk = small_disk("8m")
    before_step(3, fill, disk, leaving)
    recipe = ("log.every_steps=1", f"run.output={disk / 'run'}", "log.tensorboard=true")
    code, _, (error,) = command(*recipe)
    before_step(0, None)
    assert code == FAILED
    assert error.startswith(f"{disk / 'run'}/")  # the file for which there is no room
    assert error.endswith(
        "; make room, then rerun the same command to resume from the last checkpoint"
    )
    assert newest(disk / "run").name == "step-00000002.pt"
    assert not list((disk / "run" / "checkpoints").glob("*.tmp"))

    (disk / "filler").unlink()
    code, out, errors = command(*recipe)
    assert (code, errors) == (DONE, [])
    assert "resuming at step 2 of 4" in out
    assert command("log.every_steps=1")[0] == DONE
    ours, theirs = (
        torch.load(newest(folder), weights_only=True) for folder in (disk / "run", command.folder)
    )
    assert_bitwise_equal(ours["engine"]["weights"], theirs["engine"]["weights"])
