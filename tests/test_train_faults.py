"""train.py when its folder, its images, its disk or its memory fail, and when it is told to stop."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from PIL import Image

from parallel.parent_death import bound_to_parent
from tests.conftest import QUICKSTART, ROOT
from tests.train_command import DONE, FAILED, SHORT, STOPPED, before_step, command, events, newest

__all__ = ["before_step", "command"]  # fixtures

# A run folder that is lost while a run writes it.


def _removed(folder):
    shutil.rmtree(folder)


def _without_its_files(folder):
    """As `rm -rf FOLDER/*` leaves it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(("how", "step"), [(_removed, 4), (_without_its_files, 2)])
def test_a_folder_that_is_lost_ends_the_run(command, before_step, how, step):
    """Also before the last step, whose end would be lost with it. Nothing is written in its place."""
    before_step(step, how, command.folder)
    code, out, errors = command("log.tensorboard=false")
    assert code == FAILED and len(errors) == 1, errors
    assert errors[0].startswith(str(command.folder)) and "removed, renamed, replaced or unmounted" in errors[0]
    assert not any(line.startswith("done") for line in out)
    assert not command.folder.exists() or not list(command.folder.iterdir())


def test_a_file_system_that_is_unmounted_ends_the_run_and_nothing_is_written_below(command, before_step, small_disk):
    mount = small_disk("8m")
    before_step(3, subprocess.run, ["umount", "--lazy", mount])
    for folder in (mount, mount / "run"):
        code, _, errors = command("log.tensorboard=false", output=folder)
        assert code == FAILED and len(errors) == 1, errors
        assert errors[0].startswith(f"{folder}: no longer what this run opened there")
        assert not list(mount.iterdir())
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount], check=True)


# Images that are not to be used.


@pytest.fixture
def folder_data(tmp_path):
    """Two classes of 13 and 12 JPEGs to train on, 3 and 2 to validate with; the overrides that read them."""
    for split, counts in (("train", (13, 12)), ("val", (3, 2))):
        for label, count in zip(("cat", "dog"), counts):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (12, 10), (40 * i % 256, 80 * label.count("o"), 7 * i)).save(folder / f"{i:02d}.jpg")
    root = tmp_path / "images"
    return root, ("data.source=folder", f"data.root={root}", "model.classes=2", "batch.global=12", "batch.micro=12")


def test_folders_of_images_are_trained_on(command, folder_data):
    _, overrides = folder_data
    code, out, errors = command(*overrides)
    assert (code, errors) == (DONE, [])
    assert "1 image left over in each epoch" in out[4]
    assert events(command.folder, "eval")[-1]["images"] == 5


def test_images_that_cannot_be_found_are_refused_before_the_folder_is_made(command, folder_data):
    root, overrides = folder_data
    assert (
        command.refuses(*overrides, "data.root=/no/such/place") == "/no/such/place: no such folder; correct data.root"
    )
    for path in (root / "train" / "dog").iterdir():
        path.unlink()
    line = command.refuses(*overrides)
    assert line.startswith(f"{root}/train/dog: ") and "fill it or remove it" in line
    assert not command.folder.exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_an_unreadable_image_stops_the_run_with_its_name(command, folder_data, split):
    root, overrides = folder_data
    bad = root / split / "cat" / "00.jpg"
    bad.write_bytes(bad.read_bytes()[:200])
    line = command.refuses(*overrides, "batch.global=24", "batch.micro=24", "run.steps=5")
    assert line.startswith(f"{bad}: ") and "data.bad_images=skip" in line


def test_the_advice_to_leave_it_out_can_be_followed_in_the_same_folder(command, folder_data):
    """25 images in steps of 25: each of the 3 epochs meets the one that cannot be read, and counts it."""
    root, overrides = folder_data
    bad = root / "train" / "cat" / "00.jpg"
    for path in (bad, root / "val" / "cat" / "00.jpg"):
        path.write_bytes(b"")
    overrides = (*overrides, "batch.global=25", "batch.micro=5", "run.steps=3", "log.every_steps=1")
    command.refuses(*overrides)
    code, out, errors = command(*overrides, "data.bad_images=skip")
    assert (code, errors) == (DONE, [])
    assert [line for line in out if line.startswith("left out: ")] == [f"left out: {bad}: the file is empty"] * 3
    assert [event["unreadable_images"] for event in events(command.folder, "train")] == [1, 2, 3]
    event = events(command.folder, "eval")[-1]
    assert (event["images"], event["unreadable"]) == (4, 1)
    assert any("(4 images); 1 unreadable left out" in line for line in out)


# Signals.


def test_a_second_interrupt_exits_at_once_without_saving(command, before_step):
    before_step(3, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    code, _, (error,) = command()
    assert code == FAILED
    assert "interrupted" in error and "to resume from the last checkpoint" in error
    assert newest(command.folder).name == "step-00000002.pt"


def start(*arguments, **streams):
    """train.py as users start it."""
    command = [sys.executable, "train.py", "--config", QUICKSTART, *SHORT, *arguments]
    return subprocess.Popen(bound_to_parent(command), cwd=ROOT, text=True, **streams)


def test_ctrl_c_in_a_pipeline_saves_though_nobody_reads_its_output_any_more(tmp_path):
    """As in `train.py | tee log`: the interrupt reaches both, and tee does not wait. Exit code 75 and one line."""
    process = start(
        f"run.output={tmp_path / 'run'}", "run.steps=1000000", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == STOPPED
    assert error.startswith("SIGINT: saved at step ") and error.count("\n") == 1
    step = int(error.split("step ")[1].split(";")[0])
    assert newest(tmp_path / "run").name == f"step-{step:08d}.pt"


# Training that cannot go on, and disks that are full.


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (
            "[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried to allocate 36000000000000 bytes",
            "batch.micro",
        ),
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "batch.micro"),
        ("DataLoader worker (pid 71) is killed by signal: Killed.", "data.workers"),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(command, before_step, words, remedy):
    """torch's words on a CPU, on a GPU, and where the kernel killed a process that loads images."""

    def fail():
        raise RuntimeError(words)

    before_step(2, fail)
    code, _, (error,) = command()
    assert code == FAILED and "memory" in error and f"lower {remedy}" in error


def fill(disk, leaving):
    """Takes all room but `leaving` bytes."""
    free = os.statvfs(disk)
    with open(disk / "filler", "wb") as stream:
        stream.write(bytes(free.f_bavail * free.f_bsize - leaving))


@pytest.mark.parametrize("leaving", [0, 64 << 10], ids=["metrics", "checkpoint"])
def test_a_full_disk_ends_the_run_with_1_and_a_run_with_room_resumes(command, before_step, small_disk, leaving):
    """Before step 3 the disk fills up, so that not even a log line fits, or that but no checkpoint."""
    disk = small_disk("8m")
    before_step(3, fill, disk, leaving)
    recipe = ("log.every_steps=1", f"run.output={disk / 'run'}", "log.tensorboard=true")
    code, _, (error,) = command(*recipe)
    before_step(0, None)
    assert code == FAILED
    assert error.startswith(f"{disk / 'run'}/")  # the file for which there is no room
    assert error.endswith(
        ": No space left on device; make room, then rerun the same command to resume from the last checkpoint"
    )
    assert newest(disk / "run").name == "step-00000002.pt"
    assert not list((disk / "run" / "checkpoints").glob("*.tmp"))

    (disk / "filler").unlink()
    code, out, errors = command(*recipe)
    assert (code, errors) == (DONE, [])
    assert "resuming at step 2 of 4" in out
    assert command("log.every_steps=1")[0] == DONE
    weights = [
        torch.load(newest(folder), weights_only=True)["engine"]["weights"] for folder in (disk / "run", command.folder)
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
