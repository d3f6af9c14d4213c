"""An eager executor: a copy of the model runs micro batch by micro batch on the CPU, with
PopTorch's rules around it.

Weights and state are copied when python/_poplar_executor.py of PopTorch 3.4 does; marks are
python/ops.py's. Micro batches of a call have the replica innermost: number i * replicas + r goes to
replica r (PopART 3.4, willow/src/stepiosplitter.cpp). What cannot be compiled is refused as by
popart_compiler/source/Compiler.cpp and CompilerImpl.cpp.
"""

import copy
import logging
import weakref

import torch
from signatures import poptorch
from torch import distributed

from . import optim

logger = logging.getLogger("poptorch::python")

_holder = None  # of the IPUs: one executor of this process
# of the present forward pass: blocks begun as (user_id, ipu_id), losses, overlapped tensors
_marks = {}


def _mark(kind, value):
    _marks.setdefault(kind, []).append(value)
    return value


def BeginBlock(layer_to_call, user_id=None, ipu_id=None):
    """Makes a module begin a block whenever it is called; changes the module in place and returns
    it."""
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise poptorch.Error("module has already been assigned to a block.")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


class _BlockHook:
    def __init__(self, user_id, ipu_id):
        self._block = (user_id, ipu_id)

    def __call__(self, module, inputs):
        _mark("blocks", self._block)


def identity_loss(x, reduction):
    """Marks the loss that is differentiated. The double knows the reduction "none" only."""
    assert reduction == "none", reduction
    return _mark("losses", x)


def recomputationCheckpoint(*tensors):
    (tensor,) = tensors
    return tensor


def set_overlap_for_input(input_tensors, mode):
    """Marks an input to be copied while others are computed, and returns it."""
    assert isinstance(mode, poptorch.OverlapMode)
    return _mark("overlaps", input_tensors)


def set_overlap_for_output(output_tensors, mode):
    return set_overlap_for_input(output_tensors, mode)


class PoplarExecutor:
    """Called like the model, runs it on the IPUs. Made by trainingModel and inferenceModel."""

    def __init__(self, model, options, optimizer=None):
        options.frozen = True
        self.model = model
        self.options = options
        self._optimizer = self._values = self._program = None
        self._host_is_stale = False
        if optimizer is not None:
            self.setOptimizer(optimizer)
            _read_before_use(weakref.ref(self), model)

    def isCompiled(self):
        return self._program is not None

    def isAttachedToDevice(self):
        return self.isCompiled() and _holder is not None and _holder() is self

    def compile(self, *args, **kwargs):
        assert not kwargs, "the double takes positional arguments only"
        assert not list(self.model.buffers()), "the double moves no buffers"
        count = self.options.micro_batches
        assert all(len(tensor) % count == 0 for tensor in args), (
            f"batch dimension: must be a multiple of {count}"
        )
        self._inputs = [(tensor.shape, tensor.dtype) for tensor in args]
        program = copy.deepcopy(self.model)
        self._check(program, [tensor[: len(tensor) // count] for tensor in args])
        rounds = self.options.value("Precision.enableStochasticRounding", False)
        self._rounded = optim.stochastic if rounds else optim.nearest
        self._program = program
        self._state = {}
        if self._optimizer is not None:
            self._make_state()
        self._attach()

    def _check(self, program, micro_batch):
        """Refuses what PopTorch cannot compile."""
        training = self._optimizer is not None
        options = self.options
        _marks.clear()
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
            outputs = program(*micro_batch)
        losses, blocks, overlaps = (
            _marks.get(kind, []) for kind in ("losses", "blocks", "overlaps")
        )
        if training and len(losses) != 1:
            raise poptorch.Error(
                f"{len(losses)} losses found in graph. Graph must have one final loss."
            )
        stages = len(blocks) or 1
        pipelined = not isinstance(options.value("setExecutionStrategy"), poptorch.ShardedExecution)
        ends = [*micro_batch, *(outputs if isinstance(outputs, tuple) else [outputs])]
        if overlaps and pipelined:
            raise poptorch.Error("Overlapped IO is not supported with poptorch.PipelinedExecution.")
        if overlaps and not options.value("TensorLocations.numIOTiles"):
            raise poptorch.Error("No IO tiles allocated. You must allocate at least 32 IO tiles.")
        if not all(any(tensor is end for end in ends) for tensor in overlaps):
            raise poptorch.Error(
                "poptorch.set_overlap_for_input applied on a node which is not a tensor input."
            )
        if pipelined and [ipu for _, ipu in blocks] != list(range(len(blocks))):
            raise poptorch.Error(
                f"{blocks}: the IPUs of a pipeline must increase from block to block"
            )
        method, least = (
            ("Training.gradientAccumulation", 2 * stages - 1)
            if training
            else ("deviceIterations", stages)
        )
        if pipelined and options.value(method, 1) < least:
            raise poptorch.Error(
                f"poptorch.Options().{method} must be greater than or equal to the number of pipeline stages ({least}) "
                "when using poptorch.PipelinedExecution."
            )
        ipus = stages * options.replicas
        if ipus > 64 or ipus & (ipus - 1):
            raise poptorch.Error(
                f"{ipus} IPUs: PopTorch must reserve a power of 2 or maximum of 64 per process"
            )

    def _make_state(self):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._groups = [
            [names[id(each)] for each in group["params"]] for group in self._optimizer.param_groups
        ]
        for group, values in zip(self._groups, self._values):
            for name in group:
                made = self._optimizer.new_state(values, self._program.get_parameter(name).detach())
                self._state.update({prefix + name: tensor for prefix, tensor in made.items()})

    def __call__(self, *args, **kwargs):
        if not self.isCompiled():
            self.compile(*args, **kwargs)
        if not self.isAttachedToDevice():
            self._attach()
        if [(tensor.shape, tensor.dtype) for tensor in args] != self._inputs:
            raise poptorch.Error(
                "Shape or data type mismatch: the inputs are not those that the model was compiled for"
            )
        if not all(tensor.is_contiguous() for tensor in args):
            logger.warning(
                "At least one input tensor is not contiguous: non-contiguous tensors will be converted."
            )
        self._write_state()
        micro_batches = list(zip(*(tensor.chunk(self.options.micro_batches) for tensor in args)))
        if self._optimizer is None:
            with torch.no_grad():
                return self._collected([self._program(*each) for each in micro_batches])
        self._host_is_stale = True
        return tuple(map(self._collected, zip(*self._train(micro_batches))))

    def _train(self, micro_batches):
        """The outputs of all micro batches, after the update."""
        outputs = []
        scale = self._optimizer.loss_scaling
        sums = [{} for _ in range(self.options.replicas)]
        for number, inputs in enumerate(micro_batches):
            self._program.zero_grad(set_to_none=True)
            _marks.clear()
            outputs.append([tensor.detach() for tensor in self._program(*inputs)])
            (_marks["losses"][0].sum() * scale).backward()
            own = sums[number % len(sums)]
            for name, parameter in self._program.named_parameters():
                if parameter.grad is not None:  # added in the accumulator's type
                    total = parameter.grad.float() + (own[name].float() if name in own else 0.0)
                    own[name] = self._rounded(total, self._optimizer.types["accum_type"])
        gradients = self._reduced(sums, scale)
        with torch.no_grad():
            for names, values in zip(self._groups, self._values):
                for name in filter(gradients.__contains__, names):
                    state = {
                        each: self._state[each + name]
                        for each in optim.PREFIXES
                        if each + name in self._state
                    }
                    weight = self._program.get_parameter(name)
                    self._optimizer.update(values, weight, gradients[name], state, self._rounded)
        return outputs

    def _reduced(self, sums, scale):
        """{name: float32 mean gradient}, over micro batches and replicas of all processes, without
        loss scale."""
        accumulation = self.options.value("Training.gradientAccumulation", 1)
        assert (
            self.options.value("Training.accumulationAndReplicationReductionType")
            == poptorch.ReductionType.Mean
        )
        strategy = self.options.value("Training.setMeanAccumulationAndReplicationReductionStrategy")
        # A running mean of one micro batch is its gradient.
        assert strategy == poptorch.MeanReductionStrategy.Post or accumulation == 1, (
            "the double divides once"
        )
        total = {name: sum(part[name].float() for part in sums) for name in sums[0]}
        processes = distributed.get_world_size() if distributed.is_initialized() else 1
        if processes > 1:
            for gradient in total.values():
                distributed.all_reduce(gradient)
        factor = scale * self.options.replicas * processes * accumulation
        return {name: gradient * (1.0 / factor) for name, gradient in total.items()}

    def _collected(self, tensors):
        """One output of all micro batches; a scalar becomes one element each.

        The sum is each replica's own.
        """
        mode = self.options.value("outputMode")
        replicas = self.options.replicas
        assert mode in (poptorch.OutputMode.All, poptorch.OutputMode.Sum), (
            "the double knows All and Sum"
        )
        if mode == poptorch.OutputMode.Sum:
            tensors = [sum(tensors[replica::replicas]) for replica in range(replicas)]
        if len(tensors) == 1:
            return tensors[0]
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)

    def _attach(self):
        global _holder
        if _holder is not None and _holder() not in (None, self):
            raise poptorch.Error("Failed to acquire IPU(s)")
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
        if self.isAttachedToDevice():
            self.detachFromDevice()
        self._program = None
        if getattr(self.model, "is_wrapped", False):
            self.model.__class__ = type(self.model).__bases__[0]

    def copyWeightsToDevice(self):
        self._host_is_stale = False
        _copy(self.model, self._program)

    def _read_weights(self):
        """To the user's model, if the device has changed them; with synthetic data nothing leaves
        the device."""
        if self._host_is_stale and not self.options.value("enableSyntheticData"):
            _copy(self._program, self.model)
        self._host_is_stale = False

    def load_state_dict(self, state_dict, strict=True):
        self._read_weights()
        result = self.model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def setOptimizer(self, optimizer):
        """Takes an optimizer, or the same one with other values.

        A constant of a program may not change.
        """
        assert isinstance(optimizer, optim.Optimizer), (
            f"Unsupported optimizer type. Types supported {optim.NAMES}"
        )
        if type(optimizer).__name__ not in optim.NAMES:
            logger.warning(
                "Optimizer `%s` subclassed: its Python code is never run", type(optimizer).__name__
            )
        values = [_on_device(group) for group in optimizer.param_groups]
        for before, after in zip(self._values, values) if self.isCompiled() else ():
            for name in before.keys() - optimizer.variable_attrs.names:
                if before[name] != after[name]:
                    raise poptorch.Error(
                        f"Problem with {name}. Values are constant but do not match."
                    )
        optimizer.device_state = weakref.WeakMethod(self._read_state)
        self._optimizer = optimizer
        self._values = values
        if self.isAttachedToDevice():
            self._write_state()

    def _read_state(self):
        """{PopART's name: tensor}; None before there is a program."""
        return (
            {name: tensor.clone() for name, tensor in self._state.items()}
            if self.isCompiled()
            else None
        )

    def _write_state(self):
        if self._optimizer is not None and self._optimizer.loaded is not None:
            for name, tensor in self._state.items():
                tensor.copy_(self._optimizer.loaded["ipu_state"][name])
            self._optimizer.loaded = None


def _copy(source, target):
    with torch.no_grad():
        for theirs, own in zip(source.parameters(), target.parameters()):
            own.copy_(theirs)


def _on_device(group):
    """{name: number} of a group of parameters, in the float32 of a device."""
    values = {
        name: value for name, value in group.items() if name != "params" and value is not None
    }
    return {
        name: tuple(map(_single, value)) if name == "betas" else _single(value)
        for name, value in values.items()
    }


def _single(value):
    return torch.tensor(float(value), dtype=torch.float32).item()


def _read_before_use(executor, model):
    """Makes `model` another class, as PopTorch does, whose state_dict reads the device first."""

    class PoptorchModel(type(model)):
        is_wrapped = True

        def state_dict(self, *args, destination=None, prefix="", keep_vars=False):
            if executor() is not None:
                executor()._read_weights()
            # by position, of which torch warns
            return super().state_dict(*args, destination, prefix, keep_vars)

    model.__class__ = PoptorchModel


def trainingModel(model, options=None, optimizer=None):
    if getattr(model, "is_wrapped", False):
        unwrap = "Call model.destroy() on the model to unwrap before wrapping again."
        raise RuntimeError(f"Model has already been wrapped in 'poptorch.trainingModel'. {unwrap}")
    return PoplarExecutor(model, options, optimizer)


def inferenceModel(model, options=None):
    return PoplarExecutor(model, options)
