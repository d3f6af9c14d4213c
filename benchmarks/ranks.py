"""Shared by benchmarks of several processes: ranks of this machine with one thread each, their turns, our engine."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from multiprocessing import connection
from multiprocessing.context import BaseContext
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch

from benchmarks import claims
from data.batches import MicroBatch
from engines.torch_engine import TorchEngine
from parallel.parent_death import die_with_parent
from parallel.processes import Processes
from recipe.batch import divide
from recipe.config import Recipe


class Turn(NamedTuple):
    """One turn of a side: seconds on the clock, and processor seconds of all threads of the process."""

    seconds: float
    processor: float


def run(size: int, function: Callable, *args: Any) -> List[Any]:
    """Calls function(rank, *args) in `size` fresh processes of one torch thread each; their results by rank.

    MASTER_ADDR, MASTER_PORT and LOCAL_WORLD_SIZE are set as `parallel/processes.py` reads them. The function and what
    it takes and returns travel by pickle.

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    return results_of(multiprocessing.get_context("spawn"), size, _rank, size, port, function, args)


def results_of(context: BaseContext, size: int, target: Callable, *args: Any) -> List[Any]:
    """Calls target(rank, writer, *args) in a process for each rank; returns the results by rank.

    Args:
        target: sends one message: (True, the result) or (False, its error).

    Raises:
        RuntimeError: a rank failed or died; the others are killed before.
    """
    processes, waiting, results = [], {}, {}
    try:
        for rank in range(size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(rank, writer, *args), daemon=True)
            process.start()
            writer.close()
            processes.append(process)
            waiting[reader] = rank
        while waiting:
            for reader in connection.wait(list(waiting)):
                rank = waiting.pop(reader)
                try:
                    done, value = reader.recv()
                except EOFError:
                    done, value = False, "died without a word"
                if not done:
                    raise RuntimeError(f"rank {rank}: {value}")
                results[rank] = value
        return [results[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(rank: int, writer: connection.Connection, size: int, port: int, function: Callable, args: tuple) -> None:
    die_with_parent()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        writer.send((True, function(rank, *args)))
    except BaseException:
        writer.send((False, traceback.format_exc()))


def in_turn(sides: Dict[str, Callable[[], None]], rounds: int, processes: Processes) -> Dict[str, List[Turn]]:
    """This rank's turns by name, after one of each that does not count.

    A turn is two calls, of which the second is timed: the first finds memory and caches as another side left them.
    Every rank must call this with the same names in the same order, which turns around from round to round. All ranks
    begin a turn together.
    """
    turns: Dict[str, List[Turn]] = {name: [] for name in sides}
    numbers = claims.less(rounds, min(rounds, 2)) + 1
    shown = claims.progress if processes.topology.is_main else lambda items, what: items
    for number in shown(range(numbers), f"turns of {', '.join(sides)}:"):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            sides[name]()
            processes.wait_for_all()
            start, used = time.perf_counter(), time.process_time()
            sides[name]()
            turns[name].append(Turn(time.perf_counter() - start, time.process_time() - used))
    return {name: values[1:] for name, values in turns.items()}


def joined(turns: Sequence[Sequence[Turn]]) -> Tuple[List[float], List[float]]:
    """Seconds of the slowest rank and processor seconds of all ranks, turn by turn, from turns given by rank."""
    together = list(zip(*turns))
    return (
        [max(turn.seconds for turn in each) for each in together],
        [sum(turn.processor for turn in each) for each in together],
    )


def images_and_labels(plan: Recipe, count: int) -> tuple:
    """Images in memory, uint8 [count, 3, size, size], and labels, int64 [count]: noise, the same for all sides."""
    generator = torch.Generator().manual_seed(0)
    size = plan.model.image_size
    images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, plan.model.classes, (count,), generator=generator)


class Ours:
    """Our engine, one stage of one replica; the images that each step takes lie in memory."""

    def __init__(self, plan: Recipe, processes: Processes):
        place = processes.topology
        self.engine = TorchEngine(plan, divide(plan, place.replicas), processes)
        batch = self.engine.batch
        rows, first = batch.micro, place.replica * batch.accumulation
        images, labels = (tensor.split(rows) for tensor in images_and_labels(plan, batch.accumulation * rows))
        self._images = [
            MicroBatch(images[number], labels[number], labels[number], rows, first + number, 0, ())
            for number in range(batch.accumulation)
        ]
        self._step = 0

    def update(self) -> None:
        """One step: all micro batches forward and backward, exchange, update."""
        self.engine.train_step(self._own_images(), self._step, lr=0.1)
        self._step += 1

    def _own_images(self) -> Iterator[MicroBatch]:
        return iter(self._images if self.engine.topology.is_first else ())
