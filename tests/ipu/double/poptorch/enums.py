"""Members and values of PopTorch's enumerations (PopTorch 3.4, python/enums.py)."""

import enum


class MeanReductionStrategy(enum.IntEnum):
    """When a mean over micro batches and replicas divides: at each addition, or once at the end."""

    Running = 0
    Post = 1
    PostAndLoss = 2


class DataLoaderMode(enum.IntEnum):
    """Where batches are made: in this process, in another, or there from smaller ones."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class SharingStrategy(enum.IntEnum):
    """How a data set reaches the loading process."""

    SharedMemory = 0
    FileSystem = 1
    Fork = 2
    ForkServer = 3


class OutputMode(enum.IntEnum):
    """Which micro batches' outputs come back."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


class ConnectionType(enum.IntEnum):
    """When the IPUs are taken."""

    Always = 0
    OnDemand = 1
    Never = 2


class HalfFloatCastingBehavior(enum.IntEnum):
    """Deprecated: one behaviour is left."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class ReductionType(enum.IntEnum):
    """How gradients of micro batches and replicas are combined."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class OverlapMode(enum.Enum):
    """How far ahead of the computation a tensor is copied."""

    NoOverlap = "no_overlap"
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"


class AutoStage(enum.IntEnum):
    """How blocks without named stages get one."""

    SameAsIpu = 0
    AutoIncrement = 1
