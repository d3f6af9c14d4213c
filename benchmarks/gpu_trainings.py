"""The suite's sections on whole trainings: accuracy beside the CPU's, evaluation and exported programs."""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, Iterator, List, Sequence

from benchmarks import QUICKSTART, QUIET, ROOT
from benchmarks.gpu_measure import Row, Session, Side, missing, reason, recipe
from benchmarks.gpu_training import on_device
from common import cores
from engines import factory
from parallel.parent_death import bound_to_parent
from recipe.batch import divide
from training.metrics import read_events

SAME = "accuracy beside a CPU"
EXPORT = "evaluation and export"
CPU = "the CPU's"
DEVICES = "the device's"
SEEDS = (0, 1, 2)
_RECIPE = ROOT / "configs" / "evidence.yaml"  # its images are drawn: nothing has to be downloaded
_LEAST_SECONDS = 1.0  # of a command, so that one that begins late ends with a reason


# Accuracy -------------------------------------------------------------------------------------------------------------


def same_accuracy(session: Session) -> Iterator[Row]:
    """Top-1 of a short training with three seeds, on the device and on the CPU of the same machine.

    The dtype is `auto`: float16 on a GPU, float32 on a CPU. The CPU's trainings run at once, beside the device's, which
    run one after the other.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        threads = max(1, (cores.available() - 1) // len(SEEDS))
        beside = {}
        for seed in SEEDS:
            command = _training(session, "cpu", seed, folder / f"cpu{seed}", f"run.threads={threads}")
            beside[seed] = stack.enter_context(_started(command, folder / f"cpu{seed}.txt"))
        # Both rows have all seeds or none: means of other seeds could not be compared.
        kernels = f"engine.kernels={session.plan.kernels[0]}"
        on_device = functools.partial(_device_accuracies, session, folder, kernels)
        yield from session.attempts({DEVICES: on_device})
        yield from session.attempts({CPU: functools.partial(_cpu_accuracies, session, folder, beside)})


def _training(session: Session, device: str, seed: int, folder: Path, *overrides: str) -> List[str]:
    """Return the command of a training."""
    return [
        *("train.py", "--config", str(_RECIPE), *session.plan.trained, *QUIET, *overrides),
        *(f"run.device={device}", f"run.seed={seed}", f"run.output={folder}"),
    ]


def _device_accuracies(session: Session, folder: Path, kernels: str) -> Row:
    accuracies = []
    for seed in SEEDS:
        place = folder / f"device{seed}"
        kinds = (kernels, f"engine.memory_format={session.plan.layout}")
        _run(session, _training(session, session.plan.device, seed, place, *kinds), folder / "device.txt")
        accuracies.append(_top1(place))
    return _accuracies(session, DEVICES, accuracies)


def _cpu_accuracies(session: Session, folder: Path, processes: Dict[int, subprocess.Popen]) -> Row:
    accuracies = []
    for seed, process in processes.items():
        _wait(session, process, folder / f"cpu{seed}.txt")
        accuracies.append(_top1(folder / f"cpu{seed}"))
    return _accuracies(session, CPU, accuracies)


def _accuracies(session: Session, what: str, accuracies: Sequence[float]) -> Row:
    note = f"seeds {', '.join(map(str, SEEDS))}"
    return Row(session.section, what, tuple(100 * each for each in accuracies), "%", note=note)


def _top1(folder: Path) -> float:
    return read_events(folder)["end"][-1]["top1"]


# Evaluation and export ------------------------------------------------------------------------------------------------


def evaluation_and_export(session: Session) -> Iterator[Row]:
    """Images a second of an evaluation; then top-1 of a run, scored anew on the device, and of its exported program."""
    plan = session.plan
    note = f"{recipe(plan, plan.micro).model.image_size} px, {plan.micro} images a batch, bfloat16"
    sides = {f"evaluation, {kernels}": functools.partial(_evaluation, session, kernels) for kernels in plan.kernels}
    yield from session.compare(
        sides,
        lambda seconds: plan.micro / seconds,
        "images/s",
        calls=plan.steps,
        warm_up=2,
        note=note,
    )
    with tempfile.TemporaryDirectory() as name:
        yield from _exported(session, Path(name))


def _evaluation(session: Session, kernels: str, stack: contextlib.ExitStack) -> Side:
    """Return what scores images that lie on the device."""
    plan = session.plan
    engine = (f"engine.memory_format={plan.layout}", f"engine.kernels={kernels}")
    made = recipe(plan, plan.micro, *engine, "precision.compute=bfloat16", f"batch.evaluation={plan.micro}")
    evaluating = factory.create(made, divide(made, 1))
    stack.callback(evaluating.close)
    batch = on_device(made, evaluating.device)
    return lambda: evaluating.evaluate_step(batch)


def _exported(session: Session, folder: Path) -> Iterator[Row]:
    """Train a little, and score what comes out in each form."""
    run = folder / "run"
    program = folder / "program.pt2"
    device = f"run.device={session.plan.device}"
    commands = {
        "at the end of the run": ["train.py", "--config", str(QUICKSTART), *QUIET, "run.epochs=4", device,
                                  "schedule.warmup_epochs=1", f"run.output={run}"],
        "scored anew": ["evaluate.py", "--checkpoint", str(run), "--output", str(folder / "anew"), device],
        "exported program": ["-m", "tools.export", str(run), "--format", "torch", "--output", str(program), device],
        "exported program, scored": ["evaluate.py", "--checkpoint", str(program), "--output", str(folder / "program"),
                                     f"--config={QUICKSTART}"],
    }  # fmt: skip
    scores = {"scored anew": "anew", "exported program, scored": "program"}
    for what, command in commands.items():
        try:
            _run(session, command, folder / "output.txt")
            top1 = _top1(run)
            if what in scores:
                top1 = json.loads((folder / scores[what] / "scores.json").read_text(encoding="utf-8"))["top1"]
        except (RuntimeError, OSError, KeyError) as error:
            # Each command needs what the one before has written.
            yield missing(session.section, what, reason(error))
            return
        if what != "exported program":
            yield Row(session.section, f"top-1, {what}", (100 * top1,), "%", note="digits")


# Commands -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen]:
    """Start a command of this repository, and end it with the block. Args: output: what it prints."""
    with open(output, "w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            bound_to_parent([sys.executable, *command]),
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _run(session: Session, command: Sequence[str], output: Path) -> None:
    with _started(command, output) as process:
        _wait(session, process, output)


def _wait(session: Session, process: subprocess.Popen, output: Path) -> None:
    """Wait for a command. Raises RuntimeError: it failed, or the section's time is over."""
    began = time.monotonic()
    try:
        code = process.wait(max(_LEAST_SECONDS, session.left()))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {time.monotonic() - began:.0f} s") from None
    if code:
        lines = output.read_text(encoding="utf-8").strip().splitlines() or ["it printed nothing"]
        raise RuntimeError(f"exit code {code}: {lines[-1]}")
