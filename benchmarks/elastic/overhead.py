"""What remembering the last two steps, and listening for the end of a generation, cost a step."""

from __future__ import annotations

import dataclasses
from typing import List, Tuple

import torch

from benchmarks import claims, ranks
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from data.batches import MicroBatch
from engines.torch_engine import TorchEngine
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import divide
from training.elastic import Memory
from training.loop import Progression

REPLICAS, MICRO, MICRO_BATCHES, ROUNDS = 2, 16, 12, 20


def rank_takes_turns(rank: int) -> dict:
    own = (f"batch.micro={MICRO}", f"batch.global={MICRO * MICRO_BATCHES}", f"parallel.replicas={REPLICAS}")
    plan = of_step(*B0, *own, "exchange.order=tree", "log.noise_scale=false")
    processes = Processes(Topology(REPLICAS, 1, rank, rank), torch.device("cpu"))
    engine = TorchEngine(plan, divide(plan, REPLICAS), processes, steps_per_epoch=1)
    images, labels = (each.split(MICRO) for each in ranks.images_and_labels(plan, MICRO * MICRO_BATCHES))
    whole = [MicroBatch(*each, each[1], MICRO, number, 0, ()) for number, each in enumerate(zip(images, labels))]
    share, memory, step = engine.batch.shares[rank], Memory(), iter(range(10**6))

    def turn(elastic: bool, _: int) -> float:
        def one() -> None:
            number = next(step)
            engine.train_step(iter(whole[share.start : share.stop]), number, lr=0.1)
            if elastic:
                memory.keep(engine, dataclasses.replace(Progression(), step=number))

        processes.wait_for_all()
        return claims.seconds(lambda: (one(), one()))

    found = claims.in_turn({"elastic": True, "plain": False}, ROUNDS, turn, "turns:" if rank == 0 else None)
    processes.part()
    return found


def measured() -> Tuple[List[dict], dict]:
    torch.set_num_threads(1)  # as in the ranks
    outcomes = ranks.run(REPLICAS, rank_takes_turns)
    times = {side: [max(each) / 2 for each in zip(*(found[side] for found in outcomes))] for side in outcomes[0]}
    rows = [{"side": side, **claims.milliseconds(each, "_per_step")} for side, each in times.items()]
    more = [ratio - 1 for ratio in claims.ratios(times["elastic"], times["plain"])]
    return rows, claims.claim("elastic_overhead", more, "of a step", "<= 0.02")
