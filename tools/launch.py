"""The launcher's command: checks everything, then becomes train.py or poprun, or starts and watches the ranks.

    ./run_pod.sh [--stages K] [--replicas R] [--nnodes N --node-rank I --master HOST[:PORT]] [--max-restarts M]
                 [--instances I] [--poprun=FLAGS] [--dry-run] --config FILE [section.key=value ...]

Exit codes are train.py's. Ranks are started and watched by parallel/agent.py; hosts find each other by
parallel/hosts.py. This file runs on Python 3.8 and loads no torch by itself.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import argparse
import ctypes
import shlex
import shutil
from pathlib import Path
from typing import List, NamedTuple, Optional, Sequence, Tuple

from parallel import hosts
from parallel.hosts import Hosts
from recipe import batch, ipu, loading
from recipe.config import Recipe
from recipe.credentials import masked
from recipe.division import count
from recipe.errors import DONE, ConfigError, UserError
from tools.arguments import whole, within
from training.command import Parser, naming, one_line
from training.run_folder import check_owner

_PROGRAM = Path(__file__).resolve().parent.parent / "train.py"


class Plan(NamedTuple):
    """Ranks to start: each runs `program` (with its arguments), `local` of them on this host, `world` on all `hosts`.

    command: does the same without this launcher. text: one line about all that.
    """

    recipe: Recipe
    hosts: Hosts
    world: int
    local: int
    shape: str
    program: List[str]
    command: List[str]
    text: str


@one_line()
def main(arguments: Optional[Sequence[str]] = None, program: Path = _PROGRAM) -> int:
    """Runs the command; returns its exit code, or becomes another program. Every rank runs `program`."""
    options = _parser().parse_intermixed_args(arguments)
    plan = _plan(options, program)
    description = naming(options.config, batch.describe, plan.recipe)
    if options.dry_run:
        print(f"{description}\nlaunch     {plan.text}")
        return DONE
    if plan.recipe.run.device == "ipu":
        poprun = shutil.which("poprun")
        if poprun is None:
            remedy = "source the enable.sh of the Poplar SDK, or --dry-run"
            raise UserError(f"run.device=ipu needs poprun on the PATH; {remedy}")
        print(plan.text, flush=True)
        os.execv(poprun, [poprun, *plan.command[1:]])
    if plan.hosts.this == 0:
        check_owner(plan.recipe)
    _check_gpus(plan)
    if plan.world == 1 and not options.max_restarts:
        os.execv(sys.executable, plan.command)
    return _start(plan, options.max_restarts)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="run_pod.sh",
        description="Train a recipe on all devices of one or several hosts.",
        epilog="docs/cluster.md has examples for several hosts and for SLURM.",
        allow_abbrev=False,
    )
    own, again = "configs/quickstart.yaml", "times to start again after a failure (default: 0)"
    parser.add_argument("--config", default=own, metavar="FILE", help="recipe (default: %(default)s)")
    parser.add_argument("--stages", type=whole, metavar="K", help="pipeline stages: parallel.stages=K")
    parser.add_argument("--replicas", type=whole, metavar="R", help="copies of the model: parallel.replicas=R")
    parser.add_argument("--nnodes", type=whole, metavar="N", help="hosts; SLURM's, in a step of several nodes")
    parser.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0, the master")
    parser.add_argument("--master", metavar="HOST[:PORT]", help="where host 0 listens (port 29500)")
    parser.add_argument("--max-restarts", type=within(0, 10**9), default=0, metavar="M", help=again)
    parser.add_argument("--instances", type=whole, metavar="I", help="run.device=ipu: poprun's --num-instances")
    flags = "run.device=ipu: other flags of poprun"
    parser.add_argument("--poprun", type=shlex.split, default=[], metavar="FLAGS", help=flags)
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _plan(options: argparse.Namespace, program: Path) -> Plan:
    """The plan of these options. Raises UserError."""
    recipe, overrides, note = _with_stages(options)
    found = hosts.find(options.nnodes, options.node_rank, options.master)
    on_ipus = recipe.run.device == "ipu"
    if on_ipus and found.number > 1:
        raise UserError("poprun itself starts all hosts of a pod; leave --nnodes, --node-rank and --master out")
    if on_ipus and options.max_restarts:
        raise UserError("--max-restarts is for CPUs and GPUs; after poprun has failed, the same command resumes")
    if not on_ipus and (options.instances or options.poprun):
        flag = "--instances" if options.instances else "--poprun"
        raise UserError(f"{flag} goes with run.device=ipu, but run.device is {recipe.run.device}")
    replicas = recipe.parallel.replicas or _automatic_replicas(recipe, found.number, options.dry_run)
    # Only checked and shown with this number: the ranks find it by counting themselves.
    recipe = loading.load(options.config, [*overrides, f"parallel.replicas={replicas}"])
    stages = recipe.parallel.stages
    world, shape = replicas * stages, f"{count(replicas, 'replica')} x {count(stages, 'stage')}"
    local, arguments = world // found.number, [str(program), "--config", options.config, *overrides]
    if world % found.number:
        remedy = f"give --replicas so that replicas x {stages} is a multiple of {found.number}"
        raise UserError(f"{world} processes = {shape} do not divide over {found.number} hosts; {remedy}")
    if on_ipus:
        instances = options.instances or 1
        if replicas % instances:
            raise UserError(f"--instances {instances} does not divide {replicas} replicas; give a divisor")
        ipu.check_served(replicas // instances, stages, replicas)
        command = ["poprun", "--num-replicas", str(replicas), "--ipus-per-replica", str(stages)]
        command += ["--num-instances", str(options.instances)] if options.instances else []
        command += [*options.poprun, sys.executable, *arguments]
    elif world == 1 and not options.max_restarts:
        command = [sys.executable, *arguments]
    else:
        rendezvous = ["--standalone"]
        if found.number > 1:
            rendezvous = [f"--nnodes={found.number}", f"--node-rank={found.this}"]
            rendezvous += [f"--master-addr={found.master}", f"--master-port={found.port}"]
        command = ["torchrun", *rendezvous, f"--nproc-per-node={local}", *arguments]
    where = "this host" if found.number == 1 else f"{found.number} hosts, {local} here on host {found.this}"
    ranks = count(world, "IPU") if on_ipus else count(world, "process", "processes")
    place = "" if on_ipus else f" on {where}"
    text = f"{ranks} = {shape}{place}{note}: {' '.join(shlex.quote(masked(part)) for part in command)}"
    return Plan(recipe, found, world, local, shape, arguments, command, text)


def _with_stages(options: argparse.Namespace) -> Tuple[Recipe, List[str], str]:
    """(recipe, overrides, note): a list of cuts that does not fit --stages gives way to automatic ones."""
    given = {"parallel.replicas": options.replicas, "parallel.stages": options.stages}
    overrides = [*options.overrides, *(f"{key}={value}" for key, value in given.items() if value)]
    try:
        return loading.load(options.config, overrides), overrides, ""
    except ConfigError as error:
        if not options.stages or any(text.startswith("parallel.split=") for text in overrides):
            raise
        overrides.append("parallel.split=auto")
        try:
            recipe = loading.load(options.config, overrides)
        except ConfigError:
            raise error from None  # what is wrong is something else
    note = f" (--stages {options.stages} does not fit the recipe's parallel.split: parallel.split=auto instead)"
    return recipe, overrides, note


def _automatic_replicas(recipe: Recipe, number: int, dry_run: bool) -> int:
    """Number of replicas: as many as the GPUs of all hosts, taken to be like this one, hold; on CPUs one per host."""
    if recipe.run.device == "ipu":
        replicas = batch.whole_pod(recipe).parallel.replicas
        if replicas or dry_run:
            return replicas or 1
        raise UserError("how many IPUs there are is not known here; give the number of replicas: --replicas R")
    gpus = _gpus(recipe)
    return max(1, gpus * number // recipe.parallel.stages) if gpus else number


def _gpus(recipe: Recipe) -> int:
    """GPUs of this host that the recipe may use."""
    if recipe.run.device not in ("auto", "cuda"):
        return 0
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver; spares the CPU's runs loading torch
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_gpus(plan: Plan) -> None:
    """NCCL refuses two ranks on one GPU, after a while and at length. Raises UserError."""
    device, gpus = plan.recipe.run.device, 0
    if plan.world > 1 and device != "cpu":
        gpus = _gpus(plan.recipe)
    if plan.world > 1 and plan.local > gpus and (gpus or device == "cuda"):
        ranks = f"{plan.local} processes on this host ({plan.shape} over {count(plan.hosts.number, 'host')})"
        raise UserError(f"{ranks} need a GPU each, but there are {gpus}; lower --replicas or --stages")


def _start(plan: Plan, max_restarts: int) -> int:
    """Starts this host's ranks and stays until they are gone."""
    from parallel import agent

    signals = agent.Signals()  # before torch is loaded, which takes seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns where hosts have no reverse DNS
    print(plan.text, flush=True)
    silence = plan.recipe.parallel.silence
    return agent.run(plan.hosts, plan.local, plan.shape, plan.program, max_restarts, signals, silence)
