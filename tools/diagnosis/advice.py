"""First thing to change, by rule from the measured figures: the part of a step that costs most beside computing."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from engines.choice import Candidate, pick
from parallel.evidence import PAGE
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.division import Batch, count
from recipe.exchange import Auto
from tools.diagnosis.splitting import Rank
from tools.formats import duration, percent, scaled
from training.monitor import workers_needed
from training.timeline import ideal

_WORTH = 0.05  # share of a step below which a part is not worth a change
_LAG = 0.1  # by which one rank falls behind the others so that it is to blame
_LOSS = Auto().accept_loss  # points of top-1 that a proposed exchange may lose

Remedy = Tuple[str, List[str]]  # text and overrides


class Figures(NamedTuple):
    """Figures that the rules depend on. recipe: without `auto`. cores: of a rank. bandwidth: bytes a second.

    reading: share of an image's time that is reading its bytes, None where images are no files. methods: exchanges by
    themselves, the most faithful first. slowest: the rank farthest behind the others of its stage.
    """

    recipe: Recipe
    batch: Batch
    parts: Dict[str, float]
    device: str
    cores: int
    reading: Optional[float]
    bandwidth: Optional[float]
    methods: Sequence[Candidate]
    slowest: Optional[Rank]
    mfu: float

    @property
    def larger(self) -> str:
        return f"batch.global={2 * self.batch.global_}"

    def share(self, part: str) -> float:
        return self.parts[part] / math.fsum(self.parts.values())


class Advice(NamedTuple):
    """limit: the part to be mended first, or compute. overrides: of the command line; none if the remedy is no key."""

    limit: str
    text: str
    overrides: List[str]


def advise(figures: Figures) -> Advice:
    """The first thing to fix."""
    limit = max(_RULES, key=figures.share)  # the first of equal ones
    if figures.share(limit) >= _WORTH:
        return Advice(limit, *_RULES[limit](figures, percent(figures.share(limit))))
    peak = f"{percent(figures.mfu)} of what large matrix products reach here (MFU)"
    fault = f"No other part takes {percent(_WORTH)} of a step: computing is the limit, at {peak}."
    if figures.batch.accumulation % 2:
        return Advice("compute", f"{fault} More replicas make it faster.", [])
    larger = f"batch.micro={2 * figures.batch.micro}"
    use = "may use the device better, with the same batch, if the memory suffices; else more replicas make it faster."
    return Advice("compute", f"{fault} {larger} {use}", [larger])


def _input(figures: Figures, share: str) -> Remedy:
    needed = workers_needed(figures.recipe.data.workers, figures.share("input"))
    fault, more = f"Waiting for images takes {share} of a step", f"data.workers={needed}"
    files = figures.reading is not None
    if files and figures.reading >= 0.5:
        text = (
            f"{fault}, and {percent(figures.reading)} of an image's time is reading its bytes: pack the images into "
            "shards (python -m tools.shards pack) on a disk that is nearer, or let more reads be under way at once: "
            f"{more} would keep up."
        )
        return text, [more]
    if needed <= figures.cores:
        return f"{fault}: {more} would keep up.", [more]
    dali = ["data.reader=dali"] if files and figures.device == "cuda" else []
    smaller = "draw less for each image (data.augment, data.glyph_size)"
    if files:
        smaller = "make the files smaller (python -m tools.shards pack --short-side PIXELS)"
    if dali:
        smaller += ", or let the GPU decode: data.reader=dali"
    cores = f"{needed} workers would keep up, but a rank has {count(figures.cores, 'core')}"
    return f"{fault}: {cores}; {smaller}, or give it more cores.", dali


def _straggling(figures: Figures, share: str) -> Remedy:
    fault, slowest = f"Waiting for the slowest replica takes {share} of a step", figures.slowest
    if slowest is not None and slowest.lag >= _LAG:
        rank = f"rank {slowest.rank} on host {slowest.host} computes {percent(slowest.lag)} slower than the others"
        remedy = "Look for what else runs there, at its clock and its cores, or leave it out: a step waits for it."
        return f"{fault}: {rank}. {remedy}", []
    text = (
        f"{fault}, now of one and now of another: something else runs on the machines. More micro batches a step "
        f"average it out: {figures.larger}, with the learning rate that goes with it."
    )
    return text, [figures.larger]


def _exchange(figures: Figures, share: str) -> Remedy:
    link = f" over links of {scaled(8 * figures.bandwidth, 'bit/s')}" if figures.bandwidth else ""
    fault = f"The exchange takes {share} of a step{link}"
    larger = f"{figures.larger} makes it once in twice as many images"
    section = figures.recipe.exchange
    own = next((each for each in figures.methods if each.name == section.variant), None)
    if own is not None:  # as exchange.method=auto by default
        taken = pick([each for each in figures.methods if each is own or each.accepted(_LOSS)])[0]
        if taken.seconds < own.seconds:
            overrides = taken.method.overrides(section)
            loss = f" It {taken.evidence} of top-1 in our experiments ({PAGE})." if taken.evidence.loss else ""
            times = f"takes {duration(taken.seconds)} by itself in place of {duration(own.seconds)}"
            return f"{fault}: {' '.join(overrides)} {times}.{loss} Without that, {larger}.", overrides
    late = ""
    if figures.device == "cpu" and not section.delay:
        late = "; exchange.delay=1 lets it run beside the next step, with what is sent one step late (docs/exchange.md)"
    return f"{fault}, and no other method is worth a change: {larger}{late}.", [figures.larger]


def _bubble(figures: Figures, share: str) -> Remedy:
    batch, data, virtual = figures.batch, figures.recipe.data, figures.recipe.parallel.virtual_stages or 1
    now, doubled = (percent(1 - ideal(times * batch.accumulation, batch.stages, virtual)) for times in (1, 2))
    halved, least = batch.micro // 2, 2 if data.mixup or data.cutmix is not None else 1  # images of a pair are mixed
    override = figures.larger if batch.micro % 2 or halved < least else f"batch.micro={halved}"
    micro_batches = count(batch.accumulation, "micro batch", "micro batches")
    text = (
        f"A pipeline's stages stand still for {share} of a step: {micro_batches} on {batch.stages} stages leave "
        f"{now} at best; {override} makes twice as many, and that {doubled}."
    )
    return text, [override]


def _imbalance(figures: Figures, share: str) -> Remedy:
    fault = f"The slowest stage takes {share} of a step longer than the mean of all"
    if figures.recipe.parallel.split is not None and not bound_to_cut(figures.recipe, figures.batch.replicas):
        return f"{fault}: parallel.split=auto cuts the model by what its blocks cost here.", ["parallel.split=auto"]
    fewer = f"parallel.stages={max(1, figures.batch.stages // 2)}"
    remedy = f"fewer stages and more replicas waste less: {fewer}."
    return f"{fault}, and the cut is as even as the recipe lets it be: {remedy}", [fewer]


def _update(figures: Figures, share: str) -> Remedy:
    fault = f"The optimizer's update takes {share} of a step"
    larger = f"it is made once a step, so {figures.larger} makes it once in twice as many images."
    if figures.device == "cpu" and not figures.recipe.engine.compile:
        compiled = "engine.compile=true makes one program of it where there is a compiler"
        return f"{fault}: {compiled}; {larger}", ["engine.compile=true"]
    return f"{fault}: {larger}", [figures.larger]


# Of equal parts the first is named: its remedy costs least.
_RULES = {
    "input": _input,
    "straggling": _straggling,
    "exchange": _exchange,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "update": _update,
}
