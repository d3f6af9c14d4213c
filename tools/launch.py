"""The launcher's command: checks everything, then becomes train.py or poprun, or starts and watches the ranks.

    ./run_pod.sh [--stages K] [--replicas R] [--nnodes N --node-rank I --master HOST[:PORT]] [--max-restarts M]
                 [--instances I] [--poprun=FLAGS] [--dry-run] --config FILE [section.key=value ...]

Exit codes are train.py's. How ranks are started and watched is in parallel/agent.py, how
hosts find each other in parallel/hosts.py.
This file runs on Python 3.8 and loads no torch by itself.
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
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Sequence

from parallel import hosts
from recipe import batch, ipu, loading
from recipe.config import Recipe
from recipe.credentials import masked
from recipe.division import count
from recipe.errors import DONE, ConfigError, UserError
from training.command import Parser, naming, one_line
from training.run_folder import check_owner

_PROGRAM = Path(__file__).resolve().parent.parent / "train.py"


@dataclass(frozen=True)
class Plan:
    """Processes to start: `replicas` x `recipe.parallel.stages` processes of `command` over `hosts`."""

    recipe: Recipe
    hosts: hosts.Hosts
    command: List[str]  # the program and its arguments
    note: str  # what the launcher decided by itself

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.recipe.parallel.replicas

    @property
    def stages(self) -> int:
        """Devices of each copy."""
        return self.recipe.parallel.stages

    @property
    def world(self) -> int:
        """Processes on all hosts."""
        return self.replicas * self.stages

    @property
    def local(self) -> int:
        """Processes on this host."""
        return self.world // self.hosts.number


@one_line()
def main(arguments: Optional[Sequence[str]] = None, program: Path = _PROGRAM) -> int:
    """Runs the command; returns its exit code, or becomes another program. Every rank runs `program`."""
    options = _parser().parse_intermixed_args(arguments)
    plan = _plan(options, program)
    if options.dry_run:
        print(f"{naming(options.config, batch.describe, plan.recipe)}\nlaunch     {_describe(plan, options)}")
        return DONE
    naming(options.config, batch.describe, plan.recipe)
    if plan.recipe.run.device == "ipu":
        return _become_poprun(plan, options)
    if plan.hosts.this == 0:
        check_owner(plan.recipe)
    _check_gpus(plan)
    if plan.world == 1 and not options.max_restarts:
        os.execv(sys.executable, [sys.executable, *plan.command])
    return _start(plan, options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="run_pod.sh",
        description="Train a recipe on all devices of one or several hosts.",
        epilog="docs/cluster.md has examples for several hosts and for SLURM.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default="configs/quickstart.yaml", metavar="FILE", help="recipe (default: %(default)s)"
    )
    parser.add_argument("--stages", type=_positive, metavar="K", help="pipeline stages: parallel.stages=K")
    parser.add_argument("--replicas", type=_positive, metavar="R", help="copies of the model: parallel.replicas=R")
    parser.add_argument("--nnodes", type=_positive, metavar="N", help="hosts; SLURM's, in a step of several nodes")
    parser.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0, the master")
    parser.add_argument("--master", metavar="HOST[:PORT]", help="where host 0 listens (port 29500)")
    parser.add_argument(
        "--max-restarts", type=_whole, default=0, metavar="M", help="times to start again after a failure (default: 0)"
    )
    parser.add_argument("--instances", type=_positive, metavar="I", help="run.device=ipu: poprun's --num-instances")
    parser.add_argument(
        "--poprun", type=shlex.split, default=[], metavar="FLAGS", help="run.device=ipu: other flags of poprun"
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _positive(text: str) -> int:
    number = _whole(text)
    if number == 0:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return int(text)


def _plan(options: argparse.Namespace, program: Path) -> Plan:
    """The plan of these options. Raises UserError."""
    overrides = list(options.overrides)
    if options.replicas:
        overrides.append(f"parallel.replicas={options.replicas}")
    recipe, overrides, note = _with_stages(options, overrides)
    found = hosts.find(options.nnodes, options.node_rank, options.master)
    if recipe.run.device == "ipu":
        if found.number > 1:
            raise UserError("poprun itself starts all hosts of a pod; leave --nnodes, --node-rank and --master out")
        if options.max_restarts:
            raise UserError(
                "--max-restarts is for ranks of torchrun; after poprun has failed, the same command resumes"
            )
    elif options.instances or options.poprun:
        flag = "--instances" if options.instances else "--poprun"
        raise UserError(f"{flag} goes with run.device=ipu, but run.device is {recipe.run.device}")
    replicas = recipe.parallel.replicas or _automatic_replicas(recipe, found.number, options.dry_run)
    # Only checked and shown with this number: the ranks find it by counting themselves.
    recipe = loading.load(options.config, [*overrides, f"parallel.replicas={replicas}"])
    if recipe.run.device == "ipu":
        _check_instances(recipe, options.instances or 1)
    plan = Plan(recipe, found, [str(program), "--config", options.config, *overrides], note)
    if plan.world % found.number:
        raise UserError(
            f"{plan.world} processes = {_shape(plan)} do not divide over {found.number} hosts; "
            f"give --replicas so that replicas x {plan.stages} is a multiple of {found.number}"
        )
    return plan


def _check_instances(recipe: Recipe, instances: int) -> None:
    """Refuse poprun processes without equal shares of the replicas, or of too many IPUs. Raises UserError."""
    replicas = recipe.parallel.replicas
    if replicas % instances:
        raise UserError(f"--instances {instances} does not divide {replicas} replicas; give a divisor")
    ipu.check_served(replicas // instances, recipe.parallel.stages, replicas)


def _with_stages(options: argparse.Namespace, overrides: List[str]) -> tuple:
    """(recipe, overrides, note): a list of cuts that does not fit --stages gives way to automatic ones."""
    if not options.stages:
        return loading.load(options.config, overrides), overrides, ""
    overrides = [*overrides, f"parallel.stages={options.stages}"]
    try:
        return loading.load(options.config, overrides), overrides, ""
    except ConfigError:
        if any(text.startswith("parallel.split=") for text in overrides):
            raise
        automatic = [*overrides, "parallel.split=auto"]
        try:
            recipe = loading.load(options.config, automatic)
        except ConfigError:
            recipe = None
        if recipe is None:
            raise  # what is wrong is something else
        note = f"--stages {options.stages} does not fit the recipe's parallel.split: parallel.split=auto instead"
        return recipe, automatic, note


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

    return torch.cuda.devicecount() if torch.cuda.is_available() else 0


def _check_gpus(plan: Plan) -> None:
    """NCCL refuses two ranks on one GPU, after a while and at length. Raises UserError."""
    device = plan.recipe.run.device
    if plan.world == 1 or device == "cpu":
        return
    gpus = _gpus(plan.recipe)
    if plan.local > gpus and (gpus or device == "cuda"):
        raise UserError(
            f"{plan.local} processes on this host ({_shape(plan)} over {count(plan.hosts.number, 'host')}) need a "
            f"GPU each, but there {'is' if gpus == 1 else 'are'} {gpus}; lower --replicas or --stages"
        )


def _become_poprun(plan: Plan, options: argparse.Namespace) -> int:
    poprun = shutil.which("poprun")
    if poprun is None:
        raise UserError("run.device=ipu needs poprun on the PATH; source the enable.sh of the Poplar SDK, or --dry-run")
    print(_describe(plan, options), flush=True)
    os.execv(poprun, [poprun, *_poprun_arguments(plan, options)])


def _poprun_arguments(plan: Plan, options: argparse.Namespace) -> List[str]:
    instances = ["--num-instances", str(options.instances)] if options.instances else []
    shape = ["--num-replicas", str(plan.replicas), "--ipus-per-replica", str(plan.stages), *instances]
    return [*shape, *options.poprun, sys.executable, *plan.command]


def _start(plan: Plan, options: argparse.Namespace) -> int:
    """Starts this host's ranks and stays until they are gone."""
    from parallel.signals import Signals

    signals = Signals()  # before torch is loaded, which takes seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns where hosts have no reverse DNS
    print(_describe(plan, options), flush=True)
    from parallel import agent

    silence = plan.recipe.parallel.silence
    return agent.run(plan.hosts, plan.local, _shape(plan), plan.command, options.max_restarts, signals, silence)


def _describe(plan: Plan, options: argparse.Namespace) -> str:
    """One line: what is started, as a command that does the same."""
    note = f" ({plan.note})" if plan.note else ""
    if plan.recipe.run.device == "ipu":
        command = ["poprun", *_poprun_arguments(plan, options)]
        return f"{count(plan.world, 'IPU')} = {_shape(plan)}{note}: {_quoted(command)}"
    where, shape = "this host", ["--standalone"]
    if plan.hosts.number > 1:
        number, this = plan.hosts.number, plan.hosts.this
        where = f"{number} hosts, {plan.local} here on host {this}"
        shape = [f"--nnodes={number}", f"--node-rank={this}", f"--master-addr={plan.hosts.master}"]
        shape.append(f"--master-port={plan.hosts.port}")
    command = ["torchrun", *shape, f"--nproc-per-node={plan.local}", *plan.command]
    if plan.world == 1 and not options.max_restarts:
        command = [sys.executable, *plan.command]
    return f"{count(plan.world, 'process', 'processes')} = {_shape(plan)} on {where}{note}: {_quoted(command)}"


def _quoted(command: Sequence[str]) -> str:
    return " ".join(shlex.quote(masked(part)) for part in command)


def _shape(plan: Plan) -> str:
    return f"{count(plan.replicas, 'replica')} x {count(plan.stages, 'stage')}"
