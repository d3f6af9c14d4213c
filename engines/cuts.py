"""Cut of a model into parts: at the blocks that the recipe names, or by what blocks cost.

Costs are measured only where the cut changes no bit of what is learned: elsewhere they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Dict, List, NamedTuple, Sequence, Tuple

import torch

from common.errors import ConfigError
from engines.devices import memory_of
from engines.stage import blocks_to_recompute
from models import balance, costs, shapes
from models.balance import split_names
from models.base import BlockList
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.distribution import Parallel
from recipe.division import Batch
from recipe.network import Model
from recipe.settled import image_size

# Working copy, gradient, and float32 scratch of weight and momentum; half weights add 4.
_BYTES_PER_PARAMETER = 16


class Parts(NamedTuple):
    """The parts of a model.

    names: of the blocks of each part, in order.
    note: a line for the user about an automatic cut, or "".
    """

    names: List[List[str]]
    note: str


@dataclass
class Blocks:
    """A model that is to be cut, and what a cut depends on.

    model: whole.
    section: of the recipe, from which blocks are counted.
    parallel: of the recipe: how many parts, and where.
    batch: of a step.
    """

    model: BlockList
    section: Model
    parallel: Parallel
    batch: Batch


def parts(blocks: Blocks, processes: Processes, device: torch.device, *, bound: str) -> Parts:
    """Cut a model for the processes of a run, all of which call.

    One process that computes all stages has one part; wrong cut points are refused there too.

    Args:
        blocks: the model.
        processes: of the run; they measure at once, as they will compute.
        device: that computes.
        bound: why another cut would be another result (`recipe.checks.bound_to_cut`), or "".

    Raises:
        ConfigError: cut points that are no blocks, out of order, or leave a part without
            parameters; too many parts.
    """
    if processes.topology.stages == 1:
        # A wrong cut is refused also where nothing is cut.
        _divided(blocks, lambda: ([], ""))
        return Parts([blocks.model.names], "")
    return _divided(blocks, lambda: _automatic(blocks, processes, device, bound=bound))


def counted(blocks: Blocks) -> Parts:
    """Cut a model where blocks cannot be timed one by one, also for one process.

    An automatic cut balances multiply-adds, and ignores memory.

    Args:
        blocks: the model.

    Raises:
        ConfigError: cut points that the model does not have.
    """

    def automatic() -> Tuple[Sequence[str], str]:
        count = blocks.parallel.parts
        in_flight = [blocks.batch.accumulation] * count
        cut = balance.balance(_counted_costs(blocks), count, in_flight=in_flight)
        return cut.cuts, cut.describe("counted")

    if blocks.parallel.stages == 1:
        return Parts([blocks.model.names], "")
    return _divided(blocks, automatic)


def own_parts(names: Sequence[Sequence[str]], topology: Topology) -> Dict[int, Sequence[str]]:
    """Return the parts of this process by number.

    Args:
        names: of the blocks of each part.
        topology: of the run. A process has every `stages`-th part, so that neighbours are on
            neighbours.
    """
    parts_here = {}
    for number, blocks in enumerate(names):
        if number % topology.stages == topology.stage:
            parts_here[number] = blocks
    return parts_here


def _counted_costs(blocks: Blocks) -> Dict[str, balance.BlockCost]:
    itemsize = next(blocks.model.parameters()).element_size()
    section = blocks.section
    return shapes.costs(section, image_size(section), blocks.batch.micro, itemsize)


def _measured_costs(
    blocks: Blocks,
    processes: Processes,
    device: torch.device,
) -> Dict[str, balance.BlockCost]:
    """Measure the blocks by random images, the same result on all processes, which all call."""
    size = image_size(blocks.section)
    # The same pixels on all processes, so that times differ by the machines alone.
    generator = torch.Generator().manual_seed(0)
    shape = (blocks.batch.micro, 3, size, size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    measured = costs.measure(blocks.model, images.to(device))
    return costs.median(processes.gather(measured))


def _divided(blocks: Blocks, automatic: Callable[[], Tuple[Sequence[str], str]]) -> Parts:
    """Return the parts that cut points make, the recipe's or automatic ones. Raises ConfigError."""
    model = blocks.model
    parallel = blocks.parallel
    # A part needs a parameter to train.
    trained = set()
    for name in model.names:
        if any(True for _ in model.block(name).parameters()):
            trained.add(name)
    if parallel.parts > len(trained):
        raise ConfigError(balance.too_many_parts(parallel.parts, len(trained)))
    # The recipe's own cut, or one that is made here.
    note = ""
    if isinstance(parallel.split, list):
        cut: Sequence[str] = parallel.split
    else:
        cut, note = automatic()
    try:
        divided = split_names(model.names, cut)
    except ValueError as error:
        raise ConfigError(f"parallel.split: {error}") from None
    # The cut points exist, but two of them may enclose no block that trains.
    for names in divided:
        if not trained.intersection(names):
            raise ConfigError(
                f"parallel.split: the stage of {', '.join(names)} has no parameters; cut further behind"
            )
    return Parts(divided, note)


def _automatic(
    blocks: Blocks,
    processes: Processes,
    device: torch.device,
    *,
    bound: str,
) -> Tuple[List[str], str]:
    """Return the balanced cut. All ranks measure at once, and the median counts.

    A counted cut is a function of the recipe and the number of replicas, whatever memory is free.
    """
    parallel = blocks.parallel
    batch = blocks.batch
    # Memory counts with measured costs alone: a counted cut must not depend on it.
    memory = None
    if parallel.split == "counted":
        block_costs = _counted_costs(blocks)
        origin = "counted"
    elif bound:
        block_costs = _counted_costs(blocks)
        origin = f"counted, not measured: {bound}, so that another cut would be another result"
    else:
        block_costs = _measured_costs(blocks, processes, device)
        # The parts of one process share its memory.
        memory = memory_of(device) // (parallel.virtual_stages or 1)
        origin = "measured"
    # One process decides: free memory differs between hosts.
    cut = processes.from_main(
        lambda: balance.balance(
            block_costs,
            parallel.parts,
            in_flight=parallel.in_flight(batch.accumulation),
            recompute=blocks_to_recompute(blocks.model.names, parallel.recompute),
            bytes_per_parameter=_BYTES_PER_PARAMETER,
            memory=memory,
            phases=parallel.schedule == "gpipe",
        )
    )
    return cut.cuts, cut.describe(origin)
