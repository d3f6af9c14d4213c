"""A recipe's options for PopTorch as plain data: names stand for its objects, so plans need no Poplar SDK.

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
        return self.start + "()" + "".join(f".{name}({_listed(arguments)})" for name, arguments in self.calls)


class Setting(NamedTuple):
    """One call on PopTorch's options. call: the method, e.g. Options.Training.gradientAccumulation. arguments: plain
    values, Names and Chains. source: the keys of the recipe that it comes from, or "always: " and why. main_only: for
    the first process of a run."""

    call: str
    arguments: tuple
    source: str
    main_only: bool = False

    def __str__(self) -> str:
        return f"{self.call}({_listed(self.arguments)})"


def evaluation_iterations(recipe: Recipe) -> int:
    """Batches that a replica scores in one call: 4 x stages keep filling and draining a pipeline below a fifth."""
    return recipe.ipu.evaluation_iterations or 4 * recipe.parallel.stages


def overlaps(recipe: Recipe, batch: Batch) -> bool:
    """Whether images and results of training move while the device computes: in turns of a loop (mainloops.cpp)."""
    return recipe.ipu.overlap_io is not False and not pipelined(recipe) and batch.accumulation > 1


def evaluation_overlaps(recipe: Recipe) -> bool:
    """Whether they do in evaluation."""
    return recipe.ipu.overlap_io is not False and not pipelined(recipe) and evaluation_iterations(recipe) > 1


def notes(recipe: Recipe, replicas: int, served: int) -> Tuple[str, ...]:
    """Return lines to print at the start of a run.

    Args:
        replicas: of the run.
        served: those of this process.
    """
    ipu = recipe.ipu
    found = []
    used = replicas * recipe.parallel.stages
    if ipu.pod is not None and used < ipu.pod:
        found.append(f"{used} of {ipu.pod} IPUs are used: {replicas} replicas of {recipe.parallel.stages} (ipu.pod)")
    if ipu.synthetic_data:
        found.append("synthetic data: nothing is learned, and the weights that are saved and scored are the first ones")
    if ipu.shard_optimizer_state and served == 1:
        found.append("ipu.shard_optimizer_state has no effect with one replica an instance; start fewer instances")
    if recipe.log.noise_scale in (True, "layers"):
        found.append("log.noise_scale: not measured, as PopTorch sums gradients on the device")
    if pipelined(recipe):
        prefetched = f"pipelined stages: {ipu.prefetch_depth} micro batches are prefetched, but I/O does not overlap"
        found.append(f"{prefetched}; parallel.schedule=sharded overlaps it, with one stage at work at a time")
    return tuple(found)


def training_settings(recipe: Recipe, batch: Batch, served: int, under_poprun: bool) -> List[Setting]:
    """The options of the training model, in the order in which they are to be set. Args: served: replicas of this
    process. under_poprun: the options are popdist's, which bring the replicas along."""
    return [
        *_common(recipe, served, under_poprun, overlaps(recipe, batch)),
        *_updates(recipe, batch),
        *(_popart(name, value, f"always: {reason}") for name, value, reason in _PUBLISHED),
    ]


def evaluation_settings(recipe: Recipe, batch: Batch, served: int, under_poprun: bool) -> List[Setting]:
    """The options of the inference model, in the order in which they are to be set."""
    source = "ipu.evaluation_iterations" if recipe.ipu.evaluation_iterations else "parallel.stages"
    return [
        *_common(recipe, served, under_poprun, evaluation_overlaps(recipe)),
        Setting("Options.deviceIterations", (evaluation_iterations(recipe),), source),
        Setting("Options.outputMode", (Name("poptorch.OutputMode.All"),), "always: logits of every image"),
        Setting("Options.Precision.enableStochasticRounding", (False,), "always: scores repeat"),
    ]


def model_calls(recipe: Recipe, batch: Batch, training: bool) -> List[Setting]:
    """The calls on the model besides the options: stages, outputs that are kept, transfers that overlap."""
    parallel, mode = recipe.parallel, Name("poptorch.OverlapMode.OverlapAccumulationLoop")
    later = parallel.split if isinstance(parallel.split, list) else ["the cut by multiply-adds"] * (parallel.stages - 1)
    found = [
        Setting("poptorch.BeginBlock", (block, f"stage {number}", number), "parallel.split")
        for number, block in enumerate(["preprocess", *later])
    ]
    if training:
        found += [
            Setting("poptorch.recomputationCheckpoint", (f"output of {block}",), "ipu.keep_activations")
            for block in recipe.ipu.keep_activations
        ]
        found.append(Setting("poptorch.identity_loss", ("the loss", "none"), "always: where gradients begin"))
    if overlaps(recipe, batch) if training else evaluation_overlaps(recipe):
        found += [
            Setting("poptorch.set_overlap_for_input", ("every input", mode), "ipu.overlap_io"),
            Setting("poptorch.set_overlap_for_output", ("every output", mode), "ipu.overlap_io"),
        ]
    return found


def _common(recipe: Recipe, served: int, under_poprun: bool, overlap: bool) -> Iterator[Setting]:
    """Options that training and evaluation have in common."""
    ipu, stages = recipe.ipu, recipe.parallel.stages
    if not under_poprun:
        instead = f"under poprun popdist.poptorch.Options(ipus_per_replica={stages}) brings them"
        yield Setting("Options.replicationFactor", (served,), f"parallel.replicas; {instead}")
    strategy = Chain("poptorch.PipelinedExecution" if pipelined(recipe) else "poptorch.ShardedExecution")
    yield Setting("Options.setExecutionStrategy", (strategy,), "parallel.stages, parallel.schedule")
    if ipu.available_memory_proportion is not None:
        shares = ipu.available_memory_proportion * (stages if len(ipu.available_memory_proportion) == 1 else 1)
        by_ipu = {f"IPU{number}": share for number, share in enumerate(shares)}
        yield Setting("Options.setAvailableMemoryProportion", (by_ipu,), "ipu.available_memory_proportion")
    partials = ipu.partials or ("half" if compute_dtype(recipe) == "float16" else "float")
    source = "ipu.partials" if ipu.partials else "precision.compute"
    yield Setting("Options.Precision.setPartialsType", (Name(f"torch.{partials}"),), source)
    if ipu.convolution_dithering:
        # setPartialsType and Training.setConvolutionDithering overwrite each other's dictionary (python/options.py).
        options = {"partialsType": partials, "enableConvDithering": "true"}
        yield _popart("convolutionOptions", options, f"ipu.convolution_dithering, {source}")
    yield Setting("Options.enableStableNorm", (True,), "always: variances about the mean, as on other devices")
    yield _popart("groupNormStridedChannelGrouping", False, "always: groups of neighbouring channels, as in torch")
    if overlap:
        yield Setting("Options.TensorLocations.numIOTiles", (ipu.io_tiles,), "ipu.io_tiles, ipu.overlap_io")
    yield _popart("defaultPrefetchBufferingDepth", ipu.prefetch_depth, "ipu.prefetch_depth")
    engine = {
        "target.deterministicWorkers": "portable",
        "opt.enableMultiAccessCopies": "false",
    }
    source = "always: replicas round alike; always: less memory, as published"
    if ipu.exchange_memory_target:
        engine["opt.internalExchangeOptimisationTarget"] = ipu.exchange_memory_target
        source = f"ipu.exchange_memory_target; {source}"
    yield _popart("engineOptions", engine, source)
    if ipu.profile:  # after the engine's options, which it adds to
        yield Setting("Options.enableProfiling", (ipu.profile,), "ipu.profile", main_only=True)
    if ipu.executable_cache:
        yield Setting("Options.enableExecutableCaching", (ipu.executable_cache,), "ipu.executable_cache")
    if ipu.synthetic_data:
        yield Setting("Options.enableSyntheticData", (True,), "ipu.synthetic_data")


def _updates(recipe: Recipe, batch: Batch) -> Iterator[Setting]:
    """Accumulation, reduction, loss scale, rounding and recomputation."""
    precision, division = recipe.precision, "batch.global, batch.micro, parallel.replicas"
    recompute, source = recipe.parallel.recompute, "parallel.recompute"
    # A sum in float32, divided once. Without accumulation PopART sums the replicas' gradients in their own float16,
    # where a mean that is kept as it goes cannot overflow.
    strategy = Name("poptorch.MeanReductionStrategy." + ("Post" if batch.accumulation > 1 else "Running"))
    mean, why = Name("poptorch.ReductionType.Mean"), "always: the gradient of the mean loss over batch.global"
    stochastic = precision.weights == "float16" and precision.rounding == "stochastic"
    training = "Options.Training"
    yield Setting("Options.deviceIterations", (1,), "always: the learning rate changes with every update")
    yield Setting(f"{training}.gradientAccumulation", (batch.accumulation,), division)
    yield Setting(f"{training}.accumulationAndReplicationReductionType", (mean,), why)
    yield Setting(f"{training}.setMeanAccumulationAndReplicationReductionStrategy", (strategy,), division)
    if precision.dynamic_loss_scale:
        yield Setting(f"{training}.setAutomaticLossScaling", (True,), "precision.dynamic_loss_scale")
    yield Setting("Options.Precision.enableStochasticRounding", (stochastic,), "precision.rounding, precision.weights")
    yield Setting("Options.outputMode", (Name("poptorch.OutputMode.Sum"),), "always: loss and hits of an update")
    yield Setting("Options.randomSeed", (recipe.run.seed,), "run.seed")
    if recipe.ipu.shard_optimizer_state:
        calls = (("useOnChipStorage", (True,)), ("useReplicatedTensorSharding", (True,)))
        location = Chain("poptorch.TensorLocationSettings", calls)
        yield Setting("Options.TensorLocations.setOptimizerLocation", (location,), "ipu.shard_optimizer_state")
    if pipelined(recipe):  # which PopTorch recomputes by default
        yield _popart("autoRecomputation", _RECOMPUTE_PIPELINE if recompute else _RECOMPUTE_NONE, source)
    elif recompute:
        yield _popart("explicitRecomputation", True, source)
        kept = recipe.ipu.keep_activations
        kind, source = (_RECOMPUTE_ALL, f"{source}, ipu.keep_activations") if kept else (_RECOMPUTE_STANDARD, source)
        yield _popart("autoRecomputation", kind, source)


# PopART's RecomputationType, by number: PopTorch has no names for it (willow/include/popart/sessionoptions.hpp).
_RECOMPUTE_NONE, _RECOMPUTE_STANDARD, _RECOMPUTE_PIPELINE, _RECOMPUTE_ALL = 0, 1, 3, 4
_OVERLAP_MEMORY_OPTIMIZED = 3  # of AccumulateOuterFragmentSchedule

# Other options of Graphcore's published PyTorch recipe of this model (vision/cnns/pytorch, SDK 3.4), without its
# disableOptimizerStateTensorStreams, which would keep the momentum on the device.
_PUBLISHED = (
    ("scheduleNonWeightUpdateGradientConsumersEarly", True, "frees gradients as soon as they are added"),
    ("accumulateOuterFragmentSettings.schedule", _OVERLAP_MEMORY_OPTIMIZED, "IPUs of a replica update together"),
    ("replicatedCollectivesSettings.prepareScheduleForMergingCollectives", True, "few large sums over replicas"),
    ("replicatedCollectivesSettings.mergeAllReduceCollectives", True, "few large sums over replicas"),
    ("disableGradAccumulationTensorStreams", True, "accumulators stay on the device"),
)


def _popart(name: str, value: object, source: str) -> Setting:
    return Setting("Options._Popart.set", (name, value), source)


def shown(value: object) -> str:
    """A value as Python writes it, a Name or a Chain as the code that makes it."""
    return str(value) if isinstance(value, (Name, Chain)) else repr(value)


def _listed(arguments: tuple) -> str:
    return ", ".join(map(shown, arguments))
