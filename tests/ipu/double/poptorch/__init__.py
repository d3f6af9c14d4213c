"""A stand-in for PopTorch 3.4 that trains on the CPU: its signatures, its rules, its results; none of its code.

What the product does not use is missing. docs of each module say which part of PopTorch it follows.
"""

from . import optim
from .enums import (
    AutoStage,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    MeanReductionStrategy,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
)
from .errors import Error
from .executor import PoplarExecutor, inferenceModel, trainingModel
from .loader import AsynchronousDataAccessor, DataLoader
from .ops import (
    BeginBlock,
    Block,
    identity_loss,
    recomputationCheckpoint,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .option_groups import TensorLocationSettings
from .options import Options
from .strategy import PipelinedExecution, ShardedExecution, Stage

__version__ = "3.4.0-double"

__all__ = [
    "AsynchronousDataAccessor",
    "AutoStage",
    "BeginBlock",
    "Block",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "MeanReductionStrategy",
    "Options",
    "OutputMode",
    "OverlapMode",
    "PipelinedExecution",
    "PoplarExecutor",
    "ReductionType",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "TensorLocationSettings",
    "identity_loss",
    "inferenceModel",
    "optim",
    "recomputationCheckpoint",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "trainingModel",
]
