"""Measures training steps of a recipe.

They are measured as it trains, with images in memory, without exchange, and the update alone.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from data.base import Source
from data.batches import MicroBatch
from engines import factory, feed
from engines.base import ClosableIterator, Engine, one_step
from engines.devices import synchronize
from engines.torch_engine import TorchEngine, image_settings
from optim import schedule
from parallel import exchange
from parallel.processes import Processes
from recipe import batch as arithmetic
from recipe.batch import Lengths
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange
from tools.diagnosis import splitting
from tools.diagnosis.splitting import Passes, Times
from tools.planning import workload

_FEWEST = 3  # repetitions of each measurement
_MOST = 40
# Steps with a timeline. On a GPU each span waits for the device, so these are not timed as a whole;
# on a CPU all are.
_TRACED = 8
_TRACED_ON_CPU = 1000
# Seconds: a turn has as many steps as that takes, since a few milliseconds are no measurement.
_TURN = 0.05
# The same for steps as trained, which come in bursts of as many micro batches as there are workers.
_WINDOW = 0.2
# Of a step, where the recipe has more: enough for exchange and update to be small beside them.
_MICRO_BATCHES = 4
_LEARNING_RATE = 1e-3  # of updates that are made for their time alone; takes as long as any other


class Setup(NamedTuple):
    """The run that is measured.

    batch: of the recipe.
    processes: of the run.
    device: of this rank.
    lengths: of the run in steps.
    source: the training images; None where they do not enter.
    """

    recipe: Recipe
    batch: Batch
    processes: Processes
    device: torch.device
    lengths: Lengths
    source: Optional[Source]

    def changed(self, section: str, **keys: object) -> Setup:
        """Return the setup with other values of some keys of a `section` of its recipe."""
        return self._replace(recipe=workload.changed(self.recipe, section, **keys))

    def settled(self) -> Setup:
        """Return the setup as it trains after its first epochs.

        That is at the full image size, with the last density, and at most one step late. The batch
        stays as it begins, and each replica has as much of it.
        """
        section = self.recipe.exchange
        setup = self.changed("exchange", delay=min(1, section.delay))
        if section.sparse:
            setup = setup.changed("exchange", density_warmup=[], dense_steps=0)
        # These say how steps change in a run, not what one costs. Beside them a recipe refuses steps
        # without an exchange, or of a few micro batches.
        setup = setup.changed("batch", schedule=None, largest=None, rate_rule="none")
        setup = setup.changed("parallel", elastic=False, shares="even")
        return setup.changed("data", image_sizes=None)

    def silent(self) -> Setup:
        """Return the setup without an exchange."""
        section = Exchange(method="none")
        return self._replace(recipe=self.recipe.model_copy(update={"exchange": section}))

    def shrunk(self, accumulation: int) -> Setup:
        """Return the setup with `accumulation` micro batches a step."""
        total = self.batch.micro * accumulation * self.batch.replicas
        smaller = self.changed("batch", global_=total)
        return smaller._replace(batch=arithmetic.divide(smaller.recipe, self.batch.replicas))


class Measurement(NamedTuple):
    """Steps that were measured.

    times: the same on all ranks.
    engine: on which more can be measured.
    complete: so many images were used that those loaded ahead of the first step do not count.
    """

    times: Times
    engine: TorchEngine
    complete: bool


class _Waiting(NamedTuple):
    """Steps with images from the loader.

    steps: seconds of each window, by step.
    waited: for images in them.
    complete: see `Measurement`.
    """

    steps: List[float]
    waited: List[float]
    complete: bool


class _Bench:
    """An engine with the micro batches of a step in memory, the same ones in each step."""

    def __init__(self, setup: Setup):
        recipe = setup.recipe
        steps_per_epoch = setup.lengths.steps_per_epoch
        self.processes = setup.processes
        self.batch = setup.batch
        self._delay = recipe.exchange.delay
        self._rate = schedule.create(recipe, setup.lengths)
        # Together: an engine that one rank cannot create, all ranks refuse.
        engine = self.processes.together(
            lambda: factory.create(recipe, self.batch, self.processes, steps_per_epoch)
        )
        # The command refuses recipes for IPUs, the only ones with another engine.
        assert isinstance(engine, TorchEngine)
        self.engine = engine
        self._memory = self.processes.together(lambda: _loaded(setup, engine))
        self._step = 0
        self._steps_in_turn = 1
        self._updates_in_turn = 1

    def steps(self, count: int, batches: Optional[Iterator[MicroBatch]] = None) -> float:
        """Return the seconds of a step, the mean of several that all ranks begin together.

        Args:
            count: how many they are.
            batches: of a loader; None: images are in memory.
        """
        self.processes.wait_for_all()
        start = time.perf_counter()
        for _ in range(count):
            images = iter(self._memory) if batches is None else batches
            self.engine.train_step(images, one_step(self._step), self._rate(self._step))
            # The clock is read when the device has done the step.
            synchronize(self.engine.device)
            self._step += 1
        return (time.perf_counter() - start) / count

    def until_steady(self) -> float:
        """Do the steps that find nothing ready or make no update.

        Returns:
            Seconds of one after them, the slowest rank's.
        """
        # The first step allocates; with a delay the first ones have nothing to apply.
        self.steps(1 + self._delay)
        of_step = max(self.processes.gather(self.steps(1)))
        of_update = max(self.processes.gather(self.updates()))
        self._steps_in_turn = max(1, math.ceil(_TURN / of_step))
        self._updates_in_turn = max(1, math.ceil(_TURN / of_update))
        return of_step

    def turn(self) -> float:
        """Return the seconds of a step with the images in memory."""
        # Of several short ones the first only fills caches.
        if self._steps_in_turn > 1:
            self.steps(1)
        return self.steps(self._steps_in_turn)

    def updates(self) -> float:
        """Return the seconds of the optimizer's update alone, with the last step's gradient."""
        one = torch.ones((), device=self.engine.device)
        weights = self.engine.weights
        self.processes.wait_for_all()
        start = time.perf_counter()
        for _ in range(self._updates_in_turn):
            finite = weights.prepare(one)
            # In training this message carries loss and norms, too.
            self.processes.sum((~finite).double())
            weights.apply(self._step, _LEARNING_RATE, finite, False)
        synchronize(self.engine.device)
        return (time.perf_counter() - start) / self._updates_in_turn


def _loaded(setup: Setup, engine: TorchEngine) -> List[MicroBatch]:
    """Return the micro batches of the first step, on the device of an engine."""
    # One step is not worth processes that read it.
    recipe = workload.changed(setup.recipe, "data", workers=0)
    batches = feed.training_batches(
        setup.source,
        image_settings(recipe),
        batch=setup.batch,
        replica=engine.topology.replica,
        steps=range(1),
        device=engine.device,
    )
    with contextlib.closing(batches):
        return list(batches)


def measure(setup: Setup, seconds: float, say: Callable[[str], None]) -> Measurement:
    """Measure on all ranks, each of which calls this.

    Args:
        setup: of the run.
        seconds: for measuring, about.
        say: prints a line, if large steps take longer.
    """
    setup = setup.settled()
    exchanges = _exchanges(setup)
    accumulation, step = _size_of_step(setup, exchanges, seconds, say)
    shrunk = setup.shrunk(accumulation)
    # Steps without exchange, with a timeline, and steps with it, where there is one.
    alone = _traced_bench(shrunk.silent() if exchanges else shrunk, seconds, step)
    whole = _Bench(shrunk) if exchanges else alone
    benches = [whole, alone] if exchanges else [whole]
    for bench in benches:
        bench.until_steady()
    sides = [bench.turn for bench in benches] + [whole.updates]
    # Before and after the steps as trained, since a machine does not stay as fast as it was.
    before = _turns(sides, setup.processes, 0.25 * seconds)
    waiting = _as_trained(whole, shrunk, min(before[0]), 0.4 * seconds)
    after = _turns(sides, setup.processes, 0.25 * seconds)
    # In the order of `sides`.
    from_memory, *unexchanged, update = (early + late for early, late in zip(before, after))
    times = Times(
        accumulation=accumulation,
        stages=setup.processes.topology.stages,
        virtual=setup.recipe.parallel.virtual_stages or 1,
        as_trained=waiting.steps,
        waited=waiting.waited,
        from_memory=from_memory,
        without_exchange=unexchanged[0] if exchanges else [],
        update=update,
        passes=_passes(alone, setup.processes),
    )
    return Measurement(times, whole.engine, waiting.complete)


def _traced_bench(setup: Setup, seconds: float, step: float) -> _Bench:
    """Return an engine that has a timeline of some steps.

    Args:
        setup: without an exchange.
        seconds: for all measurements.
        step: seconds of a step.
    """
    on_cpu = setup.device.type == "cpu"
    traced = _TRACED_ON_CPU
    if not on_cpu:
        traced = min(_TRACED, max(_FEWEST, int(seconds / 8 / step)))
    bench = _Bench(setup.changed("log", trace=traced))
    # The first step is not in the timeline. On a GPU the others of it are done now: see _TRACED.
    bench.steps(1 if on_cpu else 1 + traced)
    return bench


def _passes(bench: _Bench, processes: Processes) -> Passes:
    """Return the passes of the traced steps of all ranks, the same on each."""
    recorder = bench.engine.recorder
    assert recorder is not None  # `_traced_bench` asks for a timeline
    spans = recorder.collect()
    stages = processes.topology.stages
    # Only the main rank has the spans of all.
    return processes.from_main(lambda: splitting.passes(spans, stages))


def _exchanges(setup: Setup) -> bool:
    """Return whether a step combines gradients."""
    method = exchange.of(setup.recipe.exchange)
    return method.sparse or (setup.batch.replicas > 1 and method.sums)


def _size_of_step(
    setup: Setup,
    exchanges: bool,
    seconds: float,
    say: Callable[[str], None],
) -> Tuple[int, float]:
    """Return the micro batches of the step that is measured, and its seconds.

    Args:
        setup: of the run.
        exchanges: a step combines gradients.
        seconds: for all measurements.
        say: prints a line, if even the least steps take longer.
    """
    batch = setup.batch
    fewest = min(batch.accumulation, batch.stages)
    # An engine of its own, which is freed before the others are made.
    step = _Bench(setup.silent().shrunk(fewest)).until_steady()
    accumulation = min(batch.accumulation, max(fewest, 2 * batch.stages, _MICRO_BATCHES))
    # As trained, and twice in turns, with those that do not count.
    repetitions = _FEWEST * (9 if exchanges else 3) + 3
    if accumulation > fewest and step / fewest * accumulation * repetitions > seconds:
        accumulation = fewest
    step *= accumulation / fewest
    if step * repetitions > seconds:
        least = f"the least step to be measured takes {step:.2g} s"
        say(f"{least}: steps take {step * repetitions:.0f} s in all")
    return accumulation, step


def _turns(
    sides: Sequence[Callable[[], float]],
    processes: Processes,
    seconds: float,
) -> List[List[float]]:
    """Return the seconds of each side by turn, the slowest rank's.

    The order of the sides alternates.
    """
    measured: List[List[float]] = [[] for _ in sides]
    for number in rounds(processes, seconds):
        # Neither side always comes first, in caches that the other has filled.
        order = list(range(len(sides)))
        if number % 2:
            order.reverse()
        for side in order:
            measured[side].append(sides[side]())
    by_side = zip(*processes.gather(measured))
    return [slowest(by_rank) for by_rank in by_side]


def _as_trained(bench: _Bench, setup: Setup, step: float, seconds: float) -> _Waiting:
    """Measure steps with images from the loader.

    Args:
        bench: of the run.
        setup: whose images and workers are used.
        step: seconds of one with images in memory.
        seconds: for measuring.
    """
    processes = bench.processes
    # Workers deliver their first micro batches together: a window has one of each.
    burst = max(1, math.ceil(setup.recipe.data.workers / bench.batch.accumulation))
    affordable = max(1, int(seconds / 4 / step))
    # The main rank decides, as all ranks have to do the same steps.
    complete = processes.from_main(lambda: burst <= affordable)
    first = burst if complete else 1
    # Whole bursts only: in a part of one nothing, or everything, is waited for.
    window = first * max(1, math.ceil(_WINDOW / (first * step)))
    as_trained = []
    waited = []
    with contextlib.closing(_endless(bench.engine, setup.source)) as batches:
        # Images that were loaded ahead of the first step cost nothing: they are used up first.
        bench.steps(first, batches)
        before = max(processes.gather(bench.engine.data_wait()))
        for _ in rounds(processes, seconds):
            as_trained.append(bench.steps(window, batches))
            so_far = max(processes.gather(bench.engine.data_wait()))
            waited.append((so_far - before) / window)
            before = so_far
    return _Waiting(slowest(processes.gather(as_trained)), waited, complete)


def _endless(engine: Engine, source: Optional[Source]) -> ClosableIterator:
    """Return micro batches of more steps than are ever measured."""
    return engine.training_batches(source, range(10**9))


def rounds(processes: Processes, seconds: float) -> Iterator[int]:
    """Yield numbers of repetitions, as many on every rank, until the main one has spent its time.

    Args:
        processes: of the run.
        seconds: that the main rank spends.
    """
    start = time.perf_counter()
    for number in range(_MOST):
        if number >= _FEWEST:
            goes_on = processes.from_main(lambda: time.perf_counter() - start < seconds)
            if not goes_on:
                return
        yield number


def slowest(by_rank: Sequence[Sequence[float]]) -> List[float]:
    """Return, repetition by repetition, the seconds of the rank that took longest.

    Args:
        by_rank: seconds of each rank's repetitions.
    """
    return [max(values) for values in zip(*by_rank)]
