"""A compiled model on its IPUs: weights, optimizer state, and runs of many micro batches.

Micro batches of a call are laid out with the replica innermost: number i * replicas + r goes to replica r (PopART 3.4,
willow/src/stepiosplitter.cpp hands successive ones to successive replicas). What cannot be compiled is refused as by
popart_compiler/source/Compiler.cpp and CompilerImpl.cpp of PopTorch 3.4.
"""

import copy

import torch
from signatures import poptorch
from torch import distributed

from . import ops, updates


class Device:
    """The model as compiled for one micro batch.

    Attributes:
        ipus: of all replicas.
        blocks: (user_id, number of the IPU) in the order in which the model begins them.
        values: {name: number} of each group of parameters, in training.
        state: {prefix and parameter's name: tensor}, of the optimizer.
    """

    def __init__(self, model, options, optimizer, values, micro_batch):
        """Args: model: copied, so that later changes do not reach the device. micro_batch: its arguments."""
        self._module, self._options, self._optimizer, self.values = copy.deepcopy(model), options, optimizer, values
        assert not list(model.buffers()), "the double moves no buffers"
        self._trace(micro_batch)
        self._rounded = updates.stochastic if options.value("Precision.enableStochasticRounding", False) else (
            updates.nearest
        )  # fmt: skip
        self.state = {}
        if optimizer is not None:
            self._make_state(model)

    def _trace(self, micro_batch):
        training, options = self._optimizer is not None, self._options
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training), ops.collected() as marks:
            outputs = self._module(*micro_batch)
        if training and len(marks.losses) != 1:
            raise poptorch.Error(f"{len(marks.losses)} losses found in graph. Graph must have one final loss.")
        self.blocks = marks.blocks
        stages = len(self.blocks) or 1
        pipelined = not isinstance(options.value("setExecutionStrategy", None), poptorch.ShardedExecution)
        if marks.overlaps:
            ends = [*micro_batch, *(outputs if isinstance(outputs, tuple) else [outputs])]
            self._check_overlap(pipelined, all(any(tensor is end for end in ends) for tensor in marks.overlaps))
        if pipelined:
            self._check_pipeline(stages, training)
        self.ipus = stages * options.replicas
        if self.ipus > 64 or self.ipus & (self.ipus - 1):
            raise poptorch.Error(f"{self.ipus} IPUs: PopTorch must reserve a power of 2 or maximum of 64 per process")

    def _check_overlap(self, pipelined, only_ends):
        if pipelined:
            raise poptorch.Error("Overlapped IO is not supported with poptorch.PipelinedExecution.")
        if not self._options.value("TensorLocations.numIOTiles", 0):
            raise poptorch.Error("No IO tiles allocated. You must allocate at least 32 IO tiles.")
        if not only_ends:
            raise poptorch.Error("poptorch.set_overlap_for_input applied on a node which is not a tensor input.")

    def _check_pipeline(self, stages, training):
        if [ipu for _, ipu in self.blocks] != list(range(len(self.blocks))):
            raise poptorch.Error(f"{self.blocks}: the IPUs of a pipeline must increase from block to block")
        if training and self._options.accumulation < 2 * stages - 1:
            raise poptorch.Error(
                "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of "
                f"pipeline stages ({2 * stages - 1}) when using poptorch.PipelinedExecution."
            )
        if not training and self._options.iterations < stages:
            raise poptorch.Error(
                "poptorch.Options().deviceIterations must be greater than or equal to the number of pipeline stages "
                f"({stages}) when using PopTorch.PipelinedExecution."
            )

    # Weights and state

    def write_weights(self, weights):
        """Copies {name: parameter} of the host to the device."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(weights[name])

    def read_weights(self, weights):
        """Copies the device's parameters into {name: parameter}; with synthetic data nothing leaves the device."""
        if self._options.value("enableSyntheticData", False):
            return
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                weights[name].copy_(parameter)

    def _make_state(self, model):
        kind, types, correction = type(self._optimizer).__name__, self._optimizer.types, self._optimizer.bias_correction
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = dict(self._module.named_parameters())
        self._groups = [[names[id(each)] for each in group["params"]] for group in self._optimizer.param_groups]
        for group, values in zip(self._groups, self.values):
            for name in group:
                made = updates.new_state(kind, values, types, correction, parameters[name].detach())
                self.state.update({prefix + name: tensor for prefix, tensor in made.items()})

    def read_state(self):
        """{PopART's name: tensor}."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def write_state(self, state):
        """Takes what read_state gave."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    # Running

    def run(self, args):
        """One call: all micro batches of the arguments, and in training the update; returns the outputs."""
        micro_batches = list(zip(*(tensor.chunk(self._options.micro_batches) for tensor in args)))
        if self._optimizer is None:
            with torch.no_grad():
                outputs = [self._module(*each) for each in micro_batches]
        else:
            outputs = self._train(micro_batches)
        if isinstance(outputs[0], torch.Tensor):
            return self._collected(outputs)
        return tuple(self._collected(list(tensors)) for tensors in zip(*outputs))

    def _train(self, micro_batches):
        replicas, outputs = self._options.replicas, []
        sums = [{} for _ in range(replicas)]
        for number, inputs in enumerate(micro_batches):
            self._module.zero_grad(set_to_none=True)
            with ops.collected() as marks:
                output = self._module(*inputs)
            (marks.losses[0].sum() * self._optimizer.loss_scaling).backward()
            self._accumulate(sums[number % replicas], number // replicas)
            outputs.append([tensor.detach() for tensor in output])
        self._update(self._reduced(sums))
        return outputs

    def _accumulate(self, sums, number):
        """Adds the gradients of micro batch `number` in the accumulator's type: a sum, or a running mean."""
        for name, parameter in self._module.named_parameters():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            before = sums[name].float() if name in sums else torch.zeros_like(gradient)
            if self._running_mean():
                after = before * (number / (number + 1)) + gradient / (number + 1)
            else:
                after = before + gradient
            sums[name] = self._rounded(after, self._optimizer.types["accum_type"])

    def _running_mean(self):
        strategy = self._options.value(
            "Training.setMeanAccumulationAndReplicationReductionStrategy", poptorch.MeanReductionStrategy.Post
        )
        return self._mean() and strategy == poptorch.MeanReductionStrategy.Running

    def _mean(self):
        reduction = self._options.value("Training.accumulationAndReplicationReductionType", poptorch.ReductionType.Mean)
        return reduction == poptorch.ReductionType.Mean

    def _reduced(self, sums):
        """{name: float32 gradient}: over replicas of all processes, without loss scale and, for a mean, counts."""
        total = {name: sum(part[name].float() for part in sums) for name in sums[0]}
        processes = distributed.get_world_size() if distributed.is_initialized() else 1
        if processes > 1:
            for gradient in total.values():
                distributed.all_reduce(gradient)
        factor = self._optimizer.loss_scaling
        if self._mean():
            factor *= self._options.replicas * processes
            if not self._running_mean():
                factor *= self._options.accumulation
        return {name: gradient * (1.0 / factor) for name, gradient in total.items()}

    def _update(self, gradients):
        kind, parameters = type(self._optimizer).__name__, dict(self._module.named_parameters())
        scale = self._optimizer.loss_scaling
        with torch.no_grad():
            for names, values in zip(self._groups, self.values):
                for name in filter(gradients.__contains__, names):
                    state = {each: self.state[each + name] for each in updates.PREFIXES if each + name in self.state}
                    updates.apply(kind, values, parameters[name], gradients[name], state, self._rounded, scale)

    def _collected(self, tensors):
        """One output of all micro batches; a scalar becomes one element each. The sum is each replica's own."""
        mode, replicas = self._options.value("outputMode", None), self._options.replicas
        assert mode in (poptorch.OutputMode.All, poptorch.OutputMode.Sum), "the double knows All and Sum"
        if mode == poptorch.OutputMode.Sum:
            tensors = [sum(tensors[replica::replicas]) for replica in range(replicas)]
        if len(tensors) == 1:
            return tensors[0]
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
