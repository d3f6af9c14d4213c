"""Do replicas of different speeds give the sum of their rates?

EfficientNet-B0 G16 at 64 px, two replicas in two processes of one thread, 24 micro batches of 16 that lie in memory,
`exchange.order: tree`. One replica is made slow: after each micro batch it sleeps for as long as that took. A step with
even shares and one with the shares that `parallel.shares: measured` has found take turns; both have the same bits. The
sum of rates: each replica's images over the seconds of its own forward and backward passes in the same step.
"""

from __future__ import annotations

import statistics
import time
from typing import Dict, List, NamedTuple, Tuple

import torch

from benchmarks import claims, ranks
from benchmarks.step import B0
from benchmarks.step import recipe as of_step
from data.batches import MicroBatch
from engines.base import one_step
from engines.torch_engine import TorchEngine
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import divide
from recipe.config import Recipe

REPLICAS, SLOW = 2, 1  # replicas, and the one that is slow
MICRO, MICRO_BATCHES = 16, 24
ROUNDS = 15
SETTLING = 4  # times that shares may change before they are taken


class Turn(NamedTuple):
    """A step: its seconds, those of this rank's passes, and its micro batches."""

    seconds: float
    passes: float
    micro_batches: int


def recipe() -> Recipe:
    batch = (f"batch.micro={MICRO}", f"batch.global={MICRO * MICRO_BATCHES}", f"parallel.replicas={REPLICAS}")
    return of_step(*B0, *batch, "exchange.order=tree", "parallel.shares=measured", "log.noise_scale=false")


def sleep_as_long_as_computing(engine: TorchEngine) -> None:
    """From here on this process has half its speed."""
    work, started = engine._work, []
    forward, backward = work.before_forward, work.after_backward

    def before(number: int) -> None:
        started.append(time.perf_counter())
        forward(number)

    def after(part: int, last: bool) -> None:
        backward(part, last)
        time.sleep(time.perf_counter() - started.pop())

    work.before_forward, work.after_backward = before, after


def rank_takes_turns(rank: int) -> Dict[str, List[Turn]]:
    processes, plan = Processes(Topology(REPLICAS, 1, rank, rank), torch.device("cpu")), recipe()
    engine = TorchEngine(plan, divide(plan, REPLICAS), processes, steps_per_epoch=1)
    images, labels = (each.split(MICRO) for each in ranks.images_and_labels(plan, MICRO * MICRO_BATCHES))
    whole = [MicroBatch(*each, each[1], MICRO, number, 0, ()) for number, each in enumerate(zip(images, labels))]
    if rank == SLOW:
        sleep_as_long_as_computing(engine)

    def step() -> None:
        share = engine.batch.shares[rank]
        engine.train_step(iter(whole[share.start : share.stop]), one_step(0), lr=0.1)

    def turn(shares: List[range], _: int) -> Turn:
        engine.set_shares(0, shares)
        step()  # finds memory as these shares leave it
        processes.wait_for_all()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        return Turn(seconds, engine._shares.read()[0], len(shares[rank]))

    even = engine.batch.shares
    for _ in range(SETTLING):
        step()
        step()
        engine.balance(0)
    sides = {"even": even, "measured": engine.batch.shares}
    found = claims.in_turn(sides, ROUNDS, turn, what="turns of even, measured:" if rank == 0 else None)
    processes.part()
    return found


def over_sum(turns: Tuple[Turn, ...]) -> float:
    """The rate of all replicas in a step over the sum of their own rates. Args: turns: of each rank."""
    own = sum(each.micro_batches / each.passes for each in turns)
    return MICRO_BATCHES / max(each.seconds for each in turns) / own


def measured() -> Tuple[List[dict], dict]:
    torch.set_num_threads(1)  # as in the ranks: the report says so
    outcomes, rows, shares_of_sum = ranks.run(REPLICAS, rank_takes_turns), [], {}
    for side in outcomes[0]:
        turns = list(zip(*(each[side] for each in outcomes)))
        shares_of_sum[side] = [over_sum(each) for each in turns]
        seconds = [max(turn.seconds for turn in each) for each in turns]
        row = {"side": f"{side} shares", "micro_batches": " + ".join(str(each.micro_batches) for each in turns[0])}
        rate = statistics.median(MICRO * MICRO_BATCHES / each for each in seconds)
        ratio = statistics.median(shares_of_sum[side])
        rows.append({**row, **claims.milliseconds(seconds, "_per_step"), "images_per_second": rate, "over_sum": ratio})
    return rows, claims.claim("uneven_rate_over_sum", shares_of_sum["measured"], "of the sum of rates", ">= 0.9")
