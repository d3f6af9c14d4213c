"""Does a pipeline of two processes come close to twice the rate of one, and what does recomputing save?

    python -m benchmarks.pipeline [--quick] [--json]

EfficientNet-B4 G16 at 64 px and half of B0's width, micro batches of 8, float32, images in memory, GPipe, cut where
`parallel.split: auto` cuts it here. Two stages are two processes of one thread, in which all sides take turns:
- `ours`: a training step of our engine, and beside it one with `parallel.recompute`.
- `alone`: each process trains the whole model. The ideal is the sum of their rates times M / (M + 1), as M micro
  batches fill and drain two stages.
- `torch`: the same blocks and cut by torch.distributed.pipelining, with our LARS, without what an engine owes besides:
  sums of losses and hits, a check for finite gradients, a mask for each micro batch in the random layers.
`processor_ms`: without waiting. Memory is how far resident memory rises in two steps, in processes of their own.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import ctypes
import gc
import itertools
import statistics
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks import claims, ranks
from benchmarks.processes import kilobytes
from benchmarks.ranks import Ours
from benchmarks.step import recipe as of_step
from engines import cuts
from engines.stage import boundaries
from models.balance import split_names
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from parallel.processes import Processes
from parallel.topology import Topology
from parallel.work import Boundary
from recipe.batch import divide
from recipe.checks import bound_to_cut
from recipe.config import Recipe

STAGES = 2
MODEL = ("model.name=efficientnet_b4", "model.width=0.5", "model.image_size=64", "model.drop_path=0.2")
MICRO = 8
ROUNDS = {1: 9, 4: 3, 8: 3, 32: 10}  # by micro batches
ROUNDS_BESIDE = 3  # of what no claim is made of
RECOMPUTE = "ours, recompute"
MEMORY_REPETITIONS = {"torch": 1, "ours": 2, RECOMPUTE: 2}
MEMORY_STEPS = 2
CPU = torch.device("cpu")

Turns = Dict[Tuple[int, str], List[ranks.Turn]]  # by micro batches and side


def most() -> int:
    return claims.less(32, 8)


def recipe(stages: int, micro_batches: int, split: Sequence[str], *overrides: str) -> Recipe:
    """Args: split: the blocks that open the stages after the first."""
    batch = (f"batch.micro={MICRO}", f"batch.global={MICRO * micro_batches}")
    cut = (f"parallel.stages={stages}", f"parallel.split=[{','.join(split)}]", "parallel.schedule=gpipe")
    return of_step(*MODEL, *batch, *cut, *overrides)


class Torchs:
    """One stage of the same model by torch's own pipeline, and an update."""

    def __init__(self, plan: Recipe, split: Sequence[str], group: dist.ProcessGroup):
        model = build(plan.model, plan.run.seed)
        parts = split_names(model.names, split)
        rank, size = dist.get_rank(group), plan.model.image_size
        with torch.device("meta"):
            shapes = boundaries(
                parts, build(plan.model, plan.run.seed), Boundary((MICRO, 3, size, size), torch.uint8), torch.float32
            )
        self.module = model.part(parts[rank]).train()
        entering, leaving = (
            torch.empty(tuple(shape), dtype=dtype, device="meta").requires_grad_(dtype == torch.float32)
            for shape, dtype in shapes[rank : rank + 2]
        )
        stage = PipelineStage(self.module, rank, len(parts), CPU, input_args=entering, output_args=leaving, group=group)
        loss = nn.CrossEntropyLoss(label_smoothing=plan.data.label_smoothing)
        self._schedule = ScheduleGPipe(stage, plan.batch.global_ // MICRO, loss_fn=loss)
        self._is_first, self._is_last = stage.is_first, stage.is_last
        self._images, self._labels = ranks.images_and_labels(plan, plan.batch.global_)
        self._optimizer = factory.create(plan.optimizer, dict(self.module.named_parameters()), norm_parameters(model))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = 0.1

    def update(self) -> None:
        losses: Optional[list] = [] if self._is_last else None
        self._schedule.step(
            *((self._images,) if self._is_first else ()),
            target=self._labels if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()


def rank_takes_turns(rank: int) -> Tuple[List[str], str, Turns]:
    """All sides in turn, each as far as it is this rank's; where the model is cut, and the engine's line about it."""
    processes = Processes(Topology(1, STAGES, rank, rank), CPU)
    single = Processes(Topology(), CPU)
    split, note = automatic_cut(processes)
    turns: Turns = {}
    for count in claims.less(tuple(ROUNDS), (1, 8)):
        sides = {
            "torch": Torchs(recipe(STAGES, count, split), split, processes.stage_group).update,
            "ours": Ours(recipe(STAGES, count, split), processes).update,
            "alone": Ours(recipe(1, count, ()), single).update,
        }
        found = ranks.in_turn(sides, ROUNDS[count], processes)
        if count == most():
            less = recipe(STAGES, count, split, "parallel.recompute=true")
            found.update(ranks.in_turn({RECOMPUTE: Ours(less, processes).update}, ROUNDS_BESIDE, processes))
        turns.update({(count, name): values for name, values in found.items()})
        del sides
    processes.part()
    return split, note, turns


def automatic_cut(processes: Processes) -> Tuple[List[str], str]:
    """The blocks that open the stages after the first with `parallel.split: auto`, and the engine's line about it."""
    plan = recipe(STAGES, most(), (), "parallel.split=auto")
    model = build(plan.model, plan.run.seed)
    blocks = cuts.Blocks(model, plan.model, plan.parallel, divide(plan, 1))
    parts, note = cuts.parts(blocks, processes, CPU, bound=bound_to_cut(plan, 1))
    return [names[0] for names in parts[1:]], note


def rank_peaks(rank: int, side: str, split: Sequence[str]) -> Tuple[float, float]:
    """MB by which this process's memory rises at most during steps, and the most that it holds then."""
    processes = Processes(Topology(1, STAGES, rank, rank), CPU)
    plan = recipe(STAGES, most(), split, f"parallel.recompute={str(side == RECOMPUTE).lower()}")
    step = (Torchs(plan, split, processes.stage_group) if side == "torch" else Ours(plan, processes)).update
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building left to the allocator is not there to be used for nothing
    before = kilobytes("self", "status")["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    for _ in range(MEMORY_STEPS):
        step()
    peak = kilobytes("self", "status")["VmHWM"]
    processes.part()
    return (peak - before) / 1000, peak / 1000


def measure_memory(split: Sequence[str]) -> Tuple[List[dict], List[float]]:
    """Rows, and the largest stage's peak with recomputing over that without, by repetition."""
    repetitions = claims.less(MEMORY_REPETITIONS, dict.fromkeys(MEMORY_REPETITIONS, 1))
    cases = [side for side, number in repetitions.items() for _ in range(number)]
    peaks: Dict[str, list] = {side: [] for side in repetitions}
    for side in claims.progress(cases, "memory of a side:"):
        peaks[side].append(ranks.run(STAGES, rank_peaks, side, split))
    rows = []
    for side, stage in itertools.product(peaks, range(STAGES)):
        rise, whole = (statistics.median(each[stage][kind] for each in peaks[side]) for kind in range(2))
        where = {"part": f"memory of stage {stage}", "micro_batches": most(), "side": side}
        rows.append({**where, "peak_mb": rise, "process_mb": whole})
    largest = {side: [max(rise for rise, _ in each) for each in found] for side, found in peaks.items()}
    return rows, claims.ratios(largest[RECOMPUTE], largest["ours"])


def rates_of(turns: Sequence[Turns], count: int, side: str) -> Tuple[List[float], List[float]]:
    """Images a second by turn, and their shares of the ideal in neighbouring turns."""
    images = count * MICRO
    by_turn = zip(*(each[count, "alone"] for each in turns))
    alone = [sum(images / turn.seconds for turn in each) for each in by_turn]
    seconds, _ = ranks.joined([each[count, side] for each in turns])
    rates = alone if side == "alone" else [images / each for each in seconds]
    return rates, claims.ratios(rates, [rate * count / (count + STAGES - 1) for rate in alone])


def row(turns: Sequence[Turns], count: int, side: str) -> dict:
    seconds, processor = ranks.joined([each[count, side] for each in turns])
    rates, efficiencies = rates_of(turns, count, side)
    return {
        "part": "step",
        "micro_batches": count,
        "side": side,
        **claims.milliseconds(seconds, "_per_step"),
        "processor_ms": 1000 * statistics.median(processor),
        "images_per_second": statistics.median(rates),
        "efficiency_of_ideal": statistics.median(efficiencies) if side != "alone" else None,
    }


def main() -> None:
    as_json = claims.begin(__doc__, takes="15 minutes", quick="3 minutes").json
    torch.set_num_threads(1)  # as in the ranks: the report says so
    splits, notes, turns = zip(*ranks.run(STAGES, rank_takes_turns))
    rows = [row(turns, *key) for key in turns[0]]
    ours, theirs = (ranks.joined([each[most(), side] for each in turns])[0] for side in ("ours", "torch"))
    memory_rows, over_plain = measure_memory(splits[0])
    print(notes[0])
    efficiencies = rates_of(turns, most(), "ours")[1]
    made = [
        claims.claim(f"efficiency_of_ideal_k2_m{most()}", efficiencies, "of the ideal", ">= 0.93"),
        claims.claim("time_over_torch_pipelining", claims.ratios(ours, theirs), "times", "<= 1.0"),
        claims.claim("peak_memory_recompute_over_plain", over_plain, "times", "<= 0.15"),
    ]
    claims.report("pipeline", [*rows, *memory_rows], made, as_json)
