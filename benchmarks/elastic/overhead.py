"""What an elastic run costs a step where no replica is lost: it remembers two steps, and asks the
store.
"""

from __future__ import annotations

import itertools
from typing import Dict, List, Tuple

import torch

from benchmarks import claims, ranks
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from parallel.elastic import Elastic
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe
from training.elastic import Memory
from training.progression import Progression

REPLICAS = 2
MICRO = 16
MICRO_BATCHES = 12
ROUNDS = 60
_STEPS = 2  # of a turn


def _recipe() -> Recipe:
    """Return the recipe of both sides."""
    overrides = [
        f"batch.micro={MICRO}",
        f"batch.global={MICRO * MICRO_BATCHES}",
        f"parallel.replicas={REPLICAS}",
        "exchange.order=tree",
        "log.noise_scale=false",
    ]
    return of_step(*B0, *overrides)


def rank_takes_turns(rank: int) -> Dict[str, List[float]]:
    """Make steps as an elastic run and as another one, in turns, as one of the ranks.

    Args:
        rank: of this process.

    Returns:
        Seconds of each turn, by side.
    """
    plan = _recipe()
    place = Topology(REPLICAS, 1, rank, rank)
    processes = Processes(place, torch.device("cpu"))
    ours = ranks.Ours(plan, processes)
    memory = Memory([])
    numbers = itertools.count()
    # It asks the store in rank 0, where a launcher would have its own.
    elastic = Elastic(place, plan.parallel, {})

    def plain_steps() -> None:
        """Make the steps of a turn."""
        for _ in range(_STEPS):
            ours.update()

    def elastic_steps() -> None:
        """Make the steps of a turn, with all that an elastic run does after each."""
        for _ in range(_STEPS):
            ours.update()
            memory.keep(ours.engine, Progression(step=next(numbers)))
            elastic.check()
            is_wanted = place.is_main and elastic.wants()
            assert not is_wanted, "nobody waits to be taken in"

    def turn(is_elastic: bool, number: int) -> float:
        """Time the steps of one side; the `number` of the turn does not matter."""
        # The thread that listens for the end of a generation runs in turns of this side only.
        if is_elastic:
            elastic.begin()
        processes.wait_for_all()
        seconds = claims.seconds(elastic_steps if is_elastic else plain_steps)
        if is_elastic:
            elastic.close()
        return seconds

    # All ranks take the same turns; one of them tells of it.
    shown = "turns:" if rank == 0 else None
    sides = {"elastic": True, "plain": False}
    seconds = claims.in_turn(sides, ROUNDS, turn, what=shown)
    processes.part()
    return seconds


def measured() -> Tuple[List[dict], dict]:
    """Measure both sides.

    Returns:
        A row for each side, and the claim.
    """
    torch.set_num_threads(1)  # as in the ranks
    by_rank = ranks.run(REPLICAS, rank_takes_turns)
    rows = []
    times = {}
    for side in by_rank[0]:
        # A step is done when the slowest rank has done it.
        turns = zip(*(seconds[side] for seconds in by_rank))
        times[side] = [max(turn) / _STEPS for turn in turns]
        rows.append({"side": side, **claims.milliseconds(times[side], "_per_step")})
    ratios = claims.ratios(times["elastic"], times["plain"])
    claim = claims.claim(
        "elastic_overhead",
        [ratio - 1 for ratio in ratios],
        unit="of a step",
        goal="<= 0.02",
    )
    return rows, claim
