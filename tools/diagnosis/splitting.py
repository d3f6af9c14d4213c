"""From measured times to the parts of a step: pure arithmetic, no torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import (
    TYPE_CHECKING,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

from tools.formats import duration, percent

if TYPE_CHECKING:
    from engines.timeline import Span

# In the order in which a bar shows them. `rest` is what the others do not explain, and may be
# negative.
PARTS = (
    "compute",
    "input",
    "imbalance",
    "bubble",
    "exchange",
    "straggling",
    "update",
    "rest",
)
_PASSES = ("load", "forward", "backward")
_ONCE = ("update", "exchange", "rest")  # parts that do not grow with the micro batches of a step
WORTH = 0.05  # share of a step below which a part is not worth a change
_VARIES = 0.3  # share of the median that the middle half of the repetitions may span


class Spread(NamedTuple):
    """Repetitions of one measurement.

    low: the smallest.
    high: the largest.
    repetitions: how many there are.
    """

    median: float
    low: float
    high: float
    repetitions: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of the `values` of at least one repetition."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


class Passes(NamedTuple):
    """Seconds of forward and backward passes, a value for each step.

    by_rank: of a rank's own passes.
    by_replica: from a replica's first pass to its last.
    """

    by_rank: Dict[int, List[float]]
    by_replica: Dict[int, List[float]]


class Times(NamedTuple):
    """Seconds of steps, a value for each repetition.

    accumulation: micro batches of a step.
    stages: ranks that share a replica.
    virtual: parts of the model on each of them.
    as_trained: with images from the loader.
    waited: for images in those.
    from_memory: with images in memory.
    without_exchange: in turns with the latter; empty where nothing is exchanged.
    update: of the optimizer alone.
    passes: of steps without exchange.
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
    """Return the passes of traced steps.

    Args:
        spans: of all ranks, each of which has some in every step.
        stages: ranks that share a replica.
    """
    seconds: Dict[Tuple[int, int], List[float]] = defaultdict(list)  # of each rank and step
    moments: Dict[Tuple[int, int], List[float]] = defaultdict(list)  # of each replica and step
    for span in spans:
        if span.kind in _PASSES:
            replica = span.rank // stages
            seconds[span.rank, span.step].append(span.end - span.start)
            moments[replica, span.step] += [span.start, span.end]
    # A rank's passes do not overlap. Those of a replica's stages do: they last from first to last.
    return Passes(
        by_rank=_by_step(seconds, math.fsum),
        by_replica=_by_step(moments, lambda values: max(values) - min(values)),
    )


def _by_step(
    values: Mapping[Tuple[int, int], List[float]],
    total: Callable[[List[float]], float],
) -> Dict[int, List[float]]:
    """Return a number for each step, by rank or replica.

    Args:
        values: by rank or replica, and step.
        total: makes one of those of a step.
    """
    by_step: Dict[int, List[float]] = defaultdict(list)
    # Sorted, as spans of several ranks come in any order: the lists follow the steps.
    for (owner, _), of_step in sorted(values.items()):
        by_step[owner].append(total(of_step))
    return by_step


def parts(times: Times) -> Dict[str, float]:
    """Return the seconds of each part of the measured step (docs/doctor.md).

    They add up to the median of `as_trained`.

    Args:
        times: of the step.
    """
    # A replica's passes take as long as they last; where stages share it, each also stands still.
    by_step = list(zip(*times.passes.by_replica.values()))
    length = statistics.median(statistics.mean(lengths) for lengths in by_step)
    busy = _busy_by_stage(times)
    mean_busy = statistics.mean(busy)
    if times.stages == 1:
        # One rank's passes follow each other: the time between them belongs to them.
        compute = length
        bubble = 0.0
    else:
        compute = mean_busy
        # Time beyond the slowest stage: filling and emptying the pipeline.
        bubble = max(0.0, length - max(busy))
    # Noise can make a step without exchange the longer one.
    exchanged = _exchange_seconds(times)
    exchange = max(0.0, statistics.median(exchanged)) if exchanged else 0.0
    # Replicas wait for the slowest one: on average as long as it is behind their mean.
    behind = [max(lengths) - statistics.mean(lengths) for lengths in by_step]
    seconds = {
        "compute": compute,
        "input": statistics.median(times.waited),
        "imbalance": max(busy) - mean_busy,
        "bubble": bubble,
        "exchange": exchange,
        "straggling": statistics.median(behind),
        "update": statistics.median(times.update),
    }
    # By this definition the parts add up, whatever was measured.
    step = statistics.median(times.as_trained)
    seconds["rest"] = step - math.fsum(seconds.values())
    return seconds


def _busy_by_stage(times: Times) -> List[float]:
    """Return the seconds that each stage computes in a step, the mean over its ranks."""
    medians: List[List[float]] = [[] for _ in range(times.stages)]
    for rank, seconds in times.passes.by_rank.items():
        medians[rank % times.stages].append(statistics.median(seconds))
    return [statistics.mean(ranks) for ranks in medians]


def _exchange_seconds(times: Times) -> List[float]:
    """Return the seconds that the exchange adds to a step, by turn; they may be negative."""
    # Both were measured right after each other, so slow changes of the machine cancel.
    turns = zip(times.from_memory, times.without_exchange)
    return [whole - without for whole, without in turns]


def scaled(measured: Dict[str, float], times: Times, accumulation: int) -> Dict[str, float]:
    """Return the parts of a step with more micro batches than were measured.

    Computing and waiting for images grow with the micro batches. Update, exchange and filling a
    pipeline of K ranks with V parts of the model each, (K - 1) / V turns of the slowest stage, come
    once a step. Lasting differences between replicas grow with the micro batches, chance with their
    square root. Of the rest, what workers take grows.

    Args:
        measured: seconds of each part of the measured step.
        times: of that step.
        accumulation: micro batches of the longer step.
    """
    factor = accumulation / times.accumulation
    seconds = {}
    for name in PARTS:
        seconds[name] = measured[name] * (1.0 if name in _ONCE else factor)
    # These three are in part of the one kind and in part of the other.
    seconds["bubble"] = _scaled_bubble(measured, times, factor)
    seconds["rest"] += (factor - 1) * _beside_workers(measured, times)
    seconds["straggling"] = _scaled_straggling(measured, times, factor)
    return seconds


def _scaled_bubble(measured: Dict[str, float], times: Times, factor: float) -> float:
    """Return the seconds for which stages stand still with `factor` times the micro batches.

    They fill the pipeline once, and wait beyond that with each micro batch.
    """
    turn = (measured["compute"] + measured["imbalance"]) / times.accumulation
    filling = min(measured["bubble"], (times.stages - 1) / times.virtual * turn)
    waiting = measured["bubble"] - filling
    return filling + factor * waiting


def _beside_workers(measured: Dict[str, float], times: Times) -> float:
    """Return the seconds by which workers slow a step down while they read."""
    as_trained = statistics.median(times.as_trained)
    from_memory = statistics.median(times.from_memory)
    return as_trained - measured["input"] - from_memory


def _scaled_straggling(measured: Dict[str, float], times: Times, factor: float) -> float:
    """Return the seconds of waiting for the slowest replica with `factor` times the work."""
    by_replica = times.passes.by_replica.values()
    medians = [statistics.median(lengths) for lengths in by_replica]
    # A replica that is always slow, and chance.
    lasting = min(measured["straggling"], max(medians) - statistics.mean(medians))
    chance = measured["straggling"] - lasting
    return factor * lasting + math.sqrt(factor) * chance


def doubts(times: Times, seconds: Dict[str, float]) -> List[str]:
    """Return why the parts of a step are no ground for advice, a clause each; nothing if they are.

    Parts are measured one after the other. If the machine changes meanwhile, because other programs
    run on it, they do not add up, or repetitions of the same work differ.

    Args:
        times: of the step.
        seconds: of its parts, as measured or scaled.
    """
    step = math.fsum(seconds.values())
    reasons = _doubts_of_sum(seconds, step)
    # Waiting for images may vary by its nature: what remains of a step without it should not.
    computed = [whole - waited for whole, waited in zip(times.as_trained, times.waited)]
    reasons += _doubts_of_repetitions("steps", computed)
    reasons += _doubts_of_repetitions("steps with images in memory", times.from_memory)
    exchanged = _exchange_seconds(times)
    # An exchange that is not worth a change need not be known well.
    if exchanged and seconds["exchange"] >= WORTH * step:
        low, _ = _middle_half(exchanged)
        if low <= 0:
            reasons.append("steps with and without the exchange differ by less than they vary")
    return reasons


def _doubts_of_sum(seconds: Dict[str, float], step: float) -> List[str]:
    """Return a clause if the parts add up to much more or less than the step."""
    rest = seconds["rest"] / step
    if rest <= -WORTH:
        total = percent(1 - rest)
        return [f"the parts, measured one after the other, add up to {total} of a step"]
    changeable = [name for name in seconds if name not in ("compute", "rest")]
    largest = max(seconds[name] for name in changeable) / step
    # A rest smaller than the part to be mended does not change what comes first.
    if rest >= max(WORTH, largest):
        fault = f"{percent(rest)} of a step is in no part"
        return [f"{fault}, which is more than any part that a recipe can change"]
    return []


def _doubts_of_repetitions(name: str, values: Sequence[float]) -> List[str]:
    """Return a clause if the middle half of the repetitions spans too much."""
    low, high = _middle_half(values)
    if high - low <= _VARIES * statistics.median(values):
        return []
    between = f"{duration(low)} and {duration(high)}"
    return [f"{name} vary: half of {len(values)} take between {between}"]


def _middle_half(values: Sequence[float]) -> List[float]:
    """Return the quartiles around the middle half."""
    # Of one value there are no quantiles.
    if len(values) < 2:
        return [values[0], values[0]]
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return [quartiles[0], quartiles[2]]


def straggling(times: Times, accumulation: int) -> float:
    """Return the relative deviation of a replica's passes in a step, over replicas and steps.

    Differences between steps average out over the micro batches, those between replicas do not.

    Args:
        times: of the measured step.
        accumulation: micro batches of the step that is meant.
    """
    by_replica = list(times.passes.by_replica.values())
    means = [statistics.mean(lengths) for lengths in by_replica]
    between = statistics.pvariance(means)
    within = statistics.mean(statistics.pvariance(lengths) for lengths in by_replica)
    # The law of total variance.
    factor = accumulation / times.accumulation
    return math.sqrt(between + within / factor) / statistics.mean(means)


class Rank(NamedTuple):
    """A rank's passes.

    rank, replica, stage: its place in the run.
    host: name of its machine.
    mean, deviation: seconds of a measured step.
    lag: how much longer than those of others of its stage, relative; None where there are none.
    """

    rank: int
    replica: int
    stage: int
    host: str
    mean: float
    deviation: float
    lag: Optional[float]


def ranks(measured: Passes, stages: int, hosts: Sequence[str]) -> List[Rank]:
    """Return a row for each rank.

    Args:
        measured: passes of all ranks.
        stages: ranks that share a replica.
        hosts: of each rank.
    """
    means = {rank: statistics.mean(values) for rank, values in measured.by_rank.items()}
    rows = []
    for rank, values in measured.by_rank.items():
        stage = rank % stages
        # Stages differ in their work, so a rank is compared with those of its own.
        others = []
        for other, mean in means.items():
            if other != rank and other % stages == stage:
                others.append(mean)
        row = Rank(
            rank=rank,
            replica=rank // stages,
            stage=stage,
            host=hosts[rank],
            mean=means[rank],
            deviation=statistics.pstdev(values),
            lag=means[rank] / statistics.mean(others) - 1 if others else None,
        )
        rows.append(row)
    return rows


def slowest(rows: Sequence[Rank]) -> Optional[Rank]:
    """Return the rank that falls farthest behind the others of its stage; None without others.

    Args:
        rows: of all ranks.
    """
    compared = [(row.lag, row) for row in rows if row.lag is not None]
    if not compared:
        return None
    _, farthest = max(compared, key=lambda pair: pair[0])
    return farthest
