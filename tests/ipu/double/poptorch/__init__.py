"""A stand-in for PopTorch 3.4 that trains on the CPU: its signatures, its refusals, its results;
none of its code.

It has what the product uses. Each module names the files of PopTorch and PopART that it follows.
"""

from signatures import poptorch as _table

from . import optim  # noqa: F401
from .executor import (  # noqa: F401
    BeginBlock,
    PoplarExecutor,
    identity_loss,
    inferenceModel,
    recomputationCheckpoint,
    set_overlap_for_input,
    set_overlap_for_output,
    trainingModel,
)
from .loader import DataLoader  # noqa: F401
from .options import Options, TensorLocationSettings  # noqa: F401

for _name in (
    "DataLoaderMode",
    "Error",
    "MeanReductionStrategy",
    "OutputMode",
    "OverlapMode",
    "PipelinedExecution",
    "ReductionType",
    "ShardedExecution",
):
    globals()[_name] = getattr(_table, _name)

__version__ = "3.4.0-double"
