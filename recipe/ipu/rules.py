"""What IPUs refuse: rules that are checked before anything is compiled, which takes many minutes.

Facts are those of PopTorch 3.4 and PopART 3.4; docs/ipu.md names the files.
"""

from __future__ import annotations

import json
from typing import Iterator

from common.errors import ConfigError
from recipe.config import Recipe
from recipe.division import Batch
from recipe.hardware import EngineSection
from recipe.ipu.optimizers import optimizer
from recipe.ipu.poprun import is_power
from recipe.network import Timm


def compute_dtype(recipe: Recipe) -> str:
    """Return the dtype of activations and working weights: float16 unless `recipe` says otherwise."""
    return "float16" if recipe.precision.compute == "auto" else recipe.precision.compute


def pipelined(recipe: Recipe) -> bool:
    """Return whether the stages of `recipe` work at the same time, on successive micro batches."""
    return recipe.parallel.stages > 1 and recipe.parallel.schedule != "sharded"


_POPLAR = "Poplar compiles with layouts and kernels of its own"
# The key, the values that IPUs take (the first is the remedy), and why.
_ALLOWED = (
    ("model.train", ("all",), "a compiled program updates all weights"),
    ("optimizer.clip_norm", (None,), "PopTorch's LAMB and RMSprop cannot clip gradients"),
    ("optimizer.layer_decay", (None,), "PopTorch was never tried with a rate for each block"),
    (
        "average.step_decay",
        (None,),
        "the weights would leave the device after every update (epoch_decay works)",
    ),
    (
        "exchange.method",
        ("dense", "auto"),
        "PopART exchanges gradients itself, completely and in float32",
    ),
    ("exchange.bits", (None,), "PopART exchanges gradients itself, in float32"),
    ("exchange.delay", (0,), "PopART makes each update from the gradients of its own step"),
    ("exchange.order", ("fast",), "PopART decides in which order gradients are added"),
    ("batch.schedule", (None,), "the accumulation is compiled into the program"),
    ("data.bad_images", ("error",), "a compiled program takes whole micro batches only"),
    (
        "data.loss",
        ("cross_entropy",),
        "the binary cross entropy was never compiled by PopTorch here",
    ),
    (
        "data.balance",
        ("sampling", "none"),
        "a loss with weights of classes was never compiled by PopTorch here",
    ),
    ("data.reader", ("torch",), "PopTorch's loader reads by worker processes of its own"),
    ("precision.compute", ("float16", "float32", "auto"), "the IPU has float16 and float32 only"),
    (
        "parallel.schedule",
        ("1f1b", "gpipe", "sharded"),
        "PopART pipelines in one way of its own, one stage an IPU",
    ),
    (
        "log.trace",
        (0,),
        "the host does not see what IPUs do when (ipu.profile=FOLDER writes Poplar's own profile)",
    ),
    (
        "log.profile",
        (0,),
        "torch.profiler does not see what IPUs do (ipu.profile=FOLDER writes Poplar's own profile)",
    ),
    (
        "log.memory",
        (False,),
        "there are snapshots of CUDA's memory only (ipu.profile=FOLDER shows an IPU's)",
    ),
    *((f"engine.{key}", (default,), _POPLAR) for key, default in EngineSection()),
)


def check(recipe: Recipe, batch: Batch) -> None:
    """Check a recipe against all rules.

    Args:
        recipe: with `run.device: ipu`.
        batch: how its global batch is divided.

    Raises:
        ConfigError: the first rule that is broken, in one line with key, reason and remedy.
    """
    optimizer(recipe)  # raises the error of one that has no form there
    _check_values(recipe)
    for fault in _faults(recipe, batch):
        raise ConfigError(fault)
    if pipelined(recipe):
        _check_pipeline(recipe, batch)


def _check_values(recipe: Recipe) -> None:
    """Raise ConfigError for a key with a value that IPUs never take."""
    for key, allowed, reason in _ALLOWED:
        # A key that this kind of the section does not have is as good as the first value.
        section, _, name = key.partition(".")
        value = getattr(getattr(recipe, section), name, allowed[0])
        if value not in allowed:
            remedy = allowed[0] if isinstance(allowed[0], str) else json.dumps(allowed[0])
            raise ConfigError(f"{key} {value} on IPUs: {reason}; use {key}={remedy}")


def _faults(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Yield the fault of each broken rule about several keys: key with value, reason and remedy."""
    if isinstance(recipe.model, Timm):
        reason = (
            "PopTorch was never tried with them; use an EfficientNet, as model.name=efficientnet_b4"
        )
        yield f"model.name timm on IPUs: {reason}"
    if recipe.model.batch_statistics:
        reason = "running statistics would be each replica's own; use model.norm=group or layer"
        yield f"model.norm batch on IPUs: {reason}"
    sizes = {pixels for _, pixels in recipe.data.image_sizes or ()}
    if len(sizes) > 1:
        reason = "every size is another program to compile; use one size, or a run for each (model.init_from)"
        yield f"data.image_sizes {recipe.data.image_sizes} on IPUs: {reason}"
    yield from _faults_of_precision(recipe)
    yield from _faults_of_activations(recipe)
    yield from _faults_of_transfers(recipe, batch)
    yield from _faults_of_numbers(recipe, batch)


def _faults_of_precision(recipe: Recipe) -> Iterator[str]:
    """Yield faults of number formats."""
    weights = recipe.precision.weights
    compute = compute_dtype(recipe)
    if compute != weights:
        reason = "weights live on the device, in the format that it computes in"
        remedy = f"use precision.weights={compute} or precision.compute={weights}"
        yield f"precision.weights {weights} with precision.compute {compute} on IPUs: {reason}; {remedy}"
    if recipe.precision.dynamic_loss_scale and compute == "float32":
        reason = (
            "PopART finds the scale from float16 gradients; use precision.dynamic_loss_scale=false"
        )
        yield f"precision.dynamic_loss_scale on IPUs: {reason}"
    # A checkpoint would hold momenta times a scale that nobody has stored.
    if recipe.precision.dynamic_loss_scale and recipe.optimizer.name == "sgd":
        reason = "PopTorch keeps SGD's momentum multiplied by the scale, which PopART changes"
        remedy = "use precision.dynamic_loss_scale=false"
        yield f"precision.dynamic_loss_scale with optimizer.name sgd on IPUs: {reason}; {remedy}"


def _faults_of_activations(recipe: Recipe) -> Iterator[str]:
    """Yield faults of what is kept for the backward pass."""
    recompute = recipe.parallel.recompute
    if isinstance(recompute, list):
        reason = "PopART recomputes all blocks or none"
        remedy = "use parallel.recompute=true, and ipu.keep_activations for exceptions"
        yield f"parallel.recompute as a list on IPUs: {reason}; {remedy}"
    if recipe.ipu.keep_activations and not recompute:
        reason = "without recomputation all activations are kept"
        remedy = "use parallel.recompute=true or ipu.keep_activations=[]"
        yield f"ipu.keep_activations on IPUs: {reason}; {remedy}"


def _faults_of_transfers(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Yield faults of transfers that are to overlap; null asks for that where it is possible."""
    if not recipe.ipu.overlap_io:
        return
    if pipelined(recipe):
        reason = '"Overlapped IO is not supported with poptorch.PipelinedExecution"'
        remedy = "use ipu.overlap_io=null, or parallel.schedule=sharded, or parallel.stages=1"
        yield f"ipu.overlap_io with pipelined stages on IPUs: {reason}; {remedy}"
    if batch.accumulation == 1:
        reason = (
            "an update has only one micro batch; use ipu.overlap_io=null, or a smaller batch.micro"
        )
        yield f"ipu.overlap_io with an accumulation of 1 on IPUs: {reason}"


def _faults_of_numbers(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Yield the fault of each number that PopTorch or the pod does not take."""
    ipu = recipe.ipu
    stages = recipe.parallel.stages
    # A single number stands for every IPU of a replica.
    proportions = ipu.available_memory_proportion
    if proportions is not None and len(proportions) not in (1, stages):
        reason = f"{stages} stages have {stages} IPUs; give one number, or one for each stage"
        yield f"ipu.available_memory_proportion {proportions} on IPUs: {reason}"
    # A pipeline is filled and drained in each call.
    iterations = ipu.evaluation_iterations
    if iterations is not None and pipelined(recipe) and iterations < stages:
        reason = f"a pipeline of {stages} stages needs at least {stages} batches; use ipu.evaluation_iterations=null"
        yield f"ipu.evaluation_iterations {iterations} on IPUs: {reason}"
    # Of the batch: poprun may have decided on the replicas where the recipe says auto.
    counts = {"parallel.stages": batch.stages, "parallel.replicas": batch.replicas}
    for key, value in counts.items():
        if not is_power(value):
            above = 1 << value.bit_length()
            below = above // 2
            yield f"{key} {value} on IPUs: IPUs come in powers of two; use {below} or {above}"
    if ipu.io_tiles % 2:
        reason = f"PopTorch takes even numbers; use ipu.io_tiles={ipu.io_tiles + 1}"
        yield f"ipu.io_tiles {ipu.io_tiles} on IPUs: {reason}"


def _check_pipeline(recipe: Recipe, batch: Batch) -> None:
    """Raise ConfigError for too few micro batches.

    In training a pipeline has a forward and a backward part for each stage, in one for the last.
    """
    stages = batch.stages
    replicas = batch.replicas
    needed = 2 * stages - 1
    if batch.accumulation >= needed:
        return
    # The largest micro batch that leaves enough of them, else a larger global batch.
    least = 2 if recipe.data.mixes else 1  # mixing needs partners
    images = batch.global_ // replicas
    micros = [
        micro
        for micro in range(least, batch.micro)
        if images % micro == 0 and images // micro >= needed
    ]
    remedy = (
        f"batch.micro={micros[-1]}" if micros else f"batch.global={batch.micro * replicas * needed}"
    )
    if replicas > 1:
        remedy += ", fewer replicas"
    division = f"{batch.global_} = {batch.micro} micro x {batch.accumulation} x {replicas} replicas"
    raise ConfigError(
        f"accumulation on IPUs: {division}, but a pipeline of {stages} stages needs "
        f"2 x {stages} - 1 = {needed} micro batches or more in training; use {remedy} or parallel.schedule=sharded"
    )
