"""The first thing to change, by rule from the measured figures.

It is the part of a step that costs most beside computing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence

from common.text import count
from engines.choice import Candidate, pick
from parallel.evidence import PAGE
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.exchange import Auto, Exchange
from tools.diagnosis import splitting
from tools.diagnosis.splitting import WORTH
from tools.formats import duration, percent, scaled
from training.monitor import workers_needed
from training.timeline import ideal

if TYPE_CHECKING:
    from tools.diagnosis.examination import Findings

_LAG = 0.1  # by which one rank falls behind the others so that it is to blame
_LOSS = Auto().accept_loss  # points of top-1 that a proposed exchange may lose


class Remedy(NamedTuple):
    """A change to the recipe or to the machines.

    overrides: of the command line; none if the remedy is no key.
    """

    text: str
    overrides: List[str]


class Advice(NamedTuple):
    """The remedy for the part to be mended first.

    limit: that part, or compute.
    text: for people.
    overrides: see `Remedy`.
    """

    limit: str
    text: str
    overrides: List[str]


def advise(recipe: Recipe, findings: Findings) -> Advice:
    """Return the first thing to fix.

    Args:
        recipe: without `auto` in exchange and engine.
        findings: of its examination.
    """
    # Of equal parts the first is named.
    limit = max(_RULES, key=lambda name: findings.parts[name])
    share = findings.parts[limit] / findings.step
    if share >= WORTH:
        remedy = _RULES[limit](recipe, findings, share)
    else:
        limit = "compute"
        remedy = _compute(findings)
    return Advice(limit, remedy.text, remedy.overrides)


def _twice(findings: Findings) -> str:
    """Return the override that doubles the batch."""
    return f"batch.global={2 * findings.batch.global_}"


def _compute(findings: Findings) -> Remedy:
    """Return the remedy where no part but computing is worth a change."""
    peak = f"{percent(findings.mfu)} of what large matrix products reach here (MFU)"
    others = f"No other part takes {percent(WORTH)} of a step"
    text = f"{others}: computing is the limit, at {peak}. More replicas help"
    # A larger micro batch has less overhead, if it divides the same batch.
    if findings.batch.accumulation % 2:
        return Remedy(f"{text}.", [])
    doubled = 2 * findings.batch.micro
    larger = f"batch.micro={doubled}"
    return Remedy(f"{text}; with the same batch, {larger} may, if the memory suffices.", [larger])


def _input(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for waiting for images."""
    needed = workers_needed(recipe.data.workers, share)
    more = f"data.workers={needed}"
    reading = findings.reading.share_of_bytes
    fault = f"Waiting for images takes {percent(share)} of a step"
    # More workers hardly help if they wait for the same disk.
    if reading is not None and reading >= 0.5:
        fault += f", and {percent(reading)} of an image's time is reading its bytes"
        shards = "pack the images into shards (python -m tools.shards pack) on a nearer disk"
        return Remedy(f"{fault}: {shards}, or {more} would keep up.", [more])
    # More workers help while a rank has cores for them.
    ranks_of_host = findings.hosts.count(findings.hosts[0])
    cores = max(1, findings.about["cores"] // ranks_of_host)
    if needed <= cores:
        return Remedy(f"{fault}: {more} would keep up.", [more])
    return _cheaper_images(findings, fault, needed, cores)


def _cheaper_images(findings: Findings, fault: str, needed: int, cores: int) -> Remedy:
    """Return the remedy where more workers are needed than a rank has cores.

    Args:
        findings: of the examination.
        fault: in words.
        needed: workers that would keep up.
        cores: of a rank.
    """
    there = count(cores, "core")
    few = f"{fault}: {needed} workers would keep up, but a rank has {there}; give it more, or"
    # Images that are drawn, not read.
    if findings.reading.share_of_bytes is None:
        return Remedy(f"{few} draw less for each image (data.augment, data.glyph_size).", [])
    smaller = "make the files smaller (python -m tools.shards pack --short-side PIXELS)"
    # DALI decodes on GPUs only.
    if findings.about["device"] == "cpu":
        return Remedy(f"{few} {smaller}.", [])
    dali = "data.reader=dali"
    return Remedy(f"{few} {smaller}, or let the GPU decode: {dali}.", [dali])


def _straggling(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for waiting for the slowest replica."""
    fault = f"Waiting for the slowest replica takes {percent(share)} of a step"
    slowest = splitting.slowest(findings.ranks)
    lag = None if slowest is None else slowest.lag
    # A rank that always lags can be mended. Chance averages out over more micro batches.
    if slowest is not None and lag is not None and lag >= _LAG:
        rank = f"rank {slowest.rank} on host {slowest.host}"
        behind = f"computes {percent(lag)} slower than the others"
        remedy = "Look for what else runs there, or leave it out."
        return Remedy(f"{fault}: {rank} {behind}. {remedy}", [])
    larger = _twice(findings)
    cause = "now of one and now of another: something else runs on the machines"
    remedy = f"{larger}, with the learning rate that goes with it"
    return Remedy(f"{fault}, {cause}. More micro batches average it out: {remedy}.", [larger])


def _exchange(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for an exchange that is not hidden."""
    section = recipe.exchange
    fault = f"The exchange takes {percent(share)} of a step"
    if findings.links:
        bandwidth = 8 * findings.links.bandwidth.median
        fault += f" over links of {scaled(bandwidth, 'bit/s')}"
    twice = _twice(findings)
    larger = f"{twice} makes it once in twice as many images"
    # Another method, if there is a faster one that is known to lose little.
    candidates = [method.timed for method in findings.methods]
    current = _current(candidates, section)
    faster = None if current is None else _faster(candidates, current)
    if current is not None and faster is not None:
        overrides = faster.method.overrides(section)
        times = _times(faster, current)
        text = f"{fault}: {' '.join(overrides)} {times} Without that, {larger}."
        return Remedy(text, overrides)
    # A late exchange is hidden on CPUs only, and costs accuracy: it is mentioned, not proposed.
    late = ""
    if findings.about["device"] == "cpu" and not section.delay:
        beside = "exchange.delay=1 lets it run beside the next step"
        late = f"; {beside}, with what is sent one step late (docs/exchange.md)"
    return Remedy(f"{fault}, and no other method is worth a change: {larger}{late}.", [twice])


def _times(faster: Candidate, current: Candidate) -> str:
    """Return in words what an exchange takes in place of the current one, and what it loses."""
    by_itself = f"{duration(faster.seconds)} by itself"
    times = f"takes {by_itself} in place of {duration(current.seconds)}."
    if faster.evidence is None or not faster.evidence.loss:
        return times
    return f"{times} It {faster.evidence} of top-1 in our experiments ({PAGE})."


def _current(candidates: Sequence[Candidate], section: Exchange) -> Optional[Candidate]:
    """Return the candidate that is in use; None where methods were not measured."""
    for candidate in candidates:
        if candidate.name == section.variant:
            return candidate
    return None


def _faster(candidates: Sequence[Candidate], current: Candidate) -> Optional[Candidate]:
    """Return what `exchange.method=auto` would take by default, if it is faster than now."""
    acceptable = []
    for candidate in candidates:
        if candidate is current or candidate.accepted(_LOSS):
            acceptable.append(candidate)
    fastest, *_ = pick(acceptable)
    return fastest if fastest.seconds < current.seconds else None


def _bubble(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for a pipeline whose stages stand still."""
    batch = findings.batch
    virtual = recipe.parallel.virtual_stages or 1
    now = 1 - ideal(batch.accumulation, batch.stages, virtual)
    doubled = 1 - ideal(2 * batch.accumulation, batch.stages, virtual)
    override = _more_micro_batches(recipe, findings)
    micro_batches = count(batch.accumulation, "micro batch", "micro batches")
    text = (
        f"A pipeline's stages stand still for {percent(share)} of a step: "
        f"{micro_batches} on {batch.stages} stages leave {percent(now)} at best; "
        f"{override} makes twice as many, and that {percent(doubled)}."
    )
    return Remedy(text, [override])


def _more_micro_batches(recipe: Recipe, findings: Findings) -> str:
    """Return the override that makes twice as many micro batches in a step."""
    micro = findings.batch.micro
    # The two images of a mixed pair stay together.
    least = 2 if recipe.data.mixes else 1
    # Smaller ones keep the batch, and with it what is learned: a larger batch is the second choice.
    if micro % 2 or micro // 2 < least:
        return _twice(findings)
    return f"batch.micro={micro // 2}"


def _imbalance(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for stages that take unequally long."""
    fault = f"The slowest stage takes {percent(share)} of a step longer than the mean of all"
    batch = findings.batch
    # Measured cuts are the best, but not allowed where a cut changes what is learned.
    if recipe.parallel.split is not None and not bound_to_cut(recipe, batch.replicas):
        automatic = "parallel.split=auto"
        remedy = f"{automatic} cuts the model by what its blocks cost here"
        return Remedy(f"{fault}: {remedy}.", [automatic])
    halved = max(1, batch.stages // 2)
    fewer = f"parallel.stages={halved}"
    remedy = f"fewer stages and more replicas waste less: {fewer}."
    return Remedy(f"{fault}, as evenly as the recipe can be cut: {remedy}", [fewer])


def _update(recipe: Recipe, findings: Findings, share: float) -> Remedy:
    """Return the remedy for a long update."""
    fault = f"The optimizer's update takes {percent(share)} of a step"
    twice = _twice(findings)
    larger = f"it is made once a step, so {twice} makes it once in twice as many images."
    if findings.about["device"] == "cpu" and not recipe.engine.compile:
        compiled = "engine.compile=true"
        program = f"{compiled} makes one program of it where there is a compiler"
        return Remedy(f"{fault}: {program}; {larger}", [compiled])
    return Remedy(f"{fault}: {larger}", [twice])


# Of equal parts the first is named: its remedy costs least.
_RULES: Dict[str, Callable[[Recipe, Findings, float], Remedy]] = {
    "input": _input,
    "straggling": _straggling,
    "exchange": _exchange,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "update": _update,
}
