"""Options, enumerations and optimizers of PopTorch 3.4 with their parameters: names without code.

The double binds every call to them. A parameter has an annotation where PopTorch refuses arguments
of another type (by an AssertionError, mostly of OptionsDict.set in python/_options_impl.py). A
comment gives the file and line of PopTorch 3.4.
"""

import enum

# Session options that the product sets, of those that PopTorch takes
# (popart_compiler/source/SessionOptions.cpp).
SESSION_OPTIONS = {
    "accumulateOuterFragmentSettings.schedule",
    "autoRecomputation",
    "convolutionOptions",
    "defaultPrefetchBufferingDepth",
    "disableGradAccumulationTensorStreams",
    "engineOptions",
    "explicitRecomputation",
    "groupNormStridedChannelGrouping",
    "replicatedCollectivesSettings.mergeAllReduceCollectives",
    "replicatedCollectivesSettings.prepareScheduleForMergingCollectives",
    "scheduleNonWeightUpdateGradientConsumersEarly",
}


class poptorch:
    class MeanReductionStrategy(enum.IntEnum):  # python/enums.py:5
        Running, Post, PostAndLoss = range(3)

    class DataLoaderMode(enum.IntEnum):  # python/enums.py:26
        Sync, Async, AsyncRebatched = range(3)

    class OutputMode(enum.IntEnum):  # python/enums.py:65
        Final, EveryN, All, Sum, Default = range(5)

    class ReductionType(enum.IntEnum):  # python/enums.py:105
        Sum, Mean, NoReduction = range(3)

    class OverlapMode(enum.Enum):  # python/enums.py:159
        NoOverlap = "no_overlap"
        OverlapAccumulationLoop = "overlap_accumulation_loop"
        OverlapDeviceIterationLoop = "overlap_device_iteration_loop"

    class Error(RuntimeError):  # python/poptorch.cpp:1249
        pass

    class Options:  # python/options.py:1146
        def deviceIterations(self, device_iterations: int): ...  # python/options.py:1396
        def enableExecutableCaching(self, path): ...  # python/options.py:1552
        def enableProfiling(self, profile_dir=None): ...  # python/options.py:1797
        def enableStableNorm(self, enabled): ...  # python/options.py:1751
        def enableSyntheticData(self, enabled): ...  # python/options.py:1763
        def outputMode(
            self, output_mode: enum.IntEnum, output_return_period=None
        ): ...  # python/options.py:1692
        def randomSeed(self, random_seed: int): ...  # python/options.py:1740
        def replicationFactor(self, replication_factor: int): ...  # python/options.py:1459
        def setAvailableMemoryProportion(
            self, available_memory_proportion: dict
        ): ...  # python/options.py:1426
        def setExecutionStrategy(self, strategy): ...  # python/options.py:1408

        class Precision:  # python/options.py:1361
            def enableStochasticRounding(self, enabled): ...  # python/options.py:142
            def setPartialsType(self, dtype): ...  # python/options.py:165

        class Training:  # python/options.py:1369
            def accumulationAndReplicationReductionType(
                self, reduction_type
            ): ...  # python/options.py:278
            def gradientAccumulation(self, gradient_accumulation: int): ...  # python/options.py:216
            def setAutomaticLossScaling(self, enabled): ...  # python/options.py:336

            def setMeanAccumulationAndReplicationReductionStrategy(
                self, mean_reduction_strategy
            ): ...  # python/options.py:307

        class TensorLocations:  # python/options.py:1337
            def numIOTiles(self, num_tiles: int): ...  # python/options.py:600
            def setOptimizerLocation(self, location): ...  # python/options.py:647

        class _Popart:  # python/options.py:1376
            def set(self, key, value): ...  # python/options.py:416

    class TensorLocationSettings:  # python/options.py:515
        def useOnChipStorage(self, use: bool = True): ...  # python/options.py:539
        def useReplicatedTensorSharding(self, use: bool = True): ...  # python/options.py:555

    class PipelinedExecution:  # python/options.py:806
        def __init__(self, *args): ...

    class ShardedExecution:  # python/options.py:924
        def __init__(self, *args): ...

    class AsynchronousDataAccessor:  # python/__init__.py:526
        def __init__(
            self, dataset, buffer_size=3, miss_sleep_time_in_ms=0.1, load_indefinitely=True,
            early_preload=False, sharing_strategy=3, rebatched_size=None,
        ): ...  # fmt: skip

    class optim:
        class SGD:  # python/optim.py:108
            def __init__(
                self, params, lr, momentum=None, dampening=None, weight_decay=None, nesterov=None,
                maximize=None, foreach=None, differentiable=None, loss_scaling=None, velocity_scaling=None,
                use_combined_accum=None, accum_type=None, velocity_accum_type=None, max_grad_norm=None,
            ): ...  # fmt: skip

        class RMSprop:  # python/optim.py:545
            def __init__(
                self, params, lr=None, alpha=None, eps=None, weight_decay=None, momentum=None, centered=None,
                foreach=None, maximize=None, differentiable=None, loss_scaling=None, accum_type=None,
                first_order_momentum_accum_type=None, second_order_momentum_accum_type=None,
                use_tf_variant=None,
            ): ...  # fmt: skip

        class LAMB:  # python/optim.py:666
            def __init__(
                self, params, lr=None, betas=None, eps=None, weight_decay=None, bias_correction=None,
                loss_scaling=None, max_weight_norm=None, accum_type=None, first_order_momentum_accum_type=None,
                second_order_momentum_accum_type=None,
            ): ...  # fmt: skip
