"""Stages and the two execution strategies that the product uses (PopTorch 3.4, python/options.py)."""

from . import enums, ops


class Stage:
    """One or more blocks, by user_id, that share a stage; ipu(n) places it."""

    def __init__(self, *block_ids):
        assert all(isinstance(block, str) for block in block_ids), (
            f"Block IDs are supposed to be strings but got {block_ids}"
        )
        self._blocks = block_ids
        self._stage_id = -1
        self._ipu = None

    @property
    def blocks(self):
        """The user_ids."""
        return self._blocks

    def ipu(self, ipu):
        """Sets the IPU of the stage."""
        assert isinstance(ipu, int)
        self._ipu = ipu
        return self


class _Stages:
    """Gives each block that a traced forward enters its stage, and keeps the order in which IPUs were entered."""

    def __init__(self, by_block, auto_stage):
        self._by_block = by_block
        self._named = bool(by_block)
        self._auto_stage = auto_stage
        self._next_stage = 1
        self._next_id = 0

    def next_id(self):
        """The user_id of a block that has none: 0, 1, ... as text."""
        self._next_id += 1
        return str(self._next_id - 1)

    def restart_ids(self):
        """Block.useAutoId."""
        self._next_id = 0

    def begin(self, user_id, ipu_id):
        """(stage, IPU) of the block that starts."""
        user_id = user_id or self.next_id()
        stage = self._stage(user_id, ipu_id)
        ipu = stage._ipu if stage._ipu is not None else ipu_id
        return stage._stage_id, stage._stage_id if ipu is None else ipu

    def _stage(self, user_id, ipu_id):
        if user_id not in self._by_block:
            assert not self._named, f"Unknown Block '{user_id}' list of expected Blocks: {list(self._by_block.keys())}"
            self._by_block[user_id] = self._new_stage(user_id, ipu_id)
        return self._by_block[user_id]

    def _new_stage(self, user_id, ipu_id):
        stage = Stage(user_id)
        if self._auto_stage == enums.AutoStage.SameAsIpu:
            assert ipu_id is not None, (
                f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block {user_id}"
            )
            stage._stage_id = ipu_id
        else:
            stage._stage_id = self._next_stage
            self._next_stage += 1
        return stage


class PipelinedExecution:
    """Stages work at the same time on successive micro batches.

    Args:
        args: an AutoStage (default SameAsIpu), or stages: Stage, user_id, or a list of user_ids each.
    """

    _execution_mode = 0

    def __init__(self, *args):
        self._auto_stage = enums.AutoStage.SameAsIpu
        self._by_block = {}
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            self._auto_stage = args[0]
            return
        for number, argument in enumerate(args):
            self._add_stage(number, argument)

    def _add_stage(self, number, argument):
        if isinstance(argument, Stage):
            stage = argument
        elif isinstance(argument, str):
            stage = Stage(argument)
        else:
            stage = Stage(*argument)
        stage._stage_id = number
        for block in stage.blocks:
            assert block not in self._by_block, f"{block} associated with more than one stage"
            self._by_block[block] = stage

    def stage(self, block_id):
        """The Stage that a block belongs to."""
        assert block_id in self._by_block, f"Unknown block {block_id}"
        return self._by_block[block_id]

    def onStartTracing(self):
        """From here on blocks take effect."""
        ops.Block._stages_manager = _Stages(dict(self._by_block), self._auto_stage)

    def onEndTracing(self):
        """From here on blocks do nothing."""
        ops.Block._stages_manager = None

    def backendOptions(self):
        """What the compiler is told."""
        return {"execution_mode": self._execution_mode}


class ShardedExecution(PipelinedExecution):
    """Stages work one after the other on the same micro batch."""

    _execution_mode = 1
