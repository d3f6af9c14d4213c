"""Does a pipeline of two processes come close to twice the rate of one, and what does recomputing save?

    python -m benchmarks.pipeline [--quick] [--json]

EfficientNet-B4 G16 at 64 px and half of B0's width, micro batches of 8, float32, images in memory,
GPipe, cut where `parallel.split: auto` cuts it here. Two stages are two processes of one thread, in
which all sides take turns:
- `ours`: a training step of our engine, and beside it one with `parallel.recompute`.
- `alone`: each process trains the whole model. The ideal is the sum of their rates times
  M / (M + 1), as M micro batches fill and drain two stages.
- `torch`: the same blocks and cut by torch.distributed.pipelining, with our LARS, without what an
  engine owes besides: sums of losses and hits, a check for finite gradients, a mask for each micro
  batch in the random layers.
`processor_ms`: without waiting. Memory is how far resident memory rises in two steps, in processes
of their own.
"""

if __name__ == "__main__":  # before the imports: see run
    from common.command import run

    run(__file__)

import ctypes
import gc
import statistics
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

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
from models.families import build
from models.normalization import norm_parameters
from optim import factory
from parallel.groups import Group
from parallel.processes import Processes
from parallel.topology import Topology
from parallel.work import Boundary
from recipe.batch import divide
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.settled import image_size

STAGES = 2
MODEL = (
    "model.name=efficientnet_b4",
    "model.width=0.5",
    "model.image_size=64",
    "model.drop_path=0.2",
)
MICRO = 8
ROUNDS = {1: 9, 4: 3, 8: 3, 32: 10}  # by micro batches
ROUNDS_BESIDE = 3  # of what no claim is made of
TORCH = "torch"
OURS = "ours"
ALONE = "alone"
RECOMPUTE = "ours, recompute"
MEMORY_REPETITIONS = {TORCH: 1, OURS: 2, RECOMPUTE: 2}
MEMORY_STEPS = 2
CPU = torch.device("cpu")

Turns = Dict[Tuple[int, str], List[ranks.Turn]]  # by micro batches and side


class Cut(NamedTuple):
    """The cut of the model into stages.

    split: the blocks that open the stages after the first.
    note: the engine's line about it.
    """

    split: List[str]
    note: str


class Outcome(NamedTuple):
    """The turns of a rank, and where it cut the model."""

    cut: Cut
    turns: Turns


class Peak(NamedTuple):
    """The most memory of a process during some steps, in MB.

    rise: above what it held before.
    whole: of the process.
    """

    rise: float
    whole: float


Peaks = Dict[str, List[List[Peak]]]  # by side, repetition and stage


class Rates(NamedTuple):
    """The rates of a side, turn by turn.

    images: a second.
    of_ideal: their shares of the ideal in neighbouring turns.
    """

    images: List[float]
    of_ideal: List[float]


def most() -> int:
    """Return the number of micro batches that claims are about."""
    return claims.less(32, 8)


def recipe(stages: int, micro_batches: int, split: Sequence[str], *overrides: str) -> Recipe:
    """Return the recipe of a step.

    Args:
        stages: of the pipeline.
        micro_batches: of the step.
        split: the blocks that open the stages after the first.
        overrides: further ones.
    """
    pipeline = [
        f"batch.micro={MICRO}",
        f"batch.global={MICRO * micro_batches}",
        f"parallel.stages={stages}",
        f"parallel.split=[{','.join(split)}]",
        "parallel.schedule=gpipe",
    ]
    return of_step(*MODEL, *pipeline, *overrides)


# Torch's pipeline ---------------------------------------------------------------------------------


class Torchs:
    """One stage of the same model by torch's own pipeline, and an update."""

    def __init__(self, plan: Recipe, split: Sequence[str], group: Group):
        """
        Args:
            plan: the recipe.
            split: the blocks that open the stages after the first.
            group: the processes of the pipeline, ordered by stage.
        """
        model = build(plan.model, plan.run.seed)
        parts = split_names(model.names, split)
        rank = dist.get_rank(group)
        self.module = model.part(parts[rank]).train()

        # Shapes are given, or torch would compute to learn them.
        entering, leaving = _examples(plan, parts, rank)
        stage = PipelineStage(
            self.module,
            rank,
            len(parts),
            CPU,
            input_args=entering,
            output_args=leaving,
            group=group,
        )
        self._is_first = stage.is_first
        self._is_last = stage.is_last
        loss = nn.CrossEntropyLoss(label_smoothing=plan.data.label_smoothing)
        self._schedule = ScheduleGPipe(stage, plan.batch.global_ // MICRO, loss_fn=loss)
        # All images of a step: the schedule divides them into micro batches.
        self._images, self._labels = ranks.images_and_labels(plan, plan.batch.global_)

        named = dict(self.module.named_parameters())
        self._optimizer = factory.create(plan.optimizer, named, norm_parameters(model))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = 0.1

    def update(self) -> None:
        """Make one update from all micro batches."""
        # Images enter the first stage; labels and losses belong to the last.
        inputs = (self._images,) if self._is_first else ()
        losses: Optional[list] = [] if self._is_last else None
        self._schedule.step(
            *inputs,
            target=self._labels if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()


def _examples(
    plan: Recipe,
    parts: Sequence[Sequence[str]],
    rank: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor without memory of what enters a rank's part, and of what leaves it."""
    size = image_size(plan.model)
    images = Boundary((MICRO, 3, size, size), torch.uint8)
    # Only shapes are wanted, not the weights.
    with torch.device("meta"):
        model = build(plan.model, plan.run.seed)
        between = boundaries(parts, model, images, torch.float32)
    entering = _example(between[rank])
    leaving = _example(between[rank + 1])
    return entering, leaving


def _example(boundary: Boundary) -> torch.Tensor:
    """Return a tensor without memory of a boundary; images have no gradient, activations have."""
    shape = tuple(boundary.shape)
    example = torch.empty(shape, dtype=boundary.dtype, device="meta")
    is_image = boundary.dtype == torch.uint8
    return example.requires_grad_(not is_image)


# In the ranks -------------------------------------------------------------------------------------


def _topology(rank: int) -> Topology:
    """Return the place of a process in the pipeline."""
    return Topology(replicas=1, stages=STAGES, rank=rank, local_rank=rank)


def rank_takes_turns(rank: int) -> Outcome:
    """Let all sides take turns, each as far as it is this rank's.

    Args:
        rank: of this process.
    """
    processes = Processes(_topology(rank), CPU)
    single = Processes(Topology(), CPU)
    cut = automatic_cut(processes)
    turns: Turns = {}
    for count in claims.less(tuple(ROUNDS), (1, 8)):
        plan = recipe(STAGES, count, cut.split)
        sides = {
            TORCH: Torchs(plan, cut.split, processes.stage_group).update,
            OURS: Ours(plan, processes).update,
            ALONE: Ours(recipe(1, count, ()), single).update,
        }
        by_side = ranks.in_turn(sides, ROUNDS[count], processes)
        # Recomputing has turns of its own, of which no claim is made.
        if count == most():
            recomputing = recipe(STAGES, count, cut.split, "parallel.recompute=true")
            beside = {RECOMPUTE: Ours(recomputing, processes).update}
            by_side.update(ranks.in_turn(beside, ROUNDS_BESIDE, processes))
        for name, values in by_side.items():
            turns[count, name] = values
        # Their memory is freed before the next ones are made.
        del sides
    processes.part()
    return Outcome(cut, turns)


def automatic_cut(processes: Processes) -> Cut:
    """Return where `parallel.split: auto` cuts the model.

    Args:
        processes: of the pipeline, all of which call.
    """
    plan = recipe(STAGES, most(), (), "parallel.split=auto")
    model = build(plan.model, plan.run.seed)
    blocks = cuts.Blocks(model, plan.model, plan.parallel, batch=divide(plan, 1))
    parts = cuts.parts(blocks, processes, CPU, bound=bound_to_cut(plan, 1))
    openings = [names[0] for names in parts.names[1:]]
    return Cut(openings, parts.note)


def rank_peaks(rank: int, side: str, split: Sequence[str]) -> Peak:
    """Return the most memory of this process during steps of a side.

    Args:
        rank: of this process.
        side: name of the side.
        split: the blocks that open the stages after the first.
    """
    processes = Processes(_topology(rank), CPU)
    update = _update_of(side, split, processes)
    # What building left to the allocator would be used by steps without a rise.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = kilobytes("self", "status")["VmRSS"]
    # The peak is counted from here.
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(MEMORY_STEPS):
        update()
    peak = kilobytes("self", "status")["VmHWM"]
    processes.part()
    # What Linux calls kB are 1,024 bytes.
    return Peak(rise=(peak - before) * 1024 / 1e6, whole=peak * 1024 / 1e6)


def _update_of(side: str, split: Sequence[str], processes: Processes) -> Callable[[], None]:
    """Build a side of one stage; return its update."""
    recompute = "true" if side == RECOMPUTE else "false"
    override = f"parallel.recompute={recompute}"
    plan = recipe(STAGES, most(), split, override)
    if side == TORCH:
        return Torchs(plan, split, processes.stage_group).update
    return Ours(plan, processes).update


# Results ------------------------------------------------------------------------------------------


def measure_memory(split: Sequence[str]) -> Tuple[List[dict], List[float]]:
    """Measure the memory of all sides.

    Args:
        split: the blocks that open the stages after the first.

    Returns:
        Rows, and the largest stage's rise with recomputing over that without, by repetition.
    """
    peaks = _peaks(split)
    rows = []
    rises: Dict[str, List[float]] = {}  # of the largest stage, by side and repetition
    for side, repetitions in peaks.items():
        for stage in range(STAGES):
            of_stage = [stages[stage] for stages in repetitions]
            rows.append(_memory_row(side, stage, of_stage))
        rises[side] = []
        for stages in repetitions:
            largest = max(peak.rise for peak in stages)
            rises[side].append(largest)
    return rows, claims.ratios(rises[RECOMPUTE], rises[OURS])


def _peaks(split: Sequence[str]) -> Peaks:
    """Return the peaks of all sides."""
    once = dict.fromkeys(MEMORY_REPETITIONS, 1)
    repetitions = claims.less(MEMORY_REPETITIONS, once)
    cases: List[str] = []
    for side, number in repetitions.items():
        cases.extend([side] * number)
    # Each in processes of its own, or one side would use what another left to the allocator.
    peaks: Peaks = {side: [] for side in repetitions}
    for side in claims.progress(cases, "memory of a side:"):
        of_stages = ranks.run(STAGES, rank_peaks, side, split)
        peaks[side].append(of_stages)
    return peaks


def _memory_row(side: str, stage: int, peaks: Sequence[Peak]) -> dict:
    """Return the row of a stage of a side."""
    return {
        "part": f"memory of stage {stage}",
        "micro_batches": most(),
        "side": side,
        "peak_mb": statistics.median(peak.rise for peak in peaks),
        "process_mb": statistics.median(peak.whole for peak in peaks),
    }


def _joined(turns: Sequence[Turns], count: int, side: str) -> ranks.JoinedTurns:
    """Return the turns of a side, joined over the ranks."""
    return ranks.joined(_by_rank(turns, count, side))


def _by_rank(turns: Sequence[Turns], count: int, side: str) -> List[List[ranks.Turn]]:
    """Return the turns of a side by rank."""
    return [of_rank[count, side] for of_rank in turns]


def rates_of(turns: Sequence[Turns], count: int, side: str) -> Rates:
    """Return the rates of a side.

    Args:
        turns: by rank.
        count: of micro batches.
        side: its name.
    """
    images = count * MICRO
    # What both processes reach alone, together.
    by_rank = _by_rank(turns, count, ALONE)
    alone = []
    for together in zip(*by_rank):
        rate = sum(images / turn.seconds for turn in together)
        alone.append(rate)
    # The stages are not all at work while the micro batches fill and drain them.
    rounds = count + STAGES - 1
    ideal = [rate * count / rounds for rate in alone]
    rates = alone
    if side != ALONE:
        joined = _joined(turns, count, side)
        rates = [images / seconds for seconds in joined.seconds]
    return Rates(rates, claims.ratios(rates, ideal))


def row(turns: Sequence[Turns], count: int, side: str) -> dict:
    """Return the row of a side's steps.

    Args:
        turns: by rank.
        count: of micro batches.
        side: its name.
    """
    joined = _joined(turns, count, side)
    rates = rates_of(turns, count, side)
    efficiency = statistics.median(rates.of_ideal) if side != ALONE else None
    return {
        "part": "step",
        "micro_batches": count,
        "side": side,
        **claims.milliseconds(joined.seconds, "_per_step"),
        "processor_ms": 1000 * statistics.median(joined.processor),
        "images_per_second": statistics.median(rates.images),
        "efficiency_of_ideal": efficiency,
    }


def step_claims(turns: Sequence[Turns]) -> List[dict]:
    """Return the claims about steps.

    Args:
        turns: by rank.
    """
    count = most()
    of_ideal = rates_of(turns, count, OURS).of_ideal
    ours = _joined(turns, count, OURS)
    torchs = _joined(turns, count, TORCH)
    over_torch = claims.ratios(ours.seconds, torchs.seconds)
    return [
        claims.claim(f"efficiency_of_ideal_k2_m{count}", of_ideal, "of the ideal", ">= 0.93"),
        claims.claim("time_over_torch_pipelining", over_torch, "times", "<= 1.0"),
    ]


def main() -> None:
    """Measure steps and memory; print the table and the claims."""
    as_json = claims.begin(__doc__, takes="15 minutes", quick="3 minutes").json
    torch.set_num_threads(1)  # as in the ranks: the report says so
    outcomes: List[Outcome] = ranks.run(STAGES, rank_takes_turns)
    turns = [outcome.turns for outcome in outcomes]
    rows = []
    for count, side in turns[0]:
        rows.append(row(turns, count, side))
    # All ranks make the same cut.
    cut = outcomes[0].cut
    memory_rows, over_plain = measure_memory(cut.split)
    print(cut.note)

    all_claims = [
        *step_claims(turns),
        claims.claim("peak_memory_recompute_over_plain", over_plain, "times", "<= 0.15"),
    ]
    claims.report("pipeline", [*rows, *memory_rows], all_claims, as_json)
