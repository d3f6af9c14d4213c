"""The groups under Options: Precision, Training, TensorLocations, Distributed, _Popart (PopTorch 3.4,
python/options.py)."""

import os
from pathlib import Path

import torch

from . import enums
from .errors import logger
from .option_values import OptionValues

# Accepted by PopART's session (PopTorch 3.4, popart_compiler/source/SessionOptions.cpp).
_SESSION_OPTIONS = frozenset(Path(__file__).with_name("session_options.txt").read_text(encoding="utf-8").split())


class PopartOptions(OptionValues):
    """Session options of PopART by name; integers where PopART has enumerations."""

    def __init__(self):
        super().__init__()
        self.__dict__["options"] = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}

    def set(self, key, value):
        """Sets one. A name that PopART lacks is refused here; PopTorch refuses it at compilation."""
        self.checkIsFrozen()
        if key not in _SESSION_OPTIONS:
            raise RuntimeError(f"Unknown session option {key}")
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options):
        """Options of Poplar's engine, text to text."""
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns, level=2):
        """Patterns of PopART's compiler to switch, over a level of them."""
        assert isinstance(level, int)
        assert isinstance(patterns, dict)
        self.checkIsFrozen()
        self.options.update(patterns_level=level, patterns=patterns)
        return self


class PrecisionOptions(OptionValues):
    """Options.Precision."""

    def __init__(self, popart):
        super().__init__()
        self.__dict__["_popart"] = popart

    def halfFloatCasting(self, half_float_casting):
        """Deprecated, without effect."""
        logger.warning("[Deprecated] Do not call options.Precision.halfFloatCasting(): HalfUpcastToFloat is the rule.")
        return self

    def runningStatisticsAlwaysFloat(self, value):
        """Deprecated, without effect."""
        if not isinstance(value, bool):
            raise ValueError("runningStatisticsAlwaysFloat needs to be set to a bool")
        logger.warning("[Deprecated] Do not call options.Precision.runningStatisticsAlwaysFloat(): False is the rule.")
        return self

    def enableFloatingPointExceptions(self, enabled):
        """Whether NaN and overflow stop the device."""
        assert isinstance(enabled, bool), "enableFloatingPointExceptions needs to be set to a bool"
        self._popart.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled):
        """Whether results in float16 are rounded up or down at random, right on average."""
        self._popart.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype):
        """Type of partial sums of matmuls and convolutions. Replaces what setConvolutionDithering set."""
        names = {torch.float32: "float", torch.float16: "half"}
        if dtype not in names:
            raise ValueError("parameter to setPartialsType should be eithertorch.float or torch.half")
        self._popart.set("partialsTypeMatMuls", names[dtype])
        self._popart.set("convolutionOptions", {"partialsType": names[dtype]})
        return self


class TrainingOptions(OptionValues):
    """Options.Training."""

    def __init__(self, popart):
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )
        self.__dict__["_popart"] = popart

    def gradientAccumulation(self, gradient_accumulation):
        """Micro batches per update and replica."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type):
        """Mean or Sum over micro batches and replicas."""
        if reduction_type not in (enums.ReductionType.Mean, enums.ReductionType.Sum):
            raise ValueError(
                "accumulationAndReplicationReductionType must be set to "
                "poptorch.ReductionType.Mean or poptorch.ReductionType.Sum"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(self, mean_reduction_strategy):
        """When a mean divides; Running is forced where the optimizer accumulates in float16."""
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled):
        """Whether the device finds the loss scale itself. The double keeps the optimizer's scale all the same."""
        self._popart.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled):
        """Spreads convolutions over tiles. Replaces what setPartialsType set for convolutions."""
        self._popart.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class DistributedOptions(OptionValues):
    """Options.Distributed."""

    def __init__(self):
        super().__init__(num_distributed_processes=1, distributed_process_id=0)
        DistributedOptions.configureProcessId(
            self, int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")), int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
        )

    def disable(self):
        """One process, whatever the environment says."""
        return self.configureProcessId(0, 1)

    def configureProcessId(self, process_id, num_processes):
        """Which process this is, of how many."""
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self):
        """This process."""
        return self.distributed_process_id

    @property
    def numProcesses(self):
        """All processes."""
        return self.num_distributed_processes


class TensorLocationSettings(OptionValues):
    """Where one kind of tensor is kept."""

    def minElementsForReplicatedTensorSharding(self, min_elements):
        """Smaller tensors are not sharded."""
        assert isinstance(min_elements, int)
        self.createOrSet(minElementsForReplicatedTensorSharding=min_elements)
        return self

    def useOnChipStorage(self, use=True):
        """On the IPU rather than in the host's or streaming memory."""
        assert isinstance(use, bool)
        self.createOrSet(onChip=int(use))
        return self

    def useReplicatedTensorSharding(self, use=True):
        """Each replica keeps a part."""
        assert isinstance(use, bool)
        self.createOrSet(useReplicatedTensorSharding=int(use))
        return self

    def useIOTilesToLoad(self, use=True):
        """Loaded through I/O tiles."""
        assert isinstance(use, bool)
        self.createOrSet(useIOTilesToLoad=int(use))
        return self

    def useIOTilesToStore(self, use=True):
        """Stored through I/O tiles."""
        assert isinstance(use, bool)
        self.createOrSet(useIOTilesToStore=int(use))
        return self


class TensorLocationOptions(OptionValues):
    """Options.TensorLocations."""

    def numIOTiles(self, num_tiles):
        """Tiles of each IPU that move data instead of computing: even, 32 to 192."""
        assert isinstance(num_tiles, int)
        assert 32 <= num_tiles <= 192 and num_tiles % 2 == 0, "numIOTiles must be an even number between 32 and 192."
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location):
        """Of activations."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location):
        """Of weights."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location):
        """Of optimizer state."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location):
        """Of gradient accumulators."""
        return self._locate("location_accumulator", location)

    def _locate(self, name, location):
        assert isinstance(location, TensorLocationSettings)
        self.createOrSet(**{name: location.toDict()})
        return self
