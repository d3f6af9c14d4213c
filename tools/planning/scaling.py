"""Seconds of a step by cause, on 1 to 4,096 replicas: a model of few constants (docs/planning.md)."""

from __future__ import annotations

import statistics
from typing import Dict, NamedTuple, Optional

from parallel.costs import Link
from parallel.exchange import Gradient, Method
from parallel.exchange import of as method_for
from recipe.config import Recipe
from recipe.ipu.rules import pipelined
from recipe.shares import even, mean_sums
from tools.planning.machine import Machine
from tools.planning.workload import Workload

REPLICAS = [2**power for power in range(13)]
_FEW = 0.1  # below this share of a step, what is not computing is no limit


class Row(NamedTuple):
    """A step on `replicas`. parts: its seconds by cause. hours: of training, where that is known.

    global_batch: the recipe's, or where `grown` the least that so many replicas can share. efficiency: rate over that
    of one replica times as many. limit: the part that costs most besides computing, if these exceed a tenth.
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
    hours: Optional[float] = None


def predict(recipe: Recipe, machine: Machine, replicas: int, workload: Workload) -> Row:
    """A step of `recipe` on `replicas` of `machine`. The formulae are in docs/planning.md, "The model"."""
    micro, stages = recipe.batch.micro, recipe.parallel.stages
    least = recipe.parallel.least  # that fill a pipeline
    if machine.device == "ipu" and pipelined(recipe):
        least = 2 * stages - 1
    accumulation = max(-(-recipe.batch.global_ // (micro * replicas)), least)
    batch, sums = accumulation * micro * replicas, 1.0
    if recipe.exchange.in_tree:
        batch = max(recipe.batch.global_, least * micro * replicas)
        shares = even(batch // micro, replicas, least)
        accumulation, sums = max(map(len, shares)), mean_sums(shares)
    parts = _seconds(recipe, machine, replicas, accumulation, workload, sums)
    single = sum(_seconds(recipe, machine, 1, max(1, batch // micro), workload, 1.0).values())
    seconds = sum(parts.values())
    limit = max((name for name in parts if name != "compute"), key=parts.__getitem__)
    if parts["compute"] >= (1 - _FEW) * seconds:
        limit = "compute"
    return Row(
        replicas, replicas * len(workload.stages), batch, batch > recipe.batch.global_, accumulation, seconds,
        batch / seconds, single / (replicas * seconds), parts, limit,
    )  # fmt: skip


def exchange(machine: Machine, method: Method, replicas: int, workload: Workload, sums: float = 1.0) -> float:
    """Seconds in which replicas combine the largest stage's gradient by a method. Args: sums: see Gradient."""
    if replicas == 1:
        return 0.0
    levels, joined = [], 1  # groups that meet, and their link; the last may hold more groups than there are
    for reach in machine.links:
        if joined >= replicas:
            break
        within = replicas if reach.devices is None else min(replicas, max(1, reach.devices // len(workload.stages)))
        groups = -(-within // joined)
        if groups > 1:
            levels.append((groups, Link(reach.latency.value, 1 / reach.bandwidth.value)))
            joined *= groups
    largest = max(Gradient(stage.parameters, layers=stage.layers, sums=sums) for stage in workload.stages)
    return method.seconds_over(levels, replicas, largest, workload.gradient_bytes)


def slowest_of(count: int) -> float:
    """Expected largest of `count` standard normal numbers. Source: Blom, 1958, Statistical estimates: (n - 3/8)."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def backward_share(workload: Workload) -> float:
    """Share of a micro batch's time in the backward pass."""
    return 0.5 if workload.recomputed else 2 / 3


def _seconds(
    recipe: Recipe, machine: Machine, replicas: int, accumulation: int, workload: Workload, sums: float
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
    hidden = 0.0 if recipe.exchange.in_tree else machine.overlap * slowest * backward_share(workload)
    if machine.device == "cpu":  # elsewhere late exchanges overlap nothing (docs/exchange.md)
        hidden = max(hidden, recipe.exchange.beside * sum(parts.values()))
    combining = exchange(machine, method_for(recipe.exchange), replicas, workload, sums)
    parts["exchange"] = max(0.0, combining - hidden)
    parts["update"] = max(stage.parameters for stage in workload.stages) / machine.update.value
    parts["straggling"] = machine.straggling.value * slowest_of(replicas) * sum(parts.values())
    copying = 3 * workload.image_size**2 / machine.to_device.value  # seconds an image; beside it is read
    reading = 1 / (machine.decode.value * machine.cores * len(workload.stages)) if recipe.data.encoded else 0.0
    parts["input"] = max(0.0, accumulation * micro * max(copying, reading) - sum(parts.values()))
    return parts


def _fill(recipe: Recipe, machine: Machine, stages: int) -> float:
    """Micro batches' time that a pipeline's slowest stage stands still in a step."""
    if stages == 1 or recipe.parallel.schedule == "sharded":
        return 0.0
    return 2.0 * (stages - 1) if machine.device == "ipu" else (stages - 1) / (recipe.parallel.virtual_stages or 1)
