"""engine.memory_format and engine.kernels: put into a model, and the fastest of them found on this GPU."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch

from engines import cuts
from engines.devices import compute_dtype, device_of, name_of, set_determinism, synchronize
from engines.stage import Stage, blocks_to_recompute, boundaries
from models import shapes
from models.families import build
from models.kernels import patching
from models.stages import BlockList
from parallel.work import Boundary
from recipe.batch import training_image_sizes
from recipe.bounded import read_json
from recipe.config import Recipe
from recipe.division import Batch
from recipe.errors import ConfigError, first_line
from recipe.files import replacing
from recipe.hardware import EngineSection

if TYPE_CHECKING:
    from parallel.agreement import Agreement

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
# engine.kernels -> layers that get our own.
_KERNELS = {"torch": (), "group_norm": ("group_norm",), "group_conv": ("group_conv",), "triton": patching.KERNELS}
_PLAIN = {"memory_format": "contiguous", "kernels": "torch"}  # what `auto` is where nothing is measured
_WARM_UP, _TIMED = 3, 7  # micro batches; in the first ones cuDNN searches, and Triton compiles


class Candidate(NamedTuple):
    """A way to compute the model."""

    memory_format: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.memory_format} {self.kernels}"


class Outcome(NamedTuple):
    """Seconds of a micro batch, forward and backward, or why there are none."""

    seconds: Optional[float]
    fault: str = ""


class _Part(NamedTuple):
    """The part of the model that is measured: its blocks, and what enters it."""

    names: List[str]
    entering: Boundary


def check(section: EngineSection, device: torch.device) -> None:
    """Refuses, before training, what the section asks for by name and this machine cannot do. Raises ConfigError."""
    if device.type != "cuda" and section.memory_format == "channels_last":
        raise ConfigError(
            "engine.memory_format channels_last: on a CPU group normalisation loses digits in it; "
            "use engine.memory_format=auto"
        )
    if section.kernels in ("auto", "torch"):
        return
    if device.type != "cuda":
        raise ConfigError(
            f"engine.kernels {section.kernels}: Triton's kernels need a CUDA device; use engine.kernels=auto"
        )
    if not patching.available():
        raise ConfigError(f"engine.kernels {section.kernels}: Triton is not installed; use engine.kernels=auto")


def apply(model: BlockList, section: EngineSection, device: torch.device) -> torch.memory_format:
    """Puts the section's kernels and layout into a model on `device`; returns the layout, for the stages.

    Off CUDA nothing changes: weights that were trained there are to be scored anywhere. What is `auto` still is
    contiguous and torch. Weights stay contiguous in any case, as views of one flat buffer: to convert the few bytes
    of a layer's at each pass is cuDNN's business, and cheap beside activations.
    """
    if device.type != "cuda":
        return torch.contiguous_format
    if patching.available():
        patching.patch(model, _KERNELS.get(section.kernels, ()))
    memory_format = _FORMATS.get(section.memory_format, torch.contiguous_format)
    model.block("preprocess").memory_format = memory_format
    return memory_format


def resolve(
    recipe: Recipe,
    batch: Batch,
    processes: Agreement,
    say: Callable[[str], None],
    begun: Optional[EngineSection] = None,
) -> Recipe:
    """`recipe` with a choice in the place of `auto`, the same on all processes, each of which must call this.

    Measured is a micro batch, forward and backward, through the model or, of several stages, through the largest; of
    each candidate, the slowest process counts. What was measured on such a machine before is taken from a file.
    On CPUs and IPUs there is no choice: the recipe stays as it is, so that the run may still choose on a GPU.

    Args:
        begun: the section of the run that goes on, whose choice it keeps where this device has it; None for a new one.

    Raises:
        ConfigError: no such device, or cut points that the model does not have.
    """
    section = recipe.engine
    if "auto" not in (section.memory_format, section.kernels) or recipe.run.device == "ipu":
        return recipe
    device = device_of(recipe, processes.topology)
    if not _has_choice(device):
        return recipe
    if recipe.run.deterministic:
        say("engine auto: contiguous torch, as run.deterministic asks")
        return _resolved(recipe, Candidate(**_PLAIN))
    candidates = _candidates(section)
    chosen = _choice_of(section, begun)
    if chosen in candidates:
        say(f"engine auto: {chosen}, as this run has had it")
        return _resolved(recipe, chosen)
    part = processes.together(lambda: _largest_part(recipe, batch, device))
    key = _key(recipe, part, candidates, device)
    file, own = _cache_file(key), _read(key, candidates)
    known = processes.gather(own)
    before = f"measured before ({file})"
    if None in known:
        set_determinism(False)
        own = {candidate: _measured(recipe, part, device, candidate) for candidate in candidates}
        if processes.topology.local_rank == 0:
            _write(key, own)
        known, before = processes.gather(own), "measured"
    outcomes = {candidate: _slowest([each[candidate] for each in known]) for candidate in candidates}
    taken = _fastest(outcomes)
    say(f"engine auto: {_what(recipe, part, device)}, {before}")
    for candidate, outcome in outcomes.items():
        found = f"left out: {outcome.fault}" if outcome.seconds is None else f"{1e3 * outcome.seconds:.4g} ms"
        say(f"  {candidate!s:24}  {found}")
    say(f"  taken: {taken}")
    return _resolved(recipe, taken)


def _has_choice(device: torch.device) -> bool:
    return device.type == "cuda"


def _candidates(section: EngineSection) -> List[Candidate]:
    """Choices that the section leaves open, the plain one first."""
    formats = list(_FORMATS) if section.memory_format == "auto" else [section.memory_format]
    kernels = [section.kernels]
    if section.kernels == "auto":
        kernels = list(_KERNELS) if patching.available() else ["torch"]
    return [Candidate(*pair) for pair in itertools.product(formats, kernels)]


def _choice_of(section: EngineSection, begun: Optional[EngineSection]) -> Optional[Candidate]:
    """The choice of the run that goes on, where the recipe leaves it open."""
    if begun is None:
        return None
    sections = [begun if getattr(section, key) == "auto" else section for key in Candidate._fields]
    return Candidate(*map(getattr, sections, Candidate._fields))


def _resolved(recipe: Recipe, taken: Candidate) -> Recipe:
    open_keys = {key: value for key, value in taken._asdict().items() if getattr(recipe.engine, key) == "auto"}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=open_keys)})


def _largest_part(recipe: Recipe, batch: Batch, device: torch.device) -> _Part:
    """By multiply-adds. Stages that are cut by measured times are taken as if those were balanced."""
    with torch.device("meta"):
        model = build(recipe.model, recipe.run.seed)
    size = max(training_image_sizes(recipe))
    images = Boundary((batch.micro, 3, size, size), torch.uint8)
    parts = cuts.counted(model, recipe, batch)[0]
    work = shapes.blocks(recipe.model, size)
    entering = boundaries(parts, model, images, compute_dtype(recipe, device))
    largest = max(range(len(parts)), key=lambda number: sum(work[name].multiply_adds for name in parts[number]))
    return _Part(parts[largest], entering[largest])


def _measured(recipe: Recipe, part: _Part, device: torch.device, candidate: Candidate) -> Outcome:
    try:
        return Outcome(_seconds(recipe, part, device, candidate))
    except Exception as error:  # memory, a compiler, a kernel: whatever is wrong with one way, others may do
        return Outcome(None, first_line(error))
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _seconds(recipe: Recipe, part: _Part, device: torch.device, candidate: Candidate) -> float:
    """The median of some micro batches."""
    dtype = compute_dtype(recipe, device)
    model = build(recipe.model, recipe.run.seed).to(device, dtype)
    memory_format = apply(model, recipe.engine.model_copy(update=candidate._asdict()), device)
    recomputed = blocks_to_recompute(model.names, recipe.parallel.recompute)
    stage = Stage(model.part(part.names), model.draws, recomputed, memory_format)
    x = _random(part.entering, device)
    times = []
    for _ in range(_WARM_UP + _TIMED):
        synchronize(device)
        start = time.perf_counter()
        output = stage(x)
        output.backward(torch.ones_like(output))
        synchronize(device)
        times.append(time.perf_counter() - start)
        stage.zero_grad()
    return statistics.median(times[_WARM_UP:])


def _random(boundary: Boundary, device: torch.device) -> torch.Tensor:
    """Images, which are random pixels in the loader's layout, or activations."""
    generator = torch.Generator().manual_seed(0)
    shape = tuple(boundary.shape)
    if boundary.dtype == torch.uint8:
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return images.contiguous(memory_format=torch.channels_last).to(device)
    return torch.randn(shape, generator=generator).to(device, boundary.dtype).requires_grad_()


def _slowest(outcomes: Sequence[Outcome]) -> Outcome:
    """Outcome of the slowest process, on one candidate."""
    failed = [outcome for outcome in outcomes if outcome.seconds is None]
    return failed[0] if failed else max(outcomes)


def _fastest(outcomes: Dict[Candidate, Outcome]) -> Candidate:
    """The first candidate where none could be measured: training will say what is wrong."""
    seconds = {candidate: outcome.seconds for candidate, outcome in outcomes.items() if outcome.seconds is not None}
    return min(seconds, key=seconds.__getitem__) if seconds else next(iter(outcomes))


def _what(recipe: Recipe, part: _Part, device: torch.device) -> str:
    shape = part.entering.shape
    dtype = str(compute_dtype(recipe, device)).split(".")[1]
    blocks = f"{part.names[0]} to {part.names[-1]}, " if part.entering.dtype != torch.uint8 else ""
    return f"{blocks}{shape[0]} x {shape[2]} x {shape[3]} in {dtype} on {name_of(device)}"


# What was measured before -----------------------------------------------------------------------------------------


def _key(recipe: Recipe, part: _Part, candidates: Sequence[Candidate], device: torch.device) -> dict:
    """All that the times depend on."""
    return {
        "model": recipe.model.model_dump(mode="json"),
        "blocks": part.names,
        "entering": list(part.entering.shape),
        "dtype": str(compute_dtype(recipe, device)),
        "recompute": recipe.parallel.recompute,
        "candidates": [str(candidate) for candidate in candidates],
        "device": name_of(device),
        "torch": str(torch.__version__),
    }


def _cache_file(key: dict) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return Path(folder, "large-batch-efficientnet", f"engine-{digest[:16]}.json")


def _read(key: dict, candidates: Sequence[Candidate]) -> Optional[Dict[Candidate, Outcome]]:
    """Outcomes in this machine's file; None without a file, or with one of other keys."""
    try:
        content = read_json(_cache_file(key))
        found = {candidate: Outcome(float(content["seconds"][str(candidate)])) for candidate in candidates}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if content.get("key") == key and all(each.seconds > 0 for each in found.values()) else None


def _write(key: dict, found: Dict[Candidate, Outcome]) -> None:
    """Write the file, whole or not at all. With the null of a candidate that failed, `_read` measures all again."""
    file = _cache_file(key)
    seconds = {str(candidate): outcome.seconds for candidate, outcome in found.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, shared=True) as temporary:
            temporary.write_text(json.dumps({"key": key, "seconds": seconds}, indent=1) + "\n")
    except OSError:
        return  # the next run measures again
