"""The whole examination of a recipe on the machines where it is to train.

It is every measurement, and what follows from them.
"""

from __future__ import annotations

import platform
import re
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from common.errors import ConfigError, DataError
from common.text import count
from data.base import Source
from data.sources import open_source
from engines import choice
from engines.devices import device_of
from models import shapes
from parallel import topology
from parallel.processes import Processes
from recipe import batch as arithmetic
from recipe.batch import Lengths
from recipe.config import Recipe
from recipe.distribution import Parallel
from recipe.division import Batch
from recipe.settled import image_size
from tools.diagnosis import advice, images, links, splitting, steps
from tools.diagnosis import machine as machines
from tools.diagnosis.advice import Advice
from tools.diagnosis.images import Reading
from tools.diagnosis.links import Links, Method
from tools.diagnosis.splitting import Rank, Spread, Times, spread
from tools.diagnosis.steps import Setup
from tools.planning import scaling, workload
from tools.planning.machine import Machine
from tools.planning.scaling import Row
from training import agreement, choices

# Shares of the time that is given; the rest goes to links and to preparing engines.
_READING = 0.15
_TO_DEVICE = 0.03
_STEPS = 0.6
_METHODS = 0.15
_PEAKS = 3  # measurements of a large matrix product


class Findings(NamedTuple):
    """Everything that was measured, and what follows.

    batch: of the recipe.
    images: for training.
    about: the main rank's processor, device and so on.
    hosts: by rank.
    reading: of the slowest rank.
    to_device: bytes a second of copies, of the slowest rank.
    links: None where none could be measured.
    methods: of exchange, each by itself.
    times: of the step that was measured.
    complete: see `steps.Measurement`.
    parts: seconds of each part of the recipe's step.
    ranks: a row for each.
    straggling: see `splitting.straggling`.
    peak: operations a second, of all devices.
    mfu: share of the peak that a step reaches.
    notes: on what was chosen for `auto`.
    seconds: that the examination took.
    doubts: why nothing follows, see `splitting.doubts`.
    advice: None where there are doubts.
    machine: None there, too, and where no link could be measured.
    doubling: prediction for twice as many replicas; None where there is no machine.
    """

    batch: Batch
    images: int
    about: Dict[str, Any]
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
        """Return the seconds of a step."""
        return sum(self.parts.values())

    @property
    def images_per_second(self) -> float:
        """Return the rate of training."""
        return self.batch.global_ / self.step


class _Figures(NamedTuple):
    """Everything that was measured, the same on all ranks.

    Fields that `Findings` has, too, are described there.

    places: name of the host, and `machine.about`, by rank.
    """

    reading: Reading
    to_device: Spread
    links: Optional[Links]
    methods: List[Method]
    times: Times
    complete: bool
    peak: Spread
    places: List[Tuple[str, Dict[str, Any]]]


def examine(recipe: Recipe, seconds: float, say: Callable[[str], None]) -> Optional[Findings]:
    """Measure on all ranks, each of which calls this.

    Args:
        recipe: of the run.
        seconds: for measuring; large steps take longer.
        say: prints a line of progress, of the main rank.

    Returns:
        The findings; None on ranks but the main one.

    Raises:
        UserError: recipe or data cannot be used, or ranks cannot connect.
    """
    started = time.perf_counter()
    processes, device = _connect(recipe)
    is_main = processes.topology.is_main
    # One rank prints for all.
    if not is_main:
        say = _say_nothing
    agreement.check_one_recipe(recipe, processes)
    # Before the images are opened, as listing them may take minutes.
    batch = _divided(recipe, processes)
    source, lengths, training_images = _opened(recipe, processes)
    # The recipe without `auto`, on which the measurements depend.
    notes: List[str] = []
    resolved = choice.settle(recipe, batch, processes, notes.append)
    resolved = choices.settle_on_device(resolved, batch, processes, notes.append)
    # A micro batch that was `auto` may be another one now.
    batch = _divided(resolved, processes)
    ranks = count(processes.topology.world, "rank")
    say(f"measuring for about {seconds:.0f} s on {ranks}: images, links, steps, exchanges")
    setup = Setup(
        recipe=resolved,
        batch=batch,
        processes=processes,
        device=device,
        lengths=lengths,
        source=source,
    )
    figures = _measure(setup, seconds, say)
    # All ranks have the same figures by now; one concludes and reports.
    if not is_main:
        return None
    elapsed = time.perf_counter() - started
    findings = _findings(setup, figures, training_images, notes=notes, seconds=elapsed)
    return _concluded(findings, setup)


def _divided(recipe: Recipe, processes: Processes) -> Batch:
    """Return the batch of a recipe. Raises ConfigError on all ranks if it cannot be divided."""
    replicas = processes.topology.replicas
    return processes.together(lambda: arithmetic.divide(recipe, replicas))


def _say_nothing(line: str) -> None:
    """Print nothing, on ranks but the main one."""


def _connect(recipe: Recipe) -> Tuple[Processes, torch.device]:
    """Return the processes of the run, and the device of this one. Raises UserError."""
    try:
        place = topology.from_environment(recipe)
        device = device_of(recipe.run.device, place)
        return Processes(place, device, recipe.parallel.silence), device
    except ConfigError as error:
        # It is worded for train.py, the one program that run_pod.sh starts.
        launcher = r"\./run_pod\.sh( --replicas \d+( or \d+)?)?"
        text = re.sub(launcher, "torchrun (docs/doctor.md)", str(error))
        raise ConfigError(text) from None


def _opened(recipe: Recipe, processes: Processes) -> Tuple[Optional[Source], Lengths, int]:
    """Return the training images, the lengths of the run, and the number of these images.

    The images are None on ranks where they do not enter. Raises ConfigError, DataError.
    """

    def opened() -> Optional[Source]:
        """Return the images where they enter."""
        if not processes.topology.is_first:
            return None
        return open_source(recipe.data, recipe.model.classes, "train")

    source = processes.together(opened)
    by_rank = processes.gather(None if source is None else len(source))
    counts = [images for images in by_rank if images is not None]
    # With other images their epochs would have other lengths, and ranks would wait for each other.
    if len(set(counts)) > 1:
        fault = f"ranks find {min(counts)} to {max(counts)} training images"
        message = f"{fault}; give all hosts the same data.root"
        raise DataError(message if processes.topology.is_main else "")
    # Stages that receive no images need the length of the run, too.
    lengths = processes.together(lambda: arithmetic.lengths(recipe, counts[0]))
    return source, lengths, counts[0]


def _measure(setup: Setup, seconds: float, say: Callable[[str], None]) -> _Figures:
    """Measure everything, on all ranks.

    Args:
        setup: of the run.
        seconds: for all measurements.
        say: prints a line, if large steps take longer.
    """
    processes = setup.processes
    # In this order nothing is measured beside an engine that does not need one.
    reading = _reading(setup, _READING * seconds)
    to_device = _to_device(setup, _TO_DEVICE * seconds)
    measured_links = links.measure(processes, setup.device)
    measured = steps.measure(setup, _STEPS * seconds, say)
    peak = spread([measured.engine.peak_flops() for _ in range(_PEAKS)])
    # Exchanges come last: they overwrite the gradient of the engine.
    methods = []
    if processes.topology.replicas > 1 and measured_links is not None:
        methods = links.methods(
            measured.engine,
            setup.recipe,
            setup.batch,
            processes,
            link=measured_links.link,
            seconds=_METHODS * seconds,
        )
    places = processes.gather((platform.node(), machines.about(setup.device)))
    measured.engine.close()
    return _Figures(
        reading=reading,
        to_device=to_device,
        links=measured_links,
        methods=methods,
        times=measured.times,
        complete=measured.complete,
        peak=peak,
        places=places,
    )


def _to_device(setup: Setup, seconds: float) -> Spread:
    """Measure the copies of the slowest rank."""
    rate = images.to_device(
        setup.batch.micro,
        image_size(setup.recipe.model),
        setup.device,
        seconds=seconds,
    )
    return min(setup.processes.gather(rate), key=lambda rate: rate.median)


def _reading(setup: Setup, seconds: float) -> Reading:
    """Measure the reading of the slowest rank, for which a step waits.

    Unreadable images are those of all ranks.
    """
    processes = setup.processes

    def read() -> Optional[Reading]:
        """Read this replica's images where they enter."""
        if setup.source is None:
            return None
        place = processes.topology
        return images.read(setup.recipe, setup.source, place.replica, place.replicas, seconds)

    # Together: an error of one rank ends all of them, instead of leaving them to wait.
    by_rank = processes.gather(processes.together(read))
    readings = [reading for reading in by_rank if reading is not None]
    slowest = min(readings, key=lambda reading: reading.per_core.median)
    return slowest._replace(
        tried=sum(reading.tried for reading in readings),
        unreadable=sum(reading.unreadable for reading in readings),
    )


def _findings(
    setup: Setup,
    figures: _Figures,
    training_images: int,
    notes: List[str],
    seconds: float,
) -> Findings:
    """Return the findings without what follows from them.

    Args:
        setup: of the run.
        figures: that were measured.
        training_images: how many there are.
        notes: see `Findings`.
        seconds: that the examination took.
    """
    batch = setup.batch
    times = figures.times
    hosts = [host for host, _ in figures.places]
    _, about = figures.places[0]
    # The step of the recipe may have more micro batches than the one that was measured.
    measured = splitting.parts(times)
    parts = splitting.scaled(measured, times, batch.accumulation)
    step = sum(parts.values())
    model = setup.recipe.model
    flops = shapes.training_flops(model, image_size(model)) * batch.global_
    return Findings(
        batch=batch,
        images=training_images,
        about=about,
        hosts=hosts,
        reading=figures.reading,
        to_device=figures.to_device,
        links=figures.links,
        methods=figures.methods,
        times=times,
        complete=figures.complete,
        parts=parts,
        ranks=splitting.ranks(times.passes, times.stages, hosts),
        straggling=splitting.straggling(times, batch.accumulation),
        peak=figures.peak,
        mfu=flops / step / figures.peak.median,
        notes=notes,
        seconds=seconds,
        doubts=splitting.doubts(times, parts),
    )


def _concluded(findings: Findings, setup: Setup) -> Findings:
    """Return the findings with what follows from them, unless they are in doubt."""
    if findings.doubts:
        return findings
    findings = findings._replace(advice=advice.advise(setup.recipe, findings))
    # A prediction for more replicas needs a link between them.
    if findings.links is None:
        return findings
    place = setup.processes.topology
    planned = _planned(setup.recipe, place.stages)
    work = workload.of(planned)
    machine = machines.described(planned, setup.device, work, findings)
    doubling = scaling.predict(planned, machine, 2 * place.replicas, work)
    return findings._replace(machine=machine, doubling=doubling)


def _planned(recipe: Recipe, stages: int) -> Recipe:
    """Return the recipe as it was measured, at one image size, in that many stages.

    A process that computes all stages by itself is one device.
    """
    recipe = workload.changed(recipe, "data", image_sizes=None)
    if stages == recipe.parallel.stages:
        return recipe
    parallel = Parallel(
        recompute=recipe.parallel.recompute,
        replicas=recipe.parallel.replicas,
    )
    return recipe.model_copy(update={"parallel": parallel})
