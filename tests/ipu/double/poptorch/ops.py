"""Blocks, loss marks, checkpoints and overlap marks (PopTorch 3.4, python/ops.py)."""

import torch

from . import tracing
from .errors import python_error


def _each_tensor(structure, function, kind):
    """The same nest of tuples, lists and dicts with `function` applied to its tensors."""
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(_each_tensor(item, function, kind) for item in structure)
    if isinstance(structure, dict):
        return {key: _each_tensor(item, function, kind) for key, item in structure.items()}
    raise python_error(f"You may only set overlap for torch.tensor {kind}. {type(structure)} is not supported.")


def set_overlap_for_input(input_tensors, mode):
    """Marks inputs to be copied to I/O tiles while others are computed; returns them."""
    return _each_tensor(input_tensors, lambda tensor: tracing.overlap(tensor, mode), "inputs")


def set_overlap_for_output(output_tensors, mode):
    """Marks outputs to be copied from I/O tiles while others are computed; returns them."""
    return _each_tensor(output_tensors, lambda tensor: tracing.overlap(tensor, mode), "outputs")


def recomputationCheckpoint(*tensors):
    """Keeps tensors from the forward to the backward pass; returns them (a tuple where there are several)."""
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        return type(tensors[0])(recomputationCheckpoint(*tensors[0]))
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ValueError("All inputs must be tensors")
    kept = [tensor.view_as(tensor) for tensor in tensors]
    return kept[0] if len(kept) == 1 else tuple(kept)


def identity_loss(x, reduction):
    """Marks x, reduced by "sum", "mean" or "none", as the loss that is differentiated."""
    if reduction == "sum":
        return tracing.mark_loss(x.sum())
    if reduction == "mean":
        return tracing.mark_loss(x.mean())
    assert reduction == "none", "Unsupported reduction type!"
    return tracing.mark_loss(x.view_as(x))


class Block(torch.nn.Module):
    """with Block(user_id, ipu_id): what runs inside belongs to that block. Does nothing outside of tracing."""

    _stages_manager = None

    @staticmethod
    def useAutoId():
        """Numbers the blocks without user_id from 0 again."""
        if Block._stages_manager is not None:
            Block._stages_manager.restart_ids()

    @staticmethod
    def start(user_id=None, ipu_id=None):
        """Begins a block that lasts until the next one."""
        if Block._stages_manager is not None:
            tracing.begin_block(*Block._stages_manager.begin(user_id, ipu_id))

    def __init__(self, user_id=None, ipu_id=None):
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __enter__(self):
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, type, value, traceback):
        if Block._stages_manager is not None:
            tracing.end_block()


class _BlockHook:
    """Forward pre-hook that begins a block; its user_id, once numbered, stays."""

    def __init__(self, user_id, ipu_id):
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module, inputs):
        if Block._stages_manager is not None:
            if self._user_id is None:
                self._user_id = Block._stages_manager.next_id()
            Block.start(self._user_id, self._ipu_id)

    def __repr__(self):
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def BeginBlock(layer_to_call, user_id=None, ipu_id=None):
    """Makes a module begin a block whenever it is called; changes the module in place and returns it."""
    if not isinstance(layer_to_call, torch.nn.Module):
        raise python_error("module is not an instance of torch.nn.Module or function.")
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise python_error("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call
