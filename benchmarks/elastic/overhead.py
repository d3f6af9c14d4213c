"""What an elastic run costs a step where no replica is lost: it remembers two steps, and asks the store."""

from __future__ import annotations

from typing import List, Tuple

import torch

from benchmarks import claims, ranks
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from parallel.elastic import Elastic
from parallel.processes import Processes
from parallel.topology import Topology
from training.elastic import Memory
from training.progression import Progression

REPLICAS, MICRO, MICRO_BATCHES, ROUNDS = 2, 16, 12, 60


def rank_takes_turns(rank: int) -> dict:
    own = (f"batch.micro={MICRO}", f"batch.global={MICRO * MICRO_BATCHES}", f"parallel.replicas={REPLICAS}")
    plan = of_step(*B0, *own, "exchange.order=tree", "log.noise_scale=false")
    place = Topology(REPLICAS, 1, rank, rank)
    processes = Processes(place, torch.device("cpu"))
    ours, memory, step = ranks.Ours(plan, processes), Memory([]), iter(range(10**6))
    elastic = Elastic(place, plan.parallel, {})  # asks the store in rank 0, where a launcher would have its own

    def one(is_elastic: bool) -> None:
        ours.update()
        if is_elastic:
            memory.keep(ours.engine, Progression(step=next(step)))
            elastic.check()
            assert not (place.is_main and elastic.wants())

    def turn(is_elastic: bool, _: int) -> float:
        if is_elastic:
            elastic.begin()
        processes.wait_for_all()
        spent = claims.seconds(lambda: (one(is_elastic), one(is_elastic)))
        if is_elastic:
            elastic.close()
        return spent

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
