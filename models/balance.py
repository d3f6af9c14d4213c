"""Where to cut a model so that its stages cost the same and fit into memory. Needs no torch."""

from __future__ import annotations

import itertools
import math
from typing import Container, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.errors import ConfigError


class BlockCost(NamedTuple):
    """Costs of one block for one micro batch.

    forward, backward: seconds where measured, multiply-adds where counted.
    saved: bytes that autograd keeps for the backward pass, the block's input among it where it is
        needed, parameters and buffers not.
    output: bytes of the block's output.
    parameters: their number.
    """

    forward: float
    backward: float
    saved: int
    output: int
    parameters: int


class Cut(NamedTuple):
    """A cut of a model into stages, and what follows from it, per stage.

    cuts: the names of the blocks that open the stages after the first, as `split_names` takes them.
    seconds: of one micro batch, forward and backward; multiply-adds where the costs were counted.
    bytes: activations in flight and state of the parameters.
    memory: bytes of a device, as given to `balance`.
    """

    cuts: List[str]
    seconds: List[float]
    bytes: List[int]
    memory: Optional[int] = None

    @property
    def imbalance(self) -> float:
        """Share by which the slowest stage takes longer than the mean of all: 0 for an even cut."""
        # A model without convolutions has no multiply-adds: nothing is uneven then.
        mean = math.fsum(self.seconds) / len(self.seconds)
        return max(self.seconds) / mean - 1 if mean else 0.0

    @property
    def fits(self) -> bool:
        """True if every stage fits into the memory of a device."""
        return self.memory is None or max(self.bytes) <= self.memory

    def describe(self, origin: str = "measured") -> str:
        """Return one line for the terminal.

        Args:
            origin: of the costs, "measured" or "counted".
        """
        total = math.fsum(self.seconds) or 1.0
        shares = " + ".join(f"{100 * seconds / total:.0f}" for seconds in self.seconds)
        megabytes = " + ".join(f"{size / 1e6:,.0f}" for size in self.bytes)
        line = (
            f"split [{', '.join(self.cuts)}] ({origin}): stages take {shares} % of the time, "
            f"{100 * self.imbalance:.1f} % from even; memory {megabytes} MB"
        )
        if self.memory is None or self.fits:
            return line
        return f"{line}: no cut fits into {self.memory / 1e6:,.0f} MB, this one needs least"


class _Span(NamedTuple):
    """A stage that a cut may have: its number, its first block, and the block behind its last."""

    stage: int
    first: int
    end: int


class _StageCost(NamedTuple):
    """Costs of a span: seconds of one micro batch, forward and backward, and bytes."""

    seconds: float
    bytes: int


class _Phases(NamedTuple):
    """Seconds of each block in the two phases of a step."""

    forward: List[float]
    backward: List[float]


class _Activations(NamedTuple):
    """Bytes of each block's activations.

    kept: for each micro batch in flight.
    transient: once, while the block is recomputed.
    """

    kept: List[int]
    transient: List[int]


def balance(
    costs: Mapping[str, BlockCost],
    stages: int,
    *,
    in_flight: Sequence[int],
    recompute: Container[str] = frozenset(),
    bytes_per_parameter: float = 12,
    memory: Optional[int] = None,
    phases: bool = False,
) -> Cut:
    """Return the cut whose slowest stage is the fastest, among those that fit into memory.

    Exact, by dynamic programming over the blocks. Of equally fast cuts the one whose largest stage
    needs least memory is taken; where no cut fits, the one that needs least, and then the fastest
    of these. No stage is without parameters. A stage's memory is bytes_per_parameter x parameters +
    in_flight x saved bytes. Of a recomputed block only the input is in flight (but for the images);
    its saved bytes are there once.

    Args:
        costs: block's name -> cost, in running order.
        stages: of one replica, over all devices.
        in_flight: per stage, the micro batches whose activations it holds at once.
        recompute: names of the blocks that are recomputed in the backward pass: their forward pass
            is paid twice.
        bytes_per_parameter: weight, gradient and slots of the optimizer.
        memory: bytes of one device.
        phases: whether all forward passes come before all backward passes, as in GPipe. A step then
            takes as long as the slowest forward and the slowest backward phase: from the cut above,
            borders are moved as long as that sum falls, which is not exact, but never worse.

    Raises:
        ValueError: there are more stages than blocks with parameters.

    Source: of the schedules, Huang et al., 1811.06965 (GPipe) and Narayanan et al., 1806.03377
    (1F1B).
    """
    assert stages >= 1
    assert len(in_flight) == stages, f"{len(in_flight)} counts in flight for {stages} stages"
    names = list(costs)
    able = sum(cost.parameters > 0 for cost in costs.values())
    if stages > able:
        raise ValueError(f"{stages} stages are more than the {able} blocks that have parameters")

    spans = _span_costs(costs, in_flight, recompute, bytes_per_parameter)
    edges, allowed = _fastest_edges(spans, stages, len(names), memory)
    if phases:
        edges = _move_edges(edges, _phase_seconds(costs, recompute), allowed)

    chosen = [spans[span] for span in _spans(edges)]
    return Cut(
        cuts=[names[edge] for edge in edges[1:-1]],
        seconds=[cost.seconds for cost in chosen],
        bytes=[cost.bytes for cost in chosen],
        memory=memory,
    )


def too_many_parts(parts: int, blocks: int) -> str:
    """Return the fault of more `parts` than there are `blocks` with parameters."""
    return f"parallel.stages: {parts} parts are more than the {blocks} blocks that have parameters"


def check_blocks(key: str, given: Sequence[str], blocks: Sequence[str]) -> None:
    """Refuse a key of the recipe that names a block which the model does not have.

    Args:
        key: of the recipe.
        given: the names that it has.
        blocks: names of the model's blocks.

    Raises:
        ConfigError: one of them is no block.
    """
    for name in given:
        if name not in blocks:
            raise ConfigError(f"{key}: {name} is not a block; the blocks are {', '.join(blocks)}")


def split_names(names: Sequence[str], cuts: Sequence[str]) -> List[List[str]]:
    """Return `names` as consecutive lists, a new one opening at each name in `cuts`.

    Args:
        names: of blocks, in running order.
        cuts: the blocks that open the lists after the first.

    Raises:
        ValueError: a cut is no block, is the first block, or is out of order.
    """
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"{cut} is not a block; the blocks are {', '.join(names)}")
    # A cut that is out of order, or given twice, leaves an empty slice between two edges.
    positions = [list(names).index(cut) for cut in cuts]
    edges = [0, *positions, len(names)]
    stages = []
    for start, end in zip(edges, edges[1:]):
        stages.append(list(names[start:end]))
    if not all(stages):
        given = ", ".join(cuts)
        raise ValueError(
            f"the cut points {given} leave a stage empty; order them as the blocks run"
        )
    return stages


def _seconds(name: str, cost: BlockCost, recompute: Container[str]) -> float:
    """Return seconds of a block, forward and backward; twice forward if it is recomputed."""
    forward_passes = 2 if name in recompute else 1
    return cost.forward * forward_passes + cost.backward


def _phase_seconds(costs: Mapping[str, BlockCost], recompute: Container[str]) -> _Phases:
    """Return seconds of each block in the forward and in the backward phase of a step."""
    forward = [cost.forward for cost in costs.values()]
    both = [_seconds(name, cost, recompute) for name, cost in costs.items()]
    # A block that is recomputed is so in the backward phase.
    backward = [whole - once for whole, once in zip(both, forward)]
    return _Phases(forward, backward)


def _span_costs(
    costs: Mapping[str, BlockCost],
    in_flight: Sequence[int],
    recompute: Container[str],
    bytes_per_parameter: float,
) -> Dict[_Span, _StageCost]:
    """Return the cost of every stage that a cut may have: one with parameters.

    Arguments as of `balance`.
    """
    seconds = [_seconds(name, cost, recompute) for name, cost in costs.items()]
    parameters = [cost.parameters for cost in costs.values()]
    activations = _activation_bytes(costs, recompute)

    spans = {}
    for first, end in itertools.combinations(range(len(costs) + 1), 2):
        blocks = slice(first, end)
        # Each stage has an optimizer, and there is none of no parameters.
        if not any(parameters[blocks]):
            continue
        span_seconds = math.fsum(seconds[blocks])
        state = round(bytes_per_parameter * sum(parameters[blocks]))
        # Blocks are recomputed one after the other: the largest needs its memory, once.
        once = state + max(activations.transient[blocks])
        in_each = sum(activations.kept[blocks])
        for stage, micro_batches in enumerate(in_flight):
            span_bytes = micro_batches * in_each + once
            spans[_Span(stage, first, end)] = _StageCost(span_seconds, span_bytes)
    return spans


def _activation_bytes(costs: Mapping[str, BlockCost], recompute: Container[str]) -> _Activations:
    """Return the bytes of each block's activations. Arguments as of `balance`."""
    kept = []
    transient = []
    input_bytes = 0  # the first block's are images, which are there anyway
    for name, cost in costs.items():
        kept.append(input_bytes if name in recompute else cost.saved)
        transient.append(cost.saved if name in recompute else 0)
        input_bytes = cost.output
    return _Activations(kept, transient)


def _fastest_edges(
    spans: Dict[_Span, _StageCost],
    stages: int,
    blocks: int,
    memory: Optional[int],
) -> Tuple[List[int], Dict[_Span, _StageCost]]:
    """Return the edges of the fastest cut that fits, or if none does of the one that needs least.

    Args:
        spans: the stages that a cut may have.
        stages: their number.
        blocks: their number.
        memory: bytes of a device; None is enough for any cut.

    Returns:
        The edges 0, ..., `blocks`, and the stages among which they were chosen.
    """
    fitting = spans
    if memory is not None:
        fitting = _at_most(spans, "bytes", memory)
    edges = _best_edges(fitting, stages, blocks, order=("seconds", "bytes"))
    if edges is not None:
        return edges, fitting
    # A cut that does not fit is of use, too: it says how much memory is missing.
    edges = _best_edges(spans, stages, blocks, order=("bytes", "seconds"))
    assert edges is not None  # there are enough blocks with parameters
    return edges, spans


def _spans(edges: Sequence[int]) -> List[_Span]:
    """Return the stages between `edges`, numbers of blocks."""
    pairs = zip(edges, edges[1:])
    return [_Span(stage, first, end) for stage, (first, end) in enumerate(pairs)]


def _best_edges(
    spans: Dict[_Span, _StageCost], stages: int, blocks: int, order: Tuple[str, str]
) -> Optional[List[int]]:
    """Return the edges of the cut whose largest cost of kind order[0], then order[1], is least.

    In two rounds: the best beginning of a cut by both kinds need not begin the best cut, as a later
    stage may be slower anyway. The second round has only the spans whose cost of the first kind is
    at most the least that was found.

    Args:
        spans: the stages that a cut may have.
        stages: their number.
        blocks: their number.
        order: fields of `_StageCost`.

    Returns:
        The edges 0, ..., `blocks`; None if no such spans follow one another from the first block to
            the last.
    """
    edges = None
    for kind in order:
        # (stages so far, block behind them) -> (largest cost up to there, edges so far)
        best = {(0, 0): (-math.inf, [0])}
        # Sorted by stage: all ways to a place are known before one goes on from it.
        for span, cost in sorted(spans.items()):
            if (span.stage, span.first) not in best:
                continue
            largest, edges_before = best[span.stage, span.first]
            candidate = (max(largest, getattr(cost, kind)), [*edges_before, span.end])
            place = (span.stage + 1, span.end)
            # Equal costs are decided by the edges, so all processes find the same cut.
            best[place] = min(best.get(place, candidate), candidate)
        if (stages, blocks) not in best:
            return None
        limit, edges = best[stages, blocks]
        spans = _at_most(spans, kind, limit)
    return edges


def _at_most(
    spans: Dict[_Span, _StageCost],
    kind: str,
    limit: float,
) -> Dict[_Span, _StageCost]:
    """Return the stages whose cost of a `kind`, a field of `_StageCost`, is at most `limit`."""
    return {span: cost for span, cost in spans.items() if getattr(cost, kind) <= limit}


def _move_edges(edges: List[int], seconds: _Phases, allowed: Container[_Span]) -> List[int]:
    """Move edges by one or two blocks as long as that makes a step of two phases faster.

    Args:
        edges: numbers of blocks, 0 and that behind the last among them.
        seconds: of each block.
        allowed: the stages that the cut may have.
    """
    # Ends: the time falls with every round, and there are finitely many cuts.
    while True:
        best = edges
        for moved in _neighbours(edges):
            possible = all(span in allowed for span in _spans(moved))
            if possible and _step_seconds(moved, seconds) < _step_seconds(best, seconds):
                best = moved
        if best is edges:
            return edges
        edges = best


def _step_seconds(edges: Sequence[int], seconds: _Phases) -> float:
    """Return how long a step of two phases takes with the cut at `edges`.

    It is as long as the slowest forward and the slowest backward pass of a stage.
    """
    stages = [slice(span.first, span.end) for span in _spans(edges)]
    slowest_forward = max(math.fsum(seconds.forward[stage]) for stage in stages)
    slowest_backward = max(math.fsum(seconds.backward[stage]) for stage in stages)
    return slowest_forward + slowest_backward


def _neighbours(edges: List[int]) -> Iterator[List[int]]:
    """Yield `edges` with one of the inner ones moved by one or two blocks."""
    for place in range(1, len(edges) - 1):
        for step in (-2, -1, 1, 2):
            moved = list(edges)
            moved[place] += step
            yield moved
