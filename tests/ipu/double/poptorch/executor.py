"""The executor of a training or an inference model: when weights and state are copied, and who has the IPUs.

Source: PopTorch 3.4, python/_poplar_executor.py.
"""

import logging
import weakref

import torch
from signatures import poptorch

from .device import Device

logger = logging.getLogger("poptorch::python")

_holder = None  # of the IPUs: one executor of this process


class PoplarExecutor:
    """Called like the model, runs it on the IPUs. Made by trainingModel and inferenceModel."""

    def __init__(self, model, options, optimizer=None):
        options.frozen = True
        self.model, self.options = model, options
        self._optimizer = self._values = self._device = None
        self._host_is_stale = False
        if optimizer is not None:
            self.setOptimizer(optimizer)
            _read_before_use(weakref.ref(self), model)

    def isCompiled(self):
        """Whether there is a program."""
        return self._device is not None

    def isAttachedToDevice(self):
        """Whether this model has the IPUs."""
        return self.isCompiled() and _holder is not None and _holder() is self

    def compile(self, *args, **kwargs):
        """Makes the program from the arguments of a call, and takes the IPUs."""
        assert not kwargs, "the double takes positional arguments only"
        count = self.options.micro_batches
        assert all(len(tensor) % count == 0 for tensor in args), f"batch dimension: must be a multiple of {count}"
        self._inputs = [(tensor.shape, tensor.dtype) for tensor in args]
        micro_batch = [tensor[: len(tensor) // count] for tensor in args]
        self._device = Device(self.model, self.options, self._optimizer, self._values, micro_batch)
        self._attach()

    def __call__(self, *args, **kwargs):
        """Runs all micro batches of the arguments. Compiles where that was not done; takes the IPUs."""
        if not self.isCompiled():
            self.compile(*args, **kwargs)
        if not self.isAttachedToDevice():
            self._attach()
        if [(tensor.shape, tensor.dtype) for tensor in args] != self._inputs:
            raise poptorch.Error(
                "Shape or data type mismatch: the inputs are not those that the model was compiled for"
            )
        if not all(tensor.is_contiguous() for tensor in args):
            logger.warning("At least one input tensor is not contiguous: non-contiguous tensors will be converted.")
        self._write_state()
        outputs = self._device.run(args)
        self._host_is_stale = self._optimizer is not None
        return outputs

    def _attach(self):
        global _holder
        if _holder is not None and _holder() not in (None, self):
            raise poptorch.Error(f"Failed to acquire {self._device.ipus} IPU(s)")
        _holder = weakref.ref(self)
        self.copyWeightsToDevice()
        self._write_state()

    def detachFromDevice(self):
        """Reads the weights, then frees the IPUs."""
        global _holder
        if not self.isAttachedToDevice():
            raise poptorch.Error("Device is not attached")
        self._read_weights()
        _holder = None

    def destroy(self):
        """Frees the IPUs and forgets the program."""
        if self.isAttachedToDevice():
            self.detachFromDevice()
        self._device = None

    def copyWeightsToDevice(self):
        """From the user's model."""
        self._host_is_stale = False
        self._device.write_weights(dict(self.model.named_parameters()))

    def _read_weights(self):
        """To the user's model, if the device has changed them since the last time."""
        if self._host_is_stale:
            self._host_is_stale = False
            self._device.read_weights(dict(self.model.named_parameters()))

    def load_state_dict(self, state_dict, strict=True):
        """Into the user's model and, where it is attached, the device."""
        self._read_weights()
        result = self.model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def setOptimizer(self, optimizer):
        """Takes an optimizer, or the same one with other values. A constant of a program may not change."""
        values = [_on_device(group) for group in optimizer.param_groups]
        if self.isCompiled():
            for before, after in zip(self._values, values):
                for name in before.keys() - optimizer.variable_attrs.names:
                    if before[name] != after[name]:
                        raise poptorch.Error(f"Problem with {name}. Values are constant but do not match.")
            self._device.values = values
        this = weakref.ref(self)
        optimizer.device_state = lambda: this()._device.read_state() if this() and this().isCompiled() else None
        self._optimizer, self._values = optimizer, values
        if self.isAttachedToDevice():
            self._write_state()

    def _write_state(self):
        if self._optimizer is not None and self._optimizer.loaded is not None:
            self._device.write_state(self._optimizer.loaded["ipu_state"])
            self._optimizer.loaded = None


def _on_device(group):
    """{name: number} of a group of parameters, in the float32 of a device."""
    values = {name: value for name, value in group.items() if name != "params" and value is not None}
    return {name: tuple(map(_single, value)) if name == "betas" else _single(value) for name, value in values.items()}


def _single(value):
    return torch.tensor(float(value), dtype=torch.float32).item()


def _read_before_use(executor, model):
    """Makes `model` another class, as PopTorch does, whose state_dict reads the device first."""

    class PoptorchModel(type(model)):
        def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
            if executor() is not None:
                executor()._read_weights()
            return super().state_dict(*args, destination, prefix, keep_vars)  # by position, of which torch warns

    model.__class__ = PoptorchModel


def trainingModel(model, options=None, optimizer=None):
    """An executor that trains `model`."""
    return PoplarExecutor(model, options, optimizer)


def inferenceModel(model, options=None):
    """An executor that evaluates `model`."""
    return PoplarExecutor(model, options)
