"""What IPUs refuse: rules that are checked before anything is compiled, which takes many minutes.

Facts are those of PopTorch 3.4 and PopART 3.4; docs/ipu.md names the files.
"""

from __future__ import annotations

import json
from typing import Iterable, Tuple

from common.errors import ConfigError
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection
from recipe.ipu.optimizers import optimizer
from recipe.ipu.poprun import is_power


def compute_dtype(recipe: Recipe) -> str:
    """dtype of activations and working weights: float16 unless the recipe says otherwise."""
    return "float16" if recipe.precision.compute == "auto" else recipe.precision.compute


def pipelined(recipe: Recipe) -> bool:
    """Whether the stages work at the same time, on successive micro batches."""
    return recipe.parallel.stages > 1 and recipe.parallel.schedule != "sharded"


# The key, the values that IPUs take (the first is the remedy), and why.
_POPLAR = "Poplar compiles with layouts and kernels of its own"
_TAKEN = (
    ("optimizer.clip_norm", (None,), "PopTorch's LAMB and RMSprop cannot clip gradients"),
    ("average.step_decay", (None,), "the weights would leave the device after every update (epoch_decay works)"),
    ("exchange.method", ("dense", "auto"), "PopART exchanges gradients itself, completely and in float32"),
    ("exchange.delay", (0,), "PopART makes each update from the gradients of its own step"),
    ("exchange.order", ("fast",), "PopART decides in which order gradients are added"),
    ("batch.schedule", (None,), "the accumulation is compiled into the program"),
    ("data.bad_images", ("error",), "a compiled program takes whole micro batches only"),
    ("data.reader", ("torch",), "PopTorch's loader reads by worker processes of its own"),
    ("precision.compute", ("float16", "float32", "auto"), "the IPU has float16 and float32 only"),
    ("parallel.schedule", ("1f1b", "gpipe", "sharded"), "PopART pipelines in one way of its own, one stage an IPU"),
    ("log.trace", (0,), "the host does not see what IPUs do when (ipu.profile=FOLDER writes Poplar's own profile)"),
    ("log.profile", (0,), "torch.profiler does not see what IPUs do (ipu.profile=FOLDER writes Poplar's own profile)"),
    ("log.memory", (False,), "there are snapshots of CUDA's memory only (ipu.profile=FOLDER shows an IPU's)"),
    *((f"engine.{key}", (default,), _POPLAR) for key, default in EngineSection()),
)


def check(recipe: Recipe, batch: Batch) -> None:
    """Check a recipe against all rules. Raises ConfigError: one line with key, reason and remedy."""
    optimizer(recipe)
    for key, taken, reason in _TAKEN:
        section, _, name = key.partition(".")
        found = getattr(getattr(recipe, section), name, taken[0])
        if found not in taken:
            remedy = taken[0] if isinstance(taken[0], str) else json.dumps(taken[0])
            raise ConfigError(f"{key} {found} on IPUs: {reason}; use {key}={remedy}")
    for broken, key, reason in _rules(recipe, batch):
        if broken:
            raise ConfigError(f"{key} on IPUs: {reason}")
    if pipelined(recipe):
        _check_pipeline(recipe, batch)


def _rules(recipe: Recipe, batch: Batch) -> Iterable[Tuple[object, str, str]]:
    """Whether it is broken, the key with its value, the reason and the remedy of each rule about several keys."""
    precision, compute, parallel, ipu = recipe.precision, compute_dtype(recipe), recipe.parallel, recipe.ipu
    shares, iterations, stages = ipu.available_memory_proportion, ipu.evaluation_iterations, parallel.stages
    sizes = {pixels for _, pixels in recipe.data.image_sizes or ()}
    numbers = {"parallel.stages": batch.stages, "parallel.replicas": batch.replicas}
    return (
        (recipe.model.batch_statistics, "model.norm batch",
         "running statistics would be each replica's own; use model.norm=group or layer"),
        (len(sizes) > 1, f"data.image_sizes {recipe.data.image_sizes}",
         "every size is another program to compile; use one size, or a run for each (model.init_from)"),
        (compute != precision.weights, f"precision.weights {precision.weights} with precision.compute {compute}",
         f"weights live on the device, in the format that it computes in; use precision.weights={compute} or "
         f"precision.compute={precision.weights}"),
        (precision.dynamic_loss_scale and compute == "float32", "precision.dynamic_loss_scale",
         "PopART finds the scale from float16 gradients; use precision.dynamic_loss_scale=false"),
        (isinstance(parallel.recompute, list), "parallel.recompute as a list",
         "PopART recomputes all blocks or none; use parallel.recompute=true, and ipu.keep_activations for exceptions"),
        (ipu.keep_activations and not parallel.recompute, "ipu.keep_activations",
         "without recomputation all activations are kept; use parallel.recompute=true or ipu.keep_activations=[]"),
        (ipu.overlap_io and pipelined(recipe), "ipu.overlap_io with pipelined stages",
         '"Overlapped IO is not supported with poptorch.PipelinedExecution"; use ipu.overlap_io=null, or '
         "parallel.schedule=sharded, or parallel.stages=1"),
        (ipu.overlap_io and batch.accumulation == 1, "ipu.overlap_io with an accumulation of 1",
         "an update has only one micro batch; use ipu.overlap_io=null, or a smaller batch.micro"),
        (shares is not None and len(shares) not in (1, stages), f"ipu.available_memory_proportion {shares}",
         f"{stages} stages have {stages} IPUs; give one number, or one for each stage"),
        (iterations is not None and pipelined(recipe) and iterations < stages,
         f"ipu.evaluation_iterations {iterations}",
         f"a pipeline of {stages} stages needs at least {stages} batches; use ipu.evaluation_iterations=null"),
        *((not is_power(number), f"{key} {number}",
           f"IPUs come in powers of two; use {1 << (number.bit_length() - 1)} or {1 << number.bit_length()}")
          for key, number in numbers.items()),
        (ipu.io_tiles % 2, f"ipu.io_tiles {ipu.io_tiles}",
         f"PopTorch takes even numbers; use ipu.io_tiles={ipu.io_tiles + 1}"),
    )  # fmt: skip


def _check_pipeline(recipe: Recipe, batch: Batch) -> None:
    """In training a pipeline has a forward and a backward part for each stage, in one for the last."""
    stages, accumulation, replicas = batch.stages, batch.accumulation, batch.replicas
    needed = 2 * stages - 1
    if accumulation >= needed:
        return
    least = 2 if recipe.data.mixup or recipe.data.cutmix is not None else 1  # mixing needs partners
    portion = batch.global_ // replicas
    micros = [micro for micro in range(least, batch.micro) if portion % micro == 0 and portion // micro >= needed]
    remedy = f"batch.micro={micros[-1]}" if micros else f"batch.global={batch.micro * replicas * needed}"
    raise ConfigError(
        f"accumulation on IPUs: {batch.global_} = {batch.micro} micro x {accumulation} x {replicas} replicas, but a "
        f"pipeline of {stages} stages needs 2 x {stages} - 1 = {needed} micro batches or more in training; use "
        f"{remedy}{', fewer replicas' if replicas > 1 else ''} or parallel.schedule=sharded"
    )
