"""Does a pipeline of two processes come close to twice the rate of one, and what does recomputing save?

    python -m benchmarks.pipeline [--quick] [--json]

EfficientNet-B4 G16 at 64 px and half of B0's width, micro batches of 8, float32, images in memory, GPipe's schedule,
cut where `parallel.split: auto` cuts it here: B4 for its 32 blocks, because B0's 16 have no border within 2 % of the
middle, and what is lost there is not the pipeline's. K stages are K processes of one thread. All sides are called in
turn in the same long-lived processes, which begin each turn together; a step's time is that of the rank that takes
longest.
- `ours`: a training step of our engine, and beside it one with `parallel.recompute`.
- `alone`: what the ideal is taken from. K processes at once, so that they share caches and memory as the stages do,
  each training the whole model by our engine (K = 1: it is `ours`). The ideal is the sum of their rates times
  M / (M + K - 1), M micro batches filling and draining K stages.
- `torch`: the same blocks, cut at the same places, by torch.distributed.pipelining as its users write it: PipelineStage
  with given shapes, ScheduleGPipe, cross entropy, gradients in .grad from None at each step, scaled by the schedule.
  What is compared is a whole training step, so it also makes the update, by our foreach LARS over the parameters of the
  stage. It does without what an engine owes besides: sums of losses and hits, a check for finite gradients on all
  ranks, a mask of its own for each micro batch in the random layers.
- `stages`: the blocks of each stage in GPipe's order, all micro batches forward, then all backward, with nothing to
  wait for, both at once: by how much the cut is uneven and what the order costs (the activations of M micro batches
  are kept, not of one). Its step is the sum of the slowest forward and the slowest backward phase, times
  (M + K - 1) / M: what the pipeline would take if neither messages nor updates cost anything.
`processor_ms` is the time of processors over all ranks: waiting does not count.
Memory is taken in processes of their own: how far the resident memory rises in two steps above what it was before
the first. A repetition is a pair of processes for each side.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the imports: see run
    sys.path[0] = os.path.abspath(f"{__file__}/../..")
    from training.command import run

    run(__file__)

import ctypes
import gc
import re
import statistics
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks import claims, ranks
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
from recipe.config import Recipe

STAGES = 2
MODEL = ("model.name=efficientnet_b4", "model.width=0.5", "model.image_size=64", "model.drop_path=0.2")
MICRO = 8
ROUNDS = {1: 9, 4: 3, 8: 3, 32: 10}  # by micro batches, with two stages
ROUNDS_BESIDE = 3  # of what no claim is made of
ROUNDS_OF_ONE = {1: 5, 4: 2, 8: 2, 32: 1}
RECOMPUTE = "ours, recompute"
MEMORY_REPETITIONS = {"torch": 1, "ours": 2, RECOMPUTE: 2}
MEMORY_STEPS = 2
CPU = torch.device("cpu")


def counts() -> Sequence[int]:
    """Micro batches of a step, rising."""
    return claims.less(tuple(ROUNDS), (1, 8))


def most() -> int:
    """Micro batches of the step that claims are about."""
    return counts()[-1]


def recipe(stages: int, micro_batches: int, split: Sequence[str], *overrides: str) -> Recipe:
    """Args: split: the blocks that open the stages after the first."""
    batch = (f"batch.micro={MICRO}", f"batch.global={MICRO * micro_batches}")
    cut = (f"parallel.stages={stages}", f"parallel.split=[{','.join(split)}]", "parallel.schedule=gpipe")
    return of_step(*MODEL, *batch, *cut, *overrides)


class Phases(NamedTuple):
    """Seconds of one stage for all its micro batches."""

    forward: float
    backward: float


class Torchs:
    """One stage of the same model by torch's own pipeline, and an update."""

    def __init__(self, plan: Recipe, split: Sequence[str], group: dist.ProcessGroup):
        self._count = plan.batch.global_ // MICRO
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
        self._loss = nn.CrossEntropyLoss(label_smoothing=plan.data.label_smoothing)
        self._schedule = ScheduleGPipe(stage, self._count, loss_fn=self._loss)
        self._is_first, self._is_last = stage.is_first, stage.is_last
        self._images, self._labels = ranks.images_and_labels(plan, self._count * MICRO)
        self._entering = torch.randn(tuple(entering.shape))
        self._leaving = torch.randn(tuple(leaving.shape))
        self._optimizer = factory.create(plan.optimizer, dict(self.module.named_parameters()), norm_parameters(model))
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = 0.1
        self.phases: List[Phases] = []

    def update(self) -> None:
        """One training step."""
        losses: Optional[list] = [] if self._is_last else None
        self._schedule.step(
            *((self._images,) if self._is_first else ()),
            target=self._labels if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()

    def without_others(self) -> None:
        """The gradients of a step through this stage alone, in GPipe's order; keeps the seconds of both phases."""
        start = time.perf_counter()
        outputs = []
        for images, labels in zip(self._images.split(MICRO), self._labels.split(MICRO)):
            x = images if self._is_first else self._entering.clone().requires_grad_()
            output = self.module(x)
            outputs.append(self._loss(output, labels) if self._is_last else output)
        between = time.perf_counter()
        outputs.reverse()
        while outputs:
            outputs.pop().backward(None if self._is_last else self._leaving)
        self.phases.append(Phases(between - start, time.perf_counter() - between))
        self._optimizer.zero_grad()


class Outcome(NamedTuple):
    """What a rank has measured.

    split, note: where the model is cut, and the engine's line about it. turns: by (stages, micro batches, side).
    phases: of each turn of `stages`.
    """

    split: List[str]
    note: str
    turns: Dict[Tuple[int, int, str], List[ranks.Turn]]
    phases: List[Phases]


def rank_takes_turns(rank: int) -> Outcome:
    """All sides in turn, each as far as it is this rank's."""
    processes = Processes(Topology(1, STAGES, rank, rank), CPU)
    own = Processes(Topology(), CPU)
    alone = dist.new_group([0])
    split, note = automatic_cut(processes)
    turns, phases = {}, []
    for count in counts():
        one = Ours(recipe(1, count, ()), own)
        both = {
            "torch": Torchs(recipe(STAGES, count, split), split, processes.stage_group),
            "ours": Ours(recipe(STAGES, count, split), processes),
        }
        sides: Dict[str, Callable[[], None]] = {name: side.update for name, side in both.items()}
        sides["alone"] = one.update
        found = ranks.in_turn(sides, ROUNDS[count], processes)
        if count == most():
            less = Ours(recipe(STAGES, count, split, "parallel.recompute=true"), processes)
            beside = {"stages": both["torch"].without_others, RECOMPUTE: less.update}
            found.update(ranks.in_turn(beside, ROUNDS_BESIDE, processes))
        turns.update({(STAGES, count, name): values for name, values in found.items()})
        phases = both["torch"].phases[3::2]  # of the last, most micro batches; those that are timed
        del both
        sides = {"torch": _nothing, "ours": _nothing}
        if rank == 0:
            sides = {"torch": Torchs(recipe(1, count, ()), (), alone).update, "ours": one.update}
        found = ranks.in_turn(sides, ROUNDS_OF_ONE[count], processes)
        turns.update({(1, count, name): values for name, values in found.items()})
        del one, sides
    processes.part()
    return Outcome(split, note, turns, phases)


def _nothing() -> None:
    """What the second rank does while the first is alone."""


def automatic_cut(processes: Processes) -> Tuple[List[str], str]:
    """The blocks that open the stages after the first with `parallel.split: auto`, and the engine's line about it."""
    plan = recipe(STAGES, most(), (), "parallel.split=auto")
    model = build(plan.model, plan.run.seed)
    parts, note = cuts.parts(model, plan, divide(plan, 1), processes, CPU)
    return [names[0] for names in parts[1:]], note


def rank_peaks(rank: int, side: str, split: Sequence[str]) -> Tuple[float, float]:
    """MB by which this process's memory rises at most during steps, and the most that it holds then."""
    processes = Processes(Topology(1, STAGES, rank, rank), CPU)
    plan = recipe(STAGES, most(), split, f"parallel.recompute={str(side == RECOMPUTE).lower()}")
    step = (Torchs(plan, split, processes.stage_group) if side == "torch" else Ours(plan, processes)).update
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building left to the allocator is not there to be used for nothing
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    for _ in range(MEMORY_STEPS):
        step()
    peak = _resident("VmHWM")
    processes.part()
    return peak - before, peak


def _resident(name: str) -> float:
    """MB of this process's memory: VmRSS, now; VmHWM, at most."""
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1000


def measure_memory(split: Sequence[str]) -> Tuple[List[dict], List[float]]:
    """Rows, and the largest stage's peak with recomputing over that without, by repetition."""
    peaks: Dict[str, list] = {side: [] for side in MEMORY_REPETITIONS}
    for number in claims.turns(max(MEMORY_REPETITIONS.values()), "memory, turn", at_most=1):
        for side, repetitions in MEMORY_REPETITIONS.items():
            if number < repetitions:
                peaks[side].append(ranks.run(STAGES, rank_peaks, side, split))
    rows = []
    for side, found in peaks.items():
        for stage in range(STAGES):
            rise, whole = (statistics.median(each[stage][kind] for each in found) for kind in range(2))
            rows.append({**_EMPTY, "part": f"memory of stage {stage}", "stages": STAGES, "micro_batches": most(),
                         "side": side, "peak_mb": rise, "process_mb": whole})  # fmt: skip
    largest = {side: [max(rise for rise, _ in each) for each in found] for side, found in peaks.items()}
    return rows, [less / plain for less, plain in zip(largest[RECOMPUTE], largest["ours"])]


_EMPTY = dict.fromkeys(
    ("part", "stages", "micro_batches", "side", "ms_per_step", "fastest", "slowest", "processor_ms",
     "images_per_second", "efficiency_of_ideal", "imbalance", "peak_mb", "process_mb")
)  # fmt: skip


class Side:
    """What the ranks measured of one side."""

    def __init__(self, key: Tuple[int, int, str], outcomes: Sequence[Outcome]):
        """Args: key: stages, micro batches, name. outcomes: of all ranks."""
        self.stages, self.count, self.name = key
        own = outcomes[: self.stages]
        self.seconds, self.processor = ranks.joined([outcome.turns[key] for outcome in own])
        if self.name == "stages":
            self.seconds = [
                (max(forward) + max(backward)) * (self.count + self.stages - 1) / self.count
                for forward, backward in _by_turn([outcome.phases for outcome in own])
            ]
        images = self.count * MICRO
        one = self.stages, self.count, "ours" if self.stages == 1 else "alone"
        alone = [sum(images / turn.seconds for turn in each) for each in zip(*(each.turns[one] for each in own))]
        self.rates = alone if self.name == "alone" else [images / seconds for seconds in self.seconds]
        share = self.count / (self.count + self.stages - 1)
        self.efficiencies = [rate / (each * share) for rate, each in zip(self.rates, alone)]  # of neighbouring turns

    def row(self, imbalance: float) -> dict:
        """Args: imbalance: of the cut into stages."""
        cut = self.stages > 1 and self.name != "alone"
        return {
            **_EMPTY,
            "part": "step",
            "stages": self.stages,
            "micro_batches": self.count,
            "side": self.name,
            **claims.milliseconds(self.seconds, "_per_step"),
            "processor_ms": 1000 * statistics.median(self.processor),
            "images_per_second": statistics.median(self.rates),
            "efficiency_of_ideal": None if self.name == "alone" else statistics.median(self.efficiencies),
            "imbalance": imbalance if cut else None,
        }


def _by_turn(phases: Sequence[Sequence[Phases]]) -> List[Tuple[Tuple[float, ...], Tuple[float, ...]]]:
    """From (forward, backward) by stage and turn to, by turn, (forward of each stage, backward of each stage)."""
    return [tuple(zip(*turn)) for turn in zip(*phases)]


def print_bounds(phases: Sequence[Sequence[Phases]]) -> None:
    """What the cut allows. Args: phases: of each stage, its turns without the other."""
    by_sum, by_phase, shares = [], [], []
    for forward, backward in _by_turn(phases):
        whole = [sum(stage) for stage in zip(forward, backward)]
        by_sum.append(statistics.mean(whole) / max(whole))
        by_phase.append(statistics.mean(whole) / (max(forward) + max(backward)))
        shares.append(whole[0] / sum(whole))
    print(
        f"bound by the cut's imbalance, measured: mean stage time / slowest {statistics.median(by_sum):.3f}, "
        f"the slowest forward and the slowest backward phase taken together {statistics.median(by_phase):.3f}; "
        f"the first stage takes {100 * statistics.median(shares):.1f} % of the time"
    )


def main() -> None:
    as_json = claims.begin(__doc__, takes="15 minutes", quick="3 minutes").json
    torch.set_num_threads(1)  # as in the ranks: the report says so
    started = time.perf_counter()
    outcomes = ranks.run(STAGES, rank_takes_turns)
    note = outcomes[0].note
    imbalance = float(re.search(r"([\d.]+) % from even", note)[1]) / 100
    sides = {key: Side(key, outcomes) for key in sorted(outcomes[0].turns, key=lambda key: key[:2])}
    ours, theirs = sides[STAGES, most(), "ours"], sides[STAGES, most(), "torch"]
    over_torch = claims.ratios(ours.seconds, theirs.seconds)
    memory_rows, over_plain = measure_memory(outcomes[0].split)
    print(note)
    print_bounds([outcome.phases for outcome in outcomes])
    print(f"measured in {time.perf_counter() - started:.0f} s")
    made = [
        claims.claim(f"efficiency_of_ideal_k2_m{most()}", ours.efficiencies, "of the ideal", ">= 0.93"),
        claims.claim("time_over_torch_pipelining", over_torch, "times", "<= 1.03"),
        claims.claim("peak_memory_recompute_over_plain", over_plain, "times", "<= 0.6"),
    ]
    rows = [*(side.row(imbalance) for side in sides.values()), *memory_rows]
    claims.report("pipeline", rows, made, as_json)
