"""Do sums of sparse gradients take as long on a slow network as their messages alone would?

    python -m benchmarks.exchange [--quick] [--json]        (as root)

Hosts of `benchmarks/networks.py`, 2 to 32 of them with one rank each, whose cables have the rate of the table. Every
rank holds 6,250 values of a vector of 625,000, or the whole vector, and at the end has the sum in a buffer, by torch's
all-reduce (`dense`), as a mean of weights (`local`), by gathering all sparse vectors (`topk`), or by
`parallel/sparse.py`, which keeps 6,250 values of the sum (`gtopk tree`, `butterfly`, `owners`). A time is that from the
first rank's start to the last one's end. `model_ms` is `parallel/costs.py` at the cable's rate, for payload alone;
headers add 5 per cent. Rates come down as ranks share this machine's processors, which are `idle` (per cent).
All ranks' sums are compared bit for bit, and what was put in with what came out and what was kept.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import hashlib
import itertools
import math
import statistics
import time
from types import SimpleNamespace
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import distributed

from benchmarks import claims, networks
from benchmarks.networks import FRAME, PAYLOAD, Network
from parallel import costs, exchange
from parallel.costs import Link
from parallel.exchange import Setup
from parallel.local_steps import LocalSteps
from parallel.sparse import Sparse, SparseSum
from recipe.exchange import Exchange

ELEMENTS, ENTRIES = 625_000, 6_250
RATES = {2: 16, 3: 16, 4: 16, 5: 16, 8: 4, 16: 2, 32: 1}  # Mbit/s, by ranks
ROUNDS, DENSE_ROUNDS = 5, 3
ACKNOWLEDGEMENT = 66  # bytes of a frame, for every other full frame that comes
OPENING = 48  # bytes of gloo's before a message, and alone in a frame to announce it or that its receiver is ready
# What a rank sends for each message that it sends and receives, beside data: one announcement, one of readiness, and
# the acknowledgements of the other rank's.
WORDS = OPENING + 2 * (OPENING + ACKNOWLEDGEMENT) + 2 * ACKNOWLEDGEMENT
WHOLE = ("dense", "local")
PATTERNS = {"topk": "gather", "gtopk tree": "tree", "gtopk butterfly": "butterfly", "gtopk owners": "owners"}
MERGING = ("gtopk tree", "gtopk butterfly")


class Turn(NamedTuple):
    """One turn of a side on one rank: seconds on the machine's clock, ticks of all processors, bytes sent."""

    start: float
    end: float
    idle: int
    ticks: int
    sent: int


class Outcome(NamedTuple):
    """A side on one rank: its turns, the digest of each sum, the sum (rank 0's), the values left out of it."""

    turns: List[Turn]
    digests: List[str]
    total: Optional[torch.Tensor]
    kept: Sequence[Sparse]


class Side:
    """One way to sum, on one rank."""

    def __init__(self, name: str, own: Sparse, elements: int):
        self.buffer, self._name, self._own = torch.empty(elements), name, own
        self._scratch, group = torch.zeros(elements, dtype=torch.int32), distributed.group.WORLD
        if name == "local":
            processes, weights = SimpleNamespace(replica_group=group), SimpleNamespace(flat=self.buffer)
            setup = Setup(None, processes, self.buffer, (), None, group, None, None, weights)
            self._local = LocalSteps(setup, Exchange(method="local", local_steps=1))
        elif name in PATTERNS:
            self._sum = SparseSum(group, pattern=PATTERNS[name], wire="float32")

    def prepare(self) -> None:
        """The buffer as it is at the end of a backward pass, or cleared for the sum."""
        self.buffer.zero_()
        if self._name in WHOLE:
            self.buffer[self._own.indices] = self._own.values

    def __call__(self) -> Sequence[Sparse]:
        """Leaves the sum in the buffer; what this rank has to keep."""
        if self._name == "local":
            self.buffer.copy_(self._local.mean(self.buffer)).mul_(distributed.get_world_size())  # exact: names_of_sides
            return []
        if self._name == "dense":
            distributed.all_reduce(self.buffer)
            return []
        parts, kept = self._sum(self._own, self._scratch)
        for part in parts:
            self.buffer.index_add_(0, part.indices, part.values)
        return kept


def names_of_sides(ranks: int) -> List[str]:
    """Those of so many ranks: means of weights are sums again where their number is a power of two."""
    return [*WHOLE[: 1 + (ranks & (ranks - 1) == 0)], *PATTERNS]


def own_vector(rank: int) -> Sparse:
    """Random values at random places, multiples of 2**-16 below 8, of which float32 holds every sum of 32 exactly."""
    generator = torch.Generator().manual_seed(rank)
    indices = torch.randperm(ELEMENTS, generator=generator)[:ENTRIES].sort().values
    return Sparse(indices, (torch.randn(ENTRIES, generator=generator) * 2**16).round().clamp(-(2**19), 2**19) / 2**16)


def rank_takes_turns(rank: int, meet: Callable[[], object]) -> Dict[str, Outcome]:
    own = own_vector(rank)
    few = Sparse(torch.arange(8), torch.ones(8))
    names = names_of_sides(distributed.get_world_size())
    for name in names:  # connections, code and memory
        side = Side(name, few, 4096)
        side.prepare()
        side()
    sides = {name: Side(name, own, ELEMENTS) for name in names}
    outcomes: Dict[str, Outcome] = {}
    for number in range(claims.less(ROUNDS, 1)):
        for name, side in list(sides.items())[:: -1 if number % 2 else 1]:
            if name in WHOLE and number >= DENSE_ROUNDS:
                continue
            turn, kept = _take_turn(side, meet)
            if name not in outcomes:
                outcomes[name] = Outcome([], [], None if rank else side.buffer.clone(), kept)
            outcomes[name].turns.append(turn)
            outcomes[name].digests.append(hashlib.sha256(side.buffer.numpy().tobytes()).hexdigest())
    return outcomes


def _take_turn(side: Side, meet: Callable[[], object]) -> Tuple[Turn, Sequence[Sparse]]:
    side.prepare()
    meet()
    before = (*networks.processors(), networks.traffic()[0])
    meet()
    start = time.perf_counter()
    kept = side()
    end = time.perf_counter()
    meet()
    after = (*networks.processors(), networks.traffic()[0])
    return Turn(start, end, *(now - then for now, then in zip(after, before))), kept


def check(outcomes: Sequence[Dict[str, Outcome]]) -> None:
    """Raises RuntimeError where ranks' sums differ in a bit, or something was lost."""
    given = sum(_whole(own_vector(rank)) for rank in range(len(outcomes)))
    for name in outcomes[0]:
        if len({digest for each in outcomes for digest in each[name].digests}) != 1:
            raise RuntimeError(f"{name}: ranks or rounds have different sums")
        kept = [part for each in outcomes for part in each[name].kept]
        if not torch.equal(sum(map(_whole, kept), outcomes[0][name].total.double()), given):
            raise RuntimeError(f"{name}: what came out and what was kept is not what was put in")


def _whole(vector: Sparse) -> torch.Tensor:
    return torch.zeros(ELEMENTS, dtype=torch.float64).index_add_(0, vector.indices, vector.values.double())


def model(name: str, ranks: int) -> float:
    """Seconds of a side's payload on the cables of so many ranks."""
    link = Link(0.0, 8 / (RATES[ranks] * 1e6))
    if name in WHOLE:
        return costs.ring(link, ranks, 4 * ELEMENTS)
    return exchange.named(name).messages(link, ranks, ENTRIES, "float32")


def interface_bytes(name: str, ranks: int) -> float:
    """Bytes that the busiest rank's interface sends: messages, headers, acknowledgements, gloo's words."""
    rounds, whole = (ranks - 1).bit_length(), costs.message_bytes(ENTRIES, "float32")
    if name in WHOLE:
        messages = [4 * ELEMENTS / ranks] * 2 * (ranks - 1)
    elif name == "topk":
        messages = [whole] * (ranks - 1)
    elif name in MERGING:  # of a tree one for each round, as a rank sends in half of them; a word follows each
        messages = [whole, 4] * rounds
    else:
        part, doubling = whole / ranks, [min(1 << number, ranks - (1 << number)) for number in range(rounds)]
        counts, bins = [2 * ranks] * rounds, [4 * costs.BINS * blocks for blocks in doubling]
        messages = [*counts, *[part] * (ranks - 1), *bins, *(part * blocks for blocks in doubling)]
    frames = sum(math.ceil((size + OPENING) / PAYLOAD) for size in messages)
    return sum(messages) + len(messages) * WORDS + frames * (FRAME - PAYLOAD + ACKNOWLEDGEMENT / 2)


def seconds(outcomes: Sequence[Dict[str, Outcome]], name: str) -> List[float]:
    """Seconds of each round, from the first rank's start to the last one's end."""
    rounds = zip(*(each[name].turns for each in outcomes))
    return [max(turn.end for turn in turns) - min(turn.start for turn in turns) for turns in rounds]


def row(outcomes: Sequence[Dict[str, Outcome]], name: str, dropped: int) -> dict:
    ranks, times = len(outcomes), seconds(outcomes, name)
    expected = model(name, ranks)
    turns = outcomes[0][name].turns
    by_round = zip(*(each[name].turns for each in outcomes))
    sent = statistics.median(max(turn.sent for turn in each) for each in by_round)  # by the rank that sends most
    return {
        "ranks": ranks,
        "mbit_per_s": RATES[ranks],
        "side": name,
        **claims.milliseconds(times),
        "model_ms": 1e3 * expected,
        "over_model": statistics.median(times) / expected,
        "over_bytes": sent / interface_bytes(name, ranks),
        "kb_sent": sent / 1e3,
        "idle": 100 * sum(turn.idle for turn in turns) / sum(turn.ticks for turn in turns),
        "dropped": dropped,
    }


# Claim -> ranks, the sides of which the fastest counts, the side that it is compared with, goal.
CLAIMS = {
    "gtopk_over_topk_p8": (8, MERGING, "topk", 2.2),
    "gtopk_over_topk_p16": (16, MERGING, "topk", 3.5),
    "gtopk_over_topk_p32": (32, MERGING, "topk", 5.8),
    "gtopk_over_dense_p32": (32, MERGING, "dense", 18),
    "owners_over_butterfly_p32": (32, ("gtopk owners",), "gtopk butterfly", 1.5),
    "owners_over_topk_p32": (32, ("gtopk owners",), "topk", 9),
    "butterfly_over_topk_p4": (4, ("gtopk butterfly",), "topk", 1.3),
}


def claimed(times: Dict[int, Dict[str, List[float]]], rows: Sequence[dict]) -> List[dict]:
    """The claims, of seconds by ranks and side, and of the rows of the table."""
    found = []
    for name, (ranks, sides, other, goal) in CLAIMS.items():
        fastest = min((times[ranks][side] for side in sides), key=statistics.median)
        found.append(claims.claim(name, claims.ratios(times[ranks][other], fastest), "times", f">= {goal}"))
    sides = list(itertools.product((8, 16, 32), (*MERGING, "gtopk owners", "local")))
    excess = [[each / model(side, ranks) for each in times[ranks][side]] for ranks, side in sides]
    off = [100 * abs(row["over_bytes"] - 1) for row in rows if (row["ranks"], row["side"]) in sides]
    return [
        *found,
        claims.claim("worst_time_over_model", max(excess, key=statistics.median), "times", "<= 1.15"),
        claims.claim("bytes_off_from_claimed", [max(off)], "per cent", "<= 2"),
    ]


def main() -> None:
    as_json = claims.begin(__doc__, takes="9 minutes", quick="3 minutes").json
    torch.set_num_threads(1)  # as in the ranks, which are forked from here
    rows, times = [], {}
    for ranks, rate in claims.progress(list(RATES.items()), "number of ranks"):
        with Network(ranks, rate * 10**6) as network:
            outcomes = networks.run(network, rank_takes_turns)
            dropped = network.dropped()
        check(outcomes)
        times[ranks] = {name: seconds(outcomes, name) for name in outcomes[0]}
        rows += [row(outcomes, name, dropped) for name in outcomes[0]]
    claims.report("exchange", rows, claimed(times, rows), as_json)
