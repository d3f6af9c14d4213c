"""Cut of a recipe's model into parts: at the blocks that the recipe names, or by what blocks cost.

Costs are measured only where the cut changes no bit of what is learned: elsewhere they are counted.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Sequence, Tuple

import torch

from common.errors import ConfigError
from engines.devices import memory_of
from engines.stage import blocks_to_recompute
from models import balance, costs, shapes
from models.balance import split_names
from models.base import BlockList
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.division import Batch

_BYTES_PER_PARAMETER = 16  # working copy, gradient, and float32 scratch of weight and momentum; half weights add 4


def parts(
    model: BlockList, recipe: Recipe, batch: Batch, processes: Processes, device: torch.device
) -> Tuple[List[List[str]], str]:
    """Names of the blocks of each part of the model, and a line about an automatic cut.

    One process that computes all stages has one part; wrong cut points are refused there too.

    Raises ConfigError: cut points that are no blocks, out of order, or leave a part without parameters; too many parts.
    """
    single = processes.topology.stages == 1
    automatic = (lambda: ([], "")) if single else (lambda: _automatic(model, recipe, batch, processes, device))
    divided, note = _divided(model, recipe, automatic)
    return ([model.names] if single else divided), note


def counted(model: BlockList, recipe: Recipe, batch: Batch) -> Tuple[List[List[str]], str]:
    """All parts, also of one process, where blocks cannot be timed one by one: an automatic cut balances multiply-adds
    and ignores memory."""

    def automatic() -> Tuple[Sequence[str], str]:
        count, found = recipe.parallel.parts, _counted_costs(model, recipe, batch)
        cut = balance.balance(found, count, in_flight=[batch.accumulation] * count)
        return cut.cuts, cut.describe("counted")

    return ([model.names], "") if recipe.parallel.stages == 1 else _divided(model, recipe, automatic)


def own_parts(divided: Sequence[Sequence[str]], topology: Topology) -> Dict[int, Sequence[str]]:
    """By number, the parts of this process: every `stages`-th, so that neighbours are on neighbours."""
    return {number: names for number, names in enumerate(divided) if number % topology.stages == topology.stage}


def _counted_costs(model: BlockList, recipe: Recipe, batch: Batch) -> Dict[str, balance.BlockCost]:
    itemsize = next(model.parameters()).element_size()
    return shapes.costs(recipe.model, recipe.model.image_size, batch.micro, itemsize)


def _divided(
    model: BlockList, recipe: Recipe, automatic: Callable[[], Tuple[Sequence[str], str]]
) -> Tuple[List[List[str]], str]:
    """The parts that cut points make, the recipe's or automatic ones; and a line about these. Raises ConfigError."""
    found = {name for name in model.names if any(True for _ in model.block(name).parameters())}
    count = recipe.parallel.parts
    if count > len(found):
        raise ConfigError(f"parallel.stages: {count} parts are more than the {len(found)} blocks that have parameters")
    cut, note = (recipe.parallel.split, "") if isinstance(recipe.parallel.split, list) else automatic()
    try:
        divided = split_names(model.names, cut)
    except ValueError as error:
        raise ConfigError(f"parallel.split: {error}") from None
    for names in divided:
        if not found.intersection(names):
            raise ConfigError(f"parallel.split: the stage of {', '.join(names)} has no parameters; cut further behind")
    return divided, note


def _automatic(
    model: BlockList, recipe: Recipe, batch: Batch, processes: Processes, device: torch.device
) -> Tuple[List[str], str]:
    """The balanced cut. All ranks measure at once, as they will compute, and the median counts.

    A counted cut is a function of the recipe and the number of replicas, whatever memory is free now.
    """
    parallel, size, memory = recipe.parallel, recipe.model.image_size, None
    why = "" if parallel.split == "counted" else bound_to_cut(recipe, processes.topology.replicas)
    if parallel.split == "counted" or why:
        found = _counted_costs(model, recipe, batch)
        origin = f"counted, not measured: {why}, so that another cut would be another result" if why else "counted"
    else:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (batch.micro, 3, size, size), dtype=torch.uint8, generator=generator)
        found = costs.median(processes.gather(costs.measure(model, images.to(device))))
        memory, origin = memory_of(device) // (parallel.virtual_stages or 1), "measured"
    cut = processes.from_main(
        lambda: balance.balance(
            found,
            parallel.parts,
            in_flight=parallel.in_flight(batch.accumulation),
            recompute=blocks_to_recompute(model.names, parallel.recompute),
            bytes_per_parameter=_BYTES_PER_PARAMETER,
            memory=memory,
            phases=parallel.schedule == "gpipe",
        )
    )
    return cut.cuts, cut.describe(origin)
