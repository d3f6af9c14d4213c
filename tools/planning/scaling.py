"""Seconds of a step by cause, on 1 to 4,096 replicas: a model of few constants.

Its formulae are in docs/planning.md.
"""

from __future__ import annotations

import statistics
from typing import Dict, List, NamedTuple, Optional, Tuple

from parallel.costs import Link
from parallel.exchange import Gradient, Method
from parallel.exchange import of as method_for
from recipe.config import Parallel, Recipe
from recipe.ipu.rules import pipelined
from recipe.settled import micro_batch
from recipe.shares import even, mean_sums
from tools.planning.machine import Machine
from tools.planning.workload import Workload

REPLICAS = [2**power for power in range(13)]
_FEW = 0.1  # below this share of a step, what is not computing is no limit


class Row(NamedTuple):
    """A step on `replicas`.

    devices: of all of them.
    global_batch: the recipe's, or where `grown` the least that so many replicas can share.
    accumulation: micro batches of the replica that computes most.
    seconds: of the step.
    images_per_second: in training.
    efficiency: rate over that of one replica times as many.
    parts: the seconds of the step by cause.
    limit: the part that costs most besides computing, if these exceed a tenth.
    hours: of training, where that is known.
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


class _Division(NamedTuple):
    """A global batch divided among replicas.

    batch: its images.
    accumulation: micro batches of the replica that computes most.
    sums: see `Gradient`.
    """

    batch: int
    accumulation: int
    sums: float = 1.0


def predict(recipe: Recipe, machine: Machine, replicas: int, workload: Workload) -> Row:
    """Predict a step by the formulae in docs/planning.md, "The model".

    Args:
        recipe: that is trained.
        machine: that trains it.
        replicas: of the model.
        workload: of the recipe.
    """
    division = _divide(recipe, machine, replicas)
    parts = _seconds(recipe, machine, replicas, division, workload)
    seconds = sum(parts.values())
    # The same batch on one replica, for the efficiency.
    micro_batches = max(1, division.batch // micro_batch(recipe))
    alone = _Division(division.batch, micro_batches)
    single = sum(_seconds(recipe, machine, 1, alone, workload).values())
    return Row(
        replicas=replicas,
        devices=replicas * len(workload.stages),
        global_batch=division.batch,
        grown=division.batch > recipe.batch.global_,
        accumulation=division.accumulation,
        seconds=seconds,
        images_per_second=division.batch / seconds,
        efficiency=single / (replicas * seconds),
        parts=parts,
        limit=_limit(parts),
    )


def _limit(parts: Dict[str, float]) -> str:
    """Return the part of a step that is to be improved first."""
    # If nearly all of the step is computing, there is nothing else to improve.
    if parts["compute"] >= (1 - _FEW) * sum(parts.values()):
        return "compute"
    others = [name for name in parts if name != "compute"]
    return max(others, key=parts.__getitem__)


def _divide(recipe: Recipe, machine: Machine, replicas: int) -> _Division:
    """Divide the recipe's batch, or the least larger one that so many replicas can share."""
    micro = micro_batch(recipe)
    least = recipe.parallel.least  # micro batches that fill a pipeline
    if machine.device == "ipu" and pipelined(recipe):
        # Fewer are refused by PopTorch: see recipe/ipu/rules.py.
        least = 2 * recipe.parallel.stages - 1
    if recipe.exchange.in_tree:
        # Replicas may have unequal shares, which add up in tree order.
        batch = max(recipe.batch.global_, least * micro * replicas)
        shares = even(batch // micro, replicas, least)
        return _Division(batch, max(map(len, shares)), mean_sums(shares))
    # Equal shares, so the batch grows to the next multiple.
    accumulation = max(-(-recipe.batch.global_ // (micro * replicas)), least)
    return _Division(accumulation * micro * replicas, accumulation)


def exchange(
    machine: Machine,
    method: Method,
    replicas: int,
    workload: Workload,
    sums: float = 1.0,
) -> float:
    """Predict the seconds in which replicas combine the largest stage's gradient.

    Args:
        machine: whose links are used.
        method: of exchange.
        replicas: that combine theirs.
        workload: of a recipe.
        sums: see `Gradient`.
    """
    if replicas == 1:
        return 0.0
    gradients = []
    for stage in workload.stages:
        gradients.append(Gradient(stage.parameters, layers=stage.layers, sums=sums))
    levels = _levels(machine, replicas, len(workload.stages))
    return method.seconds_over(levels, replicas, max(gradients), workload.gradient_bytes)


def _levels(machine: Machine, replicas: int, stages: int) -> List[Tuple[int, Link]]:
    """Return the groups of replicas that meet, and their link, from the nearest on.

    The last level may hold more groups than there are.
    """
    levels = []
    joined = 1  # replicas that meet below this level
    for reach in machine.links:
        if joined >= replicas:
            break
        # A replica has a device for each stage.
        within = replicas
        if reach.devices is not None:
            within = min(replicas, max(1, reach.devices // stages))
        groups = -(-within // joined)
        if groups > 1:
            levels.append((groups, Link(reach.latency.value, 1 / reach.bandwidth.value)))
            joined *= groups
    return levels


def slowest_of(count: int) -> float:
    """Return the expected largest of `count` standard normal numbers.

    Source: Blom, 1958, Statistical estimates and transformed beta-variables: the quantile of
    (n - 3/8) / (n + 1/4).
    """
    if count <= 1:
        return 0.0
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def backward_share(workload: Workload) -> float:
    """Return the share of a micro batch's time in the backward pass of a `workload`."""
    return 0.5 if workload.recomputed else 2 / 3


def _seconds(
    recipe: Recipe,
    machine: Machine,
    replicas: int,
    division: _Division,
    workload: Workload,
) -> Dict[str, float]:
    """Predict the seconds of a step by cause.

    Args:
        recipe: that is trained.
        machine: that trains it.
        replicas: of the model.
        division: of the global batch among them.
        workload: of the recipe.
    """
    accumulation = division.accumulation
    stages = len(workload.stages)
    micro = _micro_batch_seconds(recipe, machine, workload)
    parts = {
        "compute": accumulation * micro.mean,
        "imbalance": accumulation * (micro.slowest - micro.mean),
        "bubble": _fill(recipe.parallel, machine.device, stages) * micro.slowest,
    }
    # Each of the following depends on the parts before it: their order is part of the model.
    computing = sum(parts.values())
    hidden = _hidden(recipe, machine, workload, slowest=micro.slowest, computing=computing)
    method = method_for(recipe.exchange)
    combining = exchange(machine, method, replicas, workload, sums=division.sums)
    parts["exchange"] = max(0.0, combining - hidden)
    # The largest stage is the last to be updated.
    parameters = max(stage.parameters for stage in workload.stages)
    parts["update"] = parameters / machine.update.value
    # Whatever a replica does, it is late by chance with all of it.
    parts["straggling"] = machine.straggling.value * slowest_of(replicas) * sum(parts.values())
    # Images are read beside all that.
    images = accumulation * micro_batch(recipe)
    needed = images * _seconds_of_image(recipe, machine, workload)
    parts["input"] = max(0.0, needed - sum(parts.values()))
    return parts


class _StageSeconds(NamedTuple):
    """Seconds of a micro batch on the stages of a pipeline, of which the slowest paces it."""

    mean: float
    slowest: float


def _micro_batch_seconds(recipe: Recipe, machine: Machine, workload: Workload) -> _StageSeconds:
    """Predict the seconds in which stages compute a micro batch."""
    micro = micro_batch(recipe)
    work = [micro * stage.multiply_adds / machine.rate.value for stage in workload.stages]
    # One stage at a time: a step takes as long as all of them together.
    if recipe.parallel.schedule == "sharded":
        return _StageSeconds(mean=sum(work), slowest=sum(work))
    return _StageSeconds(mean=sum(work) / len(work), slowest=max(work))


def _hidden(
    recipe: Recipe,
    machine: Machine,
    workload: Workload,
    slowest: float,
    computing: float,
) -> float:
    """Return the seconds of an exchange that is hidden by computing.

    Args:
        recipe: that is trained.
        machine: that trains it.
        workload: of the recipe.
        slowest: seconds of a micro batch on the slowest stage.
        computing: seconds of a step without exchange and update.
    """
    hidden = 0.0
    # A sum in tree order exists only when the last micro batch is done.
    if not recipe.exchange.in_tree:
        hidden = machine.overlap * slowest * backward_share(workload)
    # Elsewhere late exchanges overlap nothing (docs/exchange.md).
    if machine.device == "cpu":
        hidden = max(hidden, recipe.exchange.beside * computing)
    return hidden


def _seconds_of_image(recipe: Recipe, machine: Machine, workload: Workload) -> float:
    """Return the seconds in which the host of a replica prepares an image."""
    copying = 3 * workload.image_size**2 / machine.to_device.value
    if not recipe.data.encoded:
        return copying
    # All cores that belong to the replica's devices decode, while images are copied.
    reading = 1 / (machine.decode.value * machine.cores * len(workload.stages))
    return max(copying, reading)


def _fill(parallel: Parallel, device: str, stages: int) -> float:
    """Return for how many micro batches' time a pipeline's slowest stage is idle in a step."""
    if stages == 1 or parallel.schedule == "sharded":
        return 0.0
    # Forward and backward passes alternate there, so filling takes as long again.
    if device == "ipu":
        return 2.0 * (stages - 1)
    return (stages - 1) / (parallel.virtual_stages or 1)
