"""A recipe's options for PopTorch as plain data: names stand for its objects, so plans need no
Poplar SDK.

Facts are those of PopTorch 3.4 and PopART 3.4, named by file; docs/ipu.md explains each option.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Tuple

from recipe.config import Recipe
from recipe.division import Batch
from recipe.ipu.optimizers import Name
from recipe.ipu.rules import compute_dtype, pipelined


class Chain(NamedTuple):
    """The object that the name `start` makes, after the methods `calls` with their arguments."""

    start: str
    calls: Tuple[Tuple[str, tuple], ...] = ()

    def __str__(self) -> str:
        calls = [f".{name}({_listed(arguments)})" for name, arguments in self.calls]
        return f"{self.start}(){''.join(calls)}"


class Setting(NamedTuple):
    """One call on PopTorch's options.

    call: the method, e.g. Options.Training.gradientAccumulation. arguments: plain values, Names and
    Chains. source: the keys of the recipe that it comes from, or "always: " and why. main_only: for
    the first process of a run.
    """

    call: str
    arguments: tuple
    source: str
    main_only: bool = False

    def __str__(self) -> str:
        return f"{self.call}({_listed(self.arguments)})"


# PopART's RecomputationType, by number: PopTorch has no names for it
# (willow/include/popart/sessionoptions.hpp).
_RECOMPUTE_NONE = 0
_RECOMPUTE_STANDARD = 1
_RECOMPUTE_PIPELINE = 3
_RECOMPUTE_ALL = 4
_OVERLAP_MEMORY_OPTIMIZED = 3  # of AccumulateOuterFragmentSchedule

# Other options of Graphcore's published PyTorch recipe of this model (vision/cnns/pytorch, SDK
# 3.4), without its disableOptimizerStateTensorStreams, which would keep the momentum on the device.
_PUBLISHED = (
    (
        "scheduleNonWeightUpdateGradientConsumersEarly",
        True,
        "frees gradients as soon as they are added",
    ),
    (
        "accumulateOuterFragmentSettings.schedule",
        _OVERLAP_MEMORY_OPTIMIZED,
        "IPUs of a replica update together",
    ),
    (
        "replicatedCollectivesSettings.prepareScheduleForMergingCollectives",
        True,
        "few large sums over replicas",
    ),
    (
        "replicatedCollectivesSettings.mergeAllReduceCollectives",
        True,
        "few large sums over replicas",
    ),
    ("disableGradAccumulationTensorStreams", True, "accumulators stay on the device"),
)


def evaluation_iterations(recipe: Recipe) -> int:
    """Return the batches that a replica of `recipe` scores in one call.

    By default 4 x stages: filling and draining a pipeline then takes less than a fifth of the time.
    """
    return recipe.ipu.evaluation_iterations or 4 * recipe.parallel.stages


def overlaps(recipe: Recipe, batch: Batch) -> bool:
    """Return whether images and results of training move while the device computes.

    They do so in turns of a loop over the micro batches of `batch` (mainloops.cpp).
    """
    return _overlap_allowed(recipe) and batch.accumulation > 1


def evaluation_overlaps(recipe: Recipe) -> bool:
    """Return whether images and results of `recipe` move while the device computes in evaluation."""
    return _overlap_allowed(recipe) and evaluation_iterations(recipe) > 1


def _overlap_allowed(recipe: Recipe) -> bool:
    """Return whether the recipe lets transfers overlap, and the stages can."""
    # PopTorch refuses it for a pipeline; null asks for it wherever it is possible.
    return recipe.ipu.overlap_io is not False and not pipelined(recipe)


def notes(recipe: Recipe, replicas: int, served: int) -> Tuple[str, ...]:
    """Return lines to print at the start of a run.

    Args:
        recipe: of the run.
        replicas: of the run.
        served: those of this process.
    """
    # Each is about a key that has no effect here, or less than its name promises: none is an error.
    ipu = recipe.ipu
    lines = []
    used = replicas * recipe.parallel.stages
    if ipu.pod is not None and used < ipu.pod:
        lines.append(
            f"{used} of {ipu.pod} IPUs are used: {replicas} replicas of {recipe.parallel.stages} (ipu.pod)"
        )
    if ipu.synthetic_data:
        lines.append(
            "synthetic data: nothing is learned, and the weights that are saved and scored are the first ones"
        )
    if ipu.shard_optimizer_state and served == 1:
        lines.append(
            "ipu.shard_optimizer_state has no effect with one replica an instance; start fewer instances"
        )
    if recipe.log.noise_scale in (True, "layers"):
        lines.append("log.noise_scale: not measured, as PopTorch sums gradients on the device")
    if pipelined(recipe):
        prefetched = f"pipelined stages: {ipu.prefetch_depth} micro batches are prefetched, but I/O does not overlap"
        lines.append(
            f"{prefetched}; parallel.schedule=sharded overlaps it, with one stage at work at a time"
        )
    return tuple(lines)


def training_settings(
    recipe: Recipe, batch: Batch, served: int, under_poprun: bool
) -> List[Setting]:
    """Return the options of the training model, in the order in which they are to be set.

    Args:
        recipe: of the run.
        batch: how its global batch is divided.
        served: replicas of this process.
        under_poprun: the options are popdist's, which bring the replicas along.
    """
    return [
        *_common(recipe, served, under_poprun, overlaps(recipe, batch)),
        *_updates(recipe, batch),
        *_recomputation(recipe),
        *(_popart(name, value, f"always: {reason}") for name, value, reason in _PUBLISHED),
    ]


def evaluation_settings(
    recipe: Recipe, batch: Batch, served: int, under_poprun: bool
) -> List[Setting]:
    """Return the options of the inference model, in the order in which they are to be set.

    Args:
        recipe: of the run.
        batch: without effect here; both functions are called alike.
        served: replicas of this process.
        under_poprun: the options are popdist's, which bring the replicas along.
    """
    source = "ipu.evaluation_iterations" if recipe.ipu.evaluation_iterations else "parallel.stages"
    return [
        *_common(recipe, served, under_poprun, evaluation_overlaps(recipe)),
        Setting("Options.deviceIterations", (evaluation_iterations(recipe),), source),
        Setting(
            "Options.outputMode",
            (Name("poptorch.OutputMode.All"),),
            "always: logits of every image",
        ),
        Setting("Options.Precision.enableStochasticRounding", (False,), "always: scores repeat"),
    ]


def model_calls(recipe: Recipe, batch: Batch, training: bool) -> List[Setting]:
    """Return the calls on the model besides the options: stages, outputs that are kept, transfers
    that overlap.

    Args:
        recipe: of the run.
        batch: how its global batch is divided.
        training: for the training model, else for the inference model.
    """
    parallel = recipe.parallel
    if isinstance(parallel.split, list):
        later = parallel.split
    else:
        # Where it cuts follows from the model, which a plan does not build.
        later = ["the cut by multiply-adds"] * (parallel.stages - 1)
    calls = []
    # Each block opens a stage, which lasts until the next one opens.
    for stage, block in enumerate(["preprocess", *later]):
        arguments = (block, f"stage {stage}", stage)
        calls.append(Setting("poptorch.BeginBlock", arguments, "parallel.split"))
    if training:
        for block in recipe.ipu.keep_activations:
            output = (f"output of {block}",)
            calls.append(
                Setting("poptorch.recomputationCheckpoint", output, "ipu.keep_activations")
            )
        # The model returns hits beside the loss, of which there is no gradient.
        source = "always: where gradients begin"
        calls.append(Setting("poptorch.identity_loss", ("the loss", "none"), source))
    if overlaps(recipe, batch) if training else evaluation_overlaps(recipe):
        calls += _overlap_calls()
    return calls


def _overlap_calls() -> List[Setting]:
    """Return the calls that let images and results move while the device computes."""
    mode = Name("poptorch.OverlapMode.OverlapAccumulationLoop")
    return [
        Setting("poptorch.set_overlap_for_input", ("every input", mode), "ipu.overlap_io"),
        Setting("poptorch.set_overlap_for_output", ("every output", mode), "ipu.overlap_io"),
    ]


def _common(recipe: Recipe, served: int, under_poprun: bool, overlap: bool) -> Iterator[Setting]:
    """Yield the options that training and evaluation have in common."""
    stages = recipe.parallel.stages
    # Under poprun the options know their replicas already.
    if not under_poprun:
        instead = f"under poprun popdist.poptorch.Options(ipus_per_replica={stages}) brings them"
        yield Setting("Options.replicationFactor", (served,), f"parallel.replicas; {instead}")
    strategy = Chain(
        "poptorch.PipelinedExecution" if pipelined(recipe) else "poptorch.ShardedExecution"
    )
    yield Setting("Options.setExecutionStrategy", (strategy,), "parallel.stages, parallel.schedule")
    yield from _memory(recipe)
    yield from _arithmetic(recipe)
    # Tiles that move data do not compute, so they are reserved only where transfers overlap.
    if overlap:
        tiles = (recipe.ipu.io_tiles,)
        source = "ipu.io_tiles, ipu.overlap_io"
        yield Setting("Options.TensorLocations.numIOTiles", tiles, source)
    depth = recipe.ipu.prefetch_depth
    yield _popart("defaultPrefetchBufferingDepth", depth, "ipu.prefetch_depth")
    # Before the tools, of which profiling adds to these options.
    yield _engine_options(recipe)
    yield from _tools(recipe)


def _memory(recipe: Recipe) -> Iterator[Setting]:
    """Yield the share of memory for temporary data, of each IPU of a replica."""
    proportions = recipe.ipu.available_memory_proportion
    if proportions is None:
        return
    # PopTorch's option names each IPU; the recipe's single number stands for all.
    if len(proportions) == 1:
        proportions = proportions * recipe.parallel.stages
    by_ipu = {f"IPU{index}": proportion for index, proportion in enumerate(proportions)}
    yield Setting(
        "Options.setAvailableMemoryProportion", (by_ipu,), "ipu.available_memory_proportion"
    )


def _tools(recipe: Recipe) -> Iterator[Setting]:
    """Yield profile, cache and synthetic data."""
    ipu = recipe.ipu
    if ipu.profile:  # after the engine's options, which it adds to
        yield Setting("Options.enableProfiling", (ipu.profile,), "ipu.profile", main_only=True)
    if ipu.executable_cache:
        yield Setting(
            "Options.enableExecutableCaching", (ipu.executable_cache,), "ipu.executable_cache"
        )
    if ipu.synthetic_data:
        yield Setting("Options.enableSyntheticData", (True,), "ipu.synthetic_data")


def _arithmetic(recipe: Recipe) -> Iterator[Setting]:
    """Yield what convolutions, matrix products and normalisations compute in."""
    ipu = recipe.ipu
    if ipu.partials:
        partials = ipu.partials
        source = "ipu.partials"
    else:
        partials = "half" if compute_dtype(recipe) == "float16" else "float"
        source = "precision.compute"
    yield Setting("Options.Precision.setPartialsType", (Name(f"torch.{partials}"),), source)
    if ipu.convolution_dithering:
        # setPartialsType and Training.setConvolutionDithering overwrite each other's dictionary
        # (python/options.py).
        options = {"partialsType": partials, "enableConvDithering": "true"}
        yield _popart("convolutionOptions", options, f"ipu.convolution_dithering, {source}")
    yield Setting(
        "Options.enableStableNorm", (True,), "always: variances about the mean, as on other devices"
    )
    yield _popart(
        "groupNormStridedChannelGrouping",
        False,
        "always: groups of neighbouring channels, as in torch",
    )


def _engine_options(recipe: Recipe) -> Setting:
    """Return the options of Poplar's engine, which are one dictionary."""
    options = {
        "target.deterministicWorkers": "portable",
        "opt.enableMultiAccessCopies": "false",
    }
    # A single setting, so its reasons stand in one text.
    source = "always: replicas round alike; always: less memory, as published"
    if recipe.ipu.exchange_memory_target:
        options["opt.internalExchangeOptimisationTarget"] = recipe.ipu.exchange_memory_target
        source = f"ipu.exchange_memory_target; {source}"
    return _popart("engineOptions", options, source)


def _updates(recipe: Recipe, batch: Batch) -> Iterator[Setting]:
    """Yield accumulation, loss scale, rounding, results and the place of the optimizer's state."""
    precision = recipe.precision
    reason = "always: the learning rate changes with every update"
    yield Setting("Options.deviceIterations", (1,), reason)
    yield from _sums(batch)
    # PopART then changes the scale by itself, from precision.loss_scale on.
    if precision.dynamic_loss_scale:
        source = "precision.dynamic_loss_scale"
        yield Setting("Options.Training.setAutomaticLossScaling", (True,), source)
    stochastic = precision.weights == "float16" and precision.rounding == "stochastic"
    source = "precision.rounding, precision.weights"
    yield Setting("Options.Precision.enableStochasticRounding", (stochastic,), source)
    # Summed on the device: the host would otherwise fetch results of each micro batch.
    total = Name("poptorch.OutputMode.Sum")
    yield Setting("Options.outputMode", (total,), "always: loss and hits of an update")
    yield Setting("Options.randomSeed", (recipe.run.seed,), "run.seed")
    if recipe.ipu.shard_optimizer_state:
        calls = (("useOnChipStorage", (True,)), ("useReplicatedTensorSharding", (True,)))
        location = Chain("poptorch.TensorLocationSettings", calls)
        yield Setting(
            "Options.TensorLocations.setOptimizerLocation", (location,), "ipu.shard_optimizer_state"
        )


def _sums(batch: Batch) -> Iterator[Setting]:
    """Yield how gradients of micro batches and replicas are added up."""
    training = "Options.Training"
    division = "batch.global, batch.micro, parallel.replicas"
    yield Setting(f"{training}.gradientAccumulation", (batch.accumulation,), division)
    mean = Name("poptorch.ReductionType.Mean")
    reason = "always: the gradient of the mean loss over batch.global"
    yield Setting(f"{training}.accumulationAndReplicationReductionType", (mean,), reason)
    # A sum in float32, divided once. Without accumulation PopART sums the replicas' gradients in
    # their own float16, where a mean that is kept as it goes cannot overflow.
    strategy = Name(
        "poptorch.MeanReductionStrategy." + ("Post" if batch.accumulation > 1 else "Running")
    )
    yield Setting(
        f"{training}.setMeanAccumulationAndReplicationReductionStrategy", (strategy,), division
    )


def _recomputation(recipe: Recipe) -> Iterator[Setting]:
    """Yield which activations are computed again in the backward pass."""
    source = "parallel.recompute"
    if pipelined(recipe):  # which PopTorch recomputes by default
        kind = _RECOMPUTE_PIPELINE if recipe.parallel.recompute else _RECOMPUTE_NONE
        yield _popart("autoRecomputation", kind, source)
    elif recipe.parallel.recompute:
        yield _popart("explicitRecomputation", True, source)
        if recipe.ipu.keep_activations:
            yield _popart("autoRecomputation", _RECOMPUTE_ALL, f"{source}, ipu.keep_activations")
        else:
            yield _popart("autoRecomputation", _RECOMPUTE_STANDARD, source)


def _popart(name: str, value: object, source: str) -> Setting:
    """Return a setting that PopTorch has no method for."""
    return Setting("Options._Popart.set", (name, value), source)


def shown(value: object) -> str:
    """Return a value as Python writes it, a Name or a Chain as the code that makes it."""
    return str(value) if isinstance(value, (Name, Chain)) else repr(value)


def _listed(arguments: tuple) -> str:
    """Return arguments as they stand in a call."""
    return ", ".join(map(shown, arguments))
