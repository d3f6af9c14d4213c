"""A recipe's optimizer, weights and exchange for any module, in a training loop of one's own.

See docs/library.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from dataclasses import dataclass
from typing import Any, ContextManager, Dict, Mapping, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from common.errors import ConfigError
from engines import same_start, state
from engines.devices import DTYPES
from engines.exchange import GradientExchange, UpdateSections, create_weights
from engines.unused import UnusedParameters
from optim import factory
from optim.loss_scale import LossScale
from parallel import groups
from parallel.groups import Group
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import checks, loading
from recipe.config import Recipe
from recipe.division import Batch

_SECTIONS = ("optimizer", "exchange", "precision")


@dataclass
class _Checked:
    """A replica's module and settings, which can be used.

    parameters: those that are trained, by name.
    device: of all of them.
    recipe: has the sections of the user.
    batch: of an update.
    """

    parameters: Dict[str, nn.Parameter]
    device: torch.device
    recipe: Recipe
    batch: Batch


class DistributedOptimizer:
    """The optimizer, weights and exchange of a recipe, for a module on one replica.

        sections = {"optimizer": {"name": "lars"}, "exchange": {"method": "topk"}}
        optimizer = DistributedOptimizer(module, sections)
        for step in range(steps):
            optimizer.backward(loss_of(module))
            optimizer.step(lr=schedule(step))

    The module's parameters are the working copy of the weights, which persist in
    `precision.weights` (float16 with stochastic rounding, or float32) and start as the first
    replica's parameters. What is loaded into the module later is overwritten by the next update.
    The module must not be wrapped in DistributedDataParallel. Its persistent buffers and extra
    states (`get_extra_state`) also start as the first replica's; after that buffers, running
    statistics for instance, remain each replica's own and are not in `state_dict`.

    A parameter that no loss of an update depends on, on any replica, is left as it is, like a
    parameter without a gradient by torch's optimizers.

    Keys have the recipe's names, defaults and checks (configs/schema.json). `precision.compute` is
    the dtype of the module's parameters; `optimizer.skip: [norm]` means all of at most one
    dimension that are no biases. Muon's matrices are the weights of nn.Linear, of convolutions and
    of nn.MultiheadAttention alone, also parametrised by torch.nn.utils.parametrizations; those of
    other modules (nn.LSTM, nn.Bilinear, layers of your own) take AdamW's steps. So do the first and
    the last layer, which are those that the module registers first and last.
    """

    def __init__(
        self,
        module: nn.Module,
        sections: Mapping[str, Any],
        group: Optional[dist.ProcessGroup] = None,
        *,
        accumulation: int = 1,
        seed: int = 0,
        steps_per_epoch: Optional[int] = None,
    ):
        """
        Args:
            module: its parameters that require gradients are all of one dtype and on one device.
            sections: of a recipe: `optimizer`, `exchange`, `precision`; what is missing has the
                recipe's defaults.
            group: of the replicas, with this process; None: all processes, or this one without
                torch.distributed.
            accumulation: backward passes of an update.
            seed: of stochastic rounding.
            steps_per_epoch: updates of an epoch, which `exchange.density_warmup` and
                `exchange.dense_epochs` need.

        Raises:
            ConfigError: keys, parameters or a group that cannot be used, with the remedy; on every
                replica, also where their modules or settings differ.
        """
        processes = _Group(group)
        replicas = processes.topology.replicas

        with _current_gpu(*module.parameters()):
            # What one replica refuses ends all of them, and so does a module or setting that
            # another does not have.
            checked = same_start.agreed(
                processes,
                lambda: _checked(
                    module,
                    sections,
                    accumulation,
                    seed=seed,
                    replicas=replicas,
                    steps_per_epoch=steps_per_epoch,
                ),
            )
            if replicas > 1:
                settings = {
                    "accumulation": accumulation,
                    "steps_per_epoch": steps_per_epoch,
                    "seed": seed,
                    **_settings(checked.recipe),
                }
                same_start.check_same(processes, module, settings)
                same_start.share(processes, module, checked.device)

        self._processes = processes
        self._batch = checked.batch
        self._create_update(module, checked, seed, steps_per_epoch)
        self.steps = 0
        self.zero_grad()

    def _create_update(
        self,
        module: nn.Module,
        checked: _Checked,
        seed: int,
        steps_per_epoch: Optional[int],
    ) -> None:
        """Create the weights, their exchange, and what follows them."""
        recipe = checked.recipe
        parameters = checked.parameters
        update = UpdateSections(recipe.optimizer, recipe.exchange, recipe.precision)
        # Only a module's author knows its normalisations: at most one dimension is the mark that
        # most have, as of a model's (`norm_parameters`).
        norms = [name for name, parameter in parameters.items() if parameter.dim() <= 1]
        # Without depths: layer decay, which needs them, is refused for a user's module.
        self.weights = create_weights(
            update,
            parameters,
            norms=norms,
            hidden=factory.hidden_layers(module),
            depths={},
            seed=seed,
        )
        self._exchange = GradientExchange(
            self.weights,
            parameters,
            update,
            create_optimizer=functools.partial(
                factory.create,
                recipe.optimizer,
                parameters,
                norms,
            ),
            batch=checked.batch,
            processes=self._processes,
            steps_per_epoch=steps_per_epoch,
        )
        precision = recipe.precision
        dynamic = precision.dynamic_loss_scale
        self._scale = LossScale(precision.loss_scale, dynamic, checked.device)
        self._unused = UnusedParameters(self.weights.places(), checked.device)

    def backward(self, loss: torch.Tensor) -> None:
        """Make the backward pass of a micro batch.

        Args:
            loss: [], the mean over its images.
        """
        # `module.zero_grad()` of an ordinary loop may have removed the gradients.
        self.weights.gradients.show()
        # By calls and not by passes: all replicas have as many calls, of which some may fail.
        self._calls += 1
        last = self._calls == self._batch.accumulation
        # No other pass adds to these gradients, so that the exchange may begin within this one.
        if last and self._exchange.arm is not None:
            self._exchange.arm()
        (loss * self._scale.scale.to(loss.dtype)).backward()
        self.weights.gradients.accumulate()
        self._passes += 1

    def step(self, lr: float) -> torch.Tensor:
        """Make the update, after `accumulation` backward passes, without waiting for the device.

        All replicas call.

        Args:
            lr: learning rate.

        Returns:
            bool [], whether the gradients of all replicas were finite; if not, the weights are as
            before.

        Raises:
            ValueError: another number of backward passes, one that failed, or a learning rate that
                is none.
        """
        if self._passes != self._calls:
            raise ValueError(
                f"of {self._calls} backward passes {self._passes} came to their end; zero_grad() begins anew"
            )
        if self._passes != self._batch.accumulation:
            needed = self._batch.accumulation
            raise ValueError(
                f"an update needs {needed} backward passes, there were {self._passes}; zero_grad() begins anew"
            )
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"the learning rate must be a number from 0 on, not {lr}")

        # Whether another replica has a gradient for a parameter is not known yet.
        buffers = [*self.weights.own_state().values(), *self._exchange.own_state().values()]
        self._unused.save(buffers)
        divisor = self._exchange(self.steps, self._scale.scale, lr)
        assert divisor is not None, "without exchange.delay, which is refused, no gradient is late"

        # One message: on how many replicas a gradient is not finite, and on how many each parameter
        # has one.
        fault = (~self.weights.prepare(divisor)).float()
        counts = self._processes.sum(torch.cat([fault[None], self._unused.used()]))
        finite = counts[0] == 0

        # The update is of all parameters: that of unused ones is taken back, without a look at them.
        rate = self._exchange.rate(lr)
        self.weights.apply(self.steps, rate, finite, False)
        if self._unused.restore(counts[1:]):
            self.weights.refresh()
        self._exchange.after_update(self.steps)
        self._scale.update(finite)
        self.steps += 1
        self.zero_grad()
        return finite

    def zero_grad(self) -> None:
        """Forget the backward passes since the last update; `step` does so itself.

        All replicas call, after as many calls of `backward`, of which some may have failed.
        """
        # What the last backward pass has begun to send writes to the gradients until it is there.
        self._exchange.disarm()
        self._calls = 0  # begun
        self._passes = 0  # of these, done
        self._unused.forget()
        # A pass that failed has left gradients to which the next one would add.
        for _, parameter in self.weights.places():
            parameter.grad = None
        self.weights.gradients.zero()

    def state_dict(self) -> dict:
        """Return all that an update needs later, on the CPU. All replicas call.

        Weights that differ between replicas (`exchange.method: local`) are their mean.

        Returns:
            The state on the first replica, elsewhere {}.
        """
        # All replicas take part in both, before all but the first leave.
        with _current_gpu(self.weights.flat):
            replicas = list(self._exchange.replica_states())
            weights = self._exchange.mean(self.weights.flat)
        if not self._processes.topology.is_main:
            return {}
        return {
            **self.weights.state_dict(weights),
            "loss_scale": self._scale.state_dict(),
            "steps": self.steps,
            "replicas": replicas,
            **self._exchange.state_dict(),
        }

    def load_state_dict(self, saved: Optional[dict]) -> None:
        """Go on from what `state_dict` gave the first replica. All replicas call.

        There may be another number of replicas now.

        Args:
            saved: the first replica's; that of the others is not read.

        Raises:
            ValueError: names what is missing or does not fit.
        """
        with _current_gpu(self.weights.flat):
            first = self._processes.from_main(lambda: saved or {})
        state.check_parts(first, ("steps", "loss_scale", "replicas"), ())
        self.weights.load_state_dict(first)
        self._scale.load_state_dict(first["loss_scale"])
        self._exchange.load_state_dict(first)
        replicas = first["replicas"]
        self._exchange.load_replica_states(len(replicas), replicas.__getitem__)
        self.steps = first["steps"]


def _current_gpu(*tensors: torch.Tensor) -> ContextManager[object]:
    """Return a context in which the GPU of the first tensor that has one is the current one.

    Objects travel over NCCL on the current GPU, which the user may not have set to the module's.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def _checked(
    module: nn.Module,
    sections: Mapping[str, Mapping[str, Any]],
    accumulation: int,
    *,
    seed: int,
    replicas: int,
    steps_per_epoch: Optional[int],
) -> _Checked:
    """Return what the optimizer is made of. Raises ConfigError."""
    parameters = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    dtype, device = _kind(parameters)
    if not isinstance(accumulation, int) or accumulation < 1:
        raise ConfigError(
            f"accumulation is {accumulation!r}; use a whole number of backward passes, 1 or more"
        )
    # One image stands for a micro batch: how many it has only the user's loop knows.
    batch = Batch(
        global_=accumulation * replicas,
        micro=1,
        accumulation=accumulation,
        replicas=replicas,
        stages=1,
    )
    recipe = _recipe(sections, dtype, seed)
    checks.check(recipe, batch)
    # Keys that a recipe may have, but only the engine's loop can follow.
    exchange = recipe.exchange
    if exchange.method == "auto" or exchange.delay or exchange.in_tree:
        raise ConfigError(
            "exchange.method auto, exchange.delay and exchange.order tree are for train.py alone; "
            "name a method, delay=0, order=fast"
        )
    if exchange.counts_epochs and not steps_per_epoch:
        raise ConfigError(
            "exchange.density_warmup and exchange.dense_epochs count epochs; give steps_per_epoch=, the updates of one"
        )
    if recipe.optimizer.layer_decay is not None:
        unknown = "which parameters lie how deep in a module is not known"
        raise ConfigError(f"optimizer.layer_decay is for train.py alone: {unknown}; remove it")
    return _Checked(parameters, device, recipe, batch)


def _kind(parameters: Mapping[str, nn.Parameter]) -> Tuple[torch.dtype, torch.device]:
    """Return the dtype and device of all parameters."""
    kinds = {(parameter.dtype, parameter.device) for parameter in parameters.values()}
    if not kinds:
        raise ConfigError("no parameter of the module requires a gradient")
    if len(kinds) > 1:
        raise ConfigError(
            f"the parameters must be of one dtype on one device, but there are {len(kinds)} kinds"
        )
    ((dtype, device),) = kinds
    if dtype not in DTYPES.values():
        raise ConfigError(f"the parameters are {dtype}; use one of {', '.join(DTYPES)}")
    return dtype, device


def _recipe(
    sections: Mapping[str, Mapping[str, Any]],
    dtype: torch.dtype,
    seed: int,
) -> Recipe:
    """Return a recipe with the user's sections, read as if they stood in a file."""
    if not _are_sections(sections):
        raise ConfigError(
            f"sections is {sections!r}; use a dictionary of dictionaries: {{section: {{key: value}}}}"
        )
    for name in sorted(set(sections) - set(_SECTIONS)):
        raise ConfigError(f"{name} is none of the sections {', '.join(_SECTIONS)}")
    # The module says in which dtype it computes.
    compute = next(name for name, known in DTYPES.items() if known == dtype)
    precision = {"compute": compute, **sections.get("precision", {})}
    if precision["compute"] != compute:
        raise ConfigError(
            f"precision.compute is the dtype of the module's parameters, {compute}; leave it out"
        )
    # A recipe needs a length and a learning rate, which the user's loop has.
    content = {name: dict(section) for name, section in sections.items()}
    content["precision"] = precision
    content["run"] = {"steps": 2, "seed": seed}
    content["schedule"] = {"peak": 1}
    try:
        text = json.dumps(content)
    except TypeError as error:
        raise ConfigError(
            f"sections: values are numbers, text and lists, as in YAML: {error}"
        ) from None
    return loading.loads(text, "sections")


def _are_sections(sections: Any) -> bool:
    if not isinstance(sections, Mapping):
        return False
    return all(isinstance(section, Mapping) for section in sections.values())


def _settings(recipe: Recipe) -> Dict[str, Any]:
    """Return the values of the user's sections, with defaults, by the names of their keys."""
    settings = {}
    for name in _SECTIONS:
        for key, value in getattr(recipe, name).model_dump().items():
            settings[f"{name}.{key}"] = value
    return settings


class _Group(Processes):
    """The replicas of a process group that somebody else has made; without stages."""

    def __init__(self, group: Optional[dist.ProcessGroup]):
        # The user's processes have met already: here nothing is connected.
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        rank = 0
        self._world = 1
        if group is not None:
            rank = dist.get_rank(group)
            self._world = dist.get_world_size(group)
        # So torch numbers a process that is not in a group.
        if rank < 0:
            raise ConfigError(
                "this process is not in the group; only its members make the optimizer"
            )
        self.topology = Topology(self._world, 1, rank, rank)
        self._host = group if self._world > 1 else None
        self.replica_group = self._host
        self.stage_group = None
        self.host_stage_group = None

    def further_group(self) -> Group:
        """Return another group of the same replicas; None for a single one.

        Only the replicas of this group call, whatever other processes do.
        """
        if self._world == 1:
            return None
        ranks = dist.get_process_group_ranks(self._host)
        return groups.new_group(ranks=ranks)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums of `values` over replicas, in their place."""
        self.sum_over_replicas(values)
        return values
