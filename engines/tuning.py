"""engine.memory_format and engine.kernels: put into a model, and chosen: on a GPU by time, on a CPU by rule."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError, first_line
from common.json_io import read_json
from engines import cache, cuts
from engines.devices import compute_dtype, device_of, name_of, set_switches, timed
from engines.stage import Stage, blocks_to_recompute, boundaries, sent
from models import shapes
from models.base import BlockList
from models.families import build
from models.kernels import patching
from models.native import library
from models.native import patching as native
from parallel.processes import Processes
from parallel.work import Boundary
from recipe.batch import training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# engine.kernels -> layers that get kernels of our own.
_KERNELS = {"torch": (), "group_norm": ("group_norm",), "group_conv": ("group_conv",), "triton": patching.KERNELS}
_WARM_UP, _TIMED = 3, 7  # micro batches; in the first ones cuDNN searches, and Triton compiles
_MEASURED = ("cuda",)  # types of devices


class Candidate(NamedTuple):
    """A way to compute the model."""

    memory_format: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.memory_format} {self.kernels}"


# Seconds of a micro batch, forward and backward, and "", or infinity and what failed.
Outcome = Tuple[float, str]


NATIVE, PLAIN = Candidate("channels_last", "native"), Candidate("contiguous", "torch")  # a CPU's, in this order


def check(section: EngineSection, device: torch.device, compute: torch.dtype) -> None:
    """Refuse, before training, a named choice of the section that this machine cannot do.

    Args: compute: dtype of activations. Raises ConfigError.
    """
    kernels, layout = section.kernels, section.memory_format
    if device.type == "cuda":
        if kernels == "native":
            raise ConfigError("engine.kernels native: they are for CPUs; use engine.kernels=auto")
        if kernels not in ("auto", "torch") and not patching.available():
            raise ConfigError(f"engine.kernels {kernels}: Triton is not installed; use engine.kernels=auto")
        return
    if kernels not in ("auto", *(each.kernels for each in (NATIVE, PLAIN))):
        raise ConfigError(f"engine.kernels {kernels}: Triton's kernels need a CUDA device; use engine.kernels=auto")
    fits = [each for each in (NATIVE, PLAIN) if _names(section, each)]
    if not fits and kernels == "native":
        raise ConfigError(
            "engine.memory_format contiguous: native kernels are for channels_last; use engine.memory_format=auto"
        )
    if not fits:
        fault = "on a CPU torch's group normalisation loses digits in it"
        raise ConfigError(f"engine.memory_format channels_last: {fault}; use engine.memory_format=auto")
    fault = native_fault(compute) if fits == [NATIVE] else ""
    if fault:
        named = [f"engine.{key}" for key in Candidate._fields if getattr(section, key) != "auto"]
        remedy = " ".join(f"{key}=auto" for key in named)
        raise ConfigError(f"{named[-1]} {kernels if section.kernels != 'auto' else layout}: {fault}; use {remedy}")


def native_fault(compute: torch.dtype) -> str:
    """Return why our functions for CPUs cannot compute a model of this dtype here; "" where they can."""
    return "they are for float32" if compute != torch.float32 else library.fault()


def _names(section: EngineSection, candidate: Candidate) -> bool:
    """Whether a section, with `auto` for anything, means the candidate too."""
    return all(getattr(section, key) in ("auto", value) for key, value in candidate._asdict().items())


def apply(model: BlockList, section: EngineSection, device: torch.device) -> torch.memory_format:
    """Put the section's kernels and layout into a model on `device`; return the layout, for the stages.

    What the device does not have is left out: weights that were trained elsewhere are to be scored anywhere. `auto`
    that is not resolved is contiguous and torch. Weights stay contiguous: cuDNN converts the few bytes of a layer at
    each pass.
    """
    if device.type != "cuda":
        if section.kernels != "native" or native_fault(next(model.parameters()).dtype):
            return torch.contiguous_format
        return torch.channels_last if native.patch(model) else torch.contiguous_format
    if patching.available():
        patching.patch(model, _KERNELS.get(section.kernels, ()))
    memory_format = _FORMATS.get(section.memory_format, torch.contiguous_format)
    model.block("preprocess").memory_format = memory_format
    return memory_format


def resolve(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    report: Callable[[str], None],
    begun: Optional[EngineSection] = None,
) -> Recipe:
    """`recipe` with a choice in the place of `auto`, the same on all processes, each of which must call this.

    On GPUs a micro batch is timed, forward and backward, through the largest stage; of each candidate, the slowest
    process counts. On CPUs nothing is timed. On IPUs there is no choice: the recipe stays as it is.
    Args: begun: the section of a run that is resumed, whose choice is kept where this device has it.

    Raises ConfigError: no such device, or cut points that the model does not have.
    """
    section = recipe.engine
    if "auto" not in (section.memory_format, section.kernels) or recipe.run.device == "ipu":
        return recipe
    device = device_of(recipe.run.device, processes.topology)
    if device.type not in _MEASURED:
        return _with(recipe, _on_cpu(recipe, processes, device, report, begun))
    kernels = list(_KERNELS) if patching.available() else ["torch"]
    candidates = [
        Candidate(*pair)
        for pair in itertools.product(
            _FORMATS if section.memory_format == "auto" else [section.memory_format],
            kernels if section.kernels == "auto" else [section.kernels],
        )
    ]
    before = Candidate(
        *(getattr(begun if begun and getattr(section, key) == "auto" else section, key) for key in Candidate._fields)
    )
    if recipe.run.deterministic:
        taken = candidates[0]
        report(f"engine auto: {taken}, as run.deterministic asks")
    elif before in candidates:
        taken = before
        report(f"engine auto: {taken}, as this run has had it")
    else:
        taken = _fastest(recipe, batch, processes, device, candidates, report)
    return _with(recipe, taken)


def _with(recipe: Recipe, taken: Optional[Candidate]) -> Recipe:
    """The recipe with a candidate in the place of `auto`; as it is without one."""
    if taken is None:
        return recipe
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=taken._asdict())})


def _on_cpu(
    recipe: Recipe,
    processes: Processes,
    device: torch.device,
    report: Callable[[str], None],
    begun: Optional[EngineSection],
) -> Optional[Candidate]:
    """Our functions where all processes have them; None where what the section names is to be refused.

    A run that began without this choice, or without a compiler, goes on without our functions: their bits are others.
    """
    fault = ""
    if _names(recipe.engine, NATIVE):  # else nothing need be compiled
        faults = processes.gather(native_fault(compute_dtype(recipe.precision.compute, device)))
        fault = next(filter(None, faults), "")
    candidates = [each for each in (NATIVE, PLAIN) if _names(recipe.engine, each) and not (each == NATIVE and fault)]
    if not candidates:
        return None
    if begun is not None:
        before = PLAIN if _names(begun, PLAIN) else Candidate(begun.memory_format, begun.kernels)
        if before in candidates:
            # Worth a line only where another choice would be faster.
            if before != candidates[0]:
                report(f"engine auto: {before}, as this run has had it")
            return before
        if before == NATIVE:
            fault = f"{fault}; this run has had it, and goes on with other bits"
    reason = f"; not native: {fault}" if fault else ""
    report(f"engine auto: {candidates[0]}{reason}")
    return candidates[0]


def _fastest(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    device: torch.device,
    candidates: Sequence[Candidate],
    report: Callable[[str], None],
) -> Candidate:
    """The fastest candidate; the first one where none could be measured: training will show what is wrong."""
    names, entering = processes.together(lambda: _largest_part(recipe, batch, device))
    shape, dtype = list(entering.shape), str(compute_dtype(recipe.precision.compute, device)).split(".")[1]
    file = cache.place(
        "engine",
        *(recipe.model.model_dump(mode="json"), names, shape, dtype, recipe.parallel.recompute),
        *(recipe.engine.compile, recipe.engine.compile_mode, list(map(str, candidates)), name_of(device)),
        *cache.programs(),
    )
    by_rank, origin = processes.gather(_read(file, candidates)), f"measured before ({file})"
    if None in by_rank:
        set_switches(False)
        own = [_measured(recipe, names, entering, device, candidate) for candidate in candidates]
        if processes.topology.local_rank == 0:
            _write(file, candidates, own)
        by_rank, origin = processes.gather(own), "measured"
    blocks = "" if entering.dtype == torch.uint8 else f"{names[0]} to {names[-1]}, "
    place = f"{shape[0]} x {shape[2]} x {shape[3]} in {dtype} on {name_of(device)}"
    report(f"engine auto: {blocks}{place}, {origin}")
    slowest = {candidate: max(outcomes) for candidate, outcomes in zip(candidates, zip(*by_rank))}
    for candidate, (seconds, fault) in slowest.items():
        report(f"  {candidate!s:24}  {f'left out: {fault}' if fault else f'{1e3 * seconds:.4g} ms'}")
    taken = min(candidates, key=lambda candidate: slowest[candidate][0])
    report(f"  taken: {taken}")
    return taken


def _largest_part(recipe: Recipe, batch: Batch, device: torch.device) -> Tuple[List[str], Boundary]:
    """Blocks of the part with most multiply-adds, and what enters it. Cuts by measured times are taken as balanced."""
    with torch.device("meta"):
        model = build(recipe.model, recipe.run.seed)
    size = max(training_image_sizes(recipe))
    parts = cuts.counted(cuts.Blocks(model, recipe.model, recipe.parallel, batch)).names
    work = shapes.blocks(recipe.model, size)
    images = Boundary((batch.micro, 3, size, size), torch.uint8)
    entering = boundaries(parts, model, images, compute_dtype(recipe.precision.compute, device))
    return max(zip(parts, entering), key=lambda part: sum(work[name].multiply_adds for name in part[0]))


def _measured(
    recipe: Recipe, names: Sequence[str], entering: Boundary, device: torch.device, candidate: Candidate
) -> Outcome:
    try:
        return _seconds(recipe, names, entering, device, candidate), ""
    except Exception as error:  # memory, a compiler, a kernel: whatever is wrong with one candidate, others may work
        return math.inf, first_line(error)
    finally:
        torch.cuda.empty_cache()


def _seconds(
    recipe: Recipe, names: Sequence[str], entering: Boundary, device: torch.device, candidate: Candidate
) -> float:
    """The median of some micro batches, of random pixels in the loader's layout, or of activations."""
    model = build(recipe.model, recipe.run.seed).to(device, compute_dtype(recipe.precision.compute, device))
    memory_format = apply(model, recipe.engine.model_copy(update=candidate._asdict()), device)
    stage = Stage(
        model.part(names), model.draws, blocks_to_recompute(model.names, recipe.parallel.recompute), memory_format
    )
    if recipe.engine.compile:
        stage.compile(recipe.engine.compile_mode)
    x = torch.randint(0, 256, tuple(entering.shape), generator=torch.Generator().manual_seed(0))
    if entering.dtype == torch.uint8:
        x = x.byte().contiguous(memory_format=torch.channels_last).to(device)
    else:
        x = sent((x / 64 - 2).to(device, entering.dtype), memory_format).requires_grad_()

    def micro_batch() -> None:
        stage.zero_grad()
        output = stage(x)
        output.backward(torch.ones_like(output))

    return statistics.median(timed(micro_batch, device, _WARM_UP + _TIMED)[_WARM_UP:])


def _read(file: Path, candidates: Sequence[Candidate]) -> Optional[List[Outcome]]:
    """Outcomes in this machine's file; None without a file, or with one of other content."""
    try:
        content = read_json(file)
        found = [(float(content[str(candidate)]), "") for candidate in candidates]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(seconds > 0 for seconds, _ in found) else None


def _write(file: Path, candidates: Sequence[Candidate], outcomes: Sequence[Outcome]) -> None:
    """Write the file. With the null of a candidate that failed, `_read` measures all again."""
    found = {str(each): None if fault else seconds for each, (seconds, fault) in zip(candidates, outcomes)}
    cache.write(file, found)
