"""Is a data-parallel step as fast as that of DistributedDataParallel, and what does each exchange cost?

    python -m benchmarks.replicas [--quick] [--json]

EfficientNet-B0 G16 at 64 px, two replicas in two processes of one thread, 1 and 4 micro batches of 16 that lie in
memory, float32. All sides take turns in the same processes; a step's time is that of the slower one.
- `ddp`: torch's DistributedDataParallel around the same module, all backward passes but the last under no_sync, and our
  LARS. `ddp, views` has gradient_as_bucket_view=True, which saves a copy.
- `dense`: a step of our engine, whose all-reduce overlaps the last backward pass. `half`: float16 travels. `dense,
  tree`: a sum of one order for every number of replicas. `none`: no gradients travel.
The claim is about the faster form of DDP, and the number of micro batches where we do worse.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import contextlib
import statistics
from typing import Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import claims, ranks
from benchmarks.ranks import JoinedTurns, Ours, Turn
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from models.families import build
from models.normalization import norm_parameters
from optim import factory
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe

REPLICAS = 2
MICRO = 16
ROUNDS = {1: 40, 4: 25}  # by micro batches of a step
PEERS = {"ddp": False, "ddp, views": True}  # gradient_as_bucket_view, by side
SIDES: Dict[str, Tuple[str, ...]] = {  # our sides: what they change in the recipe
    "dense": (),
    "half": ("exchange.method=half", "exchange.wire=float16"),
    "dense, tree": ("exchange.order=tree",),
    "none": ("exchange.method=none",),
}
_Step = Callable[[], None]
_JoinedBySide = Dict[str, JoinedTurns]
_TurnsOfRank = Dict[Tuple[int, str], List[Turn]]  # by micro batches of a step, and side


def recipe(accumulation: int, *overrides: str) -> Recipe:
    """Return the recipe of all sides.

    Args:
        accumulation: micro batches of a step and replica.
        overrides: what a side changes.
    """
    division = (
        f"batch.micro={MICRO}",
        f"batch.global={MICRO * accumulation * REPLICAS}",
        f"parallel.replicas={REPLICAS}",
    )
    return of_step(*B0, *division, *overrides)


class Ddp:
    """One replica of the same model in torch's DistributedDataParallel."""

    def __init__(self, plan: Recipe, accumulation: int, processes: Processes, views: bool):
        """
        Args:
            plan: the recipe.
            accumulation: micro batches of a step.
            processes: one a replica.
            views: gradients are views of the buckets that travel.
        """
        model = build(plan.model, plan.run.seed)
        model.train()
        self._model = DistributedDataParallel(
            model,
            process_group=processes.replica_group,
            gradient_as_bucket_view=views,
        )
        parameters = dict(model.named_parameters())
        self._optimizer = factory.create(plan.optimizer, parameters, norm_parameters(model))
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1
        self._loss = nn.CrossEntropyLoss(label_smoothing=plan.data.label_smoothing)
        # In memory, as those of our engine.
        images, labels = ranks.images_and_labels(plan, accumulation * MICRO)
        self._batches = list(zip(images.split(MICRO), labels.split(MICRO)))

    def update(self) -> None:
        """Take one step: all micro batches forward and backward, exchange, update."""
        count = len(self._batches)
        for number, (images, labels) in enumerate(self._batches, start=1):
            # Gradients travel with the last backward pass only.
            is_last = number == count
            with contextlib.nullcontext() if is_last else self._model.no_sync():
                loss = self._loss(self._model(images), labels) / count
                loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def rank_takes_turns(rank: int) -> _TurnsOfRank:
    """Measure all sides on one rank, as the other one does.

    Args:
        rank: number of this process.

    Returns:
        The turns of this rank.
    """
    topology = Topology(replicas=REPLICAS, stages=1, rank=rank, local_rank=rank)
    processes = Processes(topology, torch.device("cpu"))
    turns: _TurnsOfRank = {}
    for count, rounds in ROUNDS.items():
        turns_of_sides = ranks.in_turn(_sides(count, processes), rounds, processes)
        for name, values in turns_of_sides.items():
            turns[count, name] = values
    processes.part()
    return turns


def _sides(count: int, processes: Processes) -> Dict[str, _Step]:
    """Return the steps of all sides, by name, for steps of so many micro batches."""
    sides: Dict[str, _Step] = {}
    for name, views in PEERS.items():
        ddp = Ddp(recipe(count), count, processes, views)
        sides[name] = ddp.update
    for name, changes in SIDES.items():
        ours = Ours(recipe(count, *changes), processes)
        sides[name] = ours.update
    return sides


def main() -> None:
    """Measure all sides in two processes, and report."""
    options = claims.begin(__doc__, takes="5 minutes", quick="2 minutes")
    torch.set_num_threads(1)  # as in the ranks: the report says so
    outcomes = ranks.run(REPLICAS, rank_takes_turns)
    # All sides are compared with the form of DDP that is faster for this number of micro batches.
    rows = []
    over_ddp = []
    for count in ROUNDS:
        turns = _joined(outcomes, count)
        peer = _faster_ddp(turns)
        for name in turns:
            rows.append(_row(count, name, turns, peer))
        dense = turns["dense"].seconds
        over_ddp.append(claims.ratios(dense, peer))
    # The claim is about the number of micro batches where we do worse.
    worst = max(over_ddp, key=statistics.median)
    claim = claims.claim("time_over_ddp", worst, "times", "<= 1.03")
    claims.report("replicas", rows, [claim], options.json)


def _joined(outcomes: Sequence[_TurnsOfRank], count: int) -> _JoinedBySide:
    """Return the turns of each side over all ranks, for steps of `count` micro batches."""
    turns = {}
    for name in (*PEERS, *SIDES):
        by_rank = [outcome[count, name] for outcome in outcomes]
        turns[name] = ranks.joined(by_rank)
    return turns


def _faster_ddp(turns: _JoinedBySide) -> List[float]:
    """Return the seconds of the form of DDP that is faster here."""
    forms = [turns[name].seconds for name in PEERS]
    return min(forms, key=statistics.median)


def _row(count: int, name: str, turns: _JoinedBySide, peer: Sequence[float]) -> dict:
    """Return the row of a side, beside `peer`, the seconds of the faster form of DDP."""
    seconds, processor = turns[name]
    median = statistics.median(seconds)
    dense = turns["dense"].seconds
    none = turns["none"].seconds
    return {
        "replicas": REPLICAS,
        "micro_batches": count,
        "side": name,
        **claims.milliseconds(seconds, "_per_step"),
        "processor_ms": 1000 * statistics.median(processor),
        "images_per_second": REPLICAS * count * MICRO / median,
        "time_over_faster_ddp": claims.median_ratio(seconds, peer),
        "time_over_dense": claims.median_ratio(seconds, dense),
        "time_over_none": claims.median_ratio(seconds, none),
    }
