"""Cost of messages between replicas, and of each exchange of this model's gradient by itself."""

from __future__ import annotations

import time
from typing import List, NamedTuple, Optional

import torch

from engines import choice
from engines.choice import Candidate
from engines.devices import synchronize
from engines.torch_engine import TorchEngine
from parallel import exchange, probe
from parallel.costs import Link
from parallel.exchange import Gradient
from parallel.processes import Processes
from recipe.config import Recipe
from recipe.division import Batch
from tools.diagnosis import loopback
from tools.diagnosis.splitting import Spread, spread
from tools.diagnosis.steps import rounds, slowest

_REPETITIONS = 5
_WARM_UP = 2  # exchanges that do not count
_LARGEST = 262144  # bytes; the largest message of parallel.probe


class Links(NamedTuple):
    """Links between replicas.

    latency: seconds.
    bandwidth: bytes a second.
    loopback: there is one replica, so two processes of this host were measured.
    """

    latency: Spread
    bandwidth: Spread
    loopback: bool

    @property
    def link(self) -> Link:
        """Return the link with the medians."""
        return Link(self.latency.median, 1 / self.bandwidth.median)


class Method(NamedTuple):
    """An exchange by itself.

    candidate: as predicted.
    measured: seconds; None where it takes long or needs other keys.
    """

    candidate: Candidate
    measured: Optional[Spread]

    @property
    def timed(self) -> Candidate:
        """Return the candidate with its seconds as measured, if they are."""
        if self.measured is None:
            return self.candidate
        return self.candidate._replace(network=self.measured.median)


def measure(processes: Processes, device: torch.device) -> Optional[Links]:
    """Measure the link between replicas, or between two processes of this host.

    Every rank calls.

    Args:
        processes: of the run.
        device: of the gradients.

    Returns:
        The link; None where two processes of this host cannot be connected.
    """
    is_loopback = processes.topology.replicas == 1
    links: Optional[List[Link]]
    if is_loopback:
        # On the main rank alone, which starts two processes: others would disturb them.
        links = processes.from_main(loopback.measure)
    else:
        # Replicas of a stage exchange among themselves, so each such group is measured.
        group = processes.replica_group
        measured = [probe.measure(group, device) for _ in range(_REPETITIONS)]
        links = _slowest_links(processes.gather(measured))
    if links is None:
        return None
    latencies = [link.latency for link in links]
    bandwidths = [_bandwidth(link) for link in links]
    return Links(spread(latencies), spread(bandwidths), is_loopback)


def _bandwidth(link: Link) -> float:
    """Return the bytes a second of a link, which are at least those of the largest message."""
    if link.seconds_per_byte:
        return 1 / link.seconds_per_byte
    # Bytes cost nothing that could be measured.
    return _LARGEST / link.latency


def _slowest_links(by_rank: List[List[Link]]) -> List[Link]:
    """Return for each repetition the larger figures of all ranks."""
    # In each round an exchange waits for the slowest rank.
    slowest_links = []
    for links in zip(*by_rank):
        latency = max(link.latency for link in links)
        seconds_per_byte = max(link.seconds_per_byte for link in links)
        slowest_links.append(Link(latency, seconds_per_byte))
    return slowest_links


def methods(
    engine: TorchEngine,
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    link: Link,
    seconds: float,
) -> List[Method]:
    """Predict every exchange of the gradient of the largest stage, and time those of the recipe.

    Every rank calls. The engine's gradient is lost.

    Args:
        engine: whose gradient is exchanged.
        recipe: whose keys of `exchange` the methods take over.
        batch: of the recipe.
        processes: of the run.
        link: between replicas.
        seconds: for all measurements; a method that takes longer is not measured.
    """
    # Of the largest stage: sizes compare by the number of elements first.
    largest = max(processes.gather(_gradient(engine, recipe.exchange.whole_1d)))
    # Sections of `exchange` with the recipe's keys.
    variants = [method.section for method in exchange.variants(recipe.exchange)]
    share = seconds / len(variants)
    candidates = exchange.candidates(recipe.exchange)
    timed = []
    for candidate in choice.predict(candidates, recipe, batch, largest, link):
        section = candidate.method.section
        # A method whose keys the recipe does not have is predicted only.
        measured = None
        if candidate.network < seconds and section in variants:
            variant = recipe.model_copy(update={"exchange": section})
            measured = _seconds(engine, variant, processes, share)
        timed.append(Method(candidate, measured))
    return timed


def _gradient(engine: TorchEngine, whole_1d: bool) -> Gradient:
    """Return the sizes of the gradient of an engine's stage.

    Args:
        engine: of this rank.
        whole_1d: vectors are sent whole.
    """
    elements = 0
    vectors = 0
    layers = 0
    for _, parameter in engine.weights.places():
        elements += parameter.numel()
        # Vectors are biases and those of normalisation; the others are layers.
        if parameter.dim() == 1:
            vectors += parameter.numel()
        elif parameter.dim() > 1:
            layers += 1
    return Gradient(elements, vectors if whole_1d else 0, layers)


def _seconds(
    engine: TorchEngine,
    recipe: Recipe,
    processes: Processes,
    seconds: float,
) -> Spread:
    """Measure the seconds of an exchange on the slowest rank.

    Args:
        engine: whose gradient is exchanged.
        recipe: with the exchange.
        processes: of the run.
        seconds: for measuring.
    """
    gradients = engine.weights.gradients
    run = engine.exchange_of(recipe, 1)
    # Values of a likely distribution: selecting and rounding take as long as in training.
    for view in gradients.views:
        view.normal_()
    # The exchange replaces the gradient by the sum, so each repetition begins with a copy.
    gradient = gradients.flat.clone()
    scale = torch.ones((), device=engine.device)

    def repetition(step: int) -> float:
        """Return the seconds of one exchange, which counts as update `step`."""
        gradients.flat.copy_(gradient)
        processes.wait_for_all()
        start = time.perf_counter()
        run(step, scale, 1.0)
        synchronize(engine.device)
        return time.perf_counter() - start

    try:
        for step in range(_WARM_UP):
            repetition(step)
        measured = [repetition(_WARM_UP + number) for number in rounds(processes, seconds)]
    finally:
        # It may have a thread, or buffers as large as the gradient.
        run.close()
    return spread(slowest(processes.gather(measured)))
