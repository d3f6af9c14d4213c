"""exchange.method auto: the exchange that is predicted to be fastest here, where that is worth its errors."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from engines import cuts
from engines.devices import device_of, timed
from models.families import build
from parallel import evidence, exchange
from parallel.costs import Link
from parallel.evidence import PAGE, Evidence
from parallel.exchange import Gradient, Method
from parallel.processes import Processes
from recipe import checks
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange

# An exchange that leaves out more must be this many times as fast as one that leaves out less: a prediction may be off
# by a fifth or so, and the evidence is of other images than the user's.
_WORTH = 1.5
# Seconds of a dense exchange that do not matter: few steps of large batches take less than some tenths.
_NEGLIGIBLE = 0.01
_UNKNOWN = 100.0  # points of top-1
_EXACT = Evidence(0.0, 0.0)


class Candidate(NamedTuple):
    """An exchange and its predicted seconds: on the network, and of processors, to select or to round.

    size: bytes that a replica sends. evidence: what the exchange loses; None if that was not measured.
    """

    method: Method
    network: float
    processor: float
    size: float = 0.0
    evidence: Optional[Evidence] = None

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def seconds(self) -> float:
        return self.network + self.processor

    def accepted(self, loss: float) -> bool:
        """Whether it is known to lose no more points of top-1, by a measurement that can tell so few."""
        return (max(self.evidence) if self.evidence is not None else _UNKNOWN) <= loss

    def __str__(self) -> str:
        work = f", {_figure(1e3 * self.processor)} ms of it to {self.method.work}" if self.processor else ""
        known = "exact" if self.method.exact else self.evidence or "loss not measured"
        size, label = f"{_figure(1e-6 * self.size)} MB", self.method.section.label
        return f"{label:22}  {size}, {_figure(1e3 * self.seconds)} ms{work}; {known}"


def resolve(
    recipe: Recipe, batch: Batch, processes: Processes, report: Callable[[str], None], begun: Optional[Exchange] = None
) -> Recipe:
    """`recipe` with a method in the place of `auto`, the same on all processes, each of which must call this.

    For a new run, links and selection are measured and the predictions reported: of the exchange alone, as if it began
    after the last backward pass, and without the merges of gtopk. One replica and IPUs take dense. Args: begun: the
    section of a run that is resumed, whose method is kept. Raises ConfigError: cut points that the model does not have.
    """
    section, replicas = recipe.exchange, processes.topology.replicas
    if section.method != "auto":
        return recipe
    if begun is not None and begun.method != "auto":
        method = exchange.of(begun)
        report(f"exchange.method auto: {method.name}, as the run began")
    elif recipe.run.device == "ipu" or replicas == 1:
        method = exchange.named("dense")
        why = "on IPUs there is no other" if recipe.run.device == "ipu" else "one replica has nobody to send to"
        report(f"exchange.method auto: dense; {why}")
    else:
        gradient = processes.together(lambda: _gradient(recipe, batch, processes))
        link, selection, rounding = _measured(
            section, gradient, processes, device_of(recipe.run.device, processes.topology)
        )
        candidates = predict(exchange.candidates(section), recipe, batch, gradient, link, selection, rounding)
        bandwidth = f"{_figure(8e-6 / link.seconds_per_byte)} Mbit/s" if link.seconds_per_byte else "not to be measured"
        report(
            f"exchange.method auto: {gradient.elements:,} gradients, {replicas} replicas; "
            f"links: latency {_figure(1e3 * link.latency)} ms, bandwidth {bandwidth}"
        )
        for each in candidates:
            report(f"  {each}")
        taken, why = pick([each for each in candidates if each.accepted(section.accept_loss)])
        method = taken.method
        report(f"  taken: {method.section.label}; {why}")
        report(f"  of those that lose {section.accept_loss:g} points of top-1 at most (exchange.accept_loss; {PAGE})")
    dropped = section.refused_by(method.section.method)
    if dropped:
        report(f"exchange.{', '.join(dropped)}: left out, as {method.section.method} sends whole gradients")
    return recipe.model_copy(update={"exchange": method.taken_by(section)})


def predict(
    methods: Sequence[Method],
    recipe: Recipe,
    batch: Batch,
    gradient: Gradient,
    link: Link,
    selection: float = 0.0,
    rounding: float = 0.0,
) -> List[Candidate]:
    """The methods that go with a recipe. Args: selection, rounding: seconds of a processor."""
    work, replicas = {"": 0.0, "select": selection, "round": rounding}, batch.replicas
    found = []
    for method in methods:
        section = method.taken_by(recipe.exchange) if recipe.exchange.method == "auto" else method.section
        try:
            checks.check(recipe.model_copy(update={"exchange": section}), batch)
        except ConfigError:
            continue
        known = _EXACT if method.exact else evidence.of(section, recipe.optimizer)
        network, size = method.seconds(link, replicas, gradient), method.bytes_sent(replicas, gradient)
        found.append(Candidate(method, network, work[method.work], size, known))
    return found


def pick(candidates: List[Candidate]) -> Tuple[Candidate, str]:
    """The candidate to take, and why: one replaces another if it is `_WORTH` times as fast."""
    taken, why = candidates[0], f"nothing else is {_WORTH} times as fast"
    if taken.seconds < _NEGLIGIBLE:
        return taken, f"below {1e3 * _NEGLIGIBLE:.0f} ms no other is worth a change"
    for each in candidates[1:]:
        if each.seconds * _WORTH <= taken.seconds:
            why = f"{taken.seconds / each.seconds:.1f} times as fast as {taken.name}, and {_WORTH} is worth a change"
            taken = each
    return taken, why


def _gradient(recipe: Recipe, batch: Batch, processes: Processes) -> Gradient:
    """Size of the largest stage's gradient. Measured cuts are taken as if they balanced multiply-adds."""
    with torch.device("meta"):
        model = build(recipe.model, recipe.run.seed)
    stages = processes.topology.stages
    parts = (
        cuts.counted(cuts.Blocks(model, recipe.model, recipe.parallel, batch)).names if stages > 1 else [model.names]
    )
    found = []
    for stage in range(stages):
        own = [model.block(name).parameters() for part in parts[stage::stages] for name in part]
        sizes = [(each.numel(), each.dim()) for block in own for each in block]
        whole = sum(size for size, dimensions in sizes if dimensions == 1) if recipe.exchange.whole_1d else 0
        layers = sum(dimensions > 1 for _, dimensions in sizes)
        found.append(Gradient(sum(size for size, _ in sizes), whole, layers))
    return max(found)


def _measured(
    section: Exchange, gradient: Gradient, processes: Processes, device: torch.device
) -> Tuple[Link, float, float]:
    """The link, and seconds to select from and to round a gradient; of the slowest process, so the same on all."""
    # These need a newer Python than the IPU's, where nothing is measured.
    from parallel import probe, selection

    vector = torch.randn(gradient.elements - gradient.whole, generator=torch.Generator().manual_seed(0)).to(device)
    count = min(max(1, round(section.density * len(vector))), len(vector))  # once densities have come down
    # The fastest of four calls: the first finds caches empty, and a machine that starts a run is busy.
    select = min(timed(lambda: selection.largest(vector, count), device, 4))
    convert = min(timed(lambda: vector.half().float(), device, 4))
    own = (*probe.measure(processes.replica_group, device), select, convert)
    latency, seconds_per_byte, *processor = map(max, zip(*processes.gather(own)))
    return Link(latency, seconds_per_byte), *processor


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
