"""Runs a function in several ranks on this machine, connected by gloo.

Ranks are forked from a server that has imported the heavy modules already. The function and its
arguments travel by pickle: it must be at the top level of its module. Results come back by value.
"""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection, forkserver
from pathlib import Path

import torch
from torch import distributed

from parallel.parent_death import die_with_parent

# What a rank would else load itself, for half a second each. The last one must stay the last.
_PRELOAD = (
    "encodings.idna",
    "matplotlib",
    "numpy",
    "PIL.Image",
    "PIL.PngImagePlugin",
    "pytest",
    "timm",
    "yaml",
    "torch.distributed",
    "torch.distributed.elastic.utils.store",
    "torch.distributed.pipelining",
    "torchvision",
    "torchvision.transforms.v2",
    "engines.micro_batch",
    "engines.torch_engine",
    "models.blocks",
    "models.native.block",
    "train",
    "training.run",
    "parallel.dense",
    "parallel.pipeline",
    "parallel.quantized",
    "parallel.topk",
    "tests.frozen",
)


def fork_server():
    """The multiprocessing context whose processes are forked from a running server that has loaded
    heavy modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    forkserver.ensure_running()
    return context


def run(size, function, *args, timeout=240, connect=True, **environment):
    """Return the results of function(rank, size, *args) in `size` processes, in the order of the
    ranks.

    Each process has one torch thread, warnings that are errors, and torchrun's variables. If one
    fails, all are killed.

    Args:
        timeout: seconds, for all ranks from their start to their results; also of every collective.
        connect: whether torch.distributed is initialised with gloo before the call and destroyed
            after it.
        environment: further variables of the processes.

    Raises RuntimeError with the output of all ranks where one fails; TimeoutError with the stacks
    of those that hang.
    """
    call = pickle.dumps((function, args))
    variables = {**addresses(), **environment}
    with started(range(size), _rank, size, call, timeout, connect, variables) as (
        processes,
        folder,
    ):
        for rank in ends(processes, folder, timeout):
            if not (folder / f"result-{rank}").exists():
                raise RuntimeError(
                    f"rank {rank} failed, exit code {processes[rank].exitcode}\n{_output(folder)}"
                )
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in processes]


@contextlib.contextmanager
def started(ranks, target, *arguments):
    """Processes {rank: process} that call target(rank, folder, *arguments), and the folder; killed
    at the end."""
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = {}
        for rank in ranks:
            processes[rank] = context.Process(target=target, args=(rank, Path(folder), *arguments))
            processes[rank].start()
            stack.callback(_kill, processes[rank])
        yield processes, Path(folder)


def ends(processes, folder, seconds):
    """Yield the ranks as they end.

    Raises TimeoutError with the output and stacks of all where some hang.
    """
    end = time.monotonic() + seconds
    waiting = {process.sentinel: rank for rank, process in processes.items()}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} hang after {seconds} s\n{_output(folder)}"
            )
        for sentinel in ready:
            processes[waiting[sentinel]].join()
            yield waiting.pop(sentinel)


def _output(folder):
    return "\n".join(
        f"{path.name}:\n{path.read_text(errors='replace')}"
        for path in sorted(folder.glob("[oe]*-*"))
    )


def _kill(process):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # with the workers it started
    process.kill()
    process.join()


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def addresses():
    """Variables by which ranks meet at the loopback."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }


def of_torchrun(rank, size):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def set_up_rank(variables, out, err):
    """Give a process its variables, files for stdout and stderr, stacks on SIGUSR1, and one
    thread."""
    die_with_parent()
    os.setsid()
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    os.environ.update({name: str(value) for name, value in variables.items()})
    torch.set_num_threads(1)


def _rank(rank, folder, size, call, timeout, connect, variables):
    set_up_rank({**of_torchrun(rank, size), **variables}, *[folder / f"out-{rank}"] * 2)
    try:
        function, args = pickle.loads(call)
        warnings.simplefilter("error")
        if connect:
            store = distributed.FileStore(str(folder / "store"), size)
            limit = datetime.timedelta(seconds=timeout)
            distributed.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=limit
            )
        result = function(rank, size, *args)
        if connect:
            distributed.destroy_process_group()
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever the groups and threads of a failed rank still wait for
