"""The executor of a training or an inference model, and when weights and state are copied.

Source: PopTorch 3.4, python/_poplar_executor.py.
"""

import copy
import itertools
from types import MethodType

import torch

from . import attributes, enums, optim, tracing, wrapping
from .device import Executable
from .errors import logger, python_error
from .options import Options

_NO_EXECUTABLE = "Model has not been compiled or has been destroyed."


class PoplarExecutor:
    """Called like the model, runs it on the IPUs. Made by trainingModel and inferenceModel."""

    def __init__(self, model, options, training, poptorch_version, optimizer=None, user_model=None):
        self._executable = None
        self._user_model = user_model or model
        self._model = model
        self._training = training
        self._options = self._own_options(options)
        self._optimizer = None
        self._settings = None
        self._tracker = attributes.AttributeTracker()
        self._ipu_optimizer_is_dirty = False
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._is_attached = False
        self._inputs = None
        if training:
            self.setOptimizer(optimizer or optim.SGD(self._user_model.parameters(), lr=0.01))
        self._options._freeze()
        if training:
            wrapping.wrap(self, self._user_model)

    def _own_options(self, options):
        if options is not None and not isinstance(options, Options):
            raise python_error(f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)")
        if options is None:
            options = Options()
        else:
            options._freeze()
            options = options.clone()
        if options.defaultOutputMode():
            options.outputMode(enums.OutputMode.Final if self._training else enums.OutputMode.All)
        if not self._training and options.Training.gradient_accumulation != 1:
            raise python_error(
                "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value "
                "(1) when running a poptorch.inferenceModel()."
            )
        return options

    @property
    def model(self):
        """The user's model."""
        return self._user_model

    @property
    def options(self):
        """The executor's own copy of the options, frozen."""
        return self._options

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._user_model, name)

    # Compiling and running

    def isCompiled(self):
        """Whether there is a program."""
        return self._executable is not None

    def compile(self, *args, **kwargs):
        """Traces the model with the arguments of a call; takes the IPUs unless the connection is Never."""
        if self.isCompiled():
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        _check_tensors(args, kwargs)
        narrow = [self._narrow(tensor) for tensor in tracing.tensors_in([args, kwargs])]
        one_args, one_kwargs = tracing.like([list(args), kwargs], iter(narrow))
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        with wrapping.unwrapped(self._model):
            executable = Executable(self._model, self._options, self._settings, names, one_args, one_kwargs)
        self._inputs = [(tensor.shape, tensor.dtype) for tensor in tracing.tensors_in([args, kwargs])]
        if self._options.connection_type != enums.ConnectionType.Never:
            executable.attach()
            self._executable = executable
            self._is_attached = True
            self._on_device_attach()
        self._executable = executable

    def _narrow(self, tensor):
        options = self._options
        accumulation = options.Training.gradient_accumulation
        count = options.device_iterations * options.replication_factor * accumulation
        size = tensor.shape[0] if tensor.dim() else 1
        assert size % count == 0, (
            f"Invalid batch dimension: In the input {tensor.shape}, the batch dimension ({size}) must be a multiple of "
            f"Options.deviceIterations({options.device_iterations}) * (Options.replicationFactor("
            f"{options.replication_factor}) / Options.inputReplicaGrouping.input_group_size(1)) * "
            f"Options.Training.gradientAccumulation({accumulation}) = {count} because it is used to calculate the "
            "batch size which will be executed on the device in any given iteration. For a full explanation see the "
            "batching semantics page of the documentation."
        )
        return tensor.narrow(0, 0, size // count) if tensor.dim() else tensor

    def __call__(self, *args, **kwargs):
        """Runs all micro batches of the arguments; compiles first where that was not done."""
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): "
            "use model.compile(inputs) instead of model(inputs)"
        )
        if not self.isCompiled():
            self.compile(*args, **kwargs)
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._follow_training()
        self._validate(args, kwargs)
        self._write_state_if_needed()
        output = self._executable.run(list(args), kwargs)
        self._dirty_host_weights = self._training
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer.host_state_is_dirty = True
        return output

    def _follow_training(self):
        """Takes the weights of a training model of the same module, where they changed since the last call."""
        sync = getattr(self._user_model, "copyWeightsToHostIfNeeded", None)
        if not callable(sync):
            return
        sync()
        if self._host_weights_version != self._user_model._host_weights_version:
            self.copyWeightsToDevice()
            self._host_weights_version = self._user_model._host_weights_version

    def _validate(self, args, kwargs):
        _check_tensors(args, kwargs)
        end = (
            "\nThis error occurred because the inputs passed at runtime don't match the inputs used to compile the "
            "model.\nTo recompile the model for the new inputs create a new inferenceModel / trainingModel wrapper or "
            "call destroy() on the curent one and try again."
        )
        tensors = list(tracing.tensors_in([args, kwargs]))
        if len(tensors) != len(self._inputs):
            expected = len(self._inputs)
            raise python_error(
                f"Number of positional arguments mismatch: expected {expected} arguments but got {len(tensors)}.{end}"
            )
        for tensor, (shape, dtype) in zip(tensors, self._inputs):
            if tensor.dtype != dtype:
                raise python_error(f"Data type mismatch: expected {dtype} but got {tensor.dtype}.{end}")
            if tensor.shape != shape:
                raise python_error(f"Shape mismatch: expected {shape} but got {tensor.shape}.{end}")

    # Weights

    def _host_weights(self):
        return dict(itertools.chain(self._model.named_parameters(), self._model.named_buffers()))

    def copyWeightsToHostIfNeeded(self):
        """Reads the weights where the device changed them since the last read; whether it did."""
        if not self._dirty_host_weights:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self):
        """Device to the user's model."""
        self._check_compiled()
        self._dirty_host_weights = False
        self._executable.read_weights(self._host_weights())
        self._host_weights_version += 1

    def copyWeightsToDevice(self):
        """The user's model to the device; the optimizer's state is read before, as the real one does."""
        self._check_compiled()
        self._dirty_host_weights = False
        if self._optimizer:
            self._optimizer.state_dict()
        self._executable.write_weights(self._host_weights())

    def load_state_dict(self, state_dict, strict=True):
        """Loads the user's model and, where attached, the device."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    # Optimizer

    def setOptimizer(self, optimizer):
        """Takes an optimizer, or the same one with other values."""
        if self.isCompiled() and optimizer != self._optimizer:
            if isinstance(self._optimizer, optim.Optimizer):
                self._read_state_if_needed()
                self._optimizer.state_dict = self._optimizer.get_state_dict
            if isinstance(optimizer, optim.Optimizer):
                optimizer.ipu_state_is_dirty = True
        if isinstance(optimizer, optim.Optimizer):
            optimizer.state_dict = MethodType(PoplarExecutor._optimizer_state_dict, self)
        settings = attributes.Settings(optimizer)
        self._tracker.check(optimizer)
        self._force_running_mean(optimizer)
        self._optimizer = optimizer
        if settings != self._settings:
            self._settings = settings
            self._ipu_optimizer_is_dirty = True
        if self.isAttachedToDevice():
            self._update_optimizer_if_needed()
            self._write_state_if_needed()

    def _force_running_mean(self, optimizer):
        """Accumulators in float16 hold a mean, not a sum (python/_optimizer_attributes.py)."""
        half = getattr(optimizer, "accum_type", torch.float32) == torch.float16
        running = enums.MeanReductionStrategy.Running
        training = self._options.Training
        if not half or getattr(optimizer, "use_combined_accum", False):
            return
        if not self.isCompiled():
            self._options._unfreeze()
            training.setMeanAccumulationAndReplicationReductionStrategy(running)
            self._options._freeze()
        elif training.meanAccumulationAndReplicationReductionStrategy != running:
            raise ValueError(
                "Invalid optimizer: the new optimizer would require changing options.Training."
                "meanAccumulationAndReplicationReductionStrategy to poptorch.MeanReductionStrategy.Running "
                "but the executable is already compiled."
            )

    def _update_optimizer_if_needed(self):
        if self._ipu_optimizer_is_dirty:
            self._executable.set_optimizer(self._settings)
            self._ipu_optimizer_is_dirty = False

    def _optimizer_state_dict(self):
        self._read_state_if_needed()
        return self._optimizer.get_state_dict()

    def _read_state_if_needed(self):
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.host_state_is_dirty:
            return
        self._check_compiled()
        assert not self._ipu_optimizer_is_dirty, "Both host and ipu states cannot be dirty at the same time."
        optimizer.set_state_dict({**self._executable.read_state(), **torch.optim.Optimizer.state_dict(optimizer)})
        optimizer.ipu_state_is_dirty = False

    def _write_state_if_needed(self):
        optimizer = self._optimizer
        if not isinstance(optimizer, optim.Optimizer) or not optimizer.ipu_state_is_dirty:
            return
        assert not optimizer.host_state_is_dirty, "Both host and ipu states cannot be dirty at the same time."
        if optimizer.has_state():
            self.copyWeightsToHostIfNeeded()
            self._executable.write_state(optimizer.state_dict())
        optimizer.ipu_state_is_dirty = False

    # Device

    def isAttachedToDevice(self):
        """Whether this model holds the IPUs."""
        return self.isCompiled() and self._executable.attached

    def attachToDevice(self):
        """Takes the IPUs and writes weights and state to them."""
        self._check_compiled()
        if self._is_attached:
            raise python_error("Device is already attached")
        self._executable.attach()
        self._is_attached = True
        self._on_device_attach()

    def detachFromDevice(self):
        """Reads weights and state, then frees the IPUs."""
        self._check_compiled()
        if not self._is_attached:
            raise python_error("Device is not attached")
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_state_if_needed()
        self._executable.detach()
        self._is_attached = False

    def _on_device_attach(self):
        self.copyWeightsToDevice()
        if self._optimizer:
            self._update_optimizer_if_needed()
        if isinstance(self._optimizer, optim.Optimizer):
            if self._optimizer.has_state():
                self._optimizer.ipu_state_is_dirty = True
                self._write_state_if_needed()
            else:
                self._optimizer.host_state_is_dirty = True
                self._optimizer.ipu_state_is_dirty = False

    def destroy(self):
        """Reads weights and state, frees the IPUs, forgets the program, and gives the user's model back."""
        if not self.isCompiled():
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._optimizer.state_dict()
        self._executable.detach()
        self._is_attached = False
        self._executable = None
        if self._training:
            wrapping.unwrap(self._user_model)

    def _check_compiled(self):
        if not self.isCompiled():
            raise python_error(_NO_EXECUTABLE)


def _check_tensors(args, kwargs):
    """The double takes tensors only; PopTorch compiles other values in as constants."""
    for argument in (*args, *kwargs.values()):
        if not isinstance(argument, torch.Tensor):
            raise python_error(f"inputs of a model must be tensors, not {type(argument)}")
        if not argument.is_contiguous():
            logger.warning("At least one input tensor is not contiguous: non-contiguous tensors will be converted.")


def trainingModel(model, options=None, optimizer=None):
    """An executor that trains `model`; RuntimeError where another one does already."""
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    if wrapping.is_wrapped(model):
        raise RuntimeError(
            "Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to unwrap "
            "before wrapping again."
        )
    return PoplarExecutor(copy.copy(model), options, True, None, optimizer=optimizer, user_model=model)


def inferenceModel(model, options=None):
    """An executor that evaluates `model`."""
    if isinstance(model, PoplarExecutor):
        model = model._user_model
    return PoplarExecutor(copy.copy(model), options, False, None)
