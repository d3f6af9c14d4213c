"""First thing to change, by rule from the measured figures: the part of a step that costs most beside computing."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, NamedTuple, Tuple

from common.text import count
from engines.choice import pick
from parallel.evidence import PAGE
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.exchange import Auto
from tools.diagnosis import splitting
from tools.diagnosis.splitting import WORTH
from tools.formats import duration, percent, scaled
from training.monitor import workers_needed
from training.timeline import ideal

if TYPE_CHECKING:
    from tools.diagnosis.examination import Findings

_LAG = 0.1  # by which one rank falls behind the others so that it is to blame
_LOSS = Auto().accept_loss  # points of top-1 that a proposed exchange may lose

Remedy = Tuple[str, List[str]]  # text and overrides


class Advice(NamedTuple):
    """limit: the part to be mended first, or compute. overrides: of the command line; none if the remedy is no key."""

    limit: str
    text: str
    overrides: List[str]


def advise(recipe: Recipe, found: Findings) -> Advice:
    """The first thing to fix. Args: recipe: without `auto` in exchange and engine."""
    limit = max(_RULES, key=found.parts.__getitem__)  # the first of equal ones
    share = found.parts[limit] / found.step
    if share >= WORTH:
        return Advice(limit, *_RULES[limit](recipe, found, share))
    peak = f"{percent(found.mfu)} of what large matrix products reach here (MFU)"
    text = f"No other part takes {percent(WORTH)} of a step: computing is the limit, at {peak}. More replicas help"
    if found.batch.accumulation % 2:
        return Advice("compute", f"{text}.", [])
    larger = f"batch.micro={2 * found.batch.micro}"
    return Advice("compute", f"{text}; with the same batch, {larger} may, if the memory suffices.", [larger])


def _twice(found: Findings) -> str:
    return f"batch.global={2 * found.batch.global_}"


def _input(recipe: Recipe, found: Findings, share: float) -> Remedy:
    needed, reading = workers_needed(recipe.data.workers, share), found.reading.share_of_bytes
    fault, more = f"Waiting for images takes {percent(share)} of a step", f"data.workers={needed}"
    if reading is not None and reading >= 0.5:
        fault += f", and {percent(reading)} of an image's time is reading its bytes"
        shards = "pack the images into shards (python -m tools.shards pack) on a nearer disk"
        return f"{fault}: {shards}, or {more} would keep up.", [more]
    cores = max(1, found.about["cores"] // found.hosts.count(found.hosts[0]))  # of a rank
    if needed <= cores:
        return f"{fault}: {more} would keep up.", [more]
    few = f"{fault}: {needed} workers would keep up, but a rank has {count(cores, 'core')}; give it more, or"
    if reading is None:
        return f"{few} draw less for each image (data.augment, data.glyph_size).", []
    smaller = "make the files smaller (python -m tools.shards pack --short-side PIXELS)"
    if found.about["device"] == "cpu":
        return f"{few} {smaller}.", []
    return f"{few} {smaller}, or let the GPU decode: data.reader=dali.", ["data.reader=dali"]


def _straggling(recipe: Recipe, found: Findings, share: float) -> Remedy:
    fault = f"Waiting for the slowest replica takes {percent(share)} of a step"
    slowest = splitting.slowest(found.ranks)
    if slowest is not None and slowest.lag >= _LAG:
        rank = f"rank {slowest.rank} on host {slowest.host} computes {percent(slowest.lag)} slower than the others"
        return f"{fault}: {rank}. Look for what else runs there, or leave it out.", []
    cause = "now of one and now of another: something else runs on the machines"
    remedy = f"More micro batches average it out: {_twice(found)}, with the learning rate that goes with it."
    return f"{fault}, {cause}. {remedy}", [_twice(found)]


def _exchange(recipe: Recipe, found: Findings, share: float) -> Remedy:
    link = f" over links of {scaled(8 * found.links.bandwidth.median, 'bit/s')}" if found.links else ""
    fault = f"The exchange takes {percent(share)} of a step{link}"
    larger = f"{_twice(found)} makes it once in twice as many images"
    section, methods = recipe.exchange, [each.timed for each in found.methods]
    own = next((each for each in methods if each.name == section.variant), None)
    if own is not None:  # as exchange.method=auto by default
        taken = pick([each for each in methods if each is own or each.accepted(_LOSS)])[0]
        if taken.seconds < own.seconds:
            overrides = taken.method.overrides(section)
            loss = f" It {taken.evidence} of top-1 in our experiments ({PAGE})." if taken.evidence.loss else ""
            times = f"takes {duration(taken.seconds)} by itself in place of {duration(own.seconds)}"
            return f"{fault}: {' '.join(overrides)} {times}.{loss} Without that, {larger}.", overrides
    late = ""
    if found.about["device"] == "cpu" and not section.delay:
        late = "; exchange.delay=1 lets it run beside the next step, with what is sent one step late (docs/exchange.md)"
    return f"{fault}, and no other method is worth a change: {larger}{late}.", [_twice(found)]


def _bubble(recipe: Recipe, found: Findings, share: float) -> Remedy:
    batch, data, virtual = found.batch, recipe.data, recipe.parallel.virtual_stages or 1
    now, doubled = (percent(1 - ideal(times * batch.accumulation, batch.stages, virtual)) for times in (1, 2))
    halved, least = batch.micro // 2, 2 if data.mixup or data.cutmix is not None else 1  # images of a pair are mixed
    override = _twice(found) if batch.micro % 2 or halved < least else f"batch.micro={halved}"
    micro_batches = count(batch.accumulation, "micro batch", "micro batches")
    text = (
        f"A pipeline's stages stand still for {percent(share)} of a step: {micro_batches} on {batch.stages} stages "
        f"leave {now} at best; {override} makes twice as many, and that {doubled}."
    )
    return text, [override]


def _imbalance(recipe: Recipe, found: Findings, share: float) -> Remedy:
    fault = f"The slowest stage takes {percent(share)} of a step longer than the mean of all"
    if recipe.parallel.split is not None and not bound_to_cut(recipe, found.batch.replicas):
        return f"{fault}: parallel.split=auto cuts the model by what its blocks cost here.", ["parallel.split=auto"]
    fewer = f"parallel.stages={max(1, found.batch.stages // 2)}"
    return f"{fault}, as evenly as the recipe can be cut: fewer stages and more replicas waste less: {fewer}.", [fewer]


def _update(recipe: Recipe, found: Findings, share: float) -> Remedy:
    fault = f"The optimizer's update takes {percent(share)} of a step"
    larger = f"it is made once a step, so {_twice(found)} makes it once in twice as many images."
    if found.about["device"] == "cpu" and not recipe.engine.compile:
        compiled = "engine.compile=true makes one program of it where there is a compiler"
        return f"{fault}: {compiled}; {larger}", ["engine.compile=true"]
    return f"{fault}: {larger}", [_twice(found)]


# Of equal parts the first is named: its remedy costs least.
_RULES = {
    "input": _input,
    "straggling": _straggling,
    "exchange": _exchange,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "update": _update,
}
