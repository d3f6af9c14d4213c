"""A recipe's optimizer, weights and exchange for any module, in a training loop of one's own: see docs/library.md."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any, Dict, Mapping, Optional, Tuple

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
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import checks, loading
from recipe.config import Recipe
from recipe.division import Batch

_SECTIONS = ("optimizer", "exchange", "precision")


class DistributedOptimizer:
    """The optimizer, weights and exchange of a recipe, for a module on one replica.

        optimizer = DistributedOptimizer(module, {"optimizer": {"name": "lars"}, "exchange": {"method": "topk"}})
        for step in range(steps):
            optimizer.backward(loss_of(module))
            optimizer.step(lr=schedule(step))

    The module's parameters are the working copy of the weights, which persist in `precision.weights` (float16 with
    stochastic rounding, or float32) and start as the first replica's parameters; what is loaded into the module later
    is overwritten by the next update. The module must not be wrapped in DistributedDataParallel. Its persistent buffers
    and extra states (`get_extra_state`) also start as the first replica's; after that buffers, running statistics for
    instance, remain each replica's own and are not in `state_dict`.

    A parameter that no loss of an update depends on, on any replica, is left as it is, like a parameter without a
    gradient by torch's optimizers.

    Keys have the recipe's names, defaults and checks (configs/schema.json). `precision.compute` is the dtype of the
    module's parameters; `optimizer.skip: [norm]` means all of one dimension that are no biases. The first and the last
    layer, which Muon leaves to AdamW, are those that the module registers first and last.
    """

    def __init__(
        self,
        module: nn.Module,
        sections: Mapping[str, Mapping[str, Any]],
        group: Optional[dist.ProcessGroup] = None,
        *,
        accumulation: int = 1,
        seed: int = 0,
        steps_per_epoch: Optional[int] = None,
    ):
        """
        Args:
            module: its parameters that require gradients are all of one dtype and on one device.
            sections: of a recipe: `optimizer`, `exchange`, `precision`; what is missing has the recipe's defaults.
            group: of the replicas, with this process; None: all processes, or this one without torch.distributed.
            accumulation: backward passes of an update.
            seed: of stochastic rounding.
            steps_per_epoch: updates of an epoch, for `exchange.density_warmup` and `exchange.dense_epochs`.

        Raises ConfigError: keys, parameters or a group that cannot be used, with the remedy; on every replica, also
        where their modules or settings differ.
        """
        processes = _Group(group)

        def checked() -> Tuple[Dict[str, nn.Parameter], torch.device, Recipe]:
            parameters = {name: each for name, each in module.named_parameters() if each.requires_grad}
            dtype, device = _kind(parameters)
            if not isinstance(accumulation, int) or accumulation < 1:
                fault = f"accumulation is {accumulation!r}"
                raise ConfigError(f"{fault}; use a whole number of backward passes, 1 or more")
            replicas = processes.topology.replicas
            self._batch = Batch(accumulation * replicas, 1, accumulation, replicas, 1)
            return parameters, device, _checked_recipe(sections, dtype, seed, self._batch)

        # Objects travel over NCCL on the current GPU, which the user may not have set to the module's.
        gpu = next((each.device for each in module.parameters() if each.is_cuda), None)
        with contextlib.nullcontext() if gpu is None else torch.cuda.device(gpu):
            # What one replica refuses ends all of them, and so does a module or setting that another does not have.
            parameters, device, recipe = same_start.agreed(processes, checked)
            if processes.topology.replicas > 1:
                about = {"accumulation": accumulation, "steps_per_epoch": steps_per_epoch, "seed": seed}
                for name in _SECTIONS:
                    section = getattr(recipe, name).model_dump()
                    about.update({f"{name}.{key}": value for key, value in section.items()})
                same_start.check_same(processes, module, about)
                same_start.share(processes, module, device)
        norms = [name for name, each in parameters.items() if each.dim() == 1]
        sections = UpdateSections(recipe.optimizer, recipe.exchange, recipe.precision)
        self.weights = create_weights(
            sections,
            parameters,
            norms=norms,
            hidden=factory.hidden_layers(module),
            seed=seed,
        )
        self._exchange = GradientExchange(
            self.weights,
            parameters,
            sections,
            norms=norms,
            batch=self._batch,
            processes=processes,
            steps_per_epoch=steps_per_epoch,
        )
        self._scale = LossScale(recipe.precision.loss_scale, recipe.precision.dynamic_loss_scale, device)
        self._unused = UnusedParameters(self.weights.places(), device)
        self._processes, self.steps = processes, 0
        self.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro batch. Args: loss: [], the mean over its images."""
        self.weights.gradients.show()  # what `module.zero_grad()` of an ordinary loop may have removed
        last = self._passes == self._batch.accumulation - 1
        if last and self._exchange.arm is not None:
            self._exchange.arm()
        (loss * self._scale.scale.to(loss.dtype)).backward()
        self.weights.gradients.accumulate()
        self._passes += 1

    def step(self, lr: float) -> torch.Tensor:
        """Make the update, after `accumulation` backward passes, without waiting for the device. All replicas call.

        Returns: bool [], whether the gradients of all replicas were finite; if not, the weights are as before.
        """
        if self._passes != self._batch.accumulation:
            needed = f"an update needs {self._batch.accumulation} backward passes"
            raise ValueError(f"{needed}, there were {self._passes}; zero_grad() begins anew")
        if not (math.isfinite(lr) and lr >= 0):
            raise ValueError(f"the learning rate must be a number from 0 on, not {lr}")
        self._unused.save([*self.weights.own_state().values(), *self._exchange.own_state().values()])
        divisor = self._exchange(self.steps, self._scale.scale, lr)
        # One message: on how many replicas a gradient is not finite, and on how many each parameter has one.
        fault = (~self.weights.prepare(divisor)).float()
        counts = self._processes.sum(torch.cat([fault[None], self._unused.used()]))
        finite = counts[0] == 0
        self.weights.apply(self.steps, self._exchange.rate(lr), finite, False)
        if self._unused.restore(counts[1:]):
            self.weights.refresh()
        self._exchange.after_update(self.steps)
        self._scale.update(finite)
        self.steps += 1
        self.zero_grad()
        return finite

    def zero_grad(self) -> None:
        """Forget the backward passes since the last update; `step` does so itself."""
        self._passes = 0
        self._unused.forget()
        self.weights.gradients.zero()

    def state_dict(self) -> dict:
        """All that an update needs later, on the CPU: on the first replica, elsewhere {}. All replicas call.

        Weights that differ between replicas (`exchange.method: local`) are their mean.
        """
        states, mean = list(self._exchange.replica_states()), self._exchange.mean(self.weights.flat)
        if not self._processes.topology.is_main:
            return {}
        weights = self.weights.state_dict(mean)
        own = {"loss_scale": self._scale.state_dict(), "steps": self.steps, "replicas": states}
        return {**weights, **own, **self._exchange.state_dict()}

    def load_state_dict(self, saved: Optional[dict]) -> None:
        """Go on from what `state_dict` gave the first replica, here or with another number of replicas. All replicas
        call. Args: saved: the first replica's; that of the others is not read.

        Raises ValueError naming what is missing or does not fit.
        """
        saved = self._processes.from_main(lambda: saved)
        state.check_parts(saved or {}, ("steps", "loss_scale", "replicas"), ())
        self.weights.load_state_dict(saved)
        self._scale.load_state_dict(saved["loss_scale"])
        self._exchange.load_state_dict(saved)
        self._exchange.load_replica_states(len(saved["replicas"]), saved["replicas"].__getitem__)
        self.steps = saved["steps"]


def _checked_recipe(sections: Mapping[str, Mapping[str, Any]], dtype: torch.dtype, seed: int, batch: Batch) -> Recipe:
    recipe = _recipe(sections, dtype, seed)
    checks.check(recipe, batch)
    exchange = recipe.exchange
    if exchange.method == "auto" or exchange.delay or exchange.in_tree:
        alone = "exchange.method auto, exchange.delay and exchange.order tree are for train.py alone"
        raise ConfigError(f"{alone}; name a method, delay=0, order=fast")
    return recipe


def _recipe(sections: Mapping[str, Mapping[str, Any]], dtype: torch.dtype, seed: int) -> Recipe:
    if not isinstance(sections, Mapping) or not all(isinstance(each, Mapping) for each in sections.values()):
        raise ConfigError(f"sections is {sections!r}; use a dictionary of dictionaries: {{section: {{key: value}}}}")
    for name in sorted(set(sections) - set(_SECTIONS)):
        raise ConfigError(f"{name} is none of the sections {', '.join(_SECTIONS)}")
    compute = next(name for name, each in DTYPES.items() if each == dtype)
    precision = {"compute": compute, **sections.get("precision", {})}
    if precision["compute"] != compute:
        raise ConfigError(f"precision.compute is the dtype of the module's parameters, {compute}; leave it out")
    given = {**{name: dict(section) for name, section in sections.items()}, "precision": precision}
    try:
        text = json.dumps({**given, "run": {"steps": 2, "seed": seed}, "schedule": {"peak": 1}})
    except TypeError as error:
        raise ConfigError(f"sections: values are numbers, text and lists, as in YAML: {error}") from None
    return loading.loads(text, "sections")


def _kind(parameters: Mapping[str, nn.Parameter]) -> Tuple[torch.dtype, torch.device]:
    """Dtype and device of all parameters."""
    kinds = {(each.dtype, each.device) for each in parameters.values()}
    if not kinds:
        raise ConfigError("no parameter of the module requires a gradient")
    if len(kinds) > 1:
        raise ConfigError(f"the parameters must be of one dtype on one device, but there are {len(kinds)} kinds")
    ((dtype, device),) = kinds
    if dtype not in DTYPES.values():
        raise ConfigError(f"the parameters are {dtype}; use one of {', '.join(DTYPES)}")
    return dtype, device


class _Group(Processes):
    """The replicas of a process group that somebody else has made; without stages."""

    def __init__(self, group: Optional[dist.ProcessGroup]):
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        rank, self._world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if rank < 0:
            raise ConfigError("this process is not in the group; only its members make the optimizer")
        self.topology = Topology(self._world, 1, rank, rank)
        self.stage_group = self.host_stage_group = None
        self.replica_group = self._host = group if self._world > 1 else None

    def further_group(self) -> Optional[dist.ProcessGroup]:
        """As in a run, but only the replicas of this group call, whatever other processes do."""
        if self._world == 1:
            return None
        return dist.new_group(dist.get_process_group_ranks(self._host), use_local_synchronization=True)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.sum_over_replicas(values)
        return values
