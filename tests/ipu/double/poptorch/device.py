"""A compiled model on its IPUs: weights, optimizer state, and runs of many micro batches.

Micro batches of a call are laid out with the replica innermost: number (iteration * accumulation + i) * replicas + r
goes to replica r (PopART 3.4, willow/src/stepiosplitter.cpp hands successive ones to successive replicas).
"""

import copy
import weakref

import torch
from torch import distributed

from . import enums, tracing, updates
from .errors import Error, logger

_ON_DEVICE = {torch.int64: torch.int32, torch.float64: torch.float32}

_holder = None


class Executable:
    """The model as compiled for one micro batch.

    Args:
        model: copied; later changes of it do not reach the device.
        options: poptorch.Options.
        settings: attributes.Settings in training, None in inference.
        names: {id of a host parameter: its name}.
        args, kwargs: one micro batch.
    """

    def __init__(self, model, options, settings, names, args, kwargs):
        self._module = copy.deepcopy(model)
        self._options = options
        self._names = names
        self._session = options._Popart.options
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        args, kwargs = self._to_device(args), self._to_device(kwargs)
        self.program = tracing.Program(self._module, options, settings is not None, args, kwargs)
        self._replicas = options.replication_factor
        self._buffers = [copy.deepcopy(buffers) for _ in range(self._replicas)]
        self.settings = None
        self.state = {}
        self._loaded_parameters = {}
        if settings is not None:
            self.set_optimizer(settings)

    # Being on a device

    @property
    def attached(self):
        """Whether this model holds the IPUs."""
        return _holder is not None and _holder() is self

    def attach(self):
        """Takes the IPUs; Error where another model of this process holds them."""
        global _holder
        if _holder is not None and _holder() is not None and _holder() is not self:
            raise Error(f"Failed to acquire {self.program.ipus * self._replicas} IPU(s)")
        _holder = weakref.ref(self)

    def detach(self):
        """Frees the IPUs."""
        global _holder
        if self.attached:
            _holder = None

    # Weights and state

    @property
    def streams_weights(self):
        """Synthetic data switches the copies of weights and state off as well (willow/src/popx/devicex.cpp)."""
        return not self._session.get("syntheticDataMode", 0)

    def write_weights(self, weights):
        """Copies {name: tensor} of parameters and buffers to the device."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(weights[name])
            for buffers in self._buffers:
                for name, buffer in buffers.items():
                    buffer.copy_(weights[name])

    def read_weights(self, weights):
        """Copies the device's parameters, and the buffers of replica 0, into {name: tensor}."""
        if not self.streams_weights:
            return
        with torch.no_grad():
            for name, tensor in [*self._module.named_parameters(), *self._buffers[0].items()]:
                weights[name].copy_(tensor)

    def set_optimizer(self, settings):
        """Takes new values; Error where a constant would change."""
        settings.check_values()
        if self.settings is None:
            if settings.globals.get("max_grad_norm", float("inf")) != float("inf"):
                raise NotImplementedError("the double does not clip gradients")
            self._make_state(settings)
        else:
            settings.check_replaces(self.settings)
        self.settings = settings
        self._loaded_parameters = {}

    def _make_state(self, settings):
        parameters = dict(self._module.named_parameters())
        self._groups = []
        for group, values in zip(settings.parameters, settings.groups):
            self._groups.append([self._names[id(parameter)] for parameter in group])
            for name in self._groups[-1]:
                made = updates.new_state(settings.kind, values, settings, parameters[name])
                self.state.update({prefix + name: tensor for prefix, tensor in made.items()})

    def read_state(self):
        """{"ipu_state": ..., "ipu_param": ...}. State whose streams are disabled stays; its place is taken by NaN."""
        stays = self._session.get("disableOptimizerStateTensorStreams", False) or not self.streams_weights
        state = {
            name: torch.full_like(tensor, float("nan")) if stays else tensor.clone()
            for name, tensor in self.state.items()
        }
        return {"ipu_state": state, "ipu_param": {**self._optimizer_values(), **self._loaded_parameters}}

    def write_state(self, state):
        """Takes what read_state gave. "ipu_param" comes back in read_state but changes no rate: setOptimizer does."""
        if not self._session.get("disableOptimizerStateTensorStreams", False) and self.streams_weights:
            for name, tensor in self.state.items():
                if name in state["ipu_state"]:
                    tensor.copy_(state["ipu_state"][name])
                else:
                    logger.warning("writeOptimizerState: ignoring missing state %s", name)
        self._loaded_parameters = {
            name: state["ipu_param"][name] for name in self._optimizer_values() if name in state["ipu_param"]
        }

    def _optimizer_values(self):
        """Variable values by PopART's names (willow/include/popart/tensornames.hpp)."""
        prefixes = {
            "lr": "learningRate",
            "weight_decay": "weightDecay",
            "beta1": "adamBeta1",
            "beta2": "adamBeta2",
            "eps": "adamEps" if self.settings.kind.startswith("LAMB") else "adaptiveEps",
            "max_weight_norm": "maxWeightNorm",
            "alpha": "adaptiveAlpha",
            "momentum": "adaptiveMomentum",
        }
        values = {"lossScaling_FLOAT": torch.tensor(self.settings.loss_scaling[0])}
        for names, group in zip(self._groups, self.settings.groups):
            for attribute, prefix in prefixes.items():
                value, constant = group.get(attribute, (0.0, True))
                if not constant:
                    values.update({f"{prefix}___specific___{name}": torch.tensor(value) for name in names})
        return values

    # Running

    def run(self, args, kwargs):
        """One call: all micro batches of the arguments, and in training the updates; returns the outputs."""
        micro_batches = self._split(args, kwargs)
        per_iteration = len(micro_batches) // self._options.device_iterations
        outputs = []
        for start in range(0, len(micro_batches), per_iteration):
            part = micro_batches[start : start + per_iteration]
            outputs += self._infer(part) if self.settings is None else self._train(part)
        return self._collect(outputs)

    def _split(self, args, kwargs):
        args, kwargs = self._to_device(args), self._to_device(kwargs)
        options = self._options
        count = options.device_iterations * options.Training.gradient_accumulation * self._replicas
        synthetic = self._session.get("syntheticDataMode", 0)
        chunks = []
        for tensor in tracing.tensors_in([args, kwargs]):
            if synthetic and tensor.is_floating_point():
                tensor = torch.randn_like(tensor)
            chunks.append(tensor.chunk(count) if tensor.dim() else [tensor] * count)
        return [tracing.like([args, kwargs], iter(parts)) for parts in zip(*chunks)]

    @staticmethod
    def _to_device(structure):
        tensors = [_narrowed(tensor) for tensor in tracing.tensors_in(structure)]
        return tracing.like(structure, iter(tensors))

    def _infer(self, micro_batches):
        outputs = []
        with torch.no_grad():
            for number, (args, kwargs) in enumerate(micro_batches):
                outputs.append(self._forward(number % self._replicas, args, kwargs)[0])
        return outputs

    def _train(self, micro_batches):
        sums = [{} for _ in range(self._replicas)]
        outputs = []
        for number, (args, kwargs) in enumerate(micro_batches):
            replica = number % self._replicas
            self._module.zero_grad(set_to_none=True)
            output, forward = self._forward(replica, args, kwargs)
            (forward.final_loss().sum() * self.settings.loss_scaling[0]).backward()
            self._accumulate(sums[replica], number // self._replicas)
            outputs.append(output)
        self._update(self._reduce(sums))
        return outputs

    def _forward(self, replica, args, kwargs):
        buffers = dict(self._module.named_buffers())
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(self._buffers[replica][name])
        forward = tracing.Forward()
        with forward:
            output = self._module(*args, **kwargs)
        self._buffers[replica] = {name: buffer.clone() for name, buffer in buffers.items()}
        return [_narrowed(tensor) for tensor in tracing.tensors_in(output)], forward

    def _rounded(self):
        return updates.stochastic if self._session.get("enableStochasticRounding", False) else updates.nearest

    def _accumulate(self, sums, number):
        """Adds the gradients of micro batch `number` in the accumulator's type: a sum, or a running mean."""
        rounded, dtype = self._rounded(), self.settings.globals.get("accum_type", torch.float32)
        for name, parameter in self._module.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            before = sums[name].float() if name in sums else torch.zeros_like(gradient)
            if self._running_mean():
                after = before * (number / (number + 1)) + gradient / (number + 1)
            else:
                after = before + gradient
            sums[name] = rounded(after, dtype)

    def _running_mean(self):
        training = self._options.Training
        return (
            training.accumulation_and_replication_reduction_type == enums.ReductionType.Mean
            and training.meanAccumulationAndReplicationReductionStrategy == enums.MeanReductionStrategy.Running
        )

    def _reduce(self, sums):
        """{name: float32 gradient}: over replicas of all processes, without loss scale and, for a mean, counts."""
        total = {name: sum(part[name].float() for part in sums) for name in sums[0]}
        processes = self._options.Distributed.numProcesses
        if processes > 1:
            for gradient in total.values():
                distributed.all_reduce(gradient)
        factor = self.settings.loss_scaling[0]
        training = self._options.Training
        if training.accumulation_and_replication_reduction_type == enums.ReductionType.Mean:
            factor *= self._replicas * processes
            if not self._running_mean():
                factor *= training.gradient_accumulation
        return {name: gradient * (1.0 / factor) for name, gradient in total.items()}

    def _update(self, gradients):
        parameters = dict(self._module.named_parameters())
        with torch.no_grad():
            for names, values in zip(self._groups, self.settings.groups):
                for name in filter(gradients.__contains__, names):
                    state = self._state_of(name)
                    updates.apply(self.settings, values, parameters[name], gradients[name], state, self._rounded())

    def _state_of(self, name):
        """{prefix: tensor} of one parameter."""
        ids = {prefix: prefix + name for prefix in updates.PREFIXES}
        return {prefix: self.state[key] for prefix, key in ids.items() if key in self.state}

    def _collect(self, outputs):
        """Joins the micro batches' outputs as the output mode says; a scalar becomes one element each."""
        kept = [self._keep(list(tensors)) for tensors in zip(*outputs)]
        return tracing.like(self.program.outputs, iter(kept))

    def _keep(self, tensors):
        mode, replicas = self._options.output_mode, self._replicas
        if mode == enums.OutputMode.Final:
            tensors = tensors[-replicas:]
        elif mode == enums.OutputMode.Sum:
            tensors = [sum(tensors[replica::replicas]) for replica in range(replicas)]
        elif mode == enums.OutputMode.EveryN:
            period = self._options.output_return_period * replicas
            ends = range(period, len(tensors) + 1, period)
            tensors = [tensor for end in ends for tensor in tensors[end - replicas : end]]
        if len(tensors) == 1:
            return tensors[0]
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)


def _narrowed(tensor):
    """Detached, with 32 bits for numbers of 64: the device has no others."""
    return tensor.detach().to(_ON_DEVICE.get(tensor.dtype, tensor.dtype))
