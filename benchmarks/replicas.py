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
from typing import Dict, List, Tuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import claims, ranks
from benchmarks.ranks import Ours
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe

REPLICAS = 2
MICRO = 16
ROUNDS = {1: 40, 4: 25}  # by micro batches of a step
PEERS = {"ddp": False, "ddp, views": True}
SIDES = {
    "dense": (),
    "half": ("exchange.method=half", "exchange.wire=float16"),
    "dense, tree": ("exchange.order=tree",),
    "none": ("exchange.method=none",),
}


def recipe(accumulation: int, *overrides: str) -> Recipe:
    batch = (f"batch.micro={MICRO}", f"batch.global={MICRO * accumulation * REPLICAS}")
    return of_step(*B0, *batch, f"parallel.replicas={REPLICAS}", *overrides)


class Ddp:
    """One replica of the same model in torch's DistributedDataParallel."""

    def __init__(self, plan: Recipe, accumulation: int, processes: Processes, views: bool):
        model = build(plan.model, plan.run.seed).train()
        self._model = DistributedDataParallel(
            model, process_group=processes.replica_group, gradient_as_bucket_view=views
        )
        self._optimizer = factory.create(plan.optimizer, dict(model.named_parameters()), norm_parameters(model))
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1
        self._loss = nn.CrossEntropyLoss(label_smoothing=plan.data.label_smoothing)
        images, labels = ranks.images_and_labels(plan, accumulation * MICRO)
        self._batches = list(zip(images.split(MICRO), labels.split(MICRO)))

    def update(self) -> None:
        last = len(self._batches) - 1
        for number, (images, labels) in enumerate(self._batches):
            with contextlib.nullcontext() if number == last else self._model.no_sync():
                loss = self._loss(self._model(images), labels) / len(self._batches)
                loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def rank_takes_turns(rank: int) -> Dict[Tuple[int, str], List[ranks.Turn]]:
    processes = Processes(Topology(REPLICAS, 1, rank, rank), torch.device("cpu"))
    turns = {}
    for count, rounds in ROUNDS.items():
        sides = {name: Ddp(recipe(count), count, processes, views).update for name, views in PEERS.items()}
        sides.update({name: Ours(recipe(count, *changes), processes).update for name, changes in SIDES.items()})
        found = ranks.in_turn(sides, rounds, processes)
        turns.update({(count, name): values for name, values in found.items()})
    processes.part()
    return turns


def main() -> None:
    as_json = claims.begin(__doc__, takes="5 minutes", quick="2 minutes").json
    torch.set_num_threads(1)  # as in the ranks: the report says so
    outcomes = ranks.run(REPLICAS, rank_takes_turns)
    rows, over_ddp = [], []
    for count in ROUNDS:
        joined = {name: ranks.joined([each[count, name] for each in outcomes]) for name in (*PEERS, *SIDES)}
        seconds = {name: values for name, (values, _) in joined.items()}
        peer = min((seconds[name] for name in PEERS), key=statistics.median)
        over_ddp.append(claims.ratios(seconds["dense"], peer))
        rows += [
            {
                "replicas": REPLICAS,
                "micro_batches": count,
                "side": name,
                **claims.milliseconds(values, "_per_step"),
                "processor_ms": 1000 * statistics.median(processor),
                "images_per_second": REPLICAS * count * MICRO / statistics.median(values),
                "time_over_faster_ddp": claims.median_ratio(values, peer),
                "time_over_dense": claims.median_ratio(values, seconds["dense"]),
                "time_over_none": claims.median_ratio(values, seconds["none"]),
            }
            for name, (values, processor) in joined.items()
        ]
    worst = max(over_ddp, key=statistics.median)
    claims.report("replicas", rows, [claims.claim("time_over_ddp", worst, "times", "<= 1.03")], as_json)
