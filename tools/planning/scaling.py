"""Seconds of a step by cause, on 1 to 4,096 replicas: a model of few constants (docs/planning.md)."""

from __future__ import annotations

import statistics
from typing import Dict, List, NamedTuple, Optional

from parallel.costs import Link
from parallel.exchange import Method, variants
from parallel.exchange import of as method_for
from recipe import ipu
from recipe.config import Recipe
from tools.planning.machine import Machine
from tools.planning.workload import Workload

REPLICAS = [2**power for power in range(13)]
_FEW = 0.1  # below this share of a step, what is not computing is no limit


class Row(NamedTuple):
    """A step on `replicas`. parts: its seconds by cause, which add up to `seconds`.

    global_batch: the recipe's, or the least that so many replicas can share, where `grown`. efficiency: rate over that
    of one replica times as many. limit: the cause that costs most besides computing, where all together cost more
    than a tenth.
    """

    replicas: int
    devices: int
    global_batch: int
    grown: bool
    accumulation: int
    seconds: float
    images_per_second: float
    efficiency: float
    parts: Dict[str, float]
    limit: str


def table(recipe: Recipe, machine: Machine, workload: Workload) -> List[Row]:
    """Predictions for 1, 2, 4, ... 4,096 replicas."""
    return [predict(recipe, machine, replicas, workload) for replicas in REPLICAS]


def predict(recipe: Recipe, machine: Machine, replicas: int, workload: Workload) -> Row:
    """A step of `recipe` on `replicas` of `machine`.

    Seconds of a step of A micro batches on K stages, of which the slowest takes t for one and the mean t':

        computing    A t'
        imbalance    A (t - t')
        bubble       F t: K - 1 micro batches to fill and drain a pipeline, (K - 1) / V with V stages a device in turn;
                     2 (K - 1) on IPUs, where a stage alternates forward and backward passes
        exchange     of the largest stage's gradient, over links from the nearest to the farthest (see `exchange`),
                     less what is hidden behind the last micro batch's backward pass, or on CPUs, where gradients are
                     late (exchange.delay), behind a whole step
        update       its parameters
        straggling   the slowest of P replicas: s E[max of P normals] of the time so far
        input        what reading, or copying to the device, takes longer than all of that
    """
    batch, accumulation, grown = _division(recipe, machine, replicas)
    one = _seconds(recipe, machine, 1, max(1, batch // recipe.batch.micro), workload)
    parts = _seconds(recipe, machine, replicas, accumulation, workload)
    seconds = sum(parts.values())
    rate = batch / seconds
    alone = batch / sum(one.values())
    return Row(
        replicas, replicas * len(workload.stages), batch, grown, accumulation, seconds, rate,
        rate / (replicas * alone), parts, _limit(parts),
    )  # fmt: skip


def exchange(machine: Machine, method: Method, replicas: int, stages: int, elements: int, size: int) -> float:
    """Seconds in which replicas combine gradients of `elements` values of `size` bytes."""
    if replicas == 1:
        return 0.0
    return method.seconds_over(_levels(machine, replicas, stages), replicas, elements, size)


def method_of(recipe: Recipe) -> str:
    """The recipe's exchange by the name that `exchange` knows; auto counts as dense until a run has measured."""
    section = recipe.exchange
    return "dense" if section.method == "auto" else section.variant


def methods(recipe: Recipe, machine: Machine, replicas: int, workload: Workload) -> Dict[str, float]:
    """Seconds of every exchange, of the largest stage's gradient."""
    return {method.name: _exchange(machine, replicas, workload, method) for method in variants(recipe.exchange)}


def rate_from(machine: Machine, recipe: Recipe, replicas: int, workload: Workload, images_per_second: float) -> float:
    """Multiply-adds a second of a device with which `predict` gives a rate that somebody has measured."""
    low, high = 1e6, 1e18
    for _ in range(200):
        middle = (low * high) ** 0.5
        guess = machine.model_copy(update={"rate": machine.rate.model_copy(update={"value": middle})})
        if predict(recipe, guess, replicas, workload).images_per_second < images_per_second:
            low = middle
        else:
            high = middle
    return low


def slowest_of(count: int) -> float:
    """Expected largest of `count` standard normal numbers. Source: Blom, 1958, Statistical estimates: (n - 3/8)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def backward_share(workload: Workload) -> float:
    """Share of a micro batch's time in the backward pass: two thirds, or a half where blocks are computed again."""
    return 0.5 if workload.recomputed else 2 / 3


def least_accumulation(recipe: Recipe, device: str) -> int:
    """Micro batches that a replica needs in each step to fill its pipeline, on devices of that kind."""
    stages = recipe.parallel.stages
    if device == "ipu" and ipu.pipelined(recipe):
        return 2 * stages - 1
    return stages if recipe.parallel.schedule in ("1f1b", "interleaved") else 1


def _division(recipe: Recipe, machine: Machine, replicas: int) -> tuple:
    """Global batch, accumulation, and whether the batch had to grow."""
    micro = recipe.batch.micro
    accumulation = max(-(-recipe.batch.global_ // (micro * replicas)), least_accumulation(recipe, machine.device))
    batch = accumulation * micro * replicas
    return batch, accumulation, batch > recipe.batch.global_


def _seconds(
    recipe: Recipe, machine: Machine, replicas: int, accumulation: int, workload: Workload
) -> Dict[str, float]:
    micro = recipe.batch.micro
    work = [micro * stage.multiply_adds / machine.rate.value for stage in workload.stages]
    slowest, mean = max(work), sum(work) / len(work)
    if recipe.parallel.schedule == "sharded":  # one stage at a time
        slowest = mean = sum(work)
    parts = {
        "compute": accumulation * mean,
        "imbalance": accumulation * (slowest - mean),
        "bubble": _fill(recipe, machine, len(work)) * slowest,
    }
    hidden = machine.overlap * slowest * backward_share(workload)
    if recipe.exchange.delay and machine.device == "cpu":  # elsewhere late exchanges overlap nothing (docs/exchange.md)
        hidden = sum(parts.values())
    parts["exchange"] = max(0.0, _exchange(machine, replicas, workload, method_for(recipe.exchange)) - hidden)
    parts["update"] = max(stage.parameters for stage in workload.stages) / machine.update.value
    parts["straggling"] = machine.straggling.value * slowest_of(replicas) * sum(parts.values())
    parts["input"] = max(0.0, accumulation * micro * _input(recipe, machine, workload) - sum(parts.values()))
    return parts


def _exchange(machine: Machine, replicas: int, workload: Workload, method: Method) -> float:
    elements = max(stage.parameters for stage in workload.stages)
    return exchange(machine, method, replicas, len(workload.stages), elements, workload.gradient_bytes)


def _fill(recipe: Recipe, machine: Machine, stages: int) -> float:
    """Micro batches' time that a pipeline's slowest stage stands still in a step."""
    if stages == 1 or recipe.parallel.schedule == "sharded":
        return 0.0
    return 2.0 * (stages - 1) if machine.device == "ipu" else (stages - 1) / (recipe.parallel.virtual_stages or 1)


def _input(recipe: Recipe, machine: Machine, workload: Workload) -> float:
    """Seconds an image of reading for one replica, or of copying it to the device: the slower one, as both go on
    beside computing."""
    seconds = 3 * workload.image_size**2 / machine.to_device.value
    if recipe.data.files:
        seconds = max(seconds, 1 / (machine.decode.value * machine.cores * len(workload.stages)))
    return seconds


def _levels(machine: Machine, replicas: int, stages: int) -> list:
    """(groups that meet, their link) from the nearest to the farthest; their product is `replicas`, or a little more
    where groups do not fill the last level."""
    found, joined = [], 1
    for reach in machine.links:
        if joined >= replicas:
            break
        within = replicas if reach.devices is None else min(replicas, max(1, reach.devices // stages))
        groups = -(-within // joined)
        if groups > 1:
            found.append((groups, Link(reach.latency.value, 1 / reach.bandwidth.value)))
            joined *= groups
    return found


def _limit(parts: Dict[str, float]) -> str:
    other: Optional[str] = max((name for name in parts if name != "compute"), key=parts.__getitem__)
    return "compute" if parts["compute"] >= (1 - _FEW) * sum(parts.values()) else other
