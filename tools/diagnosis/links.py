"""Cost of messages between replicas, and seconds of each exchange of this model's gradient by itself."""

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
    """Between replicas, or two processes of this host: seconds, bytes a second."""

    latency: Spread
    bandwidth: Spread
    loopback: bool

    @property
    def link(self) -> Link:
        return Link(self.latency.median, 1 / self.bandwidth.median)


class Method(NamedTuple):
    """An exchange by itself: predicted, and measured in seconds, but not where it takes long or needs other keys."""

    candidate: Candidate
    measured: Optional[Spread]

    @property
    def timed(self) -> Candidate:
        """With seconds as measured, if they are."""
        return self.candidate._replace(network=self.measured.median) if self.measured else self.candidate


def measure(processes: Processes, device: torch.device) -> Optional[Links]:
    """Every rank calls this. None where two processes of this host cannot be connected."""
    if processes.topology.replicas > 1:
        own = [probe.measure(processes.replica_group, device) for _ in range(_REPETITIONS)]
        found = [Link(*map(max, zip(*links))) for links in zip(*processes.gather(own))]
    else:
        found = processes.from_main(loopback.measure)
    if found is None:
        return None
    # A link on which bytes cost nothing that could be measured: at least this fast.
    bandwidth = [1 / link.seconds_per_byte if link.seconds_per_byte else _LARGEST / link.latency for link in found]
    return Links(spread([link.latency for link in found]), spread(bandwidth), processes.topology.replicas == 1)


def methods(
    engine: TorchEngine, recipe: Recipe, batch: Batch, processes: Processes, link: Link, seconds: float
) -> List[Method]:
    """Time every exchange of the gradient of the largest stage, which is lost. Every rank calls this."""
    sizes = [(parameter.numel(), parameter.dim()) for _, parameter in engine.weights.places()]
    whole = sum(size for size, dimensions in sizes if dimensions == 1) if recipe.exchange.whole_1d else 0
    layers = sum(dimensions > 1 for _, dimensions in sizes)
    gradient = max(processes.gather(Gradient(sum(size for size, _ in sizes), whole, layers)))
    own = [method.section for method in exchange.variants(recipe.exchange)]
    predicted = choice.predict(exchange.candidates(recipe.exchange), recipe, batch, gradient, link)
    found = []
    for candidate in predicted:
        tried = recipe.model_copy(update={"exchange": candidate.method.section})
        short = candidate.network < seconds and tried.exchange in own
        found.append(Method(candidate, _seconds(engine, tried, processes, seconds / len(own)) if short else None))
    return found


def _seconds(engine: TorchEngine, recipe: Recipe, processes: Processes, seconds: float) -> Spread:
    """Seconds of an exchange on the slowest rank."""
    weights, run = engine.weights, engine.exchange_of(recipe, 1)
    for view in weights.gradients.views:
        view.normal_()
    buffer, scale = weights.gradients.flat, torch.ones((), device=engine.device)
    gradient = buffer.clone()

    def repetition(step: int) -> float:
        buffer.copy_(gradient)
        processes.wait_for_all()
        start = time.perf_counter()
        run(step, scale, 1.0)
        synchronize(engine.device)
        return time.perf_counter() - start

    try:
        for step in range(_WARM_UP):
            repetition(step)
        own = [repetition(_WARM_UP + number) for number in rounds(processes, seconds)]
    finally:
        run.close()
    return spread(slowest(processes.gather(own)))
