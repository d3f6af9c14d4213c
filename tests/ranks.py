"""Ranks that go on until they end by themselves, as under a launcher that does not watch them.

tests/world.py ends all ranks when one fails. Ranks are forked from the same server.
"""

import sys
import time
import warnings
from typing import List, NamedTuple

from tests.conftest import QUICKSTART
from tests.world import addresses, ends, of_torchrun, set_up_rank, started

# A run that draws in every way a run can, of two epochs of 5 steps, the second with larger images.
# 12 micro batches a step are 1, 2, 3 or 4 replicas'.
RECIPE = (
    "run.device=cpu",
    "run.epochs=2",
    "batch.global=240",
    "batch.micro=20",
    "batch.evaluation=90",
    "model.width=0.25",
    "model.depth=0.1",
    "model.dropout=0.3",
    "model.drop_path=0.3",
    "model.image_size=8",
    "exchange.order=tree",
    "schedule.warmup_steps=2",
    "average.step_decay=0.9",
    "average.epoch_decay=0.97",
    "data.augment=randaugment",
    "data.mixup=0.2",
    "data.cutmix=0.85",
    "data.image_sizes=[[0, 8], [1, 12]]",
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
    """How a rank ended: its exit code (minus the signal), its lines, and seconds after the first
    rank to end."""

    code: int
    out: List[str]
    errors: List[str]
    later: float


def run(size, function, *args, only=None, timeout=240, **environment):
    """Call function(rank, size, *args) in `size` processes; return how each ended, in the order of
    the ranks.

    Args:
        only: the ranks to start; all, if None.
        timeout: seconds for all of them; TimeoutError with their stacks if one goes on.
        environment: further variables beside torchrun's.
    """
    chosen = range(size) if only is None else only
    variables = {**addresses(), **environment}
    with started(chosen, _rank, size, function, args, variables) as (processes, folder):
        when = {rank: time.monotonic() for rank in ends(processes, folder, timeout)}
        first = min(when.values())
        return [
            Ended(
                process.exitcode,
                *(_lines(folder / f"{name}-{rank}") for name in ("out", "err")),
                when[rank] - first,
            )
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
    from common.command import finish
    from engines.torch_engine import TorchEngine

    TorchEngine.peak_flops = lambda engine: 1e12
    if sabotage is not None:
        sabotage(rank)
    arguments = ["--config", str(QUICKSTART), *RECIPE, *overrides, *per_rank.get(rank, ())]
    finish(lambda: program.main(arguments))


def before_step(number, action):
    """Has action() called before the step `number`, counted from 1; in this process."""
    from engines.torch_engine import TorchEngine

    step = TorchEngine.train_step

    def disturbed(engine, micro_batches, update, *arguments, **keywords):
        if update.step + 1 == number:
            action()
        return step(engine, micro_batches, update, *arguments, **keywords)

    TorchEngine.train_step = disturbed


def _lines(path):
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _rank(rank, folder, size, function, args, variables):
    variables = {**of_torchrun(rank, size), **variables} if size > 1 else {}
    set_up_rank(variables, folder / f"out-{rank}", folder / f"err-{rank}")
    warnings.simplefilter("error")
    function(rank, size, *args)
    sys.stdout.flush()
