"""exchange.method auto: the exchange that is predicted to be fastest here, where that is worth its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, List, NamedTuple, Optional, Tuple

import torch

from engines import cuts
from engines.devices import device_of, timed
from models.families import build
from parallel import exchange
from parallel.costs import Link
from parallel.exchange import Gradient, Method
from recipe.config import Recipe
from recipe.division import Batch
from recipe.exchange import Exchange

if TYPE_CHECKING:
    from parallel.agreement import Agreement

# An exchange that loses more of a gradient must be this many times as fast as one that loses less: what is lost costs
# accuracy or steps, and a prediction may be wrong by a fifth or so.
_WORTH = 1.5
# Seconds of a dense exchange that do not matter: few steps of large batches take less than some tenths.
_NEGLIGIBLE = 0.01


class Candidate(NamedTuple):
    """An exchange and its predicted seconds: on the network, and of processors, to select or to round."""

    method: Method
    network: float
    processor: float

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def seconds(self) -> float:
        return self.network + self.processor


def resolve(
    recipe: Recipe, batch: Batch, processes: Agreement, report: Callable[[str], None], begun: Optional[Exchange] = None
) -> Recipe:
    """`recipe` with a method in the place of `auto`, the same on all processes, each of which must call this.

    For a new run, links and selection are measured and the predictions reported: of the exchange alone, as if it began
    after the last backward pass, and without the merges of gtopk. One replica and IPUs take dense. Keys that only topk
    and gtopk have are left out where another method is taken.

    Args: begun: the section of the run that is resumed, whose method and pattern are kept; None for a new run.

    Raises ConfigError: cut points that the model does not have.
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
        link, selection, rounding = _measured(section, gradient, processes, device_of(recipe, processes.topology))
        candidates = predict(section, replicas, gradient, link, selection, rounding)
        bandwidth = f"{_figure(8e-6 / link.seconds_per_byte)} Mbit/s" if link.seconds_per_byte else "not to be measured"
        report(
            f"exchange.method auto: {gradient.elements:,} gradients, density {section.density:g}, {replicas} replicas; "
            f"links: latency {_figure(1e3 * link.latency)} ms, bandwidth {bandwidth}"
        )
        for each in candidates:
            work = f", {_figure(1e3 * each.processor)} ms of it to {each.method.work}" if each.processor else ""
            report(f"  {each.name:15}  {_figure(1e3 * each.seconds)} ms{work}")
        taken, why = pick(candidates)
        method = taken.method
        report(f"  taken: {taken.name}; {why}")
    dropped = section.refused_by(method.section.method)
    if dropped:
        report(f"exchange.{', '.join(dropped)}: left out, as {method.section.method} sends whole gradients")
    return recipe.model_copy(update={"exchange": method.taken_by(section)})


def predict(
    section: Exchange, replicas: int, gradient: Gradient, link: Link, selection: float, rounding: float
) -> List[Candidate]:
    """The exchanges that the section allows, from the most faithful one to the one that leaves out most.

    Args: selection, rounding: seconds of a processor.
    """
    work = {"": 0.0, "select": selection, "round": rounding}
    return [
        Candidate(method, method.seconds(link, replicas, gradient), work[method.work])
        for method in exchange.variants(section)
    ]


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
        layers = sum(each.dim() > 1 for each in parameters)
        found.append(Gradient(sum(each.numel() for each in parameters), sum(whole), layers))
    return max(found)


def _measured(
    section: Exchange, gradient: Gradient, processes: Agreement, device: torch.device
) -> Tuple[Link, float, float]:
    """The link, and seconds to select from and to round a gradient; of the slowest process, so the same on all."""
    # These need a newer Python than the IPU's, where nothing is measured.
    from parallel import probe, selection

    vector = torch.randn(gradient.elements - gradient.whole, generator=torch.Generator().manual_seed(0)).to(device)
    count = min(max(1, round(section.density * len(vector))), len(vector))  # once densities have come down
    # The fastest of four calls: the first finds caches empty, and a machine that starts a run is busy.
    own = (
        probe.measure(processes.replica_group, device),
        min(timed(lambda: selection.largest(vector, count), device, 4)),
        min(timed(lambda: vector.half().float(), device, 4)),
    )
    links, *processor = zip(*processes.gather(own))
    return Link(*map(max, zip(*links))), max(processor[0]), max(processor[1])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
