"""Where PopTorch, popdist and Horovod define what the product calls, and with which parameters: names without code.

A comment gives the file and line of PopTorch 3.4 (python/..., tests/...); of Graphcore's examples at sdk-release-3.4
(vision/...) for popdist, which is not published; or of Horovod 0.28 (horovod/...).
"""

import enum

# Session options that the product sets, of those that PopTorch takes (popart_compiler/source/SessionOptions.cpp).
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
        def deviceIterations(self, device_iterations): ...  # python/options.py:1396
        def enableExecutableCaching(self, path): ...  # python/options.py:1552
        def enableProfiling(self, profile_dir=None): ...  # python/options.py:1797
        def enableStableNorm(self, enabled): ...  # python/options.py:1751
        def enableSyntheticData(self, enabled): ...  # python/options.py:1763
        def outputMode(self, output_mode, output_return_period=None): ...  # python/options.py:1692
        def randomSeed(self, random_seed): ...  # python/options.py:1740
        def replicationFactor(self, replication_factor): ...  # python/options.py:1459
        def setAvailableMemoryProportion(self, available_memory_proportion): ...  # python/options.py:1426
        def setExecutionStrategy(self, strategy): ...  # python/options.py:1408

        class Precision:  # python/options.py:1361
            def enableStochasticRounding(self, enabled): ...  # python/options.py:142
            def setPartialsType(self, dtype): ...  # python/options.py:165

        class Training:  # python/options.py:1369
            def accumulationAndReplicationReductionType(self, reduction_type): ...  # python/options.py:278
            def gradientAccumulation(self, gradient_accumulation): ...  # python/options.py:216
            def setAutomaticLossScaling(self, enabled): ...  # python/options.py:336

            def setMeanAccumulationAndReplicationReductionStrategy(
                self, mean_reduction_strategy
            ): ...  # python/options.py:307

        class TensorLocations:  # python/options.py:1337
            def numIOTiles(self, num_tiles): ...  # python/options.py:600
            def setOptimizerLocation(self, location): ...  # python/options.py:647

        class _Popart:  # python/options.py:1376
            def set(self, key, value): ...  # python/options.py:416

    class TensorLocationSettings:  # python/options.py:515
        def useOnChipStorage(self, use=True): ...  # python/options.py:539
        def useReplicatedTensorSharding(self, use=True): ...  # python/options.py:555

    class PipelinedExecution:  # python/options.py:806
        def __init__(self, *args): ...

    class ShardedExecution:  # python/options.py:924
        def __init__(self, *args): ...

    class DataLoader:  # python/__init__.py:229
        def __init__(
            self, options, dataset, batch_size=1, shuffle=None, num_workers=0, drop_last=True,
            persistent_workers=None, auto_distributed_partitioning=True, mode=0, async_options=None,
            rebatched_worker_size=None, batch_sampler=None, **kwargs,
        ): ...  # fmt: skip
        def terminate(self): ...  # python/__init__.py:499

    class AsynchronousDataAccessor:  # python/__init__.py:526
        def __init__(
            self, dataset, buffer_size=3, miss_sleep_time_in_ms=0.1, load_indefinitely=True,
            early_preload=False, sharing_strategy=3, rebatched_size=None,
        ): ...  # fmt: skip

    def trainingModel(model, options=None, optimizer=None): ...  # python/__init__.py:660
    def inferenceModel(model, options=None): ...  # python/__init__.py:720

    class PoplarExecutor:
        def __call__(self, *args, **kwargs): ...  # python/_poplar_executor.py:1223
        def compile(self, *args, **kwargs): ...  # python/_poplar_executor.py:1026
        def copyWeightsToDevice(self): ...  # python/_poplar_executor.py:577
        def destroy(self): ...  # python/_poplar_executor.py:1482
        def detachFromDevice(self): ...  # python/_poplar_executor.py:1553
        def isAttachedToDevice(self): ...  # python/_poplar_executor.py:1539
        def isCompiled(self): ...  # python/_poplar_executor.py:1548
        def load_state_dict(self, state_dict, strict=True): ...  # python/_poplar_executor.py:458
        def setOptimizer(self, optimizer): ...  # python/_poplar_executor.py:631

    class optim:
        class Optimizer:
            def load_state_dict(self, state): ...  # python/optim.py:81
            def state_dict(self): ...  # python/optim.py:78

        class VariableAttributes:
            def markAsConstant(self, attr): ...  # python/optim.py:33

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

    def BeginBlock(layer_to_call, user_id=None, ipu_id=None): ...  # python/ops.py:689
    def identity_loss(x, reduction): ...  # python/ops.py:1014
    def recomputationCheckpoint(*tensors): ...  # python/ops.py:358
    def set_overlap_for_input(input_tensors, mode): ...  # python/ops.py:481
    def set_overlap_for_output(output_tensors, mode): ...  # python/ops.py:514


class popdist:
    def init(): ...  # vision/cnns/pytorch/utils/distributed.py:18
    def getNumIpusPerReplica(): ...  # vision/cnns/tensorflow2/configuration/terminal_argparse.py:566
    def getNumLocalReplicas(): ...  # vision/cnns/pytorch/utils/distributed.py:25
    def getNumTotalReplicas(): ...  # vision/cnns/pytorch/utils/distributed.py:21

    class poptorch:
        class Options:  # vision/cnns/pytorch/train/train.py:295
            def __init__(self, ipus_per_replica=1): ...


class horovod:
    class torch:
        def allgather(tensor, name=None, process_set=None): ...  # horovod/torch/mpi_ops.py
        def init(): ...  # horovod/torch/mpi_ops.py
