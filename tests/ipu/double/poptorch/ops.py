"""Blocks, losses and overlapped tensors of a forward pass (PopTorch 3.4, python/ops.py)."""

import contextlib

from signatures import poptorch


class Marks:
    """Those of one forward pass. blocks: (user_id, number of the IPU) in the order in which they begin."""

    def __init__(self):
        self.blocks, self.losses, self.overlaps, self.kept = [], [], [], []


_current = Marks()


@contextlib.contextmanager
def collected():
    """The marks of what is computed within."""
    global _current
    _current = Marks()
    yield _current


def BeginBlock(layer_to_call, user_id=None, ipu_id=None):
    """Makes a module begin a block whenever it is called; changes the module in place and returns it."""
    layer_to_call.register_forward_pre_hook(lambda module, inputs: _current.blocks.append((user_id, ipu_id)))
    return layer_to_call


def identity_loss(x, reduction):
    """Marks the loss that is differentiated. The double knows the reduction "none" only."""
    assert reduction == "none", reduction
    _current.losses.append(x)
    return x


def recomputationCheckpoint(*tensors):
    """Keeps a tensor from the forward to the backward pass, and returns it."""
    (tensor,) = tensors
    _current.kept.append(tensor)
    return tensor


def set_overlap_for_input(input_tensors, mode):
    """Marks an input to be copied while others are computed, and returns it."""
    assert isinstance(mode, poptorch.OverlapMode)
    _current.overlaps.append(input_tensors)
    return input_tensors


def set_overlap_for_output(output_tensors, mode):
    """Likewise, an output."""
    return set_overlap_for_input(output_tensors, mode)
