"""A stand-in for PopTorch 3.4 that trains on the CPU: its signatures, its refusals, its results; none of its code.

It has what the product uses. Each module names the files of PopTorch and PopART that it follows.
"""

from signatures import poptorch as _table

from . import optim
from .executor import PoplarExecutor, inferenceModel, trainingModel
from .loader import DataLoader
from .ops import BeginBlock, identity_loss, recomputationCheckpoint, set_overlap_for_input, set_overlap_for_output
from .options import Options, TensorLocationSettings

DataLoaderMode = _table.DataLoaderMode
Error = _table.Error
MeanReductionStrategy = _table.MeanReductionStrategy
OutputMode = _table.OutputMode
OverlapMode = _table.OverlapMode
PipelinedExecution = _table.PipelinedExecution
ReductionType = _table.ReductionType
ShardedExecution = _table.ShardedExecution

__version__ = "3.4.0-double"

__all__ = [
    "BeginBlock", "DataLoader", "DataLoaderMode", "Error", "MeanReductionStrategy", "Options", "OutputMode",
    "OverlapMode", "PipelinedExecution", "PoplarExecutor", "ReductionType", "ShardedExecution",
    "TensorLocationSettings", "identity_loss", "inferenceModel", "optim", "recomputationCheckpoint",
    "set_overlap_for_input", "set_overlap_for_output", "trainingModel",
]  # fmt: skip
