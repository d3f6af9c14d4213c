"""Do replicas of different speeds give the sum of their rates?

EfficientNet-B0 G16 at 64 px, two replicas in two processes of one thread, 24 micro batches of 16
that lie in memory, `exchange.order: tree`. One replica is made slow: after each micro batch it
sleeps for as long as that took. A step with even shares and one with the shares that
`parallel.shares: measured` has found take turns; both have the same bits. The sum of rates: each
replica's images over the seconds of its own forward and backward passes in the same step.
"""

from __future__ import annotations

import statistics
import time
from typing import Dict, List, NamedTuple, Sequence, Tuple

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

REPLICAS = 2
SLOW = 1  # the replica that is slow
MICRO = 16
MICRO_BATCHES = 24
ROUNDS = 15
SETTLING = 4  # times that shares may change before they are taken


class Turn(NamedTuple):
    """One rank's part in a step.

    seconds: of the whole step.
    passes: seconds of this rank's forward and backward passes.
    micro_batches: that this rank computed.
    """

    seconds: float
    passes: float
    micro_batches: int


def recipe() -> Recipe:
    """Return the recipe of both sides."""
    overrides = [
        f"batch.micro={MICRO}",
        f"batch.global={MICRO * MICRO_BATCHES}",
        f"parallel.replicas={REPLICAS}",
        "exchange.order=tree",
        "parallel.shares=measured",
        "log.noise_scale=false",
    ]
    return of_step(*B0, *overrides)


def sleep_as_long_as_computing(engine: TorchEngine) -> None:
    """Give this process half its speed, from here on.

    Args:
        engine: of this process.
    """
    work = engine._work
    started: List[float] = []
    before_forward = work.before_forward
    after_backward = work.after_backward

    def forward_begins(number: int) -> None:
        """Note when micro batch `number` begins."""
        started.append(time.perf_counter())
        before_forward(number)

    def backward_ended(part: int, last: bool) -> None:
        """Sleep after a micro batch went through a `part`, whether or not it was the `last`."""
        after_backward(part, last)
        time.sleep(time.perf_counter() - started.pop())

    # On the object, where they come before the methods of its class.
    vars(work).update(before_forward=forward_begins, after_backward=backward_ended)


def rank_takes_turns(rank: int) -> Dict[str, List[Turn]]:
    """Make steps with even and with measured shares, in turns, as one of the ranks.

    Args:
        rank: of this process.

    Returns:
        The turns of each side.
    """
    processes = Processes(Topology(REPLICAS, 1, rank, rank), torch.device("cpu"))
    plan = recipe()
    engine = TorchEngine(plan, divide(plan, REPLICAS), processes, steps_per_epoch=1)
    whole = _micro_batches(plan)
    if rank == SLOW:
        sleep_as_long_as_computing(engine)

    def step() -> None:
        """Make one step, of the micro batches that are this rank's."""
        share = engine.batch.shares[rank]
        engine.train_step(iter(whole[share.start : share.stop]), one_step(0), lr=0.1)

    def turn(shares: List[range], number: int) -> Turn:
        """Time a step with some `shares`; the `number` of the turn does not matter."""
        engine.set_shares(0, shares)
        step()  # finds memory as these shares leave it
        processes.wait_for_all()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        passes = _seconds_of_passes(engine)
        return Turn(seconds, passes, len(shares[rank]))

    even = engine.batch.shares
    # The first step after a change is not measured, so that each change takes two.
    for _ in range(SETTLING):
        step()
        step()
        engine.balance(0)
    sides = {"even": even, "measured": engine.batch.shares}
    # All ranks take the same turns; one of them tells of it.
    shown = "turns of even, measured:" if rank == 0 else None
    turns = claims.in_turn(sides, ROUNDS, turn, what=shown)
    processes.part()
    return turns


def _micro_batches(plan: Recipe) -> List[MicroBatch]:
    """Return the micro batches of a step, those of all replicas."""
    images, labels = ranks.images_and_labels(plan, MICRO * MICRO_BATCHES)
    micro_batches = []
    for number in range(MICRO_BATCHES):
        rows = slice(number * MICRO, (number + 1) * MICRO)
        micro_batch = MicroBatch(
            images=images[rows],
            labels=labels[rows],
            indices=labels[rows],
            valid=MICRO,
            number=number,
            step=0,
            unreadable=(),
        )
        micro_batches.append(micro_batch)
    return micro_batches


def _seconds_of_passes(engine: TorchEngine) -> float:
    """Return the seconds of this rank's passes in the last step that was measured."""
    shares = engine._shares
    assert shares is not None, "the recipe has parallel.shares=measured"
    seconds, _ = shares.read()
    return seconds


def over_sum(turns: Sequence[Turn]) -> float:
    """Return the rate of all replicas in a step over the sum of their own rates.

    Args:
        turns: the same step of each rank.
    """
    own_rates = sum(turn.micro_batches / turn.passes for turn in turns)
    seconds = max(turn.seconds for turn in turns)
    return MICRO_BATCHES / seconds / own_rates


def measured() -> Tuple[List[dict], dict]:
    """Measure both sides.

    Returns:
        A row for each side, and the claim.
    """
    torch.set_num_threads(1)  # as in the ranks: the report says so
    by_rank = ranks.run(REPLICAS, rank_takes_turns)
    rows = []
    shares_of_sum: Dict[str, List[float]] = {}
    for side in by_rank[0]:
        steps = list(zip(*(turns[side] for turns in by_rank)))
        shares_of_sum[side] = [over_sum(turns) for turns in steps]
        rows.append(_row(side, steps, shares_of_sum[side]))
    claim = claims.claim(
        "uneven_rate_over_sum",
        shares_of_sum["measured"],
        unit="of the sum of rates",
        goal=">= 0.9",
    )
    return rows, claim


def _row(side: str, steps: List[Tuple[Turn, ...]], shares_of_sum: List[float]) -> dict:
    """Return the row of a side.

    Args:
        side: "even" or "measured".
        steps: the turns of all ranks in each step.
        shares_of_sum: see `over_sum`, of each step.
    """
    seconds = [max(turn.seconds for turn in turns) for turns in steps]
    rates = [MICRO * MICRO_BATCHES / spent for spent in seconds]
    return {
        "side": f"{side} shares",
        "micro_batches": " + ".join(str(turn.micro_batches) for turn in steps[0]),
        **claims.milliseconds(seconds, "_per_step"),
        "images_per_second": statistics.median(rates),
        "over_sum": statistics.median(shares_of_sum),
    }
