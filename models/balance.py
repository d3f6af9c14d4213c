"""Where to cut a model so that its stages cost the same and fit: arithmetic on what its blocks cost. Needs no torch."""

from __future__ import annotations

import itertools
import math
from typing import Container, Dict, List, NamedTuple, Optional, Sequence, Tuple


class BlockCost(NamedTuple):
    """Costs of one block for one micro batch: seconds where measured, multiply-adds where counted; and bytes.

    saved: what autograd keeps for the backward pass, the block's input among it where it is needed, parameters and
    buffers not. output: the block's. parameters: their number.
    """

    forward: float
    backward: float
    saved: int
    output: int
    parameters: int


class Cut(NamedTuple):
    """A cut of a model into stages, and what follows from it, per stage.

    cuts: the names of the blocks that open the stages after the first, as `split_names` takes them. seconds: of one
    micro batch, forward and backward; multiply-adds where the costs were counted. bytes: activations in flight and
    state of the parameters. memory: bytes of a device, as given to `balance`.
    """

    cuts: List[str]
    seconds: List[float]
    bytes: List[int]
    memory: Optional[int] = None

    @property
    def imbalance(self) -> float:
        """Share by which the slowest stage takes longer than the mean of all: 0 for an even cut."""
        mean = math.fsum(self.seconds) / len(self.seconds)
        return max(self.seconds) / mean - 1 if mean else 0.0

    @property
    def fits(self) -> bool:
        return self.memory is None or max(self.bytes) <= self.memory

    def describe(self, origin: str = "measured") -> str:
        """One line for the terminal. Args: origin: of the costs, "measured" or "counted"."""
        total = math.fsum(self.seconds) or 1.0
        shares = " + ".join(f"{100 * seconds / total:.0f}" for seconds in self.seconds)
        memory = " + ".join(f"{size / 1e6:,.0f}" for size in self.bytes)
        line = (
            f"split [{', '.join(self.cuts)}] ({origin}): stages take {shares} % of the time, "
            f"{100 * self.imbalance:.1f} % from even; memory {memory} MB"
        )
        return line if self.fits else f"{line}: no cut fits into {self.memory / 1e6:,.0f} MB, this one needs least"


def balance(
    costs: Dict[str, BlockCost],
    stages: int,
    *,
    in_flight: Sequence[int],
    recompute: Container[str] = frozenset(),
    bytes_per_parameter: float = 12,
    memory: Optional[int] = None,
    phases: bool = False,
) -> Cut:
    """The cut into `stages` whose slowest stage is the fastest, among those that fit into the devices' memory.

    Exact, by dynamic programming over the blocks. Of equally fast cuts the one whose largest stage needs least memory
    is taken; where no cut fits, the one that needs least, and then the fastest of these. No stage is without
    parameters. A stage's memory is bytes_per_parameter x parameters + in_flight x saved bytes. Of a recomputed block
    only the input is in flight (but for the images); its saved bytes are there once.

    Args:
        costs: block's name -> cost, in running order. stages: of one replica, over all devices.
        in_flight: per stage, the micro batches whose activations it holds at once.
        recompute: names of the blocks that are recomputed in the backward pass: their forward pass is paid twice.
        bytes_per_parameter: weight, gradient and slots of the optimizer. memory: bytes of one device.
        phases: whether all forward passes come before all backward passes, as in GPipe. A step then takes as long as
            the slowest forward and the slowest backward phase: from the cut above, borders are moved as long as that
            sum falls, which is not exact, but never worse.

    Raises ValueError: more stages than blocks with parameters.

    Source: of the schedules, Huang et al., 1811.06965 (GPipe) and Narayanan et al., 1806.03377 (1F1B).
    """
    assert stages >= 1 and len(in_flight) == stages, f"{len(in_flight)} counts in flight for {stages} stages"
    names, values = list(costs), list(costs.values())
    able = sum(cost.parameters > 0 for cost in values)
    if stages > able:
        raise ValueError(f"{stages} stages are more than the {able} blocks that have parameters")
    again = [name in recompute for name in names]
    inputs = [0, *(cost.output for cost in values)]
    seconds = [cost.forward * (1 + twice) + cost.backward for cost, twice in zip(values, again)]
    kept = [inputs[block] if twice else cost.saved for block, (cost, twice) in enumerate(zip(values, again))]
    transient = [cost.saved if twice else 0 for cost, twice in zip(values, again)]
    parameters = [cost.parameters for cost in values]
    # A stage as (its number, its first block, the block behind its last) -> seconds, bytes.
    every = {}
    for start, end in itertools.combinations(range(len(values) + 1), 2):
        part = slice(start, end)
        if any(parameters[part]):
            state = round(bytes_per_parameter * sum(parameters[part])) + max(transient[part])
            for stage, flying in enumerate(in_flight):
                every[stage, start, end] = (math.fsum(seconds[part]), flying * sum(kept[part]) + state)
    fitting = {part: cost for part, cost in every.items() if memory is None or cost[1] <= memory}
    edges = _best_edges(fitting, stages, len(values), order=(0, 1)) or _best_edges(every, stages, len(values), (1, 0))
    if phases:
        forward = [cost.forward for cost in values]
        backward = [whole - cost.forward for whole, cost in zip(seconds, values)]
        edges = _moved(edges, forward, backward, fitting if fitting.keys() >= set(_parts(edges)) else every)
    slowness, sizes = zip(*(every[part] for part in _parts(edges)))
    return Cut([names[edge] for edge in edges[1:-1]], list(slowness), list(sizes), memory)


def split_names(names: Sequence[str], cuts: Sequence[str]) -> list:
    """`names` as consecutive lists, a new one opening at each name in `cuts`.

    Raises ValueError: a cut is no block, is the first block, or is out of order.
    """
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"{cut} is not a block; the blocks are {', '.join(names)}")
    positions = [list(names).index(cut) for cut in cuts]
    stages = [list(names[start:end]) for start, end in zip([0, *positions], [*positions, len(names)])]
    if not all(stages):
        raise ValueError(f"the cut points {', '.join(cuts)} leave a stage empty; order them as the blocks run")
    return stages


def _parts(edges: Sequence[int]) -> List[Tuple[int, int, int]]:
    """The stages between edges: number, first block, block behind the last."""
    return list(zip(itertools.count(), edges, edges[1:]))


def _best_edges(
    parts: Dict[Tuple[int, int, int], Tuple[float, int]], stages: int, blocks: int, order: Tuple[int, int]
) -> Optional[List[int]]:
    """The edges 0, ..., `blocks` of consecutive `parts` with the least largest cost of kind order[0], then order[1].

    In two rounds: the best beginning of a cut by both kinds need not begin the best cut, as a later stage may be slower
    anyway. None if there is no way.
    """
    for kind in order:
        # (stages made, block behind them) -> (largest cost up to there, edges so far)
        best: Dict[Tuple[int, int], Tuple[float, List[int]]] = {(0, 0): (-math.inf, [0])}
        for (stage, start, end), cost in sorted(parts.items()):
            if (stage, start) in best:
                largest, edges = best[stage, start]
                found = (max(largest, cost[kind]), [*edges, end])
                best[stage + 1, end] = min(best.get((stage + 1, end), found), found)
        if (stages, blocks) not in best:
            return None
        limit, edges = best[stages, blocks]
        parts = {part: cost for part, cost in parts.items() if cost[kind] <= limit}
    return edges


def _moved(edges: List[int], forward: Sequence[float], backward: Sequence[float], allowed: Container) -> List[int]:
    """`edges` after moving them by one or two blocks as long as that lowers max(forward) + max(backward)."""

    def slowness(edges: Sequence[int]) -> float:
        stages = [slice(*ends) for ends in zip(edges, edges[1:])]
        return sum(max(math.fsum(phase[stage]) for stage in stages) for phase in (forward, backward))

    while True:
        moves = [
            [*edges[:place], edges[place] + step, *edges[place + 1 :]]
            for place in range(1, len(edges) - 1)
            for step in (-2, -1, 1, 2)
        ]
        best = min([edges, *(moved for moved in moves if all(part in allowed for part in _parts(moved)))], key=slowness)
        if slowness(best) >= slowness(edges):
            return edges
        edges = best
