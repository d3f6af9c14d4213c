"""Measures training steps of a recipe: as it trains, with images in memory, without exchange, and the update alone."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from data.base import Source
from data.batches import MicroBatch
from engines import factory, feed
from engines.devices import synchronize
from engines.torch_engine import TorchEngine
from optim import schedule
from parallel import exchange
from parallel.processes import Processes
from recipe import batch as arithmetic
from recipe.batch import Lengths
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange
from tools.diagnosis import splitting
from tools.diagnosis.splitting import Times
from tools.planning import workload

_FEWEST, _MOST = 3, 40  # repetitions of each measurement
# Steps with a timeline. On a GPU each span waits for the device, so these are not timed as a whole; on a CPU all are.
_TRACED, _TRACED_ON_CPU = 8, 1000
_TURN = 0.05  # seconds: a turn has as many steps as that takes, since a few milliseconds are no measurement
_WINDOW = 0.2  # the same for steps as trained, which come in bursts of as many micro batches as there are workers
_MICRO_BATCHES = 4  # of a step, where the recipe has more: enough for exchange and update to be small beside them
_LEARNING_RATE = 1e-3  # of updates that are made for their time alone; takes as long as any other


class _Bench:
    """An engine with the micro batches of a step in memory, the same ones in each step."""

    def __init__(self, recipe: Recipe, batch: Batch, processes: Processes, lengths: Lengths, source: Optional[Source]):
        self.processes, self.batch, self._recipe = processes, batch, recipe
        self._rate = schedule.create(recipe, lengths)
        self.engine = processes.together(lambda: factory.create(recipe, batch, processes, lengths.steps_per_epoch))
        self._memory = processes.together(lambda: self._loaded(source))
        self._step = 0
        self._count = self._update_count = 1

    def _loaded(self, source: Optional[Source]) -> List[MicroBatch]:
        recipe, engine = workload.changed(self._recipe, "data", workers=0), self.engine
        batches = feed.training_batches(source, recipe, self.batch, engine.topology, range(1), engine.device)
        with contextlib.closing(batches):
            return list(batches)

    def steps(self, count: int, batches: Optional[Iterator[MicroBatch]] = None) -> float:
        """Seconds of a step, of so many that all ranks begin together; images are in memory, or those of a loader."""
        self.processes.wait_for_all()
        start = time.perf_counter()
        for _ in range(count):
            images = iter(self._memory) if batches is None else batches
            self.engine.train_step(images, self._step, self._rate(self._step))
            synchronize(self.engine.device)
            self._step += 1
        return (time.perf_counter() - start) / count

    def until_steady(self) -> float:
        """Do the steps that find nothing ready or make no update. Seconds of one after them, the slowest rank's."""
        self.steps(1 + self._recipe.exchange.delay)
        of_step = max(self.processes.gather(self.steps(1)))
        of_update = max(self.processes.gather(self.updates()))
        self._count, self._update_count = (max(1, math.ceil(_TURN / each)) for each in (of_step, of_update))
        return of_step

    def turn(self) -> float:
        """Seconds of a step with the images in memory. Of several short ones the first only fills caches."""
        if self._count > 1:
            self.steps(1)
        return self.steps(self._count)

    def updates(self) -> float:
        """Seconds of the optimizer's update alone, from the gradient of the step before."""
        one, weights = torch.ones((), device=self.engine.device), self.engine.weights
        self.processes.wait_for_all()
        start = time.perf_counter()
        for _ in range(self._update_count):
            finite = weights.prepare(one)
            self.processes.sum((~finite).double())
            weights.apply(self._step, _LEARNING_RATE, finite, False)
        synchronize(self.engine.device)
        return (time.perf_counter() - start) / self._update_count


def measure(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    lengths: Lengths,
    source: Optional[Source],
    seconds: float,
    say: Callable[[str], None],
) -> Tuple[Times, TorchEngine, bool]:
    """Measure on all ranks, each of which calls this, in about `seconds`; `say` prints if large steps take longer.

    Returns the times, the same on all; the engine, on which more can be measured; whether enough images were used that
    those loaded ahead of the first step do not count.
    """
    # As it trains after its first epochs: the full image size, the last density; at most one step late.
    settled = {"density_warmup": [], "dense_steps": 0} if recipe.exchange.sparse else {}
    recipe = workload.changed(recipe, "exchange", delay=min(1, recipe.exchange.delay), **settled)
    recipe, method = workload.changed(recipe, "data", image_sizes=None), exchange.of(recipe.exchange)
    fewest = min(batch.accumulation, batch.stages)
    bench = _Bench(*_shrunk(_silent(recipe), batch, fewest), processes, lengths, source)
    of_step = bench.until_steady()
    accumulation = min(batch.accumulation, max(fewest, 2 * batch.stages, _MICRO_BATCHES))
    exchanges = method.sparse or (batch.replicas > 1 and method.sums)
    # As trained, and twice in turns, with those that do not count.
    repetitions = _FEWEST * (9 if exchanges else 3) + 3
    if accumulation > fewest and of_step / fewest * accumulation * repetitions > seconds:
        accumulation = fewest
    of_step *= accumulation / fewest
    if of_step * repetitions > seconds:
        say(f"the least step to be measured takes {of_step:.2g} s: steps take {of_step * repetitions:.0f} s in all")
    on_cpu = bench.engine.device.type == "cpu"
    traced = _TRACED_ON_CPU if on_cpu else min(_TRACED, max(_FEWEST, int(seconds / 8 / of_step)))
    del bench
    shrunk = _shrunk(recipe, batch, accumulation)
    without = _silent(shrunk[0]) if exchanges else shrunk[0]
    alone = _Bench(workload.changed(without, "log", trace=traced), shrunk[1], processes, lengths, source)
    alone.steps(1 if on_cpu else 1 + traced)
    whole = _Bench(*shrunk, processes, lengths, source) if exchanges else alone
    benches = [whole, alone] if exchanges else [whole]
    for bench in benches:
        bench.until_steady()
    sides = [bench.turn for bench in benches] + [whole.updates]
    # Before and after the steps as trained, since a machine does not stay as fast as it was.
    before = _turns(sides, processes, 0.25 * seconds)
    as_trained, waited, complete = _as_trained(whole, source, recipe.data.workers, before[0], 0.4 * seconds)
    after = _turns(sides, processes, 0.25 * seconds)
    from_memory, *unexchanged, update = (early + late for early, late in zip(before, after))
    spans = alone.engine.recorder.collect()  # from the second step on
    passes = processes.from_main(lambda: splitting.passes(spans, processes.topology.stages))
    shape = (accumulation, processes.topology.stages, recipe.parallel.virtual_stages or 1)
    times = Times(*shape, as_trained, waited, from_memory, unexchanged[0] if exchanges else [], update, passes)
    return times, whole.engine, complete


def _shrunk(recipe: Recipe, batch: Batch, accumulation: int) -> Tuple[Recipe, Batch]:
    """The recipe with this number of micro batches a step, and its batch."""
    shrunk = workload.changed(recipe, "batch", global_=batch.micro * accumulation * batch.replicas)
    return shrunk, arithmetic.divide(shrunk, batch.replicas)


def _silent(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"exchange": Exchange(method="none")})


def _turns(sides: Sequence[Callable[[], float]], processes: Processes, seconds: float) -> List[List[float]]:
    """Seconds of each side by turn, the slowest rank's. The order of the sides alternates."""
    own: List[List[float]] = [[] for _ in sides]
    for number in rounds(processes, seconds):
        for which in range(len(sides))[:: -1 if number % 2 else 1]:
            own[which].append(sides[which]())
    return [slowest(found) for found in zip(*processes.gather(own))]


def _as_trained(
    bench: _Bench, source: Optional[Source], workers: int, from_memory: Sequence[float], seconds: float
) -> Tuple[List[float], List[float], bool]:
    """Seconds of steps with images from the loader, and of waiting in them; whether there was time for enough."""
    processes = bench.processes
    burst = max(1, math.ceil(workers / bench.batch.accumulation))  # workers deliver their first micro batches together
    affordable = max(1, int(seconds / 4 / min(from_memory)))
    complete = processes.from_main(lambda: burst <= affordable)
    window = burst if complete else 1
    window *= max(1, math.ceil(_WINDOW / (window * min(from_memory))))
    as_trained, waited = [], []
    with contextlib.closing(bench.engine.training_batches(source, range(10**9))) as batches:
        bench.steps(burst if complete else 1, batches)
        before = max(processes.gather(bench.engine.data_wait()))
        for _ in rounds(processes, seconds):
            as_trained.append(bench.steps(window, batches))
            so_far = max(processes.gather(bench.engine.data_wait()))
            waited.append((so_far - before) / window)
            before = so_far
    return slowest(processes.gather(as_trained)), waited, complete


def rounds(processes: Processes, seconds: float) -> Iterator[int]:
    """Numbers of repetitions, as many on every rank, until the main one has spent `seconds`."""
    start = time.perf_counter()
    for number in range(_MOST):
        if number >= _FEWEST and not processes.from_main(lambda: time.perf_counter() - start < seconds):
            return
        yield number


def slowest(by_rank: Sequence[Sequence[float]]) -> List[float]:
    """Repetition by repetition, the rank that took longest."""
    return [max(values) for values in zip(*by_rank)]
