"""Runs a forward as the compiler sees it: where blocks begin, what is the loss, and what a device cannot do.

Sources: PopTorch 3.4, popart_compiler/source/Compiler.cpp (stages, overlapped I/O), CompilerImpl.cpp (number of
IPUs), poptorch/source/RemoveSurplusIdentityLosses.cpp (losses), OverlappedIO.cpp.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import enums, strategy
from .errors import Error

_LOSSES = {
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
}
_NEEDS_VALUES = {"__array__", "__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"}
_SHAPED_BY_VALUES = {"_unique2", "bincount", "masked_select", "nonzero", "unique_consecutive", "unique_dim"}

_forward = None


class Forward(TorchFunctionMode):
    """One forward pass: collects losses, blocks and overlap marks; refuses to hand values to Python."""

    def __init__(self):
        super().__init__()
        self.losses = []
        self.overlaps = []
        self.stage = self.ipu = self.switches = self.last_ipu = 0
        self.ipus = set()

    def __enter__(self):
        global _forward
        _forward = self
        return super().__enter__()

    def __exit__(self, *error):
        global _forward
        _forward = None
        return super().__exit__(*error)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in _NEEDS_VALUES:
            raise Error(f"Tensor.{name}() in a model: values stay on the IPU, Python sees none while it is traced")
        result = function(*args, **(kwargs or {}))
        if name in _LOSSES:
            self.losses.append(result)
        return result

    def final_loss(self):
        """The loss that all others lead to; Error where there is none, or several independent ones."""
        if not self.losses:
            raise Error("Couldn't find a loss in graph!")
        independent = [loss for loss in self.losses if not any(_leads_to(loss, other) for other in self.losses)]
        if len(independent) != 1:
            raise Error(
                "Multiple independent losses found in graph. Graph must have one final loss. "
                "Wrap final graph loss in poptorch.identity_loss."
            )
        return independent[0]


class _Dispatch(TorchDispatchMode):
    """Sees every operation: refuses those whose result's shape depends on values; notes the IPU of each."""

    def __init__(self, forward):
        super().__init__()
        self._forward = forward

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[-1]
        if name == "_local_scalar_dense":
            raise Error("a Python value of a tensor (item, a branch on a tensor) cannot be had while a model is traced")
        if name in _SHAPED_BY_VALUES or (name == "index" and _has_mask(args[1])):
            raise Error(f"{name}: a shape that depends on values cannot be compiled")
        if self._forward.ipu < 0:
            raise Error("No active Block, all the ops must belong to a Block")
        self._forward.ipus.add(self._forward.ipu)
        return function(*args, **(kwargs or {}))


def _has_mask(indices):
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _leads_to(loss, other):
    """Whether `other` was computed from `loss`."""
    if loss is other or other.grad_fn is None:
        return False
    seen, waiting = set(), [function for function, _ in other.grad_fn.next_functions]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        if function is loss.grad_fn:
            return True
        seen.add(function)
        waiting += [parent for parent, _ in function.next_functions]
    return False


def mark_loss(loss):
    """Notes a loss, where a forward runs for a device."""
    if _forward is not None:
        _forward.losses.append(loss)
    return loss


def overlap(tensor, mode):
    """Notes a tensor's overlap, where a forward runs for a device."""
    assert isinstance(mode, enums.OverlapMode)
    if _forward is not None and mode != enums.OverlapMode.NoOverlap:
        _forward.overlaps.append(tensor)
    return tensor


def begin_block(stage, ipu):
    """A block starts on an IPU."""
    if ipu != _forward.last_ipu:
        _forward.switches += 1
    _forward.stage, _forward.ipu, _forward.last_ipu = stage, ipu, ipu


def end_block():
    """A block given as a context ends; nothing may run before the next begins."""
    _forward.ipu = -1


class Program:
    """What tracing a model's forward once tells.

    Args:
        module: the model, called with args and kwargs: one micro batch.
        options: poptorch.Options.
        training: whether a loss and a backward pass are wanted.

    Attributes:
        ipus: number of IPUs of one replica.
        outputs: what forward returned: the structure that later results take.
    """

    def __init__(self, module, options, training, args, kwargs):
        self._options = options
        self._training = training
        forward = Forward()
        options._execution_strategy.onStartTracing()
        try:
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training), forward, _Dispatch(forward):
                self.outputs = module(*args, **kwargs)
        finally:
            options._execution_strategy.onEndTracing()
        if training:
            forward.final_loss()
        self.ipus = max(len(forward.ipus), max(forward.ipus, default=0) + 1)
        self.stages = forward.switches + 1
        self._check_overlap(forward, [*args, *kwargs.values()])
        if self._pipelined():
            self._check_pipeline()
        self._check_number_of_ipus()

    def _pipelined(self):
        return not isinstance(self._options._execution_strategy, strategy.ShardedExecution)

    def _check_overlap(self, forward, inputs):
        if not forward.overlaps:
            return
        if self._pipelined():
            raise Error(
                "Overlapped IO is not supported with poptorch.PipelinedExecution. "
                "If you are using only one IPU, please switch to poptorch.ShardedExecution."
            )
        if not self._options.TensorLocations.exists("numIOTiles"):
            raise Error(
                "No IO tiles allocated. You must allocate at least 32 IO tiles "
                "using poptorch.Options().TensorLocations.numIOTiles."
            )
        if self._options.output_mode not in (enums.OutputMode.All, enums.OutputMode.Sum):
            raise Error(
                "Unsupported output mode for overlapped IO. Please switch output "
                "mode to poptorch.OutputMode.All or poptorch.OutputMode.Sum."
            )
        ends = inputs + list(tensors_in(self.outputs))
        if not all(any(tensor is end for end in ends) for tensor in forward.overlaps):
            raise Error("poptorch.set_overlap_for_input applied on a node which is not a tensor input to the model.")

    def _check_pipeline(self):
        if self.stages > self.ipus:
            raise Error(f"{self.stages} pipeline stages on {self.ipus} IPUs: ipu_ids must increase from block to block")
        if self._training:
            stages = 2 * self.stages - 1
            if self._options.Training.gradient_accumulation < stages:
                raise Error(
                    "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of "
                    f"pipeline stages ({stages}) when using poptorch.PipelinedExecution. Please note that a model with "
                    f"{self.stages} pipeline stages in PopTorch will have an additional {self.stages - 1} stages when "
                    "training."
                )
        elif self._options.device_iterations < self.stages:
            raise Error(
                "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages "
                f"({self.stages}) when using PopTorch.PipelinedExecution."
            )

    def _check_number_of_ipus(self):
        wanted = self.ipus * self._options.replication_factor
        reserved = 1 << (wanted - 1).bit_length()
        if wanted > 64:
            raise Error(f"Too many IPUs requested ({wanted}): a process can use 64")
        if reserved != wanted:
            raise Error(
                f"The model specifies the use of {wanted} IPUs, however PopTorch must reserve a minimum of {reserved} "
                "in order to allow the model to run, because PopTorch must reserve a power of 2 or maximum of 64 IPUs "
                "per process. Please reconfigure your model to use a different number of IPUs or set "
                "poptorch.Options().autoRoundNumIPUs(True)."
            )


def tensors_in(structure):
    """The tensors of a nest of tuples, lists and dicts, in order."""
    if isinstance(structure, torch.Tensor):
        yield structure
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from tensors_in(item)
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from tensors_in(item)


def like(structure, tensors):
    """The same nest with its tensors replaced, in order, from an iterator."""
    if isinstance(structure, torch.Tensor):
        return next(tensors)
    if isinstance(structure, dict):
        return {key: like(item, tensors) for key, item in structure.items()}
    if isinstance(structure, (list, tuple)):
        return type(structure)(like(item, tensors) for item in structure)
    return structure
