"""First thing to change, by rule from the measured figures: the part of a step that costs most beside computing."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Tuple

from engines.choice import Candidate, pick
from parallel import exchange
from recipe.division import count
from tools.formats import duration, percent, scaled
from training.monitor import workers_needed
from training.timeline import ideal

# The parts that something can be done about; of equal ones the first is named: its remedy costs least.
_ORDER = ("input", "straggling", "exchange", "bubble", "imbalance", "update")
_WORTH = 0.05  # share of a step below which a part is not worth a change
_LAG = 0.1  # by which one rank falls behind the others so that it is to blame
_UNEXPLAINED = 0.15

Remedy = Tuple[str, List[str]]  # text and overrides


class Figures(NamedTuple):
    """Figures that the rules depend on.

    parts: seconds of a step by `splitting.PARTS`. device: cpu or cuda. cores: of a rank. threads: in which a rank
    computes on a CPU. split: whether the recipe says itself where stages are cut. mixes: whether images of a micro
    batch are mixed, so that it needs two. reading: share of an image's time that is reading its bytes, None where
    images are no files. delay: of gradients, in steps. method: the exchange, as `methods` calls it; these are seconds
    by themselves. reset: overrides without which another method is refused, by method. bandwidth:
    bytes a second between replicas. slowest, lag, host: the rank farthest behind the others of its stage, by which
    share, and where; None of one replica. mfu: share of the devices' peak.
    """

    parts: Dict[str, float]
    device: str
    cores: int
    threads: int
    replicas: int
    stages: int
    virtual: int
    split: bool
    mixes: bool
    accumulation: int
    micro: int
    workers: int
    reading: Optional[float]
    delay: int
    compiled: bool
    bandwidth: Optional[float]
    method: str
    methods: Dict[str, float]
    reset: Dict[str, List[str]]
    slowest: Optional[int]
    lag: Optional[float]
    host: str
    mfu: float

    @property
    def step(self) -> float:
        """Seconds."""
        return math.fsum(self.parts.values())

    @property
    def batch(self) -> int:
        """Images of a step."""
        return self.micro * self.accumulation * self.replicas

    @property
    def larger(self) -> str:
        """Override that doubles the batch."""
        return f"batch.global={2 * self.batch}"

    def share(self, part: str) -> float:
        """Share of a step."""
        return self.parts[part] / self.step


class Advice(NamedTuple):
    """limit: the part to be mended first, or compute. text: sentences. overrides: what to try, as the command line
    takes it; none where the remedy is no key."""

    limit: str
    text: str
    overrides: List[str]


def advise(figures: Figures) -> Advice:
    """The first thing to fix. A pure function of the figures."""
    limit = max(_ORDER, key=figures.share)  # the first of equal ones
    if figures.share(limit) < _WORTH:
        limit = "compute"
    text, overrides = _RULES[limit](figures, percent(figures.share(limit)))
    unexplained = figures.share("rest")
    if abs(unexplained) >= _UNEXPLAINED:
        fault = (
            f"{percent(unexplained)} of the step is in none of its parts" if unexplained > 0 else "its parts overlap"
        )
        workers = "workers that read take cores from computing, or " if figures.workers else ""
        text += f" But {fault}: {workers}the machine is busy with something else; measure again when it is quiet."
    return Advice(limit, text, overrides)


def _input(figures: Figures, share: str) -> Remedy:
    needed = workers_needed(figures.workers, figures.share("input"))
    fault, more = f"Waiting for images takes {share} of a step", f"data.workers={needed}"
    if figures.reading is not None and figures.reading >= 0.5:
        text = (
            f"{fault}, and {percent(figures.reading)} of an image's time is reading its bytes: pack the images into "
            "shards (python -m tools.shards pack) on a disk that is nearer, or let more reads be under way at once: "
            f"{more} would keep up."
        )
        return text, [more]
    if needed > figures.cores:
        smaller = "draw less for each image (data.augment, data.glyph_size)"
        if figures.reading is not None:
            smaller = "make the files smaller (python -m tools.shards pack --short-side PIXELS)"
        dali = ["data.reader=dali"] if figures.device == "cuda" and figures.reading is not None else []
        gpu = ", or let the GPU decode: data.reader=dali" if dali else ""
        cores = f"{needed} workers would keep up, but a rank has {count(figures.cores, 'core')}"
        return f"{fault}: {cores}; {smaller}{gpu}, or give it more cores.", dali
    busy = figures.device == "cpu" and figures.threads + needed > figures.cores
    but = ", though the cores that they need compute as well: measure it" if busy else ""
    return f"{fault}: {more} would keep up{but}.", [more]


def _straggling(figures: Figures, share: str) -> Remedy:
    fault = f"Waiting for the slowest replica takes {share} of a step"
    if figures.lag is not None and figures.lag >= _LAG:
        rank = f"rank {figures.slowest} on host {figures.host} computes {percent(figures.lag)} slower than the others"
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
    faster = _faster_exchange(figures)
    if faster is not None:
        overrides = [*faster.method.overrides, *figures.reset[faster.method.section.method]]
        text = (
            f"{fault}: {' '.join(overrides)} takes {duration(faster.seconds)} by itself in place of "
            f"{duration(figures.methods[figures.method])}, and changes what is learned (docs/exchange.md). "
            f"Without that, {larger}."
        )
        return text, overrides
    late = ""
    if figures.device == "cpu" and not figures.delay:
        late = (
            "; exchange.delay=1 lets it run beside the next step, with gradients that are one step late "
            "(docs/exchange.md)"
        )
    return f"{fault}, and no other method is worth a change: {larger}{late}.", [figures.larger]


def _faster_exchange(figures: Figures) -> Optional[Candidate]:
    """The exchange to change to, by the rule of exchange.method=auto; None where that is the recipe's own."""
    candidates = [Candidate(exchange.named(name), seconds, 0.0) for name, seconds in figures.methods.items()]
    if figures.method not in figures.methods:
        return None
    taken = pick(candidates)[0]
    slower = taken.seconds >= figures.methods[figures.method]
    return None if slower or taken.name == figures.method else taken


def _bubble(figures: Figures, share: str) -> Remedy:
    now, doubled = (
        percent(1 - ideal(times * figures.accumulation, figures.stages, figures.virtual)) for times in (1, 2)
    )
    halved = figures.micro // 2
    splits = figures.micro % 2 == 0 and halved >= (2 if figures.mixes else 1)
    override = f"batch.micro={halved}" if splits else figures.larger
    micro_batches = count(figures.accumulation, "micro batch", "micro batches")
    text = (
        f"A pipeline's stages stand still for {share} of a step: {micro_batches} on {figures.stages} stages leave "
        f"{now} at best; {override} makes twice as many, and that {doubled}."
    )
    return text, [override]


def _imbalance(figures: Figures, share: str) -> Remedy:
    fault = f"The slowest stage takes {share} of a step longer than the mean of all"
    if figures.split:
        return f"{fault}: parallel.split=auto cuts the model by what its blocks cost here.", ["parallel.split=auto"]
    fewer = f"parallel.stages={max(1, figures.stages // 2)}"
    remedy = f"fewer stages and more replicas waste less: {fewer}."
    return f"{fault}, and the cut is as even as the recipe lets it be: {remedy}", [fewer]


def _update(figures: Figures, share: str) -> Remedy:
    compiled = figures.device == "cpu" and not figures.compiled
    first = "engine.compile=true makes one program of it where there is a compiler; " if compiled else ""
    text = (
        f"The optimizer's update takes {share} of a step: {first}it is made once a step, so {figures.larger} makes it "
        "once in twice as many images."
    )
    return text, ["engine.compile=true" if compiled else figures.larger]


def _compute(figures: Figures, share: str) -> Remedy:
    fault = (
        f"No other part takes {percent(_WORTH)} of a step: computing is the limit, at {percent(figures.mfu)} of what "
        "large matrix products reach here (MFU)."
    )
    if figures.accumulation % 2:
        return f"{fault} More replicas make it faster.", []
    larger = f"batch.micro={2 * figures.micro}"
    use = "may use the device better, with the same batch, if the memory suffices; else more replicas make it faster."
    return f"{fault} {larger} {use}", [larger]


_RULES = {
    "input": _input,
    "straggling": _straggling,
    "exchange": _exchange,
    "bubble": _bubble,
    "imbalance": _imbalance,
    "update": _update,
    "compute": _compute,
}
