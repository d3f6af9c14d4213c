"""exchange.method auto: the exchange that is predicted to be fastest here.

A faster one is taken only where its speed is worth its errors.
"""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from engines import cuts
from engines.devices import device_of, timed
from models.base import BlockList
from models.families import build
from models.meta import without_memory
from parallel import evidence, exchange
from parallel.costs import Link
from parallel.evidence import PAGE, Evidence
from parallel.exchange import Gradient, Method
from parallel.processes import Processes
from recipe import checks
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Auto, Exchange

# An exchange that leaves out more must be this many times as fast as one that leaves out less: a
# prediction may be off by a fifth or so, and the evidence is of other images than the user's.
_WORTH = 1.5
# Seconds of a dense exchange that do not matter: few steps of large batches take less than some
# tenths.
_NEGLIGIBLE = 0.01
_UNKNOWN = 100.0  # points of top-1
_EXACT = Evidence(0.0, 0.0)


class Candidate(NamedTuple):
    """An exchange and its predicted cost.

    network: seconds of messages.
    processor: seconds to select or to round.
    size: bytes that a replica sends.
    evidence: what the exchange loses; None if that was not measured.
    """

    method: Method
    network: float
    processor: float
    size: float = 0.0
    evidence: Optional[Evidence] = None

    @property
    def name(self) -> str:
        """Return the method's name."""
        return self.method.name

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole exchange."""
        return self.network + self.processor

    def accepted(self, loss: float) -> bool:
        """Return whether it is known to lose no more than `loss` points of top-1.

        Only a measurement that can tell so few points counts.
        """
        known = _UNKNOWN if self.evidence is None else max(self.evidence)
        return known <= loss

    def __str__(self) -> str:
        work = ""
        if self.processor:
            work = f", {_figure(1e3 * self.processor)} ms of it to {self.method.work}"
        loss = "exact" if self.method.exact else self.evidence or "loss not measured"
        size = f"{_figure(1e-6 * self.size)} MB"
        time = f"{_figure(1e3 * self.seconds)} ms"
        return f"{self.method.section.label:22}  {size}, {time}{work}; {loss}"


class _Costs(NamedTuple):
    """Measured costs, of the slowest process.

    link: between replicas.
    selection, rounding: seconds to select from a gradient, and to round it.
    """

    link: Link
    selection: float
    rounding: float


def settle(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    report: Callable[[str], None],
    begun: Optional[Exchange] = None,
) -> Recipe:
    """Replace `exchange.method: auto` by a method, the same on all processes.

    For a new run, links and selection are measured and the predictions reported: of the exchange
    alone, as if it began after the last backward pass, and without the merges of gtopk. One replica
    and IPUs take dense.

    Args:
        recipe: of the run.
        batch: of a step.
        processes: of the run; all of them call.
        report: takes lines for the user.
        begun: the section of a run that is resumed, whose method is kept.

    Returns:
        The changed recipe.

    Raises:
        ConfigError: cut points that the model does not have.
    """
    section = recipe.exchange
    if not isinstance(section, Auto):
        return recipe
    # A run that goes on keeps its method: what it has saved may not fit another.
    if begun is not None and begun.method != "auto":
        method = exchange.of(begun)
        report(f"exchange.method auto: {method.name}, as the run began")
    elif recipe.run.device == "ipu":
        method = exchange.named("dense")
        report("exchange.method auto: dense; on IPUs there is no other")
    elif processes.topology.replicas == 1:
        method = exchange.named("dense")
        report("exchange.method auto: dense; one replica has nobody to send to")
    else:
        method = _predicted(recipe, section, batch, processes, report)
    # Keys that only `auto` could take are named, so that nobody believes that they count.
    dropped = section.refused_by(method.section.method)
    if dropped:
        keys = ", ".join(dropped)
        report(f"exchange.{keys}: left out, as {method.section.method} sends whole gradients")
    return recipe.model_copy(update={"exchange": method.taken_by(section)})


def _predicted(
    recipe: Recipe,
    section: Auto,
    batch: Batch,
    processes: Processes,
    report: Callable[[str], None],
) -> Method:
    """Measure links and processors, and return the method that is worth taking."""
    topology = processes.topology
    device = device_of(recipe.run.device, topology)
    # Cut points that the model does not have end all processes, with one message.
    gradient = processes.together(lambda: _gradient(recipe, batch, topology.stages))
    costs = _measured(section.density, gradient, processes, device)
    _report_links(costs.link, gradient, topology.replicas, report)
    candidates = predict(
        exchange.candidates(section),
        recipe,
        batch,
        gradient,
        costs.link,
        selection=costs.selection,
        rounding=costs.rounding,
    )
    # All are listed, also those that lose too much: the user may accept more for their speed.
    for candidate in candidates:
        report(f"  {candidate}")
    accepted = [candidate for candidate in candidates if candidate.accepted(section.accept_loss)]
    choice, reason = pick(accepted)
    limit = f"{section.accept_loss:g} points of top-1"
    report(f"  taken: {choice.method.section.label}; {reason}")
    report(f"  of those that lose {limit} at most (exchange.accept_loss; {PAGE})")
    return choice.method


def _report_links(
    link: Link,
    gradient: Gradient,
    replicas: int,
    report: Callable[[str], None],
) -> None:
    """Report what is to be exchanged, and over which links."""
    bandwidth = "not to be measured"
    if link.seconds_per_byte:
        bandwidth = f"{_figure(8e-6 / link.seconds_per_byte)} Mbit/s"
    report(
        f"exchange.method auto: {gradient.elements:,} gradients, {replicas} replicas; "
        f"links: latency {_figure(1e3 * link.latency)} ms, bandwidth {bandwidth}"
    )


def predict(
    methods: Sequence[Method],
    recipe: Recipe,
    batch: Batch,
    gradient: Gradient,
    link: Link,
    *,
    selection: float = 0.0,
    rounding: float = 0.0,
) -> List[Candidate]:
    """Predict the cost of the methods that go with a recipe.

    Args:
        methods: to choose from.
        recipe: of the run.
        batch: of a step.
        gradient: of the largest stage.
        link: between replicas.
        selection: seconds of a processor to select from the gradient.
        rounding: seconds of a processor to round it.
    """
    work = {"": 0.0, "select": selection, "round": rounding}
    candidates = []
    for method in methods:
        section = method.section
        # Some methods do not go with what else the recipe asks for: these are no candidates.
        try:
            # With the recipe's own keys, as the method would run if it were taken.
            taken = method.taken_by(recipe.exchange)
            if recipe.exchange.method == "auto":
                section = taken
            checks.check(recipe.model_copy(update={"exchange": section}), batch)
        except ConfigError:
            continue
        known = _EXACT if method.exact else evidence.of(section, recipe.optimizer)
        candidates.append(
            Candidate(
                method,
                network=method.seconds(link, batch.replicas, gradient),
                processor=work[method.work],
                size=method.bytes_sent(batch.replicas, gradient),
                evidence=known,
            )
        )
    return candidates


def pick(candidates: List[Candidate]) -> Tuple[Candidate, str]:
    """Return the candidate to take, and the reason.

    One replaces another if it is `_WORTH` times as fast.

    Args:
        candidates: those that leave out less come first.
    """
    # The first loses least, and sends most: what follows has to be worth its errors.
    choice = candidates[0]
    reason = f"nothing else is {_WORTH} times as fast"
    if choice.seconds < _NEGLIGIBLE:
        return choice, f"below {1e3 * _NEGLIGIBLE:.0f} ms no other is worth a change"
    for candidate in candidates[1:]:
        if candidate.seconds * _WORTH <= choice.seconds:
            gain = f"{choice.seconds / candidate.seconds:.1f} times as fast as {choice.name}"
            reason = f"{gain}, and {_WORTH} is worth a change"
            choice = candidate
    return choice, reason


def _gradient(recipe: Recipe, batch: Batch, stages: int) -> Gradient:
    """Return the sizes of the largest stage's gradient.

    Measured cuts are taken as if they balanced multiply-adds.
    """
    # Without memory: only the sizes of the parameters count.
    with without_memory():
        model = build(recipe.model, 0)
    parts = [model.names]
    if stages > 1:
        parts = cuts.counted(cuts.Blocks(model, recipe.model, recipe.parallel, batch)).names
    gradients = []
    for stage in range(stages):
        # A stage has every `stages`-th part.
        names = [name for part in parts[stage::stages] for name in part]
        gradients.append(_stage_gradient(model, names, recipe.exchange.whole_1d))
    # Tuples compare by their first field, the elements.
    return max(gradients)


def _stage_gradient(model: BlockList, names: Sequence[str], whole_1d: bool) -> Gradient:
    """Return the sizes of the gradient of some blocks.

    Args:
        model: whole.
        names: of the blocks.
        whole_1d: vectors are sent whole.
    """
    elements = 0
    vectors = 0
    layers = 0
    for name in names:
        for parameter in model.block(name).parameters():
            elements += parameter.numel()
            if parameter.dim() == 1:
                vectors += parameter.numel()
            elif parameter.dim() > 1:
                layers += 1
    return Gradient(elements, vectors if whole_1d else 0, layers)


def _measured(
    density: float,
    gradient: Gradient,
    processes: Processes,
    device: torch.device,
) -> _Costs:
    """Measure the link and a processor's work, the same result on all processes."""
    # These need a newer Python than the IPU's, where nothing is measured.
    from parallel import probe, selection

    generator = torch.Generator().manual_seed(0)
    # As many elements as a replica selects from: the others are sent whole, without a choice.
    vector = torch.randn(gradient.elements - gradient.whole, generator=generator).to(device)
    # The density of most steps, once a warm-up has come down to it.
    count = min(max(1, round(density * len(vector))), len(vector))
    # The fastest of four calls: the first finds caches empty, and a machine that starts a run is
    # busy.
    select = min(timed(lambda: selection.largest(vector, count), device, 4))
    convert = min(timed(lambda: vector.half().float(), device, 4))
    link = probe.measure(processes.replica_group, device)
    # The slowest process decides.
    by_rank = processes.gather((link.latency, link.seconds_per_byte, select, convert))
    latency, seconds_per_byte, select, convert = map(max, zip(*by_rank))
    return _Costs(Link(latency, seconds_per_byte), select, convert)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
