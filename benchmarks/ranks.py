"""Shared by benchmarks with processes of their own: how these start, ranks that take turns, and our engine in them."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import socket
import time
import traceback
from multiprocessing import connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from benchmarks import claims
from common.errors import first_line
from data.batches import MicroBatch
from engines.base import one_step
from engines.torch_engine import TorchEngine
from parallel import parent_death
from parallel.parent_death import die_with_parent
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import divide
from recipe.config import Recipe
from recipe.settled import image_size

# Processes that call a function -------------------------------------------------------------------


def run(size: int, function: Callable, *args: Any) -> List[Any]:
    """Call function(rank, *args) in fresh processes of one torch thread each.

    Their environment is as `parallel/joining.py` reads it. The function and what it takes and
    returns are pickled.

    Args:
        size: number of processes.
        function: what they call.
        args: what it takes behind the rank.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        free_port = server.getsockname()[1]
    prepare = functools.partial(_on_this_host, size, free_port)
    return results_of("spawn", size, prepare, function, *args)


def results_of(
    way: str, size: int, prepare: Callable[[int], None], function: Callable, *args: Any
) -> List[Any]:
    """Call prepare(rank) and then function(rank, *args) in processes, as `run` does.

    Args:
        way: how the processes start: "spawn" or "fork".
        size: their number.
        prepare: called before the function.
        function: what they call.
        args: what it takes behind the rank.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    workers: List[_Worker] = []
    results: Dict[int, Any] = {}
    try:
        for rank in range(size):
            call = functools.partial(_one_result, prepare, function, rank, args)
            workers.append(_started(way, call))
        waiting = dict(enumerate(workers))
        # Results are taken as they come, so that the first failure ends all.
        while waiting:
            ready = connection.wait([worker.reader for worker in waiting.values()])
            for rank, worker in list(waiting.items()):
                if worker.reader in ready:
                    del waiting[rank]
                    results[rank] = _result_of_rank(rank, worker)
        return [results[rank] for rank in range(size)]
    finally:
        for worker in workers:
            worker.end()


def stream(
    seconds: float,
    function: Callable[..., Iterator[Any]],
    *args: Any,
    way: str = "spawn",
    each: bool = False,
) -> Iterator[Any]:
    """Yield what function(*args) yields in a process of its own, as it comes.

    Args:
        seconds: that it may take.
        function: what the process calls.
        args: what it takes.
        way: how the process starts: "spawn" or "fork".
        each: `seconds` are for each value, not for all.

    Raises:
        RuntimeError: the function raised or its process died.
        TimeoutError: it took longer than `seconds`. The process is killed before.
    """
    end = time.monotonic() + seconds
    worker = _started(way, functools.partial(function, *args))
    try:
        while worker.reader.poll(seconds if each else max(0.0, end - time.monotonic())):
            try:
                message = worker.receive()
            except EOFError:
                worker.process.join()
                code = worker.process.exitcode
                if code:
                    raise RuntimeError(f"its process ended with exit code {code}") from None
                return
            if message.failed:
                raise RuntimeError(message.value)
            yield message.value
        raise TimeoutError(f"not done after {seconds:.0f} s")
    finally:
        worker.end()


class _Message(NamedTuple):
    """A message of a worker: a value, or its error's line and traceback."""

    failed: bool
    value: Any


class _Worker(NamedTuple):
    """A process that was started, and the end of the pipe on which its messages come."""

    process: BaseProcess
    reader: connection.Connection

    def receive(self) -> _Message:
        """Wait for a message. Raises EOFError if no more will come."""
        return pickle.loads(self.reader.recv_bytes())

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.join()


def _started(way: str, call: Callable[[], Iterator[Any]]) -> _Worker:
    """Start a process that sends what a call yields."""
    context = parent_death.context(way)
    # For types only: both ways of starting have processes, but their common class has none.
    assert isinstance(context, (SpawnContext, ForkContext))
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(writer, call))
    process.start()
    # With this process's own writer open, the reader would never see the end.
    writer.close()
    return _Worker(process, reader)


def _result_of_rank(rank: int, worker: _Worker) -> Any:
    """Return the one result that a rank sends, or raise its error."""
    try:
        message = worker.receive()
    except EOFError:
        worker.process.join()
        fault = f"died without a word, with exit code {worker.process.exitcode}"
        message = _Message(True, fault)
    if message.failed:
        raise RuntimeError(f"rank {rank}: {message.value}")
    return message.value


def _serve(writer: connection.Connection, call: Callable[[], Iterator[Any]]) -> None:
    """Send what a call yields, or its error; the process calls this."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
    try:
        for value in call():
            # By value: a tensor's memory would go with this process.
            writer.send_bytes(pickle.dumps(_Message(False, value)))
    except BaseException as error:
        text = f"{type(error).__name__}: {first_line(error)}\n{traceback.format_exc()}"
        writer.send_bytes(pickle.dumps(_Message(True, text)))
    writer.close()
    os._exit(0)  # not what a process that forked this one would do at its end


def _one_result(
    prepare: Callable[[int], None], function: Callable, rank: int, args: tuple
) -> Iterator[Any]:
    """Yield the result of a rank."""
    torch.set_num_threads(1)
    prepare(rank)
    yield function(rank, *args)


def _on_this_host(size: int, port: int, rank: int) -> None:
    """Set the variables by which ranks meet, where all run on this host."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


# Ranks that take turns ----------------------------------------------------------------------------


class Turn(NamedTuple):
    """One turn of a side.

    seconds: on the clock.
    processor: processor seconds of all threads of the process.
    """

    seconds: float
    processor: float


class JoinedTurns(NamedTuple):
    """The turns of a side, over all ranks, turn by turn.

    seconds: of the slowest rank.
    processor: processor seconds of all ranks together.
    """

    seconds: List[float]
    processor: List[float]


def in_turn(
    sides: Dict[str, Callable[[], None]], rounds: int, processes: Processes
) -> Dict[str, List[Turn]]:
    """Measure sides in turn on this rank, after one turn of each that does not count.

    A turn is two calls, of which the second is timed: the first finds memory and caches as another
    side left them. All ranks begin a turn together.

    Args:
        sides: by name; every rank must name the same ones in the same order.
        rounds: that count.
        processes: of all ranks.

    Returns:
        This rank's turns by name.
    """

    def measure(side: Callable[[], None], number: int) -> Turn:
        """Time the second of two calls of a `side`."""
        side()
        processes.wait_for_all()
        start = time.perf_counter()
        processor_start = time.process_time()
        side()
        seconds = time.perf_counter() - start
        return Turn(seconds, time.process_time() - processor_start)

    shown = f"turns of {', '.join(sides)}:" if processes.topology.is_main else None
    return claims.in_turn(sides, rounds, measure, what=shown)


def joined(turns: Sequence[Sequence[Turn]]) -> JoinedTurns:
    """Join the turns of a side over the ranks.

    Args:
        turns: by rank.
    """
    by_turn = list(zip(*turns))
    return JoinedTurns(
        seconds=[max(turn.seconds for turn in ranks) for ranks in by_turn],
        processor=[sum(turn.processor for turn in ranks) for ranks in by_turn],
    )


# Our engine ---------------------------------------------------------------------------------------


def images_and_labels(plan: Recipe, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Draw images of noise and their labels, the same for all sides.

    Args:
        plan: whose size of images and classes they have.
        count: number of images.

    Returns:
        Images, uint8 [count, 3, size, size], and labels, int64 [count].
    """
    generator = torch.Generator().manual_seed(0)
    size = image_size(plan.model)
    shape = (count, 3, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, plan.model.classes, (count,), generator=generator)
    return images, labels


class Ours:
    """Our engine, one stage of one replica; the images that each step takes lie in memory."""

    def __init__(
        self,
        plan: Recipe,
        processes: Optional[Processes] = None,
        steps_per_epoch: Optional[int] = None,
    ):
        """
        Args:
            plan: the recipe.
            processes: of all ranks; None: this one is alone.
            steps_per_epoch: of an engine that is made as for a run, with all that it compiles.
        """
        if processes is None:
            processes = Processes(Topology(), torch.device("cpu"))
        topology = processes.topology
        self.engine = TorchEngine(plan, divide(plan, topology.replicas), processes, steps_per_epoch)
        batch = self.engine.batch
        images, labels = images_and_labels(plan, batch.accumulation * batch.micro)
        images_by_number = images.split(batch.micro)
        labels_by_number = labels.split(batch.micro)
        # Images enter at a replica's first stage only.
        count = batch.accumulation if topology.is_first else 0
        first = topology.replica * batch.accumulation
        self._images = [
            MicroBatch(
                images=images_by_number[number],
                labels=labels_by_number[number],
                indices=labels_by_number[number],  # any will do
                valid=batch.micro,
                number=first + number,
                step=0,
                unreadable=(),
            )
            for number in range(count)
        ]
        self._step = 0

    def update(self) -> None:
        """Take one step: all micro batches forward and backward, exchange, update."""
        self.engine.train_step(iter(self._images), one_step(self._step), lr=0.1)
        self._step += 1
