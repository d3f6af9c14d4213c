"""The best cut, against a search through all cuts; names split at cut points."""

import itertools
import random
import re

import pytest

from common.errors import ConfigError
from models.balance import BlockCost, Cut, balance, check_blocks, split_names

NAMES = ["preprocess", "stem", "blocks.0.0", "blocks.1.0", "head"]


def search(costs, stages, in_flight, recompute, per_parameter, memory):
    """The best cut by trying all, from the definition: (fits, slowest stage, largest memory), and
    its names."""
    names = list(costs)
    before = dict(zip(names[1:], names))
    found = []
    for cuts in itertools.combinations(names[1:], stages - 1):
        parts = split_names(names, cuts)
        if not all(any(costs[name].parameters for name in part) for part in parts):
            continue
        slowest = 0
        largest = 0
        for stage, part in enumerate(parts):
            seconds = 0
            held = 0
            transient = 0
            for name in part:
                cost = costs[name]
                seconds += cost.forward + cost.backward
                if name in recompute:
                    seconds += cost.forward
                    held += costs[before[name]].output if name in before else 0
                    transient = max(transient, cost.saved)
                else:
                    held += cost.saved
            state = per_parameter * sum(costs[name].parameters for name in part)
            slowest = max(slowest, seconds)
            largest = max(largest, in_flight[stage] * held + transient + state)
        fits = memory is None or largest <= memory
        found.append((not fits, (slowest, largest) if fits else (largest, slowest), cuts))
    misfit, best, _ = min(found)
    return not misfit, best


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_best_of_all(seed):
    """Small whole numbers, so that sums are exact and ties are frequent."""
    draw = random.Random(seed)
    blocks = draw.randint(4, 9)
    stages = draw.randint(1, 4)
    most = {"forward": 5, "backward": 9, "saved": 40, "output": 9}
    costs = {
        str(block): BlockCost(
            *(draw.randint(0, limit) for limit in most.values()), draw.choice((0, 1, 5, 20))
        )
        for block in range(blocks)
    }
    costs["1"] = costs["1"]._replace(parameters=3)
    recompute = frozenset(name for name in costs if draw.random() < draw.choice((0, 0, 0.5)))
    in_flight = [draw.randint(1, 5) for _ in range(stages)]
    able = sum(cost.parameters > 0 for cost in costs.values())
    for memory in (None, draw.randint(50, 200), draw.randint(100, 500), 1):
        arguments = {
            "in_flight": in_flight,
            "recompute": recompute,
            "bytes_per_parameter": 2,
            "memory": memory,
        }
        if stages > able:
            with pytest.raises(
                ValueError,
                match=f"^{stages} stages are more than the {able} blocks that have param",
            ):
                balance(costs, stages, **arguments)
            continue
        cut = balance(costs, stages, **arguments)
        fits, best = search(
            costs, stages, in_flight, recompute=recompute, per_parameter=2, memory=memory
        )
        assert cut.fits == fits
        assert (
            (max(cut.seconds), max(cut.bytes)) if fits else (max(cut.bytes), max(cut.seconds))
        ) == best
        assert (
            len(split_names(list(costs), cut.cuts)) == len(cut.seconds) == len(cut.bytes) == stages
        )


def test_less_memory_moves_the_cut_until_nothing_fits():
    """Four like blocks; under 1F1B the first stage holds two micro batches and the second one."""
    mb = 10**6
    costs = dict.fromkeys("abcd", BlockCost(1, 2, 100 * mb, 10, 1))
    even, narrow, hopeless = (
        balance(costs, 2, in_flight=[2, 1], bytes_per_parameter=0, memory=memory * mb)
        for memory in (400, 399, 299)
    )
    assert (
        even == Cut(["c"], [6, 6], [400 * mb, 200 * mb], 400 * mb)
        and even.fits
        and even.imbalance == 0
    )
    assert (
        narrow == Cut(["b"], [3, 9], [200 * mb, 300 * mb], 399 * mb)
        and narrow.fits
        and narrow.imbalance == 0.5
    )
    assert hopeless == Cut(["b"], [3, 9], [200 * mb, 300 * mb], 299 * mb) and not hopeless.fits
    line = (
        "split [b] ({}): stages take 25 + 75 % of the time, 50.0 % from even; memory 200 + 300 MB"
    )
    assert narrow.describe() == line.format("measured")
    assert hopeless.describe("counted").startswith(
        f"{line.format('counted')}: no cut fits into 299 MB"
    )


def test_phases_that_come_one_after_the_other_are_balanced_each():
    """Cut at b, sums are 6 and 7, cut at c 9 and 4.

    But phases take 5 + 5.5 where it is cut at b, 6 + 3.5 at c.
    """
    costs = {
        "a": BlockCost(5, 1, 1, 1, 1),
        "b": BlockCost(1, 2, 1, 1, 1),
        "c": BlockCost(0.5, 3.5, 1, 1, 1),
    }
    assert balance(costs, 2, in_flight=[1, 1]).cuts == ["b"]
    assert balance(costs, 2, in_flight=[1, 1], phases=True).cuts == ["c"]
    # With two micro batches in flight the first stage, cut at c, takes 2 x 2 + 24 bytes; cut at b,
    # none takes over 26.
    assert balance(costs, 2, in_flight=[2, 1], phases=True, memory=27).cuts == ["b"]


@pytest.mark.parametrize("seed", range(10))
def test_no_move_of_a_border_makes_phases_faster(seed):
    draw = random.Random(seed)
    names = [f"b{number}" for number in range(12)]
    costs = {name: BlockCost(draw.uniform(0.5, 2), draw.uniform(0.5, 2), 1, 1, 1) for name in names}

    def slowness(edges):
        parts = split_names(names, [names[edge] for edge in edges])
        return sum(
            max(sum(costs[name][phase] for name in part) for part in parts) for phase in (0, 1)
        )

    by_sums, (one, other) = (
        [names.index(cut) for cut in balance(costs, 3, in_flight=[1] * 3, phases=phases).cuts]
        for phases in (False, True)
    )
    assert slowness((one, other)) <= slowness(by_sums)
    for step in (-2, -1, 1, 2):
        for moved in ((one + step, other), (one, other + step)):
            if 0 < moved[0] < moved[1] < len(names):
                assert slowness(moved) >= slowness((one, other)) - 1e-9


def test_names_are_split_before_each_cut():
    assert split_names(NAMES, []) == [NAMES]
    assert split_names(tuple(NAMES), ("stem", "head")) == [NAMES[:1], NAMES[1:4], NAMES[4:]]


@pytest.mark.parametrize(
    ("cuts", "fault"),
    [
        (["blocks.9.0"], f"blocks.9.0 is not a block; the blocks are {', '.join(NAMES)}"),
        (
            ["preprocess"],
            "the cut points preprocess leave a stage empty; order them as the blocks run",
        ),
        (
            ["head", "stem"],
            "the cut points head, stem leave a stage empty; order them as the blocks run",
        ),
    ],
)
def test_cuts_that_cannot_be_made_are_refused(cuts, fault):
    with pytest.raises(ValueError, match=f"^{re.escape(fault)}$"):
        split_names(NAMES, cuts)


def test_a_key_may_name_blocks_of_the_model_only():
    check_blocks("parallel.recompute", ["head", "stem"], NAMES)
    check_blocks("parallel.recompute", [], NAMES)
    with pytest.raises(ConfigError) as caught:
        check_blocks("parallel.recompute", ["stem", "blocks.2.0"], NAMES)
    blocks = "preprocess, stem, blocks.0.0, blocks.1.0, head"
    assert (
        str(caught.value)
        == f"parallel.recompute: blocks.2.0 is not a block; the blocks are {blocks}"
    )
