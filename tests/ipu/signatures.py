"""Where PopTorch, popdist and Horovod define what the product calls, and with which parameters.

Parameters are without self and annotations; an enumeration's are its members. Sources: paths with a line are files of
PopTorch 3.4 (python/..., tests/...) or, for popdist, which is not published, of Graphcore's examples at
sdk-release-3.4 (vision/...); horovod/... is Horovod 0.28.
"""

from typing import NamedTuple


class Signature(NamedTuple):
    """One name of theirs; kind: function, method, property, class, enum, exception or constant."""

    name: str
    kind: str
    parameters: str
    source: str


SIGNATURES = [
    Signature(
        "poptorch.AsynchronousDataAccessor",
        "class",
        "dataset, buffer_size=3, miss_sleep_time_in_ms=0.1, load_indefinitely=True, early_preload=False, "
        "sharing_strategy=SharingStrategy.ForkServer, rebatched_size=None",
        "python/__init__.py:526",
    ),
    Signature("poptorch.AsynchronousDataAccessor.terminate", "method", "", "python/__init__.py:620"),
    Signature("poptorch.AutoStage", "enum", "SameAsIpu=0, AutoIncrement=1", "python/enums.py:175"),
    Signature("poptorch.BeginBlock", "function", "layer_to_call, user_id=None, ipu_id=None", "python/ops.py:689"),
    Signature("poptorch.Block", "class", "user_id=None, ipu_id=None", "python/ops.py:558"),
    Signature("poptorch.Block.start", "method", "user_id=None, ipu_id=None", "python/ops.py:599"),
    Signature("poptorch.Block.useAutoId", "method", "", "python/ops.py:580"),
    Signature("poptorch.ConnectionType", "enum", "Always=0, OnDemand=1, Never=2", "python/enums.py:81"),
    Signature(
        "poptorch.DataLoader",
        "class",
        "options, dataset, batch_size=1, shuffle=None, num_workers=0, drop_last=True, "
        "persistent_workers=None, auto_distributed_partitioning=True, mode=DataLoaderMode.Sync, "
        "async_options=None, rebatched_worker_size=None, batch_sampler=None, **kwargs",
        "python/__init__.py:229",
    ),
    Signature("poptorch.DataLoader.combinedBatchSize", "property", "", "python/__init__.py:487"),
    Signature("poptorch.DataLoader.options", "property", "", "python/__init__.py:493"),
    Signature("poptorch.DataLoader.terminate", "method", "", "python/__init__.py:499"),
    Signature("poptorch.DataLoaderMode", "enum", "Sync=0, Async=1, AsyncRebatched=2", "python/enums.py:26"),
    Signature("poptorch.Error", "exception", "", "python/poptorch.cpp:1249"),
    Signature(
        "poptorch.HalfFloatCastingBehavior",
        "enum",
        "FloatDowncastToHalf=0, HalfUpcastToFloat=1, Default=2",
        "python/enums.py:94",
    ),
    Signature("poptorch.MeanReductionStrategy", "enum", "Running=0, Post=1, PostAndLoss=2", "python/enums.py:5"),
    Signature("poptorch.Options", "class", "", "python/options.py:1146"),
    Signature("poptorch.Options.Distributed", "property", "", "python/options.py:1344"),
    Signature(
        "poptorch.Options.Distributed.configureProcessId",
        "method",
        "process_id, num_processes",
        "python/options.py:492",
    ),
    Signature("poptorch.Options.Distributed.disable", "method", "", "python/options.py:468"),
    Signature("poptorch.Options.Distributed.numProcesses", "property", "", "python/options.py:510"),
    Signature("poptorch.Options.Distributed.processId", "property", "", "python/options.py:505"),
    Signature("poptorch.Options.Precision", "property", "", "python/options.py:1361"),
    Signature("poptorch.Options.Precision.enableFloatingPointExceptions", "method", "enabled", "python/options.py:118"),
    Signature("poptorch.Options.Precision.enableStochasticRounding", "method", "enabled", "python/options.py:142"),
    Signature("poptorch.Options.Precision.halfFloatCasting", "method", "half_float_casting", "python/options.py:86"),
    Signature("poptorch.Options.Precision.runningStatisticsAlwaysFloat", "method", "value", "python/options.py:101"),
    Signature("poptorch.Options.Precision.setPartialsType", "method", "dtype", "python/options.py:165"),
    Signature("poptorch.Options.TensorLocations", "property", "", "python/options.py:1337"),
    Signature("poptorch.Options.TensorLocations.numIOTiles", "method", "num_tiles", "python/options.py:600"),
    Signature("poptorch.Options.TensorLocations.setAccumulatorLocation", "method", "location", "python/options.py:657"),
    Signature("poptorch.Options.TensorLocations.setActivationLocation", "method", "location", "python/options.py:627"),
    Signature("poptorch.Options.TensorLocations.setOptimizerLocation", "method", "location", "python/options.py:647"),
    Signature("poptorch.Options.TensorLocations.setWeightLocation", "method", "location", "python/options.py:637"),
    Signature("poptorch.Options.Training", "property", "", "python/options.py:1369"),
    Signature(
        "poptorch.Options.Training.accumulationAndReplicationReductionType",
        "method",
        "reduction_type",
        "python/options.py:278",
    ),
    Signature(
        "poptorch.Options.Training.gradientAccumulation",
        "method",
        "gradient_accumulation",
        "python/options.py:216",
    ),
    Signature("poptorch.Options.Training.setAutomaticLossScaling", "method", "enabled", "python/options.py:336"),
    Signature("poptorch.Options.Training.setConvolutionDithering", "method", "enabled", "python/options.py:359"),
    Signature(
        "poptorch.Options.Training.setMeanAccumulationAndReplicationReductionStrategy",
        "method",
        "mean_reduction_strategy",
        "python/options.py:307",
    ),
    Signature("poptorch.Options._Popart", "property", "", "python/options.py:1376"),
    Signature("poptorch.Options._Popart.set", "method", "key, value", "python/options.py:416"),
    Signature("poptorch.Options._Popart.setEngineOptions", "method", "engine_options", "python/options.py:423"),
    Signature("poptorch.Options._Popart.setPatterns", "method", "patterns, level=2", "python/options.py:428"),
    Signature("poptorch.Options.clone", "method", "", "python/options.py:1895"),
    Signature("poptorch.Options.connectionType", "method", "connection_type", "python/options.py:1584"),
    Signature("poptorch.Options.defaultOutputMode", "method", "", "python/options.py:1730"),
    Signature("poptorch.Options.deviceIterations", "method", "device_iterations", "python/options.py:1396"),
    Signature("poptorch.Options.enableExecutableCaching", "method", "path", "python/options.py:1552"),
    Signature("poptorch.Options.enableProfiling", "method", "profile_dir=None", "python/options.py:1797"),
    Signature("poptorch.Options.enableStableNorm", "method", "enabled", "python/options.py:1751"),
    Signature("poptorch.Options.enableSyntheticData", "method", "enabled", "python/options.py:1763"),
    Signature("poptorch.Options.exists", "method", "option", "python/_options_impl.py:90"),
    Signature("poptorch.Options.logDir", "method", "log_dir", "python/options.py:1518"),
    Signature("poptorch.Options.modelName", "method", "name", "python/options.py:1541"),
    Signature(
        "poptorch.Options.outputMode",
        "method",
        "output_mode, output_return_period=None",
        "python/options.py:1692",
    ),
    Signature("poptorch.Options.randomSeed", "method", "random_seed", "python/options.py:1740"),
    Signature("poptorch.Options.replicationFactor", "method", "replication_factor", "python/options.py:1459"),
    Signature(
        "poptorch.Options.setAvailableMemoryProportion",
        "method",
        "available_memory_proportion",
        "python/options.py:1426",
    ),
    Signature("poptorch.Options.setExecutionStrategy", "method", "strategy", "python/options.py:1408"),
    Signature("poptorch.Options.showCompilationProgressBar", "method", "show=True", "python/options.py:1268"),
    Signature("poptorch.Options.toDict", "method", "", "python/options.py:1871"),
    Signature("poptorch.OutputMode", "enum", "Final=0, EveryN=1, All=2, Sum=3, Default=4", "python/enums.py:65"),
    Signature(
        "poptorch.OverlapMode",
        "enum",
        "NoOverlap='no_overlap', OverlapAccumulationLoop='overlap_accumulation_loop', "
        "OverlapDeviceIterationLoop='overlap_device_iteration_loop'",
        "python/enums.py:159",
    ),
    Signature("poptorch.PipelinedExecution", "class", "*args", "python/options.py:806"),
    Signature(
        "poptorch.PoplarExecutor",
        "class",
        "model, options, training, poptorch_version, optimizer=None, user_model=None",
        "python/_poplar_executor.py:115",
    ),
    Signature("poptorch.PoplarExecutor.__call__", "method", "*args, **kwargs", "python/_poplar_executor.py:1223"),
    Signature("poptorch.PoplarExecutor.attachToDevice", "method", "", "python/_poplar_executor.py:1571"),
    Signature("poptorch.PoplarExecutor.compile", "method", "*args, **kwargs", "python/_poplar_executor.py:1026"),
    Signature("poptorch.PoplarExecutor.copyWeightsToDevice", "method", "", "python/_poplar_executor.py:577"),
    Signature("poptorch.PoplarExecutor.copyWeightsToHost", "method", "", "python/_poplar_executor.py:555"),
    Signature("poptorch.PoplarExecutor.copyWeightsToHostIfNeeded", "method", "", "python/_poplar_executor.py:543"),
    Signature("poptorch.PoplarExecutor.destroy", "method", "", "python/_poplar_executor.py:1482"),
    Signature("poptorch.PoplarExecutor.detachFromDevice", "method", "", "python/_poplar_executor.py:1553"),
    Signature("poptorch.PoplarExecutor.isAttachedToDevice", "method", "", "python/_poplar_executor.py:1539"),
    Signature("poptorch.PoplarExecutor.isCompiled", "method", "", "python/_poplar_executor.py:1548"),
    Signature(
        "poptorch.PoplarExecutor.load_state_dict",
        "method",
        "state_dict, strict=True",
        "python/_poplar_executor.py:458",
    ),
    Signature("poptorch.PoplarExecutor.model", "property", "", "python/_poplar_executor.py:512"),
    Signature("poptorch.PoplarExecutor.options", "property", "", "python/_poplar_executor.py:517"),
    Signature("poptorch.PoplarExecutor.setOptimizer", "method", "optimizer", "python/_poplar_executor.py:631"),
    Signature("poptorch.ReductionType", "enum", "Sum=0, Mean=1, NoReduction=2", "python/enums.py:105"),
    Signature("poptorch.ShardedExecution", "class", "*args", "python/options.py:924"),
    Signature(
        "poptorch.SharingStrategy",
        "enum",
        "SharedMemory=0, FileSystem=1, Fork=2, ForkServer=3",
        "python/enums.py:46",
    ),
    Signature("poptorch.Stage", "class", "*block_ids", "python/options.py:672"),
    Signature("poptorch.Stage.blocks", "property", "", "python/options.py:693"),
    Signature("poptorch.Stage.ipu", "method", "ipu", "python/options.py:697"),
    Signature("poptorch.TensorLocationSettings", "class", "**default_values", "python/options.py:515"),
    Signature(
        "poptorch.TensorLocationSettings.minElementsForReplicatedTensorSharding",
        "method",
        "min_elements",
        "python/options.py:531",
    ),
    Signature("poptorch.TensorLocationSettings.useIOTilesToLoad", "method", "use=True", "python/options.py:565"),
    Signature("poptorch.TensorLocationSettings.useIOTilesToStore", "method", "use=True", "python/options.py:576"),
    Signature("poptorch.TensorLocationSettings.useOnChipStorage", "method", "use=True", "python/options.py:539"),
    Signature(
        "poptorch.TensorLocationSettings.useReplicatedTensorSharding",
        "method",
        "use=True",
        "python/options.py:555",
    ),
    Signature("poptorch.identity_loss", "function", "x, reduction", "python/ops.py:1014"),
    Signature("poptorch.inferenceModel", "function", "model, options=None", "python/__init__.py:720"),
    Signature(
        "poptorch.optim.LAMB",
        "class",
        "params, lr=None, betas=None, eps=None, weight_decay=None, bias_correction=None, loss_scaling=None, "
        "max_weight_norm=None, accum_type=None, first_order_momentum_accum_type=None, "
        "second_order_momentum_accum_type=None",
        "python/optim.py:666",
    ),
    Signature("poptorch.optim.Optimizer.has_state", "method", "", "python/optim.py:103"),
    Signature("poptorch.optim.Optimizer.load_state_dict", "method", "state", "python/optim.py:81"),
    Signature("poptorch.optim.Optimizer.state_dict", "method", "", "python/optim.py:78"),
    Signature(
        "poptorch.optim.RMSprop",
        "class",
        "params, lr=None, alpha=None, eps=None, weight_decay=None, momentum=None, centered=None, "
        "foreach=None, maximize=None, differentiable=None, loss_scaling=None, accum_type=None, "
        "first_order_momentum_accum_type=None, second_order_momentum_accum_type=None, use_tf_variant=None",
        "python/optim.py:545",
    ),
    Signature(
        "poptorch.optim.SGD",
        "class",
        "params, lr, momentum=None, dampening=None, weight_decay=None, nesterov=None, maximize=None, "
        "foreach=None, differentiable=None, loss_scaling=None, velocity_scaling=None, "
        "use_combined_accum=None, accum_type=None, velocity_accum_type=None, max_grad_norm=None",
        "python/optim.py:108",
    ),
    Signature("poptorch.optim.VariableAttributes.isConstant", "method", "attr", "python/optim.py:29"),
    Signature("poptorch.optim.VariableAttributes.markAsConstant", "method", "attr", "python/optim.py:33"),
    Signature("poptorch.optim.VariableAttributes.markAsVariable", "method", "attr", "python/optim.py:42"),
    Signature("poptorch.recomputationCheckpoint", "function", "*tensors", "python/ops.py:358"),
    Signature("poptorch.set_overlap_for_input", "function", "input_tensors, mode", "python/ops.py:481"),
    Signature("poptorch.set_overlap_for_output", "function", "output_tensors, mode", "python/ops.py:514"),
    Signature("poptorch.trainingModel", "function", "model, options=None, optimizer=None", "python/__init__.py:660"),
    Signature("horovod.torch.allgather", "function", "tensor, name=None, process_set=None", "horovod/torch/mpi_ops.py"),
    Signature("horovod.torch.init", "function", "", "horovod/torch/mpi_ops.py"),
    Signature("horovod.torch.rank", "function", "", "horovod/torch/mpi_ops.py"),
    Signature("horovod.torch.size", "function", "", "horovod/torch/mpi_ops.py"),
    Signature(
        "popdist.execute_on_instances",
        "function",
        "instances, func, *args, **kwargs",
        "vision/cnns/pytorch/train/train.py:100",
    ),
    Signature("popdist.getInstanceIndex", "function", "", "vision/cnns/pytorch/utils/distributed.py:26"),
    Signature("popdist.getNumInstances", "function", "", "vision/cnns/pytorch/utils/distributed.py:27"),
    Signature(
        "popdist.getNumIpusPerReplica",
        "function",
        "",
        "vision/cnns/tensorflow2/configuration/terminal_argparse.py:566",
    ),
    Signature("popdist.getNumLocalReplicas", "function", "", "vision/cnns/pytorch/utils/distributed.py:25"),
    Signature("popdist.getNumTotalReplicas", "function", "", "vision/cnns/pytorch/utils/distributed.py:21"),
    Signature("popdist.getReplicaIndexOffset", "function", "", "not seen in public code"),
    Signature("popdist.init", "function", "", "vision/cnns/pytorch/utils/distributed.py:18"),
    Signature("popdist.isPopdistEnvSet", "function", "", "vision/cnns/pytorch/utils/distributed.py:11"),
    Signature("popdist.poptorch.Options", "class", "ipus_per_replica=1", "vision/cnns/pytorch/train/train.py:295"),
    Signature(
        "popdist.poptorch.Options.Distributed.configureProcessId",
        "method",
        "process_id, num_processes=None",
        "tests/popdist_test.py:41",
    ),
    Signature("popdist.poptorch.Options.Distributed.disable", "method", "", "tests/popdist_test.py:30"),
    Signature(
        "popdist.poptorch.Options.Distributed.setEnvVarNames",
        "method",
        "var_num_processes, var_process_id",
        "tests/popdist_test.py:35",
    ),
    Signature("popdist.poptorch.Options.replicationFactor", "method", "replication_factor", "tests/popdist_test.py:25"),
    Signature("popdist.poptorch.Options.useIpuId", "method", "ipu_id", "tests/popdist_test.py:20"),
]
