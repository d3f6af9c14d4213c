"""The whole examination of a recipe on the machines where it is to train: every measurement, and what follows."""

from __future__ import annotations

import functools
import platform
import re
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from common.errors import ConfigError, DataError
from common.text import count
from data.base import Source
from data.sources import open_source
from engines import choice
from engines.devices import device_of
from parallel import topology
from parallel.processes import Processes
from recipe import batch as arithmetic
from recipe import loading
from recipe.batch import Lengths
from recipe.config import Recipe
from recipe.distribution import Parallel
from recipe.division import Batch
from tools.diagnosis import advice, images, links, splitting, steps
from tools.diagnosis import machine as machines
from tools.diagnosis.advice import Advice
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Rank, Spread, Times, spread
from tools.planning import scaling, workload
from tools.planning.machine import Machine
from tools.planning.scaling import Row
from training import choices
from training.run import flops_per_image

# Shares of the time that is given.
_READING, _TO_DEVICE, _STEPS, _METHODS = 0.15, 0.03, 0.6, 0.15
_PEAKS = 3


class Findings(NamedTuple):
    """Everything that was measured, and what follows. hosts: by rank. complete: see `steps.measure`. peak: operations a
    second, of all devices. doubts: why nothing follows, see `splitting.doubts`. advice: None where there are any.
    machine, doubling: None there, too, and where no link could be measured."""

    batch: Batch
    images: int
    about: dict
    hosts: List[str]
    reading: Reading
    to_device: Spread
    links: Optional[Links]
    methods: List[Method]
    times: Times
    complete: bool
    parts: Dict[str, float]
    ranks: List[Rank]
    straggling: float
    peak: Spread
    mfu: float
    notes: List[str]
    seconds: float
    doubts: List[str]
    advice: Optional[Advice] = None
    machine: Optional[Machine] = None
    doubling: Optional[Row] = None

    @property
    def step(self) -> float:
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        return self.batch.global_ / self.step


def examine(recipe: Recipe, seconds: float, say: Callable[[str], None]) -> Optional[Findings]:
    """Measure on all ranks, each of which calls this; the main one gets the findings, the others None.

    Args: seconds: for measuring; large steps take longer. say: prints a line of progress, of the main rank.

    Raises UserError: recipe or data cannot be used, or ranks cannot connect.
    """
    started = time.perf_counter()
    try:
        place = topology.from_environment(recipe)
        device = device_of(recipe, place)
        processes = Processes(place, device, recipe.parallel.silence)
    except ConfigError as error:  # which is worded for train.py, the one program that run_pod.sh starts
        by_torchrun = re.sub(r"\./run_pod\.sh( --replicas \d+( or \d+)?)?", "torchrun (docs/doctor.md)", str(error))
        raise ConfigError(by_torchrun) from None
    texts = processes.gather(loading.dump(recipe))
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        text = f"rank {other} has another recipe than rank 0; give all hosts the same files and overrides"
        raise ConfigError(text if place.is_main else "")
    batch = processes.together(lambda: arithmetic.divide(recipe, place.replicas))
    source, lengths, training_images = _opened(recipe, processes)
    notes: List[str] = []
    say = say if place.is_main else lambda line: None
    recipe = choices.measured(choice.resolve(recipe, batch, processes, notes.append), batch, processes, notes.append)
    batch = processes.together(lambda: arithmetic.divide(recipe, place.replicas))
    say(f"measuring for about {seconds:.0f} s on {count(place.world, 'rank')}: images, links, steps, exchanges")
    reading = _reading(recipe, source, processes, _READING * seconds)
    copies = processes.gather(images.to_device(recipe, device, _TO_DEVICE * seconds))
    to_device = min(copies, key=lambda each: each.median)
    found_links = links.measure(processes, device)
    times, engine, complete = steps.measure(recipe, batch, processes, lengths, source, _STEPS * seconds, say)
    peak = spread([engine.peak_flops() for _ in range(_PEAKS)])
    methods = []
    if place.replicas > 1 and found_links is not None:
        methods = links.methods(engine, recipe, batch, processes, found_links.link, _METHODS * seconds)
    facts = processes.gather((platform.node(), machines.about(device)))
    engine.close()
    if not place.is_main:
        return None
    hosts = [host for host, _ in facts]
    parts = splitting.scaled(splitting.parts(times), times, batch.accumulation)
    rows = splitting.ranks(times.passes, place.stages, hosts)
    mfu = flops_per_image(recipe, recipe.model.image_size) * batch.global_ / sum(parts.values()) / peak.median
    found = Findings(
        batch, training_images, facts[0][1], hosts, reading, to_device, found_links, methods, times, complete, parts,
        rows, splitting.straggling(times, batch.accumulation), peak, mfu, notes, time.perf_counter() - started,
        splitting.doubts(times, parts),
    )  # fmt: skip
    if found.doubts:
        return found
    found = found._replace(advice=advice.advise(recipe, found))
    if found_links is None:
        return found
    planned = _planned(recipe, place.stages)
    work = workload.of(planned)
    machine = machines.described(planned, device, work, found)
    return found._replace(machine=machine, doubling=scaling.predict(planned, machine, 2 * place.replicas, work))


def _opened(recipe: Recipe, processes: Processes) -> Tuple[Optional[Source], Lengths, int]:
    """The training images, on ranks where they enter, and their number. Raises DataError."""
    enter = processes.topology.is_first
    source = processes.together(lambda: open_source(recipe.data, recipe.model.classes, "train") if enter else None)
    counts = [each for each in processes.gather(None if source is None else len(source)) if each is not None]
    if len(set(counts)) > 1:
        text = f"ranks find {min(counts)} to {max(counts)} training images; give all hosts the same data.root"
        raise DataError(text if processes.topology.is_main else "")
    return source, processes.together(lambda: arithmetic.lengths(recipe, counts[0])), counts[0]


def _reading(recipe: Recipe, source: Optional[Source], processes: Processes, seconds: float) -> Reading:
    """Reading of the slowest rank, as a step waits for it; unreadable images are those of all ranks."""
    place = processes.topology
    read = functools.partial(images.read, recipe, source, place.replica, place.replicas, seconds)
    own = processes.together(read if source is not None else lambda: None)
    found = [each for each in processes.gather(own) if each is not None]
    slowest = min(found, key=lambda each: each.per_core.median)
    return slowest._replace(tried=sum(each.tried for each in found), unreadable=sum(each.unreadable for each in found))


def _planned(recipe: Recipe, stages: int) -> Recipe:
    """The recipe as measured: at one image size; a process that computes all stages by itself is one device."""
    recipe = workload.changed(recipe, "data", image_sizes=None)
    if stages == recipe.parallel.stages:
        return recipe
    parallel = Parallel(recompute=recipe.parallel.recompute, replicas=recipe.parallel.replicas)
    return recipe.model_copy(update={"parallel": parallel})
