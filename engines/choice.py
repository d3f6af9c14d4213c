"""exchange.method auto: the exchange that is predicted to be fastest here, where that is worth its errors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, List, NamedTuple, Optional, Tuple

import torch

from engines import cuts
from engines.devices import device_of, synchronize
from models.families import build
from parallel import exchange
from parallel.costs import Link
from parallel.exchange import Method
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange

if TYPE_CHECKING:
    from parallel.agreement import Agreement

# An exchange that loses more of a gradient has to be so many times as fast as one that loses less: what is lost costs
# accuracy or steps, and a prediction may be wrong by a fifth or so.
_WORTH = 1.5
# Seconds of a dense exchange that are no matter: few steps of large batches take less than some tenths.
_NEGLIGIBLE = 0.01


class Candidate(NamedTuple):
    """An exchange and its predicted seconds: on the network, and of processors, to select or to round."""

    method: Method
    network: float
    processor: float

    @property
    def name(self) -> str:
        """That of the method."""
        return self.method.name

    @property
    def seconds(self) -> float:
        return self.network + self.processor


class Gradient(NamedTuple):
    """Elements of the largest stage's gradient, and how many of them every method sends whole."""

    elements: int
    whole: int


def resolve(
    recipe: Recipe,
    batch: Batch,
    processes: Agreement,
    say: Callable[[str], None],
    begun: Optional[Exchange] = None,
) -> Recipe:
    """`recipe` with a method in the place of `auto`, the same on all processes, each of which must call this.

    Of a new run, links and selection are measured, and `say` is told what is predicted: of the exchange alone, as if
    it began after the last backward pass, and without the merges of gtopk. Keys that go only with topk and gtopk are
    left out where another method is taken. One replica and IPUs have no choice: they take dense.

    Args:
        begun: the section of the run that goes on, whose method and pattern it keeps; None for a new one.

    Raises:
        ConfigError: cut points that the model does not have.
    """
    if recipe.exchange.method != "auto":
        return recipe
    if begun is not None and begun.method != "auto":
        say(f"exchange.method auto: {exchange.of(begun).name}, as the run began")
        return _resolved(recipe, exchange.of(begun), say)
    if recipe.run.device == "ipu" or processes.topology.replicas == 1:
        why = "on IPUs there is no other" if recipe.run.device == "ipu" else "one replica has nobody to send to"
        say(f"exchange.method auto: dense; {why}")
        return _resolved(recipe, exchange.named("dense"), say)
    gradient = processes.together(lambda: _gradient(recipe, batch, processes))
    link, selection, rounding = _measured(recipe, gradient, processes)
    candidates = predict(recipe.exchange, processes.topology.replicas, gradient, link, selection, rounding)
    taken, why = pick(candidates)
    for line in _table(recipe, processes.topology.replicas, gradient, link, candidates):
        say(line)
    say(f"  taken: {taken.name}; {why}")
    return _resolved(recipe, taken.method, say)


def predict(
    section: Exchange, replicas: int, gradient: Gradient, link: Link, selection: float, rounding: float
) -> List[Candidate]:
    """The exchanges that the section allows, from the most faithful one to that which leaves out most.

    Args:
        selection, rounding: seconds of a processor.
    """
    work = {"": 0.0, "select": selection, "round": rounding}
    return [
        Candidate(method, method.seconds(link, replicas, gradient.elements, gradient.whole), work[method.work])
        for method in exchange.variants(section)
    ]


def pick(candidates: List[Candidate]) -> Tuple[Candidate, str]:
    """The candidate to take, and why: one takes another's place if it is `_WORTH` times as fast."""
    taken, why = candidates[0], f"nothing else is {_WORTH} times as fast"
    if taken.seconds < _NEGLIGIBLE:
        return taken, f"below {1e3 * _NEGLIGIBLE:.0f} ms no other is worth a change"
    for candidate in candidates[1:]:
        if candidate.seconds * _WORTH <= taken.seconds:
            why = (
                f"{taken.seconds / candidate.seconds:.1f} times as fast as {taken.name}, and {_WORTH} is worth a change"
            )
            taken = candidate
    return taken, why


def _resolved(recipe: Recipe, method: Method, say: Callable[[str], None]) -> Recipe:
    section, taken = recipe.exchange, method.section.method
    dropped = section.refused_by(taken)
    if dropped:
        say(f"exchange.{', '.join(dropped)}: left out, as {taken} sends whole gradients")
    return recipe.model_copy(update={"exchange": method.taken_by(section)})


def _gradient(recipe: Recipe, batch: Batch, processes: Agreement) -> Gradient:
    """Size of the largest stage's gradient. Measured cuts are taken as if they balanced multiply-adds."""
    with torch.device("meta"):
        model = build(recipe.model, recipe.run.seed)
    stages = processes.topology.stages
    parts = cuts.counted(model, recipe, batch)[0] if stages > 1 else [model.names]
    found = []
    for stage in range(stages):
        names = [name for part in parts[stage::stages] for name in part]
        parameters = [parameter for name in names for parameter in model.block(name).parameters()]
        whole = [each.numel() for each in parameters if recipe.exchange.whole_1d and each.dim() == 1]
        found.append(Gradient(sum(each.numel() for each in parameters), sum(whole)))
    return max(found)


def _measured(recipe: Recipe, gradient: Gradient, processes: Agreement) -> Tuple[Link, float, float]:
    """The link, and seconds to select and to round a gradient; of the slowest process, and so the same on all."""
    # These need a newer Python than the IPU's, where nothing is measured.
    from parallel import probe, selection

    device = device_of(recipe, processes.topology)
    vector = torch.randn(gradient.elements - gradient.whole, generator=torch.Generator().manual_seed(0)).to(device)
    count = _count(recipe.exchange, gradient)
    own = (
        probe.measure(processes.replica_group, device),
        _seconds(lambda values: selection.largest(values, min(count, len(values))), vector),
        _seconds(lambda values: values.half().float(), vector),
    )
    links, *processor = zip(*processes.gather(own))
    return Link(*map(max, zip(*links))), max(processor[0]), max(processor[1])


def _seconds(work: Callable[[torch.Tensor], object], vector: torch.Tensor) -> float:
    """Seconds of the fastest of a few calls: the first finds caches empty, and a machine that starts a run is busy."""
    found = []
    for _ in range(4):
        synchronize(vector.device)
        start = time.perf_counter()
        work(vector)
        synchronize(vector.device)
        found.append(time.perf_counter() - start)
    return min(found)


def _count(section: Exchange, gradient: Gradient) -> int:
    """Values that a replica sends of the largest stage's gradient, once densities have come down."""
    return max(1, round(section.density * (gradient.elements - gradient.whole)))


def _table(recipe: Recipe, replicas: int, gradient: Gradient, link: Link, candidates: List[Candidate]) -> List[str]:
    bandwidth = f"{_figure(8e-6 / link.seconds_per_byte)} Mbit/s" if link.seconds_per_byte else "not to be measured"
    lines = [
        f"exchange.method auto: {gradient.elements:,} gradients, density {recipe.exchange.density:g}, "
        f"{replicas} replicas; links: latency {_figure(1e3 * link.latency)} ms, bandwidth {bandwidth}"
    ]
    for each in candidates:
        and_work = f", {_figure(1e3 * each.processor)} ms of it to {each.method.work}" if each.processor else ""
        lines.append(f"  {each.name:15}  {_figure(1e3 * each.seconds)} ms{and_work}")
    return lines


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
