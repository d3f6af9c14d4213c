"""engine.memory_format and engine.kernels: their choice, and how they are put into a model.

On a GPU `auto` is chosen by time, on a CPU by rule.
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from common.errors import ConfigError, first_line
from common.json_io import read_json
from engines import ahead, cache, cuts
from engines.devices import compute_dtype, device_of, dtype_name, name_of, set_switches, timed
from engines.stage import Recompute, Stage, as_sent_between_stages, blocks_to_recompute, boundaries
from models import shapes
from models.base import BlockList
from models.families import build
from models.kernels import patching
from models.kernels.cuda import compiler
from models.meta import without_memory
from models.native import library
from models.native import patching as native
from models.preprocess import Preprocess
from parallel.processes import Processes
from parallel.work import Boundary
from recipe.batch import training_image_sizes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection
from recipe.network import Model

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# engine.kernels -> layers that get kernels of our own.
_KERNELS = {
    "torch": (),
    "group_norm": ("group_norm",),
    "group_conv": ("group_conv",),
    "triton": patching.KERNELS,
    "cuda": patching.CUDA_KERNELS,
}
# Those that `auto` measures: others have not run on a GPU.
_MEASURED_KERNELS = ("torch", "group_norm", "group_conv", "triton")
_WARM_UP = 3  # micro batches in which cuDNN searches and Triton compiles
_TIMED = 7  # micro batches
_MEASURED = ("cuda",)  # types of devices


class Candidate(NamedTuple):
    """A way to compute the model, by values of `engine.memory_format` and `engine.kernels`."""

    memory_format: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.memory_format} {self.kernels}"


NATIVE = Candidate("channels_last", "native")
PLAIN = Candidate("contiguous", "torch")
_ON_CPU = (NATIVE, PLAIN)  # a CPU's candidates, the better one first


class Outcome(NamedTuple):
    """Result of timing a candidate; of two, the slower is the larger.

    seconds: of a micro batch, forward and backward; infinity where it failed.
    fault: what failed, or "".
    """

    seconds: float
    fault: str


@dataclass
class _Part:
    """The part of a model with which candidates are timed.

    model: the whole one.
    engine: what is computed alike by all candidates.
    recompute: `parallel.recompute`.
    blocks: names of the part's blocks.
    entering: a micro batch of images, or of activations.
    device, dtype: of activations.
    """

    model: Model
    engine: EngineSection
    recompute: Recompute
    blocks: List[str]
    entering: Boundary
    device: torch.device
    dtype: torch.dtype


# Named choices --------------------------------------------------------------------------------


def check(section: EngineSection, device: torch.device, compute: torch.dtype) -> None:
    """Refuse, before training, a named choice of the section that this machine cannot do.

    Args:
        section: of the recipe.
        device: that computes.
        compute: dtype of activations.

    Raises:
        ConfigError: with the remedy.
    """
    if device.type == "cuda":
        _check_on_gpu(section.kernels)
    else:
        _check_on_cpu(section, compute)


def _check_on_gpu(kernels: str) -> None:
    if kernels == "native":
        raise ConfigError("engine.kernels native: they are for CPUs; use engine.kernels=auto")
    if kernels not in ("auto", "torch") and not patching.available():
        raise ConfigError(
            f"engine.kernels {kernels}: Triton is not installed; use engine.kernels=auto"
        )
    fault = compiler.fault() if kernels == "cuda" else ""
    if fault:
        raise ConfigError(f"engine.kernels cuda: {fault}; use engine.kernels=auto")


def _check_on_cpu(section: EngineSection, compute: torch.dtype) -> None:
    kernels = section.kernels
    if kernels not in ("auto", "native", "torch"):
        raise ConfigError(
            f"engine.kernels {kernels}: Triton's kernels need a CUDA device; use engine.kernels=auto"
        )
    # Values that no candidate of a CPU has together.
    allowed = [candidate for candidate in _ON_CPU if _allows(section, candidate)]
    if not allowed and kernels == "native":
        raise ConfigError(
            "engine.memory_format contiguous: native kernels are for channels_last; use engine.memory_format=auto"
        )
    if not allowed:
        raise ConfigError(
            "engine.memory_format channels_last: on a CPU torch's group normalisation loses digits in it; "
            "use engine.memory_format=auto"
        )
    # Our own functions, and no others, where they cannot compute.
    fault = native_fault(compute) if allowed == [NATIVE] else ""
    if fault:
        named = [key for key in Candidate._fields if getattr(section, key) != "auto"]
        value = getattr(section, named[-1])
        remedy = " ".join(f"engine.{key}=auto" for key in named)
        raise ConfigError(f"engine.{named[-1]} {value}: {fault}; use {remedy}")


def native_fault(compute: torch.dtype) -> str:
    """Return why our functions for CPUs cannot compute a model here; "" where they can.

    Args:
        compute: dtype of the model.
    """
    return "they are for float32" if compute != torch.float32 else library.fault()


def _allows(section: EngineSection, candidate: Candidate) -> bool:
    """Return whether a section, with `auto` for any value, allows a candidate."""
    values = candidate._asdict().items()
    return all(getattr(section, key) in ("auto", value) for key, value in values)


def apply(model: BlockList, section: EngineSection, device: torch.device) -> torch.memory_format:
    """Put the section's kernels and layout into a model.

    What the device does not have is left out: weights that were trained elsewhere are to be scored
    anywhere. Unresolved `auto` means contiguous and torch. Weights stay contiguous: cuDNN converts
    the few bytes of a layer at each pass.

    Args:
        model: on `device`.
        section: of the recipe.
        device: that computes.

    Returns:
        The layout, for the stages.
    """
    if device.type != "cuda":
        # A CPU's layout follows from its kernels: in channels_last only ours keep all digits.
        if section.kernels != "native" or native_fault(next(model.parameters()).dtype):
            return torch.contiguous_format
        return torch.channels_last if native.patch(model) else torch.contiguous_format
    if patching.available():
        patching.patch(model, _KERNELS.get(section.kernels, ()))
    memory_format = _FORMATS.get(section.memory_format, torch.contiguous_format)
    preprocess = model.block("preprocess")
    assert isinstance(preprocess, Preprocess), "so every family of models begins"
    preprocess.memory_format = memory_format
    return memory_format


def takes_triton(section: EngineSection) -> bool:
    """Return whether a section takes kernels of our own in Triton."""
    return bool(_KERNELS.get(section.kernels)) and patching.available()


# Automatic choices ----------------------------------------------------------------------------


def settle(
    recipe: Recipe,
    batch: Batch,
    processes: Processes,
    report: Callable[[str], None],
    begun: Optional[EngineSection] = None,
) -> Recipe:
    """Replace `auto` in the section `engine` by a choice, the same on all processes.

    On GPUs a micro batch is timed, forward and backward, through the largest stage; of each
    candidate, the slowest process counts. On CPUs nothing is timed. On IPUs there is no choice: the
    recipe stays as it is.

    Args:
        recipe: of the run.
        batch: of a step.
        processes: of the run; all of them call.
        report: takes lines for the user.
        begun: the section of a run that is resumed, whose choice is kept where this device has it.

    Returns:
        The changed recipe.

    Raises:
        ConfigError: no such device, or cut points that the model does not have.
    """
    section = recipe.engine
    if "auto" not in (section.memory_format, section.kernels) or recipe.run.device == "ipu":
        return recipe
    device = device_of(recipe.run.device, processes.topology)
    if device.type not in _MEASURED:
        dtype = compute_dtype(recipe.precision.compute, device)
        choice = _on_cpu(section, dtype, processes, report, begun)
        return recipe if choice is None else _with(recipe, choice)
    # A GPU: what repeats if that is asked for, what the run has had, or what is fastest.
    candidates = _on_gpu(section)
    before = _before(section, begun)
    if recipe.run.deterministic:
        choice = candidates[0]
        report(f"engine auto: {choice}, as run.deterministic asks")
    elif before in candidates:
        choice = before
        report(f"engine auto: {choice}, as this run has had it")
    else:
        part = processes.together(lambda: _largest_part(recipe, batch, device))
        choice = _fastest(part, candidates, processes, report)
    return _with(recipe, choice)


def _with(recipe: Recipe, choice: Candidate) -> Recipe:
    engine = recipe.engine.model_copy(update=choice._asdict())
    return recipe.model_copy(update={"engine": engine})


def _on_gpu(section: EngineSection) -> List[Candidate]:
    """Return the candidates of a GPU that a section allows."""
    # Contiguous and torch come first, which run.deterministic takes.
    formats = list(_FORMATS)
    if section.memory_format != "auto":
        formats = [section.memory_format]
    kernels = list(_MEASURED_KERNELS) if patching.available() else ["torch"]
    if section.kernels != "auto":
        kernels = [section.kernels]
    return [Candidate(*pair) for pair in itertools.product(formats, kernels)]


def _before(section: EngineSection, begun: Optional[EngineSection]) -> Candidate:
    """Return what a run has had so far, in the place of each `auto` of the section."""
    if begun is None:
        begun = section
    values = {}
    for key in Candidate._fields:
        value = getattr(section, key)
        values[key] = getattr(begun, key) if value == "auto" else value
    return Candidate(**values)


def _on_cpu(
    section: EngineSection,
    compute: torch.dtype,
    processes: Processes,
    report: Callable[[str], None],
    begun: Optional[EngineSection],
) -> Optional[Candidate]:
    """Return our functions where all processes have them, else torch's.

    None stands for a section that names what is to be refused. A run that began without this
    choice, or without a compiler, goes on without our functions: their bits are others.
    """
    # Only a section that allows our functions has them compiled.
    fault = ""
    if _allows(section, NATIVE):
        faults = processes.gather(native_fault(compute))
        fault = next(filter(None, faults), "")
    candidates = [candidate for candidate in _ON_CPU if _allows(section, candidate)]
    if fault:
        candidates.remove(NATIVE)
    if not candidates:
        return None
    # What a run had before comes first; it is worth a line only where another choice is faster.
    if begun is not None:
        before = Candidate(begun.memory_format, begun.kernels)
        if _allows(begun, PLAIN):
            before = PLAIN
        if before in candidates:
            if before != candidates[0]:
                report(f"engine auto: {before}, as this run has had it")
            return before
        if before == NATIVE:
            cause = fault or "the recipe rules it out"
            fault = f"{cause}; this run has had it, and goes on with other bits"
    reason = f"; not native: {fault}" if fault else ""
    report(f"engine auto: {candidates[0]}{reason}")
    return candidates[0]


# Times ----------------------------------------------------------------------------------------


def _fastest(
    part: _Part,
    candidates: Sequence[Candidate],
    processes: Processes,
    report: Callable[[str], None],
) -> Candidate:
    """Return the fastest candidate.

    Where none could be measured it is the first one: training will show what is wrong.
    """
    # Times of an earlier run serve where all processes have them; else all measure.
    file = _file(part, candidates)
    by_rank = processes.gather(_read(file, candidates))
    origin = f"measured before ({file})"
    if None in by_rank:
        # cuDNN searches for kernels, as it will in training.
        set_switches(False)
        outcomes = [_outcome(part, candidate) for candidate in candidates]
        # Hosts may share a home folder; of those that write at once the last one counts.
        if processes.topology.local_rank == 0:
            _write(file, candidates, outcomes)
        by_rank = processes.gather(outcomes)
        origin = "measured"
    report(f"engine auto: {_described(part)}, {origin}")
    # A step takes as long as the slowest process, and a fault counts as the longest time.
    slowest: Dict[Candidate, Outcome] = {}
    for number, candidate in enumerate(candidates):
        slowest[candidate] = max(outcomes[number] for outcomes in by_rank)
    for candidate, (seconds, fault) in slowest.items():
        time = f"left out: {fault}" if fault else f"{1e3 * seconds:.4g} ms"
        report(f"  {candidate!s:24}  {time}")
    fastest = min(candidates, key=lambda candidate: slowest[candidate].seconds)
    report(f"  taken: {fastest}")
    return fastest


def _described(part: _Part) -> str:
    shape = part.entering.shape
    blocks = ""
    if part.entering.dtype != torch.uint8:
        blocks = f"{part.blocks[0]} to {part.blocks[-1]}, "
    sizes = f"{shape[0]} x {shape[2]} x {shape[3]}"
    return f"{blocks}{sizes} in {dtype_name(part.dtype)} on {name_of(part.device)}"


def _largest_part(recipe: Recipe, batch: Batch, device: torch.device) -> _Part:
    """Return the part with most multiply-adds; cuts by measured times are taken as balanced."""
    size = max(training_image_sizes(recipe))
    dtype = compute_dtype(recipe.precision.compute, device)
    # Without memory: the whole model may not fit where a part of it is computed.
    with without_memory():
        model = build(recipe.model, 0)
    parts = cuts.counted(cuts.Blocks(model, recipe.model, recipe.parallel, batch)).names
    images = Boundary((batch.micro, 3, size, size), torch.uint8)
    entering = boundaries(parts, model, images, dtype)
    counts = shapes.blocks(recipe.model, size)
    work = [sum(counts[name].multiply_adds for name in names) for names in parts]
    # A pipeline is as fast as its slowest part.
    largest = work.index(max(work))
    return _Part(
        model=recipe.model,
        engine=recipe.engine,
        recompute=recipe.parallel.recompute,
        blocks=parts[largest],
        entering=entering[largest],
        device=device,
        dtype=dtype,
    )


def _outcome(part: _Part, candidate: Candidate) -> Outcome:
    try:
        return Outcome(_seconds(part, candidate), "")
    except Exception as error:
        # Memory, a compiler, a kernel: whatever is wrong with one candidate, others may work.
        return Outcome(math.inf, first_line(error))
    finally:
        # The next candidate gets the memory of this one.
        torch.cuda.empty_cache()


def _seconds(part: _Part, candidate: Candidate) -> float:
    """Return the median time of some micro batches, forward and backward."""
    # The part as this candidate computes it; times do not depend on the weights' seed.
    model = build(part.model, 0).to(part.device, part.dtype)
    section = part.engine.model_copy(update=candidate._asdict())
    memory_format = apply(model, section, part.device)
    recomputed = blocks_to_recompute(model.names, part.recompute)
    stage = Stage(model.part(part.blocks), model.draws, recomputed, memory_format)
    x = _random_micro_batch(part, memory_format)
    # Side by side. If that fails, the warm-up compiles, so that its lines are of no interest here.
    if takes_triton(section):
        ahead.prepared(lambda: stage.dry_pass(x))
    if section.compile:
        stage.compile(section.compile_mode)

    def compute() -> None:
        stage.zero_grad()
        output = stage(x)
        output.backward(torch.ones_like(output))

    seconds = timed(compute, part.device, _WARM_UP + _TIMED)
    return statistics.median(seconds[_WARM_UP:])


def _random_micro_batch(part: _Part, memory_format: torch.memory_format) -> torch.Tensor:
    """Return pixels in the loader's layout, or activations as stages send them."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, tuple(part.entering.shape), generator=generator)
    if part.entering.dtype == torch.uint8:
        return numbers.byte().contiguous(memory_format=torch.channels_last).to(part.device)
    # Between -2 and 2, as behind a normalisation; they get a gradient, which the stage before needs.
    activations = (numbers / 64 - 2).to(part.device, part.entering.dtype)
    return as_sent_between_stages(activations, memory_format).requires_grad_()


def _file(part: _Part, candidates: Sequence[Candidate]) -> Path:
    """Return the file of this machine's times, named by all that they depend on."""
    key = [
        part.model.model_dump(mode="json"),
        part.blocks,
        list(part.entering.shape),
        dtype_name(part.dtype),
        part.recompute,
        part.engine.compile,
        part.engine.compile_mode,
        [str(candidate) for candidate in candidates],
        name_of(part.device),
    ]
    return cache.place("engine", *key, *cache.programs())


def _read(file: Path, candidates: Sequence[Candidate]) -> Optional[List[Outcome]]:
    """Return the outcomes in a file; None without a file, or with one of other content."""
    try:
        content = read_json(file)
        seconds = [float(content[str(candidate)]) for candidate in candidates]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # NaN, too, is no time.
    if not all(value > 0 for value in seconds):
        return None
    return [Outcome(value, "") for value in seconds]


def _write(file: Path, candidates: Sequence[Candidate], outcomes: Sequence[Outcome]) -> None:
    """Write the file. With the null of a candidate that failed, `_read` measures all again."""
    content = {}
    for candidate, (seconds, fault) in zip(candidates, outcomes):
        content[str(candidate)] = None if fault else seconds
    cache.write(file, content)
