"""poptorch.Options (PopTorch 3.4, python/options.py)."""

import torch

from . import enums, strategy
from .option_groups import DistributedOptions, PopartOptions, PrecisionOptions, TensorLocationOptions, TrainingOptions
from .option_values import OptionValues


class Options(OptionValues):
    """How a model is compiled and run. Methods return the options, so that they chain."""

    def __init__(self):
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            device_iterations=1,
            log_dir=".",
            output_mode=enums.OutputMode.Default.value,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always.value,
            available_memory_proportion={},
        )
        popart = PopartOptions()
        self.__dict__.update(
            _popart=popart,
            _precision=PrecisionOptions(popart),
            _training=TrainingOptions(popart),
            _distributed=DistributedOptions(),
            _tensor_locations=TensorLocationOptions(),
            _execution_strategy=strategy.PipelinedExecution(),
            _show_compilation_progress_bar=True,
        )

    @property
    def Precision(self):
        """Number formats."""
        return self._precision

    @property
    def Training(self):
        """Accumulation and reduction."""
        return self._training

    @property
    def TensorLocations(self):
        """Where tensors are kept, and I/O tiles."""
        return self._tensor_locations

    @property
    def Distributed(self):
        """This process among others."""
        return self._distributed

    @property
    def _Popart(self):
        return self._popart

    def deviceIterations(self, device_iterations):
        """Updates (training) or micro batches (inference) per call and replica."""
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor):
        """Replicas of this process."""
        self.set(replication_factor=replication_factor)
        return self

    def setExecutionStrategy(self, strategy):
        """PipelinedExecution or ShardedExecution."""
        assert hasattr(strategy, "backendOptions")
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion):
        """Part of the memory for temporaries: {"IPU0": 0.1, ...}."""
        for key in available_memory_proportion:
            assert key.startswith("IPU"), (
                "Available memory proportions are expected to be in a dictionary of "
                f'{{"IPU0": 0.5}} where the 0 in IPU is the index of the IPU. Invalid key: {key}'
            )
        proportions = {int(key[3:]): value for key, value in available_memory_proportion.items()}
        self.set(available_memory_proportion=proportions)
        return self

    def outputMode(self, output_mode, output_return_period=None):
        """Which outputs come back; the period belongs to EveryN."""
        assert isinstance(output_mode, enums.OutputMode)
        if output_mode == enums.OutputMode.EveryN:
            assert output_return_period and output_return_period > 0, (
                "EveryN anchor must have output_return_period set to valid positive integer"
            )
        self.set(output_mode=output_mode.value, output_return_period=output_return_period or 1)
        return self

    def defaultOutputMode(self):
        """Whether outputMode was left to the kind of model."""
        return self.output_mode == enums.OutputMode.Default

    def randomSeed(self, random_seed):
        """Seed of the device's generator; seeds torch's as well."""
        assert isinstance(random_seed, int)
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def enableStableNorm(self, enabled):
        """Variances about the mean: slower, more accurate."""
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled):
        """Random numbers made on the device in place of inputs; outputs, weights and state stay there."""
        self._popart.set("syntheticDataMode", 2 if enabled else 0)
        return self

    def enableExecutableCaching(self, path):
        """Folder of compiled programs; None for none."""
        if path is not None:
            self._popart.set("cachePath", path)
        self._popart.set("enableEngineCaching", path is not None)
        return self

    def enableProfiling(self, profile_dir=None):
        """Writes a report of the compilation and the run."""
        engine = self._popart.options.get("engineOptions", {})
        engine["debug.allowOutOfMemory"] = "true"
        engine["autoReport.directory"] = profile_dir or "."
        engine["autoReport.all"] = "true"
        self._popart.setEngineOptions(engine)
        return self

    def connectionType(self, connection_type):
        """When the IPUs are taken."""
        assert isinstance(connection_type, enums.ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def modelName(self, name):
        """Name in reports."""
        self.createOrSet(model_name=name)
        return self

    def logDir(self, log_dir):
        """Folder of logs."""
        self.set(log_dir=log_dir)
        return self

    def showCompilationProgressBar(self, show=True):
        """Whether compilation shows a bar."""
        self._show_compilation_progress_bar = show
        return self

    def toDict(self):
        """Everything the compiler is told; AssertionError while no output mode is picked."""
        assert not self.defaultOutputMode(), "An output mode must be picked before serialisation"
        merged = {}
        parts = (
            self._execution_strategy.backendOptions(),
            self._popart.options,
            self._values,
            self._training.toDict(),
            self._distributed.toDict(),
            self._tensor_locations.toDict(),
        )
        for part in parts:
            assert not set(merged) & set(part), "Can't merge dictionaries, they have some keys in common"
            merged.update(part)
        return merged
