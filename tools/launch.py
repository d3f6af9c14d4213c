"""The launcher's command: checks everything, then becomes train.py or poprun, or starts and watches the ranks.

    ./run_pod.sh [--stages K] [--replicas R] [--nnodes N --node-rank I --master HOST[:PORT]] [--elastic]
                 [--max-restarts M] [--instances I] [--poprun=FLAGS] [--dry-run] --config FILE [section.key=value ...]

Exit codes are train.py's. Ranks are started and watched by parallel/agent.py; hosts find each other by
parallel/hosts.py. This file runs on Python 3.8 and loads no torch by itself.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__, computes=False)

import argparse
import ctypes
import shlex
import shutil
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from parallel import hosts, launchers
from parallel.hosts import Hosts
from recipe import batch, loading
from recipe.config import Recipe
from recipe.credentials import masked
from recipe.division import count
from recipe.errors import DONE, ConfigError, UserError
from recipe.ipu import poprun
from tools.arguments import whole, within
from training import preflight
from training.command import Parser, naming, one_line
from training.run_folder import check_owner

_PROGRAM = Path(__file__).resolve().parent.parent / "train.py"


@one_line()
def main(arguments: Optional[Sequence[str]] = None, program: Path = _PROGRAM) -> int:
    """Runs the command; returns its exit code, or becomes another program. Every rank runs `program`."""
    options = _parser().parse_intermixed_args(arguments)
    place = hosts.find(options.nnodes, options.node_rank, options.master)
    if place.number == 1:
        launchers.check_first(os.environ)
    left_over = launchers.left_over(os.environ) if place.number == 1 else ""
    launchers.forget(os.environ)  # this launcher alone says what its processes are: to the plan as to the processes
    recipe, overrides, note = _with_stages(options)
    on_ipus = _checked_device(options, recipe, place) == "ipu"
    replicas = recipe.parallel.replicas or _automatic_replicas(recipe, place.number, options.dry_run)
    # Only checked and shown with this number: the ranks find it by counting themselves.
    recipe = loading.load(options.config, [*overrides, f"parallel.replicas={replicas}"])
    stages = recipe.parallel.stages
    world, shape = replicas * stages, f"{count(replicas, 'replica')} x {count(stages, 'stage')}"
    local, rank = world // place.number, [str(program), "--config", options.config, *overrides]
    if world % place.number:
        remedy = f"give --replicas so that replicas x {stages} is a multiple of {place.number}"
        raise UserError(f"{world} processes = {shape} do not divide over {place.number} hosts; {remedy}")
    if recipe.parallel.elastic and local % stages:
        found = f"{stages} stages, but each host has {local} processes"
        raise UserError(f"parallel.elastic needs whole replicas on a host: a replica has {found}")
    single = world == 1 and not options.max_restarts
    command = (
        _poprun(options, replicas, stages, recipe.ipu.pod) if on_ipus else [] if single else _torchrun(place, local)
    )
    command += [sys.executable, *rank] if on_ipus or single else rank
    where = "this host" if place.number == 1 else f"{place.number} hosts, {local} here on host {place.this}"
    ranks = count(world, "IPU") if on_ipus else count(world, "process", "processes")
    text = f"{ranks} = {shape}{'' if on_ipus else f' on {where}'}{note}: {shlex.join(map(masked, command))}"
    description = naming(options.config, batch.describe, recipe)
    if place.this == 0:
        naming(options.config, preflight.check, recipe)
    if options.dry_run:
        print(f"{description}\nlaunch     {text}")
        return DONE
    if left_over:
        print(f"{left_over} in the environment is set aside: {ranks} of this launcher", file=sys.stderr, flush=True)
    if on_ipus:
        program = shutil.which("poprun")
        if program is None:
            raise UserError("run.device=ipu needs poprun on the PATH; source the SDK's `enable`, or --dry-run")
        print(text, flush=True)
        os.execv(program, [program, *command[1:]])
    if place.this == 0:
        check_owner(recipe)
    gpus = _gpus(recipe) if world > 1 else local
    if local > gpus and (gpus or recipe.run.device == "cuda"):  # NCCL takes a while to refuse that
        processes = f"{local} processes on this host ({shape} over {count(place.number, 'host')})"
        raise UserError(f"{processes} need a GPU each, but there are {gpus}; lower --replicas or --stages")
    if single:
        os.execv(sys.executable, command)
    from parallel import agent

    signals = agent.Signals()  # before torch is loaded, which takes seconds
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each rank warns where hosts have no reverse DNS
    if place.this == 0 or options.nnodes:  # under SLURM all hosts write into one log
        print(text, flush=True)
    parallel = recipe.parallel
    of_replica = stages if parallel.elastic and world > 1 else None  # one process has no generations
    return agent.run(place, local, shape, rank, options.max_restarts, signals, parallel.silence, of_replica)


def _parser() -> Parser:
    about = "Train a recipe on all devices of one or several hosts, or under SLURM (docs/cluster.md)."
    parser = Parser(prog="run_pod.sh", description=about, allow_abbrev=False)
    parser.add_argument("--config", default="configs/quickstart.yaml", metavar="FILE", help="recipe (%(default)s)")
    parser.add_argument("--stages", type=whole, metavar="K", help="pipeline stages: parallel.stages=K")
    parser.add_argument("--replicas", type=whole, metavar="R", help="copies of the model: parallel.replicas=R")
    parser.add_argument("--nnodes", type=whole, metavar="N", help="hosts; SLURM's, in a step of several nodes")
    parser.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0, the master")
    parser.add_argument("--master", metavar="HOST[:PORT]", help="where host 0 listens (port 29500)")
    parser.add_argument("--elastic", action="store_true", help="go on without lost replicas: parallel.elastic=true")
    parser.add_argument("--max-restarts", type=within(0, 10**9), default=0, metavar="M", help="after failures (0)")
    parser.add_argument("--instances", type=whole, metavar="I", help="run.device=ipu: poprun's --num-instances")
    parser.add_argument("--poprun", type=shlex.split, default=[], metavar="FLAGS", help="other flags of poprun")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="replaces a key of the recipe")
    return parser


def _checked_device(options: argparse.Namespace, recipe: Recipe, place: Hosts) -> str:
    device = recipe.run.device
    if device != "ipu" and (options.instances or options.poprun):
        flag = "--instances" if options.instances else "--poprun"
        raise UserError(f"{flag} goes with run.device=ipu, but run.device is {device}")
    if device == "ipu" and place.number > 1:
        raise UserError("poprun itself starts all hosts of a pod; leave --nnodes, --node-rank and --master out")
    if device == "ipu" and options.max_restarts:
        raise UserError("--max-restarts is for CPUs and GPUs; after poprun has failed, the same command resumes")
    return device


def _poprun(options: argparse.Namespace, replicas: int, stages: int, pod: Optional[int]) -> List[str]:
    fitting = poprun.fitting_instances(replicas, stages)
    instances = options.instances or fitting
    if replicas % instances:
        raise UserError(f"--instances {instances} does not divide {replicas} replicas; give a divisor")
    fault = poprun.fault_of_pod(replicas, stages, pod)
    if fault:
        raise UserError(f"{fault}; give --replicas {max(1, pod // stages)}, or correct ipu.pod")
    fault = poprun.fault_of_instance(replicas // instances, stages)
    if fault:
        raise UserError(f"{fault}; give --instances {fitting} or another divisor of {replicas}")
    flags = zip(poprun.FLAGS, (replicas, stages, instances))
    return ["poprun", *(word for flag, number in flags for word in (flag, str(number))), *options.poprun]


def _torchrun(place: Hosts, local: int) -> List[str]:
    rendezvous = ["--standalone"]
    if place.number > 1:
        rendezvous = [f"--nnodes={place.number}", f"--node-rank={place.this}"]
        rendezvous += [f"--master-addr={place.master}", f"--master-port={place.port}"]
    return ["torchrun", *rendezvous, f"--nproc-per-node={local}"]


def _with_stages(options: argparse.Namespace) -> Tuple[Recipe, List[str], str]:
    """(recipe, overrides, note): a list of cuts that does not fit --stages gives way to automatic ones."""
    given = {"parallel.replicas": options.replicas, "parallel.stages": options.stages}
    overrides = [*options.overrides, *(f"{key}={value}" for key, value in given.items() if value)]
    overrides += ["parallel.elastic=true"] if options.elastic else []
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
    """As many replicas as the GPUs of all hosts, taken to be like this one, hold; on CPUs one per host."""
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
