"""Runs a function in several ranks on this machine, connected by gloo.

Ranks are forked from a server that has imported the heavy modules already. The function and its arguments travel by
pickle: it must be at the top level of its module. Results come back by value.
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

_PRELOAD = ("numpy", "PIL.Image", "pytest", "timm", "torch.distributed", "torchvision", "yaml", "tests.preload")


def fork_server():
    """The multiprocessing context whose processes are forked from a running server that has loaded heavy modules."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    forkserver.ensure_running()
    return context


class RankTraceback(Exception):
    """Cause of the exception that `run` raises: traceback and output of ranks."""

    def __str__(self):
        return f"\n{self.args[0]}"


def run(size, function, *args, timeout=240, connect=True, **environment):
    """Return the results of function(rank, size, *args) in `size` processes, in the order of the ranks.

    Each process has one torch thread, warnings that are errors, and torchrun's variables. Whatever fails, all
    processes are killed.

    Args:
        timeout: seconds, for all ranks from their start to their results; also of every collective.
        connect: whether torch.distributed is initialised with gloo before the call and destroyed after it.
        environment: further variables of the processes.

    Raises:
        What the first rank to fail raised, with a RankTraceback as cause; RuntimeError where that cannot be pickled or
        a rank died; TimeoutError with the stacks of ranks that hang.
    """
    call, variables = pickle.dumps((function, args)), {**addresses(), **environment}
    with started(range(size), _rank, size, call, timeout, connect, variables) as (processes, folder):
        for _ in ends(processes, folder, timeout):
            # A rank that died without a result is the cause of what others report.
            ended = [rank for rank, process in processes.items() if process.exitcode is not None]
            failed = {rank: found for rank in ended for found in (_result(folder, rank),) if not found[1]}
            if failed:
                rank = min(failed, key=lambda rank: failed[rank][0])
                _raise(rank, failed[rank][2], processes[rank], _text(folder / f"out-{rank}"))
        return [pickle.loads(_result(folder, rank)[2]) for rank in processes]


def _result(folder, rank):
    """(time, whether it is no failure, pickled value or failure) of a rank that has ended."""
    path = folder / f"result-{rank}"
    return pickle.loads(path.read_bytes()) if path.exists() else (0.0, False, None)


def _raise(rank, value, process, output):
    if value is None:
        raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from RankTraceback(output)
    error, text = pickle.loads(value)
    try:
        error = pickle.loads(error)
    except Exception:
        error = RuntimeError(text.strip().splitlines()[-1])
    raise error from RankTraceback(f"rank {rank}:\n{text}{output}")


@contextlib.contextmanager
def started(ranks, target, *arguments):
    """Processes {rank: process} that call target(rank, folder, *arguments), and the folder; killed at the end."""
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = {}
        for rank in ranks:
            processes[rank] = context.Process(target=target, args=(rank, Path(folder), *arguments))
            processes[rank].start()
            stack.callback(_kill, processes[rank])
        yield processes, Path(folder)


def ends(processes, folder, seconds):
    """Yield the ranks as they end. Raises TimeoutError with the output and stacks of all where some hang."""
    end, waiting = time.monotonic() + seconds, {process.sentinel: rank for rank, process in processes.items()}
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.3)
            text = "\n".join(f"{path.name}:\n{_text(path)}" for path in sorted(folder.glob("[oe]*-*")))
            raise TimeoutError(f"ranks {sorted(waiting.values())} hang after {seconds} s") from RankTraceback(text)
        for sentinel in ready:
            processes[waiting[sentinel]].join()
            yield waiting.pop(sentinel)


def _text(path):
    return path.read_text(errors="replace") if path.exists() else ""


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
    return {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}


def of_torchrun(rank, size):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


def set_up_rank(variables, out, err):
    """Give a process its variables, files for stdout and stderr, stacks on SIGUSR1, and one thread."""
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
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if connect:
                store = distributed.FileStore(str(folder / "store"), size)
                limit = datetime.timedelta(seconds=timeout)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            result = True, pickle.dumps(function(rank, size, *args))
            if connect:
                distributed.destroy_process_group()
    except BaseException as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        result = False, pickle.dumps((pickled, traceback.format_exc()))
    sys.stdout.flush()
    (folder / f"result-{rank}.tmp").write_bytes(pickle.dumps((time.monotonic(), *result)))
    (folder / f"result-{rank}.tmp").rename(folder / f"result-{rank}")
    os._exit(0)  # whatever the groups and threads of a failed rank still wait for
