"""Classes of a trained model, its parameters and buffers that read the device before they are used.

PopTorch swaps the same classes (PopTorch 3.4, python/_poplar_executor.py); here parameters and buffers notice a use
by torch's functions only.
"""

import contextlib
import itertools
import weakref

import torch


def wrap(executor, model):
    """Makes `model` read from the device of `executor` wherever it is used on the host."""
    owner = weakref.ref(executor)

    def sync():
        return owner() is not None and owner().copyWeightsToHostIfNeeded()

    def synced(cls, function, types, args=(), kwargs=None):
        sync()
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    class PoptorchModel(type(model)):
        _replaces = type(model)
        copyWeightsToHostIfNeeded = staticmethod(sync)
        _host_weights_version = property(lambda self: owner()._host_weights_version if owner() else None)

        def destroy(self):
            if owner() is not None:
                owner().destroy()

        def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
            sync()
            return super().state_dict(*args, destination, prefix, keep_vars)  # by position, of which torch warns

    class PoptorchParameter(torch.nn.Parameter):
        _replaces = torch.nn.Parameter
        __torch_function__ = classmethod(synced)

    class PoptorchBuffer(torch.Tensor):
        _replaces = torch.Tensor
        __torch_function__ = classmethod(synced)

    PoptorchModel.__name__ = f"Poptorch{type(model).__name__}"
    for buffer in model.buffers():
        buffer.__class__ = PoptorchBuffer
    for parameter in model.parameters():
        parameter.__class__ = PoptorchParameter
    model.__class__ = PoptorchModel


def is_wrapped(model):
    """Whether a training executor has wrapped the model."""
    return hasattr(type(model), "_replaces")


def unwrap(model):
    """Gives the model its own classes back; returns what was changed: [(object, class)]."""
    things = itertools.chain([model], model.buffers(), model.parameters())
    changed = [(thing, type(thing)) for thing in things if hasattr(type(thing), "_replaces")]
    for thing, kind in changed:
        thing.__class__ = kind._replaces
    return changed


@contextlib.contextmanager
def unwrapped(model):
    """The model's own classes for a while."""
    changed = unwrap(model)
    try:
        yield
    finally:
        for thing, kind in changed:
            thing.__class__ = kind
