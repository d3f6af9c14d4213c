"""Ranks that nobody watches: what becomes of the others is theirs alone, as under a launcher that looks away.

tests/world.py ends all ranks when one fails. Here each goes on until it ends by itself; only what hangs is killed.
Ranks are forked from the server that tests/world.py describes.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import time
import warnings
from multiprocessing import connection
from pathlib import Path
from typing import List, NamedTuple

import torch

from parallel.parent_death import die_with_parent
from tests.conftest import QUICKSTART
from tests.world import _free_port, fork_server

# A run worth comparing: it draws in every way that a run can, and has two epochs of 5 steps, the second with larger
# images. 12 micro batches a step are 1, 2, 3 or 4 replicas'.
RECIPE = (
    "run.device=cpu",
    "run.epochs=2",
    "model.width=0.25",
    "model.depth=0.1",
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "model.image_size=8",
    "batch.global=240",
    "batch.micro=20",
    "batch.evaluation=90",
    "exchange.order=tree",
    "schedule.warmup_steps=2",
    "data.augment=randaugment",
    "data.mixup=0.2",
    "data.cutmix=0.85",
    "data.image_sizes=[[0, 8], [1, 12]]",
    "average.step_decay=0.9",
    "average.epoch_decay=0.97",
    "checkpoint.every_epochs=0.6",
    "log.every_steps=4",
    "log.tensorboard=false",
)
# The same steps a tenth as long: few images, drawn anew, in 4 micro batches.
SMALL = (
    "data.source=glyphs",
    "data.train_images=125",
    "data.validation_images=60",
    "data.glyph_size=8",
    "batch.global=24",
    "batch.micro=6",
    "batch.evaluation=30",
)


class Ended(NamedTuple):
    """How a rank ended: its exit code (minus the signal), its lines, and seconds after the first rank to end."""

    code: int
    out: List[str]
    errors: List[str]
    later: float


def run(size, function, *args, only=None, timeout=240, **environment):
    """Calls function(rank, size, *args) in `size` processes; how each ended, in the order of the ranks.

    Args:
        only: the ranks to start; all, if None.
        timeout: seconds for all of them; AssertionError with their stacks if one goes on.
        environment: further variables beside torchrun's.
    """
    context = fork_server()
    variables = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    variables.update(environment)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(_temporary_folder()))
        processes = {}
        for rank in range(size) if only is None else only:
            arguments = (rank, size, folder, function, args, variables)
            processes[rank] = context.Process(target=_rank, args=arguments)
            processes[rank].start()
            stack.callback(_kill, processes[rank])
        ends = _wait(processes, folder, time.monotonic() + timeout)
        first = min(ends.values())
        return [
            Ended(process.exitcode, *(_lines(folder, name, rank) for name in ("out", "err")), ends[rank] - first)
            for rank, process in processes.items()
        ]


def train(size, *overrides, per_rank=None, sabotage=None, **options):
    """`run` of train.py with RECIPE.

    Args:
        per_rank: {rank: further overrides}.
        sabotage: called with the rank before the command.
    """
    return run(size, command, overrides, per_rank or {}, sabotage, **options)


def command(rank, size, overrides, per_rank, sabotage):
    """train.py as a process of its own runs it, but that it does not measure the machine."""
    import train as program
    from engines.torch_engine import TorchEngine
    from training.command import finish

    TorchEngine.peak_flops = lambda engine: 1e12
    if sabotage is not None:
        sabotage(rank)
    arguments = ["--config", str(QUICKSTART), *RECIPE, *overrides, *per_rank.get(rank, ())]
    finish(lambda: program.main(arguments))


def before_step(number, action):
    """Has action() called before the step `number`, counted from 1; in this process."""
    from engines.torch_engine import TorchEngine

    step = TorchEngine.train_step

    def disturbed(engine, micro_batches, at, *arguments, **keywords):
        if at + 1 == number:
            action()
        return step(engine, micro_batches, at, *arguments, **keywords)

    TorchEngine.train_step = disturbed


def _temporary_folder():
    import tempfile

    return tempfile.TemporaryDirectory()


def _wait(processes, folder, end):
    """{rank: when it ended}."""
    ends, waiting = {}, {process.sentinel: rank for rank, process in processes.items()}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        assert ready, _stacks(processes, sorted(waiting.values()), folder)
        for sentinel in ready:
            ends[waiting.pop(sentinel)] = time.monotonic()
    for process in processes.values():
        process.join()
    return ends


def _stacks(processes, hanging, folder):
    """What ranks that go on have said, and where they are."""
    for rank in hanging:
        os.kill(processes[rank].pid, signal.SIGUSR2)
    time.sleep(0.3)
    texts = ["\n".join([f"rank {rank}:", *_lines(folder, "err", rank)]) for rank in processes]
    return "\n".join([f"ranks {hanging} go on", *texts])


def _kill(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with the workers it started
    process.kill()
    process.join()


def _lines(folder, name, rank):
    path = folder / f"{name}-{rank}"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _rank(rank, size, folder, function, args, variables):
    die_with_parent()
    os.setsid()
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    if size > 1:
        local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in {**local, **variables}.items()})
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    function(rank, size, *args)
    sys.stdout.flush()
