"""Shared by benchmarks with processes of their own: how these start, ranks that take turns, and our engine in them."""

import functools
import os
import pickle
import signal
import socket
import time
import traceback
from multiprocessing import connection
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


class Turn(NamedTuple):
    """One turn of a side: seconds on the clock, and processor seconds of all threads of the process."""

    seconds: float
    processor: float


def run(size: int, function: Callable, *args: Any) -> List[Any]:
    """Call function(rank, *args) in `size` fresh processes of one torch thread each; return the results by rank.

    Their environment is as `parallel/processes.py` reads it. The function and what it takes and returns are pickled.
    Raises RuntimeError if a rank failed or died; the others are killed before.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return results_of("spawn", size, functools.partial(_on_this_host, size, port), function, *args)


def results_of(way: str, size: int, prepare: Callable[[int], None], function: Callable, *args: Any) -> List[Any]:
    """run() in processes that start by `way` ("spawn" or "fork") and call prepare(rank) before the function."""
    context, processes, waiting, results = parent_death.context(way), [], {}, {}
    try:
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            call = functools.partial(_one_result, prepare, function, rank, args)
            process = context.Process(target=_serve, args=(writer, call))
            process.start()
            writer.close()
            processes.append(process)
            waiting[reader] = rank
        while waiting:
            for reader in connection.wait(list(waiting)):
                rank = waiting.pop(reader)
                try:
                    failed, value = pickle.loads(reader.recv_bytes())
                except EOFError:
                    failed, value = True, "died without a word"
                if failed:
                    raise RuntimeError(f"rank {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def stream(
    seconds: float, function: Callable[..., Iterator[Any]], *args: Any, way: str = "spawn", each: bool = False
) -> Iterator[Any]:
    """What function(*args) yields in a process of its own, as it comes. Args: each: `seconds` are for each value.

    Raises:
        RuntimeError: it raised or died. TimeoutError: it took longer than `seconds`. The process is killed before.
    """
    context, end = parent_death.context(way), time.monotonic() + seconds
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(writer, functools.partial(function, *args)))
    process.start()
    writer.close()
    try:
        while reader.poll(seconds if each else max(0.0, end - time.monotonic())):
            try:
                failed, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
                return
            if failed:
                raise RuntimeError(value)
            yield value
        raise TimeoutError(f"not done after {seconds:.0f} s")
    finally:
        process.kill()
        process.join()


def _serve(writer: connection.Connection, call: Callable[[], Iterator[Any]]) -> None:
    """In the process: send what the call yields as (False, value), its error as (True, its line and traceback)."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
    try:
        for value in call():
            writer.send_bytes(pickle.dumps((False, value)))  # by value: a tensor's memory would go with this process
    except BaseException as error:
        text = f"{type(error).__name__}: {first_line(error)}\n{traceback.format_exc()}"
        writer.send_bytes(pickle.dumps((True, text)))
    writer.close()
    os._exit(0)  # not what a process that forked this one would do at its end


def _one_result(prepare: Callable[[int], None], function: Callable, rank: int, args: tuple) -> Iterator[Any]:
    torch.set_num_threads(1)
    prepare(rank)
    yield function(rank, *args)


def _on_this_host(size: int, port: int, rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def in_turn(sides: Dict[str, Callable[[], None]], rounds: int, processes: Processes) -> Dict[str, List[Turn]]:
    """This rank's turns by name, after one of each that does not count.

    A turn is two calls, of which the second is timed: the first finds memory and caches as another side left them.
    Every rank must call this with the same names in the same order. All ranks begin a turn together.
    """

    def measure(side: Callable[[], None], number: int) -> Turn:
        side()
        processes.wait_for_all()
        start, used = time.perf_counter(), time.process_time()
        side()
        return Turn(time.perf_counter() - start, time.process_time() - used)

    shown = f"turns of {', '.join(sides)}:" if processes.topology.is_main else None
    return claims.in_turn(sides, rounds, measure, what=shown)


def joined(turns: Sequence[Sequence[Turn]]) -> Tuple[List[float], List[float]]:
    """Seconds of the slowest rank and processor seconds of all ranks, turn by turn, from turns given by rank."""
    together = list(zip(*turns))
    return (
        [max(turn.seconds for turn in each) for each in together],
        [sum(turn.processor for turn in each) for each in together],
    )


def images_and_labels(plan: Recipe, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Images in memory, uint8 [count, 3, size, size], and labels, int64 [count]: noise, the same for all sides."""
    generator = torch.Generator().manual_seed(0)
    size = plan.model.image_size
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, plan.model.classes, (count,), generator=generator)


class Ours:
    """Our engine, one stage of one replica; the images that each step takes lie in memory."""

    def __init__(self, plan: Recipe, processes: Optional[Processes] = None, steps_per_epoch: Optional[int] = None):
        """Args: steps_per_epoch: of an engine that is made as for a run, with all that it compiles."""
        processes = processes or Processes(Topology(), torch.device("cpu"))
        place = processes.topology
        self.engine = TorchEngine(plan, divide(plan, place.replicas), processes, steps_per_epoch)
        batch = self.engine.batch
        rows, first = batch.micro, place.replica * batch.accumulation
        images, labels = (tensor.split(rows) for tensor in images_and_labels(plan, batch.accumulation * rows))
        self._images = [
            MicroBatch(images[number], labels[number], labels[number], rows, first + number, 0, ())
            for number in range(batch.accumulation if place.is_first else 0)
        ]
        self._step = 0

    def update(self) -> None:
        """One step: all micro batches forward and backward, exchange, update."""
        self.engine.train_step(iter(self._images), one_step(self._step), lr=0.1)
        self._step += 1
