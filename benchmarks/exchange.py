"""Do sums of sparse gradients take as long on a slow network as their messages alone would?

    python -m benchmarks.exchange [--quick] [--json]        (as root)

Hosts of `benchmarks/networks.py`, 2 to 32 of them with one rank each, whose cables have the rate of
the table. Every rank holds 6,250 values of a vector of 625,000, or the whole vector, and at the end
has the sum in a buffer, by torch's all-reduce (`dense`), as a mean of weights (`local`), by
gathering all sparse vectors (`topk`), or by `parallel/sparse.py`, which keeps 6,250 values of the
sum (`gtopk tree`, `butterfly`, `owners`). `local` is left out on 3 and 5 hosts, where a mean does
not give the sum's bits. A time is that from the first rank's start to the last one's end, in five
turns, in three of `dense` and `local`. `model_ms` is `parallel/costs.py` at the cable's rate, for
payload alone; headers add 5 per cent. Rates come down as ranks share this machine's processors,
which are `idle` (per cent). All ranks' sums are compared bit for bit, and what was put in with what
came out and what was kept.
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
from parallel import costs, exchange, topk
from parallel.costs import Link
from parallel.exchange import Setup
from parallel.local_steps import LocalSteps
from parallel.processes import Processes
from parallel.sparse import Sparse, SparseSum
from parallel.topology import Topology
from recipe.exchange import Local

ELEMENTS = 625_000
ENTRIES = 6_250
RATES = {2: 16, 3: 16, 4: 16, 5: 16, 8: 4, 16: 2, 32: 1}  # Mbit/s, by ranks
ROUNDS = 5
DENSE_ROUNDS = 3
ACKNOWLEDGEMENT = 66  # bytes of a frame, for every other full frame that comes
# Bytes of gloo's before a message, and alone in a frame to announce it or that its receiver is
# ready.
OPENING = 48
# Bytes that a rank sends for each message that it sends and receives, beside data: one
# announcement, one of readiness, and the acknowledgements of the other rank's.
WORDS = OPENING + 2 * (OPENING + ACKNOWLEDGEMENT) + 2 * ACKNOWLEDGEMENT
WHOLE = ("dense", "local")
PATTERNS = {
    "topk": "gather",
    "gtopk tree": "tree",
    "gtopk butterfly": "butterfly",
    "gtopk owners": "owners",
}
MERGING = ("gtopk tree", "gtopk butterfly")


class Turn(NamedTuple):
    """One turn of a side on one rank.

    start: seconds on the machine's clock.
    end: seconds on it.
    idle: ticks of processors that had nothing to do.
    ticks: those of all processors.
    sent: bytes.
    """

    start: float
    end: float
    idle: int
    ticks: int
    sent: int


class Outcome(NamedTuple):
    """A side on one rank.

    turns: of each round.
    digests: of the sum of each round.
    total: the sum of the first round, float32 [ELEMENTS], of rank 0; None of the others.
    kept: the values that the first round left out of the sum on this rank.
    """

    turns: List[Turn]
    digests: List[str]
    total: Optional[torch.Tensor]
    kept: Sequence[Sparse]


Outcomes = Dict[str, Outcome]  # of one rank, by side
Times = Dict[int, Dict[str, List[float]]]  # seconds of each round, by ranks and side


# On each rank -------------------------------------------------------------------------------------


class Side:
    """One way to sum, on one rank.

    buffer: float32 [elements], where the sum is.
    """

    def __init__(self, name: str, vector: Sparse, elements: int):
        """
        Args:
            name: of the side.
            vector: of this rank.
            elements: of the whole vector.
        """
        self.buffer = torch.empty(elements)
        self._name = name
        self._vector = vector
        self._scratch = torch.zeros(elements, dtype=torch.int32)
        self._local: Optional[LocalSteps] = None
        self._sum: Optional[SparseSum] = None
        if name == "local":
            self._local = self._local_steps()
        elif name in PATTERNS:
            group = distributed.group.WORLD
            self._sum = SparseSum(group, pattern=PATTERNS[name], wire="float32")

    def _local_steps(self) -> LocalSteps:
        """Return the exchange of weights, the buffer being the weights."""
        group = distributed.group.WORLD
        # The ranks are connected already, so that only their group is missing.
        processes = Processes(Topology(), torch.device("cpu"))
        processes.replica_group = group
        setup = Setup(
            batch=None,
            processes=processes,
            gradients=self.buffer,
            places=(),
            collect=None,
            group=group,
            steps_per_epoch=None,
            weights=SimpleNamespace(flat=self.buffer),  # all that a mean asks of them
        )
        return LocalSteps(setup, Local(local_steps=1))

    def prepare(self) -> None:
        """Fill the buffer as it is at the end of a backward pass, or clear it for the sum."""
        self.buffer.zero_()
        if self._name in WHOLE:
            self.buffer[self._vector.indices] = self._vector.values

    def __call__(self) -> Sequence[Sparse]:
        """Write the sum to the buffer; return what this rank has to keep."""
        if self._local is not None:
            mean = self._local.mean(self.buffer)
            assert mean is not None, "there are several ranks"
            # Exact: see names_of_sides.
            self.buffer.copy_(mean).mul_(distributed.get_world_size())
            return []
        if self._sum is None:
            distributed.all_reduce(self.buffer)
            return []
        parts, kept = self._sum(self._vector, self._scratch)
        for part in parts:
            self.buffer.index_add_(0, part.indices, part.values)
        return kept


def names_of_sides(ranks: int) -> List[str]:
    """Return the sides that are compared.

    Args:
        ranks: how many there are.
    """
    # Means of weights are sums again, to the bit, where their number is a power of two.
    is_power_of_two = ranks & (ranks - 1) == 0
    whole = WHOLE if is_power_of_two else ("dense",)
    return [*whole, *PATTERNS]


def own_vector(rank: int) -> Sparse:
    """Return a rank's vector: random values at random places.

    Values are multiples of 2**-16 below 8, of which float32 holds every sum of 32 exactly.

    Args:
        rank: by which they are drawn.
    """
    generator = torch.Generator().manual_seed(rank)
    places = torch.randperm(ELEMENTS, generator=generator)[:ENTRIES]
    indices = places.sort().values
    normal = torch.randn(ENTRIES, generator=generator)
    multiples = (normal * 2**16).round()
    values = multiples.clamp(-(2**19), 2**19) / 2**16
    return Sparse(indices, values)


def rank_takes_turns(rank: int, meet: Callable[[], object]) -> Outcomes:
    """Let all sides sum, in turns, on one of the ranks.

    Args:
        rank: this one.
        meet: returns once all ranks have called it.

    Returns:
        The outcomes by name.
    """
    names = names_of_sides(distributed.get_world_size())
    _warm_up(names)
    vector = own_vector(rank)
    sides = {name: Side(name, vector, ELEMENTS) for name in names}
    outcomes: Outcomes = {}
    for number in range(claims.less(ROUNDS, 1)):
        # The order alternates: else a machine that slows down would always hurt the same side.
        in_order = reversed(names) if number % 2 else names
        for name in in_order:
            if name in WHOLE and number >= DENSE_ROUNDS:
                continue
            side = sides[name]
            turn, kept = _take_turn(side, meet)
            # The sum itself is needed of one round: digests tell whether others have the same.
            if name not in outcomes:
                total = side.buffer.clone() if rank == 0 else None
                outcomes[name] = Outcome([], [], total, kept)
            outcome = outcomes[name]
            outcome.turns.append(turn)
            content = side.buffer.numpy().tobytes()
            outcome.digests.append(hashlib.sha256(content).hexdigest())
    return outcomes


def _warm_up(names: Sequence[str]) -> None:
    """Let each side sum once, with few values, for connections, code and memory."""
    few = Sparse(torch.arange(8), torch.ones(8))
    for name in names:
        side = Side(name, few, 4096)
        side.prepare()
        side()


def _take_turn(side: Side, meet: Callable[[], object]) -> Tuple[Turn, Sequence[Sparse]]:
    """Let a side sum once, together with the other ranks; return what it has to keep as well."""
    side.prepare()
    # Counters are read while no rank sends or computes.
    meet()
    ticks_before = networks.processors()
    sent_before = networks.traffic().sent
    meet()
    start = time.perf_counter()
    kept = side()
    end = time.perf_counter()
    meet()
    ticks = networks.processors()
    sent = networks.traffic().sent
    turn = Turn(
        start,
        end,
        idle=ticks.idle - ticks_before.idle,
        ticks=ticks.total - ticks_before.total,
        sent=sent - sent_before,
    )
    return turn, kept


# Of all ranks -------------------------------------------------------------------------------------


def check(outcomes: Sequence[Outcomes]) -> None:
    """Compare the sums of all ranks and rounds, and what was put in with what came out.

    Args:
        outcomes: of each rank.

    Raises:
        RuntimeError: sums differ in a bit, or something was lost.
    """
    given = torch.zeros(ELEMENTS, dtype=torch.float64)
    for rank in range(len(outcomes)):
        given += _whole(own_vector(rank))
    for name in outcomes[0]:
        of_ranks = [by_name[name] for by_name in outcomes]
        digests = set()
        for outcome in of_ranks:
            digests.update(outcome.digests)
        if len(digests) != 1:
            raise RuntimeError(f"{name}: ranks or rounds have different sums")
        if not torch.equal(_sum_with_kept(of_ranks), given):
            raise RuntimeError(f"{name}: what came out and what was kept is not what was put in")


def _sum_with_kept(of_ranks: Sequence[Outcome]) -> torch.Tensor:
    """Return the sum of a side, and what was left out of it, together; float64 [ELEMENTS]."""
    total = of_ranks[0].total
    assert total is not None, "rank 0 has the sum"
    # Exact in any order: see own_vector.
    whole = total.double()
    for outcome in of_ranks:
        for part in outcome.kept:
            whole = whole + _whole(part)
    return whole


def _whole(vector: Sparse) -> torch.Tensor:
    """Return a sparse vector with its zeros, float64 [ELEMENTS]."""
    whole = torch.zeros(ELEMENTS, dtype=torch.float64)
    return whole.index_add_(0, vector.indices, vector.values.double())


def model(name: str, ranks: int) -> float:
    """Return the predicted seconds of a side's payload.

    Args:
        name: of the side.
        ranks: how many there are, each with a cable of `RATES`.
    """
    bits_per_second = RATES[ranks] * 1e6
    link = Link(0.0, 8 / bits_per_second)
    if name in WHOLE:
        return costs.ring(link, ranks, 4 * ELEMENTS)
    method = exchange.named(name)
    assert isinstance(method, topk.Sparse)
    return method.messages(link, ranks, ENTRIES, "float32")


def interface_bytes(name: str, ranks: int) -> float:
    """Return the bytes that the busiest rank's interface sends.

    They are messages, headers, acknowledgements and gloo's words.

    Args:
        name: of the side.
        ranks: how many there are.
    """
    messages = _messages(name, ranks)
    frames = 0
    for size in messages:
        frames += math.ceil((size + OPENING) / PAYLOAD)
    # A rank receives as many frames as it sends, and acknowledges every other one.
    headers = FRAME - PAYLOAD
    per_frame = headers + ACKNOWLEDGEMENT / 2
    words = len(messages) * WORDS
    return sum(messages) + words + frames * per_frame


def _messages(name: str, ranks: int) -> List[float]:
    """Return the bytes of each message that the busiest rank sends."""
    rounds = (ranks - 1).bit_length()
    whole = costs.message_bytes(ENTRIES, "float32")
    # Rings: of an all-reduce, and of a gather.
    if name in WHOLE:
        return [4 * ELEMENTS / ranks] * 2 * (ranks - 1)
    if name == "topk":
        return [whole] * (ranks - 1)
    # Of a tree one for each round, as a rank sends in half of them; a word follows each.
    if name in MERGING:
        return [whole, 4] * rounds
    return _messages_of_owners(ranks)


def _messages_of_owners(ranks: int) -> List[float]:
    """Return the bytes of each message that a rank sends: see parallel/owners.py."""
    rounds = (ranks - 1).bit_length()
    part = costs.message_bytes(ENTRIES, "float32") / ranks
    messages: List[float] = []
    # How many entries each owner gets, and the entries.
    messages += [2 * ranks] * rounds
    messages += [part] * (ranks - 1)
    # Histograms and results are gathered, of twice as many ranks in each round.
    blocks = []
    for number in range(rounds):
        distance = 1 << number
        blocks.append(min(distance, ranks - distance))
    messages += [4 * costs.BINS * count for count in blocks]
    messages += [part * count for count in blocks]
    return messages


# Figures ------------------------------------------------------------------------------------------


def seconds(outcomes: Sequence[Outcomes], name: str) -> List[float]:
    """Return the seconds of each round, from the first rank's start to the last one's end.

    Args:
        outcomes: of each rank.
        name: of the side.
    """
    times = []
    for turns in _rounds(outcomes, name):
        first_start = min(turn.start for turn in turns)
        last_end = max(turn.end for turn in turns)
        times.append(last_end - first_start)
    return times


def _rounds(outcomes: Sequence[Outcomes], name: str) -> List[Tuple[Turn, ...]]:
    """Return the turns of all ranks, round by round."""
    by_rank = [by_name[name].turns for by_name in outcomes]
    return list(zip(*by_rank))


def row(outcomes: Sequence[Outcomes], name: str, dropped: int) -> dict:
    """Return a row of the table.

    Args:
        outcomes: of each rank.
        name: of the side.
        dropped: packets that queues have dropped, in the turns of all sides.
    """
    ranks = len(outcomes)
    times = seconds(outcomes, name)
    expected = model(name, ranks)
    over_model = statistics.median(times) / expected
    # By the rank that sends most.
    most = [max(turn.sent for turn in turns) for turns in _rounds(outcomes, name)]
    sent = statistics.median(most)
    # All ranks see the same processors.
    idle = 0
    ticks = 0
    for turn in outcomes[0][name].turns:
        idle += turn.idle
        ticks += turn.ticks
    return {
        "ranks": ranks,
        "mbit_per_s": RATES[ranks],
        "side": name,
        **claims.milliseconds(times),
        "model_ms": 1e3 * expected,
        "over_model": over_model,
        "over_bytes": sent / interface_bytes(name, ranks),
        "kb_sent": sent / 1e3,
        "idle": 100 * idle / ticks,
        "dropped": dropped,
    }


# Ranks and sides whose times and bytes are to be as predicted.
_MANY = (8, 16, 32)
_PREDICTED = (*MERGING, "gtopk owners", "local")


class Comparison(NamedTuple):
    """A claim on how much faster a side is than another.

    ranks: how many there are.
    sides: of which the fastest counts.
    other: that it is compared with.
    goal: least quotient.
    """

    ranks: int
    sides: Tuple[str, ...]
    other: str
    goal: float


CLAIMS = {
    "gtopk_over_topk_p8": Comparison(8, MERGING, "topk", goal=2.2),
    "gtopk_over_topk_p16": Comparison(16, MERGING, "topk", goal=3.5),
    "gtopk_over_topk_p32": Comparison(32, MERGING, "topk", goal=5.8),
    "gtopk_over_dense_p32": Comparison(32, MERGING, "dense", goal=18),
    "owners_over_butterfly_p32": Comparison(32, ("gtopk owners",), "gtopk butterfly", goal=1.5),
    "owners_over_topk_p32": Comparison(32, ("gtopk owners",), "topk", goal=9),
    "butterfly_over_topk_p4": Comparison(4, ("gtopk butterfly",), "topk", goal=1.3),
}


def claimed(times: Times, rows: Sequence[dict]) -> List[dict]:
    """Return the claims.

    Args:
        times: of all ranks and sides.
        rows: of the table.
    """
    made = []
    for name, comparison in CLAIMS.items():
        by_side = times[comparison.ranks]
        candidates = [by_side[side] for side in comparison.sides]
        fastest = min(candidates, key=statistics.median)
        speedups = claims.ratios(by_side[comparison.other], fastest)
        made.append(claims.claim(name, speedups, "times", f">= {comparison.goal}"))
    excess = _worst_excess(times)
    off = _most_bytes_off(rows)
    return [
        *made,
        claims.claim("worst_time_over_model", excess, "times", "<= 1.15"),
        claims.claim("bytes_off_from_claimed", [off], "per cent", "<= 2"),
    ]


def _worst_excess(times: Times) -> List[float]:
    """Return times over those predicted, of the ranks and the side that are farthest off."""
    quotients = []
    for ranks, side in itertools.product(_MANY, _PREDICTED):
        expected = model(side, ranks)
        quotients.append([measured / expected for measured in times[ranks][side]])
    return max(quotients, key=statistics.median)


def _most_bytes_off(rows: Sequence[dict]) -> float:
    """Return by how many per cent the bytes that are sent differ from those predicted, at most."""
    off = []
    for figures in rows:
        if figures["ranks"] in _MANY and figures["side"] in _PREDICTED:
            off.append(100 * abs(figures["over_bytes"] - 1))
    return max(off)


def main() -> None:
    """Measure, and print the report."""
    as_json = claims.begin(__doc__, takes="10 minutes", quick="3 minutes").json
    torch.set_num_threads(1)  # as in the ranks, which are forked from here
    rows: List[dict] = []
    times: Times = {}
    for ranks, rate in claims.progress(list(RATES.items()), "number of ranks"):
        with Network(ranks, rate * 10**6) as network:
            outcomes = networks.run(network, rank_takes_turns)
            dropped = network.dropped()
        check(outcomes)
        names = list(outcomes[0])
        times[ranks] = {name: seconds(outcomes, name) for name in names}
        rows += [row(outcomes, name, dropped) for name in names]
    claims.report("exchange", rows, claimed(times, rows), as_json)
