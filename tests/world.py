"""Runs a function in several ranks on this machine, connected by gloo: what every test of the exchange starts from.

Ranks are forked from a server that has imported the heavy modules already, so one costs milliseconds. The function
and what it is given travel by pickle: it must be at the top level of its module. Results come back by value.
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
    """The multiprocessing context whose processes are forked from a server that has loaded the heavy modules.

    The server is running on return: its processes inherit the signals that whoever starts it blocks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    forkserver.ensure_running()
    return context


class RankTraceback(Exception):
    """Cause of what `run` raises: the traceback of the rank that failed first, and what it wrote."""

    def __str__(self):
        return f"\n{self.args[0]}"


def run(size, function, *args, timeout=240, connect=True, **environment):
    """Calls function(rank, size, *args) in `size` processes and returns the results, in the order of the ranks.

    Each process has one torch thread, warnings that are errors, and RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT (a free one of the loopback) set as torchrun would.

    Args:
        function: picklable by reference; its result picklable (tensors travel by value).
        timeout: seconds, for all ranks from their start to their results; also of every collective.
        connect: torch.distributed is initialised with gloo before the call and destroyed after it; False leaves
            both to the function.
        environment: further variables of the processes.

    Raises:
        What the first rank to fail raised, with a RankTraceback as cause; RuntimeError where that cannot be pickled or
        a rank died; TimeoutError with the stacks of ranks that hang. All processes are killed before.
    """
    context = fork_server()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        call = pickle.dumps((function, args))
        variables = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            **environment,
        }
        processes, readers = [], {}
        stack.callback(_kill, processes)
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            stack.callback(reader.close)
            arguments = (rank, size, folder, call, writer, timeout, connect, variables)
            process = context.Process(target=_rank, args=arguments)
            process.start()
            writer.close()
            processes.append(process)
            readers[reader] = rank
        # The server has answered: what it took to start is not counted.
        return _collect(processes, readers, Path(folder), timeout)


def _collect(processes, readers, folder, timeout):
    end = time.monotonic() + timeout
    results, waiting = {}, dict(readers)
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            hanging = sorted(waiting.values())
            texts = [f"rank {rank}:\n{_stack(processes[rank], _output_of(folder, rank))}" for rank in hanging]
            raise TimeoutError(f"ranks {hanging} hang after {timeout} s") from RankTraceback("\n".join(texts))
        failures = []
        for reader in ready:
            rank = waiting.pop(reader)
            try:
                when, done, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                when, done, value = 0.0, False, None  # died without a word: the cause of what others say
            if done:
                results[rank] = pickle.loads(value)
            else:
                failures.append((when, rank, value))
        if failures:
            _, rank, value = min(failures, key=lambda failure: failure[:2])
            _raise(rank, value, processes[rank], _output_of(folder, rank))
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    return [results[rank] for rank in range(len(processes))]


def _raise(rank, value, process, output):
    if value is None:
        process.join(1)
        text = output.read_text(errors="replace")
        raise RuntimeError(f"rank {rank} died with exit code {process.exitcode}") from RankTraceback(text)
    error, text = pickle.loads(value)
    cause = RankTraceback(f"rank {rank}:\n{text}{output.read_text(errors='replace')}")
    try:
        error = pickle.loads(error)
    except Exception:
        error = RuntimeError(text.strip().splitlines()[-1])
    raise error from cause


def _stack(process, output):
    """Has a hanging process write where all its threads are, and gives that."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.2)
    return output.read_text(errors="replace") if output.exists() else "has not started"


def _kill(processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with the workers it started
        process.kill()
        process.join()
        process.close()


def _output_of(folder, rank):
    return Path(folder) / f"output-{rank}"


def _free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _rank(rank, size, folder, call, writer, timeout, connect, variables):
    die_with_parent()
    os.setsid()
    output = os.open(_output_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in {**local, **variables}.items()})
    torch.set_num_threads(1)
    try:
        function, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if connect:
                store = distributed.FileStore(str(Path(folder) / "store"), size)
                limit = datetime.timedelta(seconds=timeout)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            result = pickle.dumps(function(rank, size, *args))
            if connect:
                distributed.destroy_process_group()
        message = (time.monotonic(), True, result)
    except BaseException as error:
        try:
            pickled = pickle.dumps(error)
        except Exception:
            pickled = b""
        message = (time.monotonic(), False, pickle.dumps((pickled, traceback.format_exc())))
    sys.stdout.flush()
    writer.send_bytes(pickle.dumps(message))
    writer.close()
    os._exit(0)  # whatever the groups and threads of a failed rank still wait for
