"""The command: exit codes, one line of complaint that names place and remedy, and nothing overwritten."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import train
from engines.torch_engine import TorchEngine
from parallel.parent_death import bound_to_parent
from recipe import loading
from recipe.errors import CheckpointError
from tests.conftest import QUICKSTART, ROOT, TINY
from training.run_folder import check_owner

DONE, FAILED, WRONG_INPUT, STOPPED = 0, 1, 2, 75


@pytest.fixture(autouse=True)
def _no_measuring(monkeypatch):
    """The machine's peak enters the utilisation alone, a timing field."""
    monkeypatch.setattr(TorchEngine, "peak_flops", lambda engine: 1e12)


# Four steps, a checkpoint after each.
SHORT = (*TINY, "model.image_size=8", "batch.micro=24", "run.steps=4", "checkpoint.every_epochs=0.001")


class Command:
    """train.py with the tiny recipe and a run folder, called in this process."""

    def __init__(self, folder, capfd):
        self.folder = folder
        self._capfd = capfd

    def __call__(self, *overrides, output=None, recipe=QUICKSTART):
        """Exit code, lines of stdout, lines of stderr."""
        self._capfd.readouterr()
        code = train.main(["--config", str(recipe), *SHORT, f"run.output={output or self.folder}", *overrides])
        captured = self._capfd.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    def refuses(self, *overrides, code=WRONG_INPUT, **keywords):
        """The one line of a call that must fail with `code` and leave every file as it was."""
        before = files(self.folder.parent)
        actual, _, errors = self(*overrides, **keywords)
        assert actual == code, errors
        assert len(errors) == 1, errors
        after = files(self.folder.parent)
        assert {path: after[path] for path in before} == before
        return errors[0]


@pytest.fixture
def command(tmp_path, capfd):
    return Command(tmp_path / "run", capfd)


def files(folder):
    """{path: content} of all files below, but for the note of the sessions' environments."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "environment.json"}


def events(folder, kind):
    found = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [event for event in found if event["event"] == kind]


def newest(folder):
    return sorted((folder / "checkpoints").glob("*.pt"))[-1]


@pytest.fixture
def interrupt(monkeypatch):
    """interrupt(step, *signals): lets this process receive signals before a step (from 1) is done."""
    original = TorchEngine.train_step

    def at(step, *signals):
        def interrupted(engine, micro_batches, number, lr, measure=False):
            if number + 1 == step:
                for one in signals:
                    signal.raise_signal(one)
            return original(engine, micro_batches, number, lr, measure)

        monkeypatch.setattr(TorchEngine, "train_step", interrupted)

    yield at


def test_a_run_ends_with_0_and_says_what_it_did(command):
    code, out, errors = command()
    assert (code, errors) == (DONE, [])
    assert out[0] == "24 = 24 micro x 1 accumulation x 1 replica (1 device)"
    assert out[1].startswith("4 steps = ")
    # On a busy machine a line about waiting for images may follow.
    assert [line for line in out[-2:] if not line.startswith("input-bound: ")][-1].startswith("done: top1 ")
    assert {path.name for path in command.folder.iterdir()} >= {
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
    }
    end = events(command.folder, "end")[0]
    assert {"top1", "top5", "images_per_second", "seconds"} <= set(end)


def test_a_finished_run_started_again_says_so_and_changes_nothing(command):
    command()
    before = files(command.folder)
    code, out, errors = command()
    assert (code, errors) == (DONE, [])
    assert len(out) == 1
    assert "this run is finished: top1" in out[0] and "run.output=FOLDER" in out[0]
    assert files(command.folder) == before


@pytest.mark.parametrize(
    ("override", "names", "remedy"),
    [
        ("optimizer.momentun=0.9", "optimizer.momentun: unknown key", "did you mean optimizer.momentum?"),
        ("optimiser.momentum=0.9", "optimiser: unknown key", "did you mean optimizer?"),
        ("batch.micro=7", "batch.global 24 is not a multiple of 7 micro", "nearest: 21 or 28"),
        ("batch.global=2400", "batch.global 2400 is more than the 1437 training images", "batch.global=1428"),
        ("schedule.warmup_steps=9", "warm-up of 9 steps is not shorter than the run of 4", "lower schedule.warmup"),
        ("model.norm_groups=3", "model.norm_groups 3 does not divide", "use model.norm_groups=4"),
        ("model.classes=9", "data.source=digits: 10 classes, but model.classes is 9", "set model.classes=10"),
        ("run.steps=-1", "run.steps: must be greater than 0", "found -1"),
        ("nonsense", "'nonsense' is not an override", "write section.key=value"),
        ("parallel.replicas=2", "parallel.replicas 2 needs 2 processes", "use parallel.replicas=auto"),
        ("data.source=folder", "data.root is not set", "data.root=/path/to/images"),
    ],
)
def test_a_recipe_that_cannot_be_run_is_refused_with_the_key_and_a_remedy(command, override, names, remedy):
    line = command.refuses("batch.micro=12", override)
    assert names in line and remedy in line


def test_a_flag_that_does_not_exist_is_refused_in_one_line(capfd):
    with pytest.raises(SystemExit) as exit:
        train.main(["--confog", "mine.yaml"])
    assert exit.value.code == WRONG_INPUT
    assert capfd.readouterr().err.splitlines() == ["train.py: unrecognized arguments: --confog; see train.py --help"]


def test_the_file_that_is_wrong_is_named(command, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"extends: {QUICKSTART}\noptimizer: {{momentun: 0.9}}\n")
    line = command.refuses(recipe=recipe)
    assert line == f"{recipe}: optimizer.momentun: unknown key; did you mean optimizer.momentum?"
    line = command.refuses("batch.micro=7", recipe=tmp_path / "none.yaml")
    assert line.startswith(f"{tmp_path / 'none.yaml'}: No such file or directory; ")


def test_a_mended_recipe_takes_the_folder_of_the_one_that_could_not_start(command):
    command.refuses("model.norm_groups=3")
    assert command()[0] == DONE


def test_processes_that_make_no_whole_replicas_are_refused(command, monkeypatch):
    for name, value in {"WORLD_SIZE": "3", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "3 processes are not a multiple of 2 stages" in command.refuses("parallel.stages=2")
    assert not command.folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(command):
    line = command.refuses("run.device=cuda")
    assert "run.device cuda" in line and "use run.device=cpu or auto" in line


# Run folders and checkpoints that are not to be used.


def test_the_folder_of_another_recipe_is_refused(command):
    command()
    line = command.refuses("run.seed=1")
    assert "belongs to another recipe: run.seed is 0 there, 1 here" in line and "run.output=FOLDER" in line


def test_a_folder_that_is_no_run_is_refused(command):
    command.folder.mkdir()
    (command.folder / "thesis.tex").write_text("years of work")
    line = command.refuses()
    assert str(command.folder) in line and "holds files that are no run" in line and "run.output=FOLDER" in line


def test_a_file_in_place_of_the_folder_is_refused(command):
    command.folder.write_text("mine")
    line = command.refuses()
    assert str(command.folder) in line and "run.output=FOLDER" in line


def test_a_folder_in_use_is_refused(command):
    command.folder.mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold, command.folder / "lock"], stdin=pipe, stdout=pipe) as holder:
        holder.stdout.readline()
        line = command.refuses()
        holder.communicate(b"\n")
    assert f"{command.folder} is in use by another process" in line and "run.output=FOLDER" in line
    assert command()[0] == DONE


@pytest.mark.parametrize(
    ("override", "difference"),
    [("model.width=0.5", "model.width is 0.5 there, 0.25 here"), ("run.seed=1", "run.seed is 1 there, 0 here")],
)
def test_a_checkpoint_of_another_run_is_refused(command, interrupt, tmp_path, override, difference):
    """Swapped in with its manifest. Also where its tensors fit: it would silently be another run's end."""
    interrupt(3, signal.SIGTERM)
    for overrides in ((), (override, f"run.output={tmp_path / 'other'}")):
        assert command(*overrides)[0] == STOPPED
    for path in (tmp_path / "other" / "checkpoints").glob("step-00000003.*"):
        shutil.copy(path, command.folder / "checkpoints" / path.name)
    line = command.refuses()
    assert line.startswith(f"{newest(command.folder)}: of another run: {difference}") and "run.output=FOLDER" in line


def test_a_damaged_only_checkpoint_is_refused(command, interrupt):
    interrupt(1, signal.SIGTERM)
    assert command()[0] == STOPPED
    path = newest(command.folder)
    path.write_bytes(path.read_bytes()[:-1000])
    line = command.refuses()
    assert line.startswith(f"{path}: damaged") and "restore one" in line


@pytest.mark.parametrize("content", [b"", b'{"step": 3'])
def test_a_run_whose_manifests_are_all_damaged_is_refused(command, interrupt, content):
    """It neither begins anew nor touches what there is; `refuses` compares all files."""
    interrupt(3, signal.SIGTERM)
    assert command()[0] == STOPPED
    manifests = sorted((command.folder / "checkpoints").glob("*.json"))
    assert len(manifests) == 2
    whole = manifests[0].read_bytes()
    for path in manifests:
        path.write_bytes(content)
    assert command.refuses().startswith(f"{manifests[-1]}: damaged: ")
    manifests[0].write_bytes(whole)
    assert "resuming at step 2 of 4" in command()[1]


@pytest.mark.parametrize("lost", ["step-*.json", "step-*"])
def test_a_run_whose_only_checkpoint_is_gone_is_refused(command, interrupt, lost):
    """A single file without a manifest may be one that was cut off, but for the event in metrics.jsonl."""
    interrupt(1, signal.SIGTERM)
    assert command()[0] == STOPPED
    checkpoints = command.folder / "checkpoints"
    for path in checkpoints.glob(lost):
        path.unlink()
    line = command.refuses()
    assert line.startswith(f"{checkpoints}: the checkpoint of step 1, which metrics.jsonl tells of, is gone")
    shutil.rmtree(checkpoints)
    assert not any(line.startswith("resuming") for line in command()[1])


def test_a_manifest_of_before_with_another_step_is_damage(command, interrupt):
    """One flipped bit in a manifest without a checksum."""
    interrupt(3, signal.SIGTERM)
    command()
    path = newest(command.folder).with_suffix(".json")
    found = {key: value for key, value in json.loads(path.read_text()).items() if key != "checksum"}
    path.write_text(json.dumps({**found, "step": 7}))
    out = command()[1]
    assert "resuming at step 2 of 4" in out
    assert f"{path}: damaged: it is that of step 7; trying the one before" in out


def test_a_folder_without_locks_may_be_used_and_later_be_locked(command, interrupt):
    interrupt(3, signal.SIGTERM)
    assert command("run.lock=false")[0] == STOPPED
    assert "resuming at step 3 of 4" in command("run.lock=true")[1]


# A run folder that is lost while a run writes it.


def _removed(folder):
    shutil.rmtree(folder)


def _emptied(folder):
    _removed(folder)
    folder.mkdir()


def _without_its_files(folder):
    """As `rm -rf FOLDER/*` leaves it."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _moved(folder):
    folder.rename(folder.with_name("moved"))


@pytest.fixture
def lose(monkeypatch):
    """lose(step, how, folder): loses the folder before a step (from 1) is done."""
    original = TorchEngine.train_step

    def at(step, how, folder):
        def losing(engine, micro_batches, number, lr, measure=False):
            if number + 1 == step:
                how(folder)
            return original(engine, micro_batches, number, lr, measure)

        monkeypatch.setattr(TorchEngine, "train_step", losing)

    return at


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("how", [_removed, _emptied, _without_its_files, _moved])
def test_a_folder_that_is_lost_ends_the_run(command, lose, how, step):
    """Also before the last step, whose end would be lost with it. Nothing is written in its place."""
    lose(step, how, command.folder)
    code, out, errors = command("log.tensorboard=false")
    assert code == FAILED and len(errors) == 1, errors
    assert errors[0].startswith(str(command.folder)) and "removed, renamed, replaced or unmounted" in errors[0]
    assert not any(line.startswith("done") for line in out)
    assert not command.folder.exists() or not list(command.folder.iterdir())


def test_a_file_system_that_is_unmounted_ends_the_run_and_nothing_is_written_below(command, lose, small_disk):
    mount = small_disk("8m")
    lose(3, lambda folder: subprocess.run(["umount", "--lazy", folder], check=True), mount)
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
    assert "1 images left over in each epoch" in out[1]
    assert events(command.folder, "eval")[-1]["images"] == 5


def test_a_missing_root_is_refused(command, folder_data):
    line = command.refuses(*folder_data[1], "data.root=/no/such/place")
    assert line == "/no/such/place: no such folder; correct data.root"
    assert not command.folder.exists()


def test_an_empty_class_folder_is_refused(command, folder_data):
    root, overrides = folder_data
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
    bad.write_bytes(b"")
    overrides = (*overrides, "batch.global=25", "batch.micro=5", "run.steps=3", "log.every_steps=1")
    command.refuses(*overrides)
    code, out, errors = command(*overrides, "data.bad_images=skip")
    assert (code, errors) == (DONE, [])
    assert [line for line in out if line.startswith("left out: ")] == [f"left out: {bad}: the file is empty"] * 3
    assert [event["unreadable_images"] for event in events(command.folder, "train")] == [1, 2, 3]


def test_an_unreadable_validation_image_is_left_out_of_the_scores_and_counted(command, folder_data):
    root, overrides = folder_data
    (root / "val" / "cat" / "00.jpg").write_bytes(b"")
    code, out, _ = command(*overrides, "data.bad_images=skip")
    assert code == DONE
    event = events(command.folder, "eval")[-1]
    assert (event["images"], event["unreadable"]) == (4, 1)
    assert any("(4 images); 1 unreadable left out" in line for line in out)


# Signals.


def test_a_termination_saves_and_the_same_command_resumes(command, interrupt):
    interrupt(3, signal.SIGTERM)
    code, _, errors = command("checkpoint.every_epochs=1")
    assert code == STOPPED
    assert errors == ["SIGTERM: saved at step 3; the same command resumes"]
    code, out, errors = command("checkpoint.every_epochs=1")
    assert (code, errors) == (DONE, [])
    assert "resuming at step 3 of 4" in out


def test_a_second_interrupt_exits_at_once_without_saving(command, interrupt):
    interrupt(3, signal.SIGINT, signal.SIGINT)
    code, _, errors = command()
    assert code == FAILED
    assert len(errors) == 1 and "interrupted" in errors[0] and "to resume from the last checkpoint" in errors[0]
    assert newest(command.folder).name == "step-00000002.pt"


def start(*arguments, **streams):
    """train.py as users start it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", "--config", QUICKSTART, *SHORT, *arguments]
    return subprocess.Popen(bound_to_parent(command), cwd=ROOT, env=environment, text=True, **streams)


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


def test_a_worker_that_is_killed_ends_the_run_with_one_line(tmp_path):
    """As the kernel does for want of memory. Torch raises it in whichever line is being run."""
    process = start(
        f"run.output={tmp_path / 'run'}", "run.steps=1000000", "data.workers=1",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    worker, *_ = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    _, error = process.communicate(timeout=240)
    assert process.returncode == FAILED
    assert error.startswith("a process that loads images was killed, perhaps for want of memory; lower data.workers")
    assert error.count("\n") == 1


# Training that cannot go on, and disks that are full.


def test_a_run_whose_gradients_stay_infinite_ends_with_1_and_a_remedy(command):
    line = command.refuses("precision.loss_scale=3e38", "precision.max_skipped_steps=1", code=FAILED)
    assert "step 2: the last 2 updates had gradients that are not finite" in line and "lower schedule.peak" in line


@pytest.fixture
def disk(small_disk):
    return small_disk("8m")


def fill(disk, leaving):
    """Takes all room but `leaving` bytes."""
    free = os.statvfs(disk)
    with open(disk / "filler", "wb") as stream:
        stream.write(bytes(free.f_bavail * free.f_bsize - leaving))


@pytest.mark.parametrize("leaving", [0, 64 << 10], ids=["metrics", "checkpoint"])
def test_a_full_disk_ends_the_run_with_1_and_a_run_with_room_resumes(command, disk, monkeypatch, tmp_path, leaving):
    """Before step 3 the disk fills up, so that not even a log line fits, or that but no checkpoint."""
    step = TorchEngine.train_step

    def full(engine, micro_batches, number, lr, measure=False):
        if number == 2:
            fill(disk, leaving)
        return step(engine, micro_batches, number, lr, measure)

    recipe = ("log.every_steps=1", f"run.output={disk / 'run'}", "log.tensorboard=true")
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "train_step", full)
        code, _, errors = command(*recipe)
    assert code == FAILED
    (error,) = errors
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


# The plan.


def plan(*arguments):
    """What --dry-run prints, in a process of its own, and whether that loaded torch."""
    program = (
        "import sys, train\n"
        "code = train.main(sys.argv[1:])\n"
        "print('torch' in sys.modules, file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (DONE, "False\n")
    return done.stdout.splitlines()


def test_the_plan_of_the_quickstart_is_printed_without_loading_torch(tmp_path):
    """1437 digits in batches of 48: 29 steps an epoch and 45 images over."""
    lines = plan(f"run.output={tmp_path / 'run'}", "batch.global=48", "batch.micro=12", "run.epochs=40")
    assert any("48 = 12 micro x 4 accumulation x 1 replica (1 device)" in line for line in lines)
    assert any("1160 steps = 40 epochs x 29 steps" in line and "45 images left over" in line for line in lines)
    assert not (tmp_path / "run").exists()


def test_the_plan_of_a_pod_needs_no_pod(tmp_path):
    """1,281,167 images in batches of 6144: 208 steps (3215 over) an epoch; 350 and 70 epochs. 64 x 2 devices."""
    recipe = tmp_path / "pod.yaml"
    recipe.write_text(
        "run: {name: pod, epochs: 350}\n"
        "model: {name: efficientnet_b4}\n"
        "batch: {global: 6144, micro: 3}\n"
        "parallel: {stages: 2, split: [blocks.3.0], replicas: 64}\n"
        "schedule: {peak_per_image: 0.00138107, warmup_epochs: 70}\n"
        "data: {source: folder, root: /no/such/place, train_images: 1281167}\n"
    )
    lines = plan("--config", recipe)
    assert any("6144 = 3 micro x 32 accumulation x 64 replicas (2 stages each: 128 devices)" in line for line in lines)
    assert any("72800 steps = 350 epochs x 208 steps, 14560 of warm-up; 3215 images" in line for line in lines)
    assert any("peak learning rate 8.485" in line for line in lines)


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_the_plan_says_whether_the_images_are_there(tmp_path, source):
    def line(*overrides):
        (found,) = [each for each in plan(f"data.source={source}", *overrides) if each.startswith("images ")]
        return found.split(maxsplit=1)[1]

    assert line() == ("not found here: data.root is not set; name the folder of the images: data.root=/path/to/images")
    root = f"data.root={tmp_path}/images"
    assert line(root) == f"not found here: {tmp_path}/images: no such folder; correct data.root"
    (tmp_path / "images" / "train").mkdir(parents=True)
    assert line(root).startswith(f"not found here: {tmp_path}/images: no folder 'val'; set data.validation_folder")
    (tmp_path / "images" / "val").mkdir()
    assert line(root) == f"found: {tmp_path}/images/train, {tmp_path}/images/val"


NO_TORCH = """
import sys
class Blocker:
    def find_spec(name, path=None, target=None):
        assert name != "torch", "torch is loaded"
sys.meta_path.insert(0, Blocker)
from training.command import finish
import importlib
command = importlib.import_module(sys.argv[1])
finish(lambda: command.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("name", ["train", "tools.launch"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.seed=1", "belongs to another recipe: run.seed is 0 there, 1 here"),
        ("run.resume=never", "already holds a run and run.resume is never"),
    ],
)
def test_the_folder_of_another_run_is_refused_before_torch_is_loaded(tmp_path, name, override, words):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(loading.dump(loading.load(QUICKSTART)))
    command = [name, "--config", QUICKSTART, f"run.output={folder}", override]
    ended = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == WRONG_INPUT
    assert ended.stderr.startswith(f"{folder} ") and words in ended.stderr and ended.stderr.count("\n") == 1


def test_what_auto_came_to_is_no_other_recipe(tmp_path):
    """A run of several replicas that took topk, begun with `exchange.method: auto`."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    overrides = ("exchange.method=topk", f"run.output={folder}")
    (folder / "config.yaml").write_text(loading.dump(loading.load(QUICKSTART, overrides)))
    check_owner(loading.load(QUICKSTART, ("exchange.method=auto", f"run.output={folder}")))
    with pytest.raises(CheckpointError, match=r"exchange\.method is topk there, dense here"):
        check_owner(loading.load(QUICKSTART, ("exchange.method=dense", f"run.output={folder}")))


def test_what_is_logged_may_change_when_a_run_resumes(command, interrupt, tmp_path):
    """The weights are those of the undisturbed run."""
    interrupt(3, signal.SIGTERM)
    assert command("log.every_steps=1")[0] == STOPPED
    code, out, errors = command("log.every_steps=4", "log.trust_ratios=false")
    assert (code, errors) == (DONE, [])
    assert "resuming at step 3 of 4" in out
    whole = tmp_path / "whole"
    interrupt(0)
    assert command(output=whole)[0] == DONE
    ends = [torch.load(newest(folder), weights_only=True)["engine"]["weights"] for folder in (command.folder, whole)]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_memory_that_does_not_suffice_is_one_line(command, monkeypatch):
    """torch's words on a CPU; CUDA's error says "out of memory" and is a RuntimeError, too."""

    def fail(*_, **__):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp] can't allocate memory: you tried to allocate 36000000000000 bytes"
        )

    monkeypatch.setattr(TorchEngine, "train_step", fail)
    code, _, errors = command()
    assert (code, len(errors)) == (FAILED, 1)
    assert "lower batch.micro" in errors[0]
