"""The launcher's command: checks everything, then becomes train.py or poprun, or starts the ranks.

    ./run_pod.sh [--stages K] [--replicas R] [--elastic] [--max-restarts M]
                 [--nnodes N --node-rank I --master HOST[:PORT]]
                 [--instances I] [--poprun=FLAGS] [--dry-run]
                 --config FILE [section.key=value ...]

Exit codes are train.py's. Ranks are started and watched by parallel/agent.py; hosts find each other
by parallel/hosts.py. This file runs on Python 3.8 and loads no torch by itself.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from common.command import run
    from training import stopping

    stopping.listen_early()
    run(__file__, computes=False)

import argparse
import ctypes
import shlex
import shutil
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence

from common import additions
from common.command import Parser, naming, one_line
from common.credentials import masked
from common.errors import DONE, ConfigError, UserError
from common.text import count
from parallel import hosts, launchers
from parallel.hosts import Hosts
from recipe import batch, loading, suggestions
from recipe.config import Recipe
from recipe.ipu import poprun
from tools.arguments import whole, within
from training import preflight, stopping
from training.run_folder import check_owner

_PROGRAM = Path(__file__).resolve().parent.parent / "train.py"


class _Given(NamedTuple):
    """The recipe of a command line.

    overrides: of the recipe's file.
    note: on cuts of the recipe that gave way, for the line that is printed; else empty.
    """

    recipe: Recipe
    overrides: List[str]
    note: str


class _Layout(NamedTuple):
    """The processes of a run, spread evenly over its hosts.

    hosts: that take part.
    replicas: copies of the model.
    stages: processes of a replica.
    """

    hosts: Hosts
    replicas: int
    stages: int

    @property
    def world(self) -> int:
        """Return the number of processes on all hosts."""
        return self.replicas * self.stages

    @property
    def local(self) -> int:
        """Return the number of processes on this host."""
        return self.world // self.hosts.number

    @property
    def shape(self) -> str:
        """Return replicas and stages in words."""
        return f"{count(self.replicas, 'replica')} x {count(self.stages, 'stage')}"


class _Plan(NamedTuple):
    """The processes of a run, and the commands that start them on this host.

    recipe: of the run, with a number of replicas.
    layout: of the processes.
    rank: command of one of them, behind this Python.
    command: by which all of them would be started.
    summary: a line about it, for the user.
    """

    recipe: Recipe
    layout: _Layout
    rank: List[str]
    command: List[str]
    summary: str

    @property
    def on_ipus(self) -> bool:
        """Return whether poprun starts the processes."""
        return self.recipe.run.device == "ipu"


@one_line()
def main(arguments: Optional[Sequence[str]] = None, program: Path = _PROGRAM) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None: those of the process.
        program: that every rank runs; a single one gets no signal before it has called
            `stopping.listen_early`.

    Returns:
        The exit code, unless this process becomes another program.
    """
    options = _parser().parse_intermixed_args(arguments)
    place = hosts.find(options.nnodes, options.node_rank, options.master)
    left_over = _forget_launchers(is_alone=place.number == 1)
    plan = _plan(options, place, program)
    # Faults that train.py would find are found here, once for all ranks.
    description = naming(options.config, batch.describe, plan.recipe)
    # Other hosts need no packages of loggers.
    if place.this == 0:
        naming(options.config, preflight.check, plan.recipe)
    if options.dry_run:
        print(f"{description}\nlaunch     {plan.summary}")
        return DONE
    if left_over:
        processes = f"{_processes(plan.layout, plan.on_ipus)} of this launcher"
        line = f"{left_over} in the environment is set aside: {processes}"
        print(line, file=sys.stderr, flush=True)
    if plan.on_ipus:
        return _become_poprun(plan)
    if place.this == 0:
        check_owner(plan.recipe)
    _check_gpus(plan.layout, plan.recipe.run.device)
    # No agent in between: the process gets signals and terminal of this one. Signals wait until
    # train.py listens.
    if _is_single(plan.layout, options.max_restarts):
        stopping.withhold()
        if stopping.was_asked():
            return launchers.stopped_early()
        os.execv(sys.executable, plan.command)
    return _run_ranks(options, plan)


def _plan(options: argparse.Namespace, place: Hosts, program: Path) -> _Plan:
    """Return what is to be started. Raises UserError.

    Args:
        options: of this command.
        place: the hosts that take part.
        program: that every rank runs.
    """
    given = _load(options)
    _check_device(options, given.recipe.run.device, place.number)
    replicas = given.recipe.parallel.replicas
    if not replicas:
        replicas = _automatic_replicas(given.recipe, place.number, options.dry_run)
    # Only checked and shown with this number: the ranks find it by counting themselves.
    recipe = loading.load(options.config, [*given.overrides, f"parallel.replicas={replicas}"])
    layout = _Layout(place, replicas, recipe.parallel.stages)
    _check_layout(layout, recipe.parallel.elastic)
    rank = [str(program), *additions.words(), "--config", options.config, *given.overrides]
    command = _command(options, layout, recipe, rank)
    on_ipus = recipe.run.device == "ipu"
    summary = _summary(layout, on_ipus, given.note, command)
    return _Plan(recipe, layout, rank, command, summary)


def _command(
    options: argparse.Namespace,
    layout: _Layout,
    recipe: Recipe,
    rank: List[str],
) -> List[str]:
    """Return the command by which all processes would be started. Raises UserError.

    Args:
        options: of this command.
        layout: of the processes.
        recipe: of the run.
        rank: command of one process, behind this Python.
    """
    if recipe.run.device == "ipu":
        return [*_poprun(options, layout, recipe.ipu.pod), sys.executable, *rank]
    # A single process needs nobody who watches it.
    if _is_single(layout, options.max_restarts):
        return [sys.executable, *rank]
    return [*_torchrun(layout), *rank]


def _is_single(layout: _Layout, max_restarts: int) -> bool:
    """Return whether one process is started that is never started again."""
    return layout.world == 1 and not max_restarts


def _parser() -> Parser:
    """Return the parser of the command line."""
    about = (
        "Train a recipe on all devices of one or several hosts, or under SLURM (docs/cluster.md)."
    )
    parser = Parser(
        prog="run_pod.sh",
        description=about,
        allow_abbrev=False,
        remedy=suggestions.for_flag,
    )
    add = parser.add_argument
    config = "configs/quickstart.yaml"
    restarts = within(0, 10**9)
    add("--config", default=config, metavar="FILE", help="recipe (%(default)s)")
    add("--stages", type=whole, metavar="K", help="pipeline stages: parallel.stages=K")
    add("--replicas", type=whole, metavar="R", help="copies of the model: parallel.replicas=R")
    add("--nnodes", type=whole, metavar="N", help="hosts; SLURM's, in a step of several nodes")
    add("--node-rank", type=int, metavar="I", help="number of this host, from 0, the master")
    add("--master", metavar="HOST[:PORT]", help="where host 0 listens (port 29500)")
    elastic = "go on without lost replicas: parallel.elastic=true"
    add("--elastic", action="store_true", help=elastic)
    add("--max-restarts", type=restarts, default=0, metavar="M", help="after failures (0)")
    # The following two are for IPUs, where poprun starts the processes.
    add("--instances", type=whole, metavar="I", help="run.device=ipu: poprun's --num-instances")
    add("--poprun", type=shlex.split, default=[], metavar="FLAGS", help="other flags of poprun")
    dry_run = "check everything and print the plan, start nothing"
    add("--dry-run", action="store_true", help=dry_run)
    add("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _forget_launchers(is_alone: bool) -> str:
    """Remove what other launchers have left in the environment.

    This launcher alone decides what its processes are, for the plan and for the processes.

    Args:
        is_alone: it is the launcher of a single host, which another one may have started.

    Returns:
        The variable that was left over, as it is named to the user, or nothing.
    """
    left_over = ""
    if is_alone:
        launchers.check_first(os.environ)
        left_over = launchers.left_over(os.environ)
    launchers.forget(os.environ)
    return left_over


def _load(options: argparse.Namespace) -> _Given:
    """Load the recipe. A list of cuts that does not fit --stages gives way to automatic ones."""
    # Options come behind the overrides of the command line: the last one counts.
    overrides = list(options.overrides)
    if options.replicas:
        overrides.append(f"parallel.replicas={options.replicas}")
    if options.stages:
        overrides.append(f"parallel.stages={options.stages}")
    if options.elastic:
        overrides.append("parallel.elastic=true")
    try:
        return _Given(loading.load(options.config, overrides), overrides, note="")
    except ConfigError as error:
        has_cuts = any(text.startswith("parallel.split=") for text in overrides)
        if not options.stages or has_cuts:
            raise
        # The recipe's cuts may be the fault. If they are not, the first error is the one to show.
        overrides.append("parallel.split=auto")
        try:
            recipe = loading.load(options.config, overrides)
        except ConfigError:
            raise error from None
    fault = f"--stages {options.stages} does not fit the recipe's parallel.split"
    return _Given(recipe, overrides, note=f" ({fault}: parallel.split=auto instead)")


def _automatic_replicas(recipe: Recipe, number: int, dry_run: bool) -> int:
    """Return as many replicas as the devices of all hosts hold.

    The `number` hosts are taken to be like this one; without GPUs each gets one replica.
    """
    if recipe.run.device == "ipu":
        replicas = batch.whole_pod(recipe).parallel.replicas
        if replicas:
            return replicas
        # What one replica does is planned all the same.
        if dry_run:
            return 1
        raise UserError(
            "how many IPUs there are is not known here; give the number of replicas: --replicas R"
        )
    gpus = _gpus(recipe.run.device)
    if not gpus:
        return number
    return max(1, gpus * number // recipe.parallel.stages)


def _gpus(device: str) -> int:
    """Return the number of GPUs of this host that a recipe with this `run.device` may use."""
    if device not in ("auto", "cuda"):
        return 0
    # Without a driver there are none: that spares runs on CPUs loading torch here.
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_device(options: argparse.Namespace, device: str, number: int) -> None:
    """Refuse options that do not go with the device, on `number` hosts. Raises UserError."""
    if device != "ipu":
        if options.instances or options.poprun:
            flag = "--instances" if options.instances else "--poprun"
            raise UserError(f"{flag} goes with run.device=ipu, but run.device is {device}")
        return
    # poprun has its own options for hosts, and restarts nothing.
    if number > 1:
        raise UserError(
            "poprun itself starts all hosts of a pod; leave --nnodes, --node-rank and --master out"
        )
    if options.max_restarts:
        raise UserError(
            "--max-restarts is for CPUs and GPUs; after poprun has failed, the same command resumes"
        )


def _check_layout(layout: _Layout, elastic: bool) -> None:
    """Refuse processes that do not divide over the hosts. Raises UserError."""
    number = layout.hosts.number
    stages = layout.stages
    if layout.world % number:
        raise UserError(
            f"{layout.world} processes = {layout.shape} do not divide over {number} hosts; "
            f"give --replicas so that replicas x {stages} is a multiple of {number}"
        )
    # A host that fails must not take a part of a replica with it that lives on another one.
    if elastic and layout.local % stages:
        raise UserError(
            "parallel.elastic needs whole replicas on a host: "
            f"a replica has {stages} stages, but each host has {layout.local} processes"
        )


def _check_gpus(layout: _Layout, device: str) -> None:
    """Refuse several processes with fewer GPUs than each needs one. Raises UserError.

    NCCL takes a while to refuse that.
    """
    if layout.world == 1:
        return
    gpus = _gpus(device)
    # Any number of processes may share a CPU.
    is_for_gpus = gpus > 0 or device == "cuda"
    if is_for_gpus and layout.local > gpus:
        over = f"{layout.shape} over {count(layout.hosts.number, 'host')}"
        raise UserError(
            f"{layout.local} processes on this host ({over}) need a GPU each, but there are {gpus}; "
            "lower --replicas or --stages"
        )


def _poprun(options: argparse.Namespace, layout: _Layout, pod: Optional[int]) -> List[str]:
    """Return the beginning of poprun's command line. Raises UserError.

    Args:
        options: of this command.
        layout: a process of it is an IPU here.
        pod: IPUs that there are, if that is known.
    """
    replicas = layout.replicas
    stages = layout.stages
    fitting = poprun.fitting_instances(replicas, stages)
    # An instance is a process of the host, which feeds several replicas.
    instances = options.instances or fitting
    if replicas % instances:
        raise UserError(
            f"--instances {instances} does not divide {replicas} replicas; give a divisor"
        )
    fault = poprun.fault_of_pod(replicas, stages, pod)
    if fault:
        assert pod is not None  # a pod of unknown size has no fault
        raise UserError(f"{fault}; give --replicas {max(1, pod // stages)}, or correct ipu.pod")
    # IPUs of one process: PopTorch takes a power of two of them up to 64.
    fault = poprun.fault_of_instance(replicas // instances, stages)
    if fault:
        raise UserError(f"{fault}; give --instances {fitting} or another divisor of {replicas}")
    words = ["poprun"]
    for flag, number in zip(poprun.FLAGS, (replicas, stages, instances)):
        words += [flag, str(number)]
    return words + options.poprun


def _torchrun(layout: _Layout) -> List[str]:
    """Return the beginning of the command line by which torchrun would start the same ranks."""
    place = layout.hosts
    words = ["torchrun"]
    if place.number == 1:
        words.append("--standalone")
    else:
        words += [f"--nnodes={place.number}", f"--node-rank={place.this}"]
        words += [f"--master-addr={place.master}", f"--master-port={place.port}"]
    return [*words, f"--nproc-per-node={layout.local}"]


def _processes(layout: _Layout, on_ipus: bool) -> str:
    """Return the number of processes, or of IPUs, in words."""
    if on_ipus:
        return count(layout.world, "IPU")
    return count(layout.world, "process", "processes")


def _summary(layout: _Layout, on_ipus: bool, note: str, command: List[str]) -> str:
    """Return a line for the user on the processes, their hosts and their command.

    Args:
        layout: of the processes.
        on_ipus: poprun starts them.
        note: see `_Given`.
        command: by which all would be started.
    """
    place = layout.hosts
    where = ""
    # Which hosts of a pod are used is up to poprun.
    if not on_ipus:
        where = " on this host"
        if place.number > 1:
            where = f" on {place.number} hosts, {layout.local} here on host {place.this}"
    words = shlex.join(map(masked, command))
    return f"{_processes(layout, on_ipus)} = {layout.shape}{where}{note}: {words}"


def _become_poprun(plan: _Plan) -> int:
    """Replace this process by poprun, or return the exit code after a signal.

    Args:
        plan: what poprun is to start.

    Raises:
        UserError: there is no poprun.
    """
    program = shutil.which("poprun")
    if program is None:
        raise UserError(
            "run.device=ipu needs poprun on the PATH; source the SDK's `enable`, or --dry-run"
        )
    # Flushed, since execv throws away what is still in the buffer.
    print(plan.summary, flush=True)
    if stopping.let_go():
        return launchers.stopped_early()
    os.execv(program, [program, *plan.command[1:]])


def _run_ranks(options: argparse.Namespace, plan: _Plan) -> int:
    """Start the ranks of this host and watch them. Return the exit code."""
    from parallel import agent

    layout = plan.layout
    parallel = plan.recipe.parallel
    # The handlers come before torch is loaded, which takes seconds. The earlier ones have noted what
    # came before.
    signals = agent.Signals()
    if stopping.was_asked():
        return launchers.stopped_early()
    # Else each rank warns where hosts have no reverse DNS.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Under SLURM all hosts write into one log: one of them is enough.
    if layout.hosts.this == 0 or options.nnodes:
        print(plan.summary, flush=True)
    # A single process has no generations.
    is_elastic = parallel.elastic and layout.world > 1
    return agent.run(
        layout.hosts,
        layout.local,
        layout.shape,
        plan.rank,
        max_restarts=options.max_restarts,
        signals=signals,
        silence=parallel.silence,
        stages=layout.stages if is_elastic else None,
    )
