"""The suite's sections on whole trainings: accuracy beside the CPU's, evaluation and exported
programs.
"""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

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


# Accuracy -----------------------------------------------------------------------------------------


def same_accuracy(session: Session) -> Iterator[Row]:
    """Measure top-1 of a short training with three seeds, on the device and on its machine's CPU.

    The dtype is `auto`: float16 on a GPU, float32 on a CPU. The CPU's trainings run at once, beside
    the device's, which run one after the other.

    Args:
        session: of the section.

    Yields:
        The row of the device, then that of the CPU: percentages by seed, or the reason why there
        are none.
    """
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        # One core is left to the process that feeds the device.
        threads = max(1, (cores.available() - 1) // len(SEEDS))
        on_cpu = {}
        for seed in SEEDS:
            command = _training(
                session,
                "cpu",
                seed,
                folder=folder / f"cpu{seed}",
                overrides=[f"run.threads={threads}"],
            )
            on_cpu[seed] = stack.enter_context(_started(command, folder / f"cpu{seed}.txt"))
        # Both rows have all seeds or none: means of other seeds could not be compared.
        device_accuracies = functools.partial(_device_accuracies, session, folder)
        yield from session.attempts({DEVICES: device_accuracies})
        cpu_accuracies = functools.partial(_cpu_accuracies, session, folder, on_cpu)
        yield from session.attempts({CPU: cpu_accuracies})


def _training(
    session: Session,
    device: str,
    seed: int,
    folder: Path,
    overrides: Sequence[str],
) -> List[str]:
    """Return the command of a training, as Python is given it.

    Args:
        session: of the section.
        device: as run.device.
        seed: as run.seed.
        folder: of the run.
        overrides: of the recipe, beside those of the plan.
    """
    return [
        "train.py",
        "--config",
        str(_RECIPE),
        *session.plan.trained,
        *QUIET,
        *overrides,
        f"run.device={device}",
        f"run.seed={seed}",
        f"run.output={folder}",
    ]


def _device_accuracies(session: Session, folder: Path) -> Row:
    """Train on the device with each seed; raises RuntimeError where a training fails."""
    plan = session.plan
    overrides = [
        f"engine.kernels={plan.kernels[0]}",
        f"engine.memory_format={plan.layout}",
    ]
    accuracies = []
    for seed in SEEDS:
        run = folder / f"device{seed}"
        command = _training(session, plan.device, seed, folder=run, overrides=overrides)
        _run(session, command, folder / "device.txt")
        accuracies.append(_top1(run))
    return _accuracies(session, DEVICES, accuracies)


def _cpu_accuracies(
    session: Session,
    folder: Path,
    processes: Dict[int, subprocess.Popen],
) -> Row:
    """Wait for the trainings on the CPU; raises RuntimeError where one fails.

    Args:
        session: of the section.
        folder: of their runs.
        processes: that train, by seed.
    """
    accuracies = []
    for seed, process in processes.items():
        run = folder / f"cpu{seed}"
        _wait(session, process, folder / f"cpu{seed}.txt")
        accuracies.append(_top1(run))
    return _accuracies(session, CPU, accuracies)


def _accuracies(session: Session, what: str, accuracies: Sequence[float]) -> Row:
    """Return the row of the accuracies of all seeds, given as shares."""
    percentages = tuple(100 * accuracy for accuracy in accuracies)
    seeds = ", ".join(map(str, SEEDS))
    return Row(session.section, what, percentages, "%", note=f"seeds {seeds}")


def _top1(run: Path) -> float:
    """Return the top-1 at the end of a run."""
    return read_events(run)["end"][-1]["top1"]


# Evaluation and export ----------------------------------------------------------------------------


def evaluation_and_export(session: Session) -> Iterator[Row]:
    """Measure evaluation; then score a run anew on the device, and its exported program.

    Args:
        session: of the section.

    Yields:
        Images a second by kernels: see `Session.compare`. Then top-1 in percent at the end of the
        run, of the run scored anew, and of its exported program.
    """
    plan = session.plan
    sides = {}
    for kernels in plan.kernels:
        sides[f"evaluation, {kernels}"] = functools.partial(_evaluation, session, kernels)
    size = recipe(plan, plan.micro).model.image_size
    yield from session.compare(
        sides,
        lambda seconds: plan.micro / seconds,
        "images/s",
        calls=plan.steps,
        warm_up=2,
        note=f"{size} px, {plan.micro} images a batch, bfloat16",
    )
    with tempfile.TemporaryDirectory() as name:
        yield from _exported(session, Path(name))


def _evaluation(session: Session, kernels: str, stack: contextlib.ExitStack) -> Side:
    """Create an engine; return a function that scores images, which lie on the device.

    Args:
        session: of the section.
        kernels: of the engine.
        stack: closes the engine.
    """
    plan = session.plan
    overrides = [
        f"engine.memory_format={plan.layout}",
        f"engine.kernels={kernels}",
        "precision.compute=bfloat16",
        f"batch.evaluation={plan.micro}",
    ]
    settings = recipe(plan, plan.micro, *overrides)
    engine = factory.create(settings, divide(settings, 1))
    stack.callback(engine.close)
    batch = on_device(settings, engine.device)
    return lambda: engine.evaluate_step(batch)


class _Step(NamedTuple):
    """A command on the way from a training to its exported program.

    what: it does, in tables.
    command: as Python is given it.
    top1: reads the score that the command leaves; None: it scores nothing.
    """

    what: str
    command: List[str]
    top1: Optional[Callable[[], float]]


def _exported(session: Session, folder: Path) -> Iterator[Row]:
    """Train a little, and score the run in each form."""
    for step in _steps(session.plan.device, folder):
        try:
            _run(session, step.command, folder / "output.txt")
            top1 = None if step.top1 is None else step.top1()
        except (RuntimeError, OSError, KeyError) as error:
            # Each command needs what those before it have written.
            yield missing(session.section, step.what, reason(error))
            return
        if top1 is not None:
            yield Row(session.section, f"top-1, {step.what}", (100 * top1,), "%", note="digits")


def _steps(device: str, folder: Path) -> List[_Step]:
    """Return the commands, which are run one after the other.

    Args:
        device: that trains, scores and exports; the program is scored where its recipe says.
        folder: of all that they write.
    """
    run = folder / "run"
    program = folder / "program.pt2"
    anew = folder / "anew"
    of_program = folder / "program"
    device_override = f"run.device={device}"
    train = [
        "train.py",
        "--config",
        str(QUICKSTART),
        *QUIET,
        "run.epochs=4",
        device_override,
        "schedule.warmup_epochs=1",
        f"run.output={run}",
    ]
    score = ["evaluate.py", "--checkpoint", str(run), "--output", str(anew), device_override]
    export = [
        "-m",
        "tools.export",
        str(run),
        "--format",
        "torch",
        "--output",
        str(program),
        device_override,
    ]
    score_program = [
        "evaluate.py",
        "--checkpoint",
        str(program),
        "--output",
        str(of_program),
        f"--config={QUICKSTART}",
    ]
    return [
        _Step("at the end of the run", train, functools.partial(_top1, run)),
        _Step("scored anew", score, functools.partial(_scored_top1, anew)),
        _Step("exported program", export, None),
        _Step(
            "exported program, scored", score_program, functools.partial(_scored_top1, of_program)
        ),
    ]


def _scored_top1(folder: Path) -> float:
    """Return the top-1 that evaluate.py has written into a folder."""
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return scores["top1"]


# Commands -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen]:
    """Start a command of this repository, and end it with the block.

    Args:
        command: as Python is given it.
        output: the file of what it prints.
    """
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
    """Run a command: see `_started` and `_wait`."""
    with _started(command, output) as process:
        _wait(session, process, output)


def _wait(session: Session, process: subprocess.Popen, output: Path) -> None:
    """Wait for a command.

    Args:
        session: whose time limits it.
        process: of the command.
        output: the file of what it prints.

    Raises:
        RuntimeError: it failed, or the section's time is over.
    """
    began = time.monotonic()
    try:
        code = process.wait(max(_LEAST_SECONDS, session.left()))
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not done after {time.monotonic() - began:.0f} s") from None
    if code:
        # Commands end with the reason in one line.
        lines = output.read_text(encoding="utf-8").strip().splitlines()
        why = lines[-1] if lines else "it printed nothing"
        raise RuntimeError(f"exit code {code}: {why}")
