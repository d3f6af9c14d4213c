"""From measured times to the parts of a step: pure arithmetic, no torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, Dict, List, NamedTuple, Optional, Sequence

from tools.formats import duration, percent

if TYPE_CHECKING:
    from engines.timeline import Span

# In the order in which a bar shows them. `rest` is what the others do not explain, and may be negative.
PARTS = ("compute", "input", "imbalance", "bubble", "exchange", "straggling", "update", "rest")
_PASSES = ("load", "forward", "backward")
WORTH = 0.05  # share of a step below which a part is not worth a change
_VARIES = 0.3  # share of the median that the middle half of the repetitions may span


class Spread(NamedTuple):
    """Repetitions of one measurement: their median, smallest and largest."""

    median: float
    low: float
    high: float
    repetitions: int


def spread(values: Sequence[float]) -> Spread:
    """Spread of at least one repetition."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


class Passes(NamedTuple):
    """By step. own: rank -> seconds of its passes. lengths: replica -> seconds from its first pass to its last."""

    own: Dict[int, List[float]]
    lengths: Dict[int, List[float]]


class Times(NamedTuple):
    """Seconds of steps: as trained, of which waited for images; with images in memory, in turns with and without
    exchange, empty where nothing is exchanged. passes: of steps without exchange.

    accumulation: micro batches of a step. stages: ranks that share a replica. virtual: parts of the model on each.
    """

    accumulation: int
    stages: int
    virtual: int
    as_trained: List[float]
    waited: List[float]
    from_memory: List[float]
    without_exchange: List[float]
    update: List[float]
    passes: Passes


def passes(spans: Sequence[Span], stages: int) -> Passes:
    """Passes of traced steps, from the spans of all ranks, each of which has some in every step."""
    own, replicas = defaultdict(list), defaultdict(list)
    for span in spans:
        if span.kind in _PASSES:
            own[span.rank, span.step].append(span.end - span.start)
            replicas[span.rank // stages, span.step] += span.start, span.end
    found = Passes(defaultdict(list), defaultdict(list))
    for (rank, _), seconds in sorted(own.items()):
        found.own[rank].append(math.fsum(seconds))
    for (replica, _), moments in sorted(replicas.items()):
        found.lengths[replica].append(max(moments) - min(moments))
    return found


def parts(times: Times) -> Dict[str, float]:
    """Seconds of each part of the measured step (docs/doctor.md). They add up to the median of `as_trained`."""
    stages = times.stages
    lengths = list(zip(*times.passes.lengths.values()))  # by step, of each replica
    length = statistics.median(map(statistics.mean, lengths))
    medians = {rank: statistics.median(values) for rank, values in times.passes.own.items()}
    by_stage = [[value for rank, value in medians.items() if rank % stages == stage] for stage in range(stages)]
    busy = list(map(statistics.mean, by_stage))
    exchanged = [whole - without for whole, without in zip(times.from_memory, times.without_exchange)]
    found = {
        # One rank's passes follow each other: what lies between them belongs to them.
        "compute": length if stages == 1 else statistics.mean(busy),
        "input": statistics.median(times.waited),
        "imbalance": max(busy) - statistics.mean(busy),
        "bubble": max(0.0, length - max(busy)) if stages > 1 else 0.0,
        "exchange": max(0.0, statistics.median(exchanged)) if exchanged else 0.0,
        "straggling": statistics.median(max(each) - statistics.mean(each) for each in lengths),
        "update": statistics.median(times.update),
    }
    return {**found, "rest": statistics.median(times.as_trained) - math.fsum(found.values())}


def scaled(measured: Dict[str, float], times: Times, accumulation: int) -> Dict[str, float]:
    """The parts of a step of `accumulation` micro batches, where fewer were measured.

    Computing and waiting for images grow with the micro batches; update, exchange and filling a pipeline of K ranks
    with V parts of the model each, (K - 1) / V turns of the slowest stage, come once a step. Lasting differences
    between replicas grow with the micro batches, chance with their square root; of the rest what workers take grows.
    """
    before, stages, virtual = times[:3]
    factor = accumulation / before
    once = ("update", "exchange", "rest")
    found = {name: measured[name] * (1.0 if name in once else factor) for name in PARTS}
    turn = (measured["compute"] + measured["imbalance"]) / before
    filling = min(measured["bubble"], (stages - 1) / virtual * turn)
    found["bubble"] = filling + factor * (measured["bubble"] - filling)
    beside = statistics.median(times.as_trained) - measured["input"] - statistics.median(times.from_memory)
    found["rest"] += (factor - 1) * beside
    medians = [statistics.median(lengths) for lengths in times.passes.lengths.values()]
    lasting = min(measured["straggling"], max(medians) - statistics.mean(medians))
    found["straggling"] = factor * lasting + math.sqrt(factor) * (measured["straggling"] - lasting)
    return found


def doubts(times: Times, found: Dict[str, float]) -> List[str]:
    """Return why the parts of a step are no ground for advice, a clause each; nothing if they are.

    Parts are measured one after the other. If the machine changes meanwhile, because other programs run on it, they do
    not add up, or repetitions of the same work differ.

    Args: found: the parts, as measured or scaled.
    """
    step = math.fsum(found.values())
    reasons = []
    rest = found["rest"] / step
    largest = max(seconds for name, seconds in found.items() if name not in ("compute", "rest")) / step
    if rest <= -WORTH:
        reasons.append(f"the parts, measured one after the other, add up to {percent(1 - rest)} of a step")
    elif rest >= max(WORTH, largest):
        reasons.append(f"{percent(rest)} of a step is in no part, which is more than any part that a recipe can change")
    # Waiting for images may vary by its nature: what remains of a step without it should not.
    without_waiting = [whole - waited for whole, waited in zip(times.as_trained, times.waited)]
    for words, values in (("steps", without_waiting), ("steps with images in memory", times.from_memory)):
        low, high = _middle_half(values)
        if high - low > _VARIES * statistics.median(values):
            reasons.append(f"{words} vary: half of {len(values)} take between {duration(low)} and {duration(high)}")
    exchanged = [whole - without for whole, without in zip(times.from_memory, times.without_exchange)]
    if exchanged and found["exchange"] >= WORTH * step and _middle_half(exchanged)[0] <= 0:
        reasons.append("steps with and without the exchange differ by less than they vary")
    return reasons


def _middle_half(values: Sequence[float]) -> List[float]:
    """The quartiles around the middle half."""
    if len(values) < 2:
        return [values[0], values[0]]
    return statistics.quantiles(values, n=4, method="inclusive")[::2]


def straggling(times: Times, accumulation: int) -> float:
    """Deviation of a replica's passes in a step of `accumulation` micro batches, over replicas and steps, relative.

    Differences between steps average out over the micro batches, those between replicas do not.
    """
    lengths = list(times.passes.lengths.values())
    means = [statistics.mean(values) for values in lengths]
    between, within = statistics.pvariance(means), statistics.mean(map(statistics.pvariance, lengths))
    factor = accumulation / times.accumulation
    return math.sqrt(between + within / factor) / statistics.mean(means)


class Rank(NamedTuple):
    """A rank's passes: seconds of a measured step. lag: how much longer than of others of its stage, relative."""

    rank: int
    replica: int
    stage: int
    host: str
    mean: float
    deviation: float
    lag: Optional[float]


def ranks(found: Passes, stages: int, hosts: Sequence[str]) -> List[Rank]:
    """A row for each rank."""
    means = {rank: statistics.mean(values) for rank, values in found.own.items()}
    rows = []
    for rank, values in found.own.items():
        others = [mean for other, mean in means.items() if other != rank and other % stages == rank % stages]
        lag = means[rank] / statistics.mean(others) - 1 if others else None
        deviation = statistics.pstdev(values)
        rows.append(Rank(rank, rank // stages, rank % stages, hosts[rank], means[rank], deviation, lag))
    return rows


def slowest(rows: Sequence[Rank]) -> Optional[Rank]:
    """The rank that falls farthest behind the others of its stage; None where there are none."""
    return max((row for row in rows if row.lag is not None), key=lambda row: row.lag, default=None)
