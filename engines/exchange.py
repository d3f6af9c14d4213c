"""A replica's gradients between its last backward pass and the update: exchanged, perhaps late."""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
)

import torch
from torch import nn

from engines.delay import Delay, Late
from engines.devices import DTYPES
from engines.state import merged
from optim import factory
from optim.base import HasSlots
from optim.norms import Norms
from optim.replica_update import ReplicaUpdate
from optim.weight_state import WeightState
from parallel import exchange
from parallel.exchange import Running, Setup, Weights
from parallel.groups import Group
from parallel.processes import Processes
from recipe.division import Batch
from recipe.exchange import Exchange, Sparse
from recipe.optimization import Optimizer, Precision, Sgd

# Subtracts updates that are made before they are exchanged.
_SUBTRACT = Sgd(momentum=0.0, weight_decay=0.0, skip=[])


class UpdateSections(NamedTuple):
    """The sections of a recipe that an update depends on."""

    optimizer: Optimizer
    exchange: Exchange
    precision: Precision


def create_weights(
    sections: UpdateSections,
    parameters: Mapping[str, nn.Parameter],
    *,
    norms: Iterable[str],
    hidden: Mapping[str, int],
    depths: Mapping[str, int],
    seed: int,
    **options: Any,
) -> WeightState:
    """Create the weights of a run, with the optimizer of what is exchanged.

    That is the recipe's for gradients, and a subtraction for the updates that replicas made.

    Args:
        sections: of the recipe.
        parameters: of this process, by name.
        norms: result of `models.normalization.norm_parameters` for the whole model.
        hidden: result of `optim.factory.hidden_layers` for the whole model.
        depths: result of `models.families.depths`; empty without `optimizer.layer_decay`.
        seed: of stochastic rounding.
        options: of WeightState.
    """
    section = sections.optimizer
    if sections.exchange.compresses_update(section):
        # The recipe's optimizer makes these updates before they are exchanged.
        section = _SUBTRACT
    return WeightState(
        parameters.items(),
        lambda named: factory.create(section, named, norms, hidden, depths),
        dtype=DTYPES[sections.precision.weights],
        rounding=sections.precision.rounding,
        seed=seed,
        clip_norm=section.clip_norm,
        **options,
    )


class _ExchangedWeights(Weights):
    """The weights as an exchange sees them.

    Its state contains the averages: where replicas make updates alone each has averages of its own.
    """

    def __init__(self, weights: WeightState, averages: Mapping[str, torch.Tensor]):
        self._weights = weights
        self._averages = averages

    @property
    def flat(self) -> torch.Tensor:
        return self._weights.flat

    def own_state(self) -> Dict[str, torch.Tensor]:
        return {**self._weights.own_state(), **self._averages}

    def refresh(self) -> None:
        self._weights.refresh()

    def store(self, start: int, end: int, values: torch.Tensor, index: int) -> None:
        self._weights.store(start, end, values, index)


class _Alone(Running):
    """The exchange of a replica that has nothing to exchange: the gradient stays as it is."""

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        pass


class GradientExchange:
    """Puts the gradient of the whole batch in the place of the replica's own.

    It does so as late as `exchange.delay` says.

    arm: to be called before the last backward pass of a step where the exchange can begin within
        it; else None.
    """

    def __init__(
        self,
        weights: WeightState,
        parameters: Mapping[str, nn.Parameter],
        sections: UpdateSections,
        *,
        create_optimizer: Callable[[], HasSlots],
        batch: Batch,
        processes: Processes,
        steps_per_epoch: Optional[int],
        averages: Optional[Mapping[str, torch.Tensor]] = None,
    ):
        """
        Args:
            weights: of `create_weights`.
            parameters: of this process, by name: those of the weights.
            sections: of the recipe, with which the weights were created.
            create_optimizer: creates the recipe's optimizer of these parameters, for replicas that
                make updates before they are exchanged.
            batch: of a step.
            processes: of the run.
            steps_per_epoch: None for an engine that does not train.
            averages: of the weights, by name, laid out as these.
        """
        section = sections.exchange
        method = exchange.of(section)
        self._weights = weights
        self._processes = processes
        self._buffer = weights.gradients.flat
        # Where updates are compressed the recipe's optimizer runs here: the weights only subtract.
        self._replica_update: Optional[ReplicaUpdate] = None
        if section.compresses_update(sections.optimizer):
            self._replica_update = _replica_update(
                weights,
                create_optimizer(),
                parameters,
                sections,
                processes=processes,
            )
        # All processes are here at once: a delayed exchange forms a group of its own.
        running = method.create(
            Setup(
                batch=batch,
                processes=processes,
                gradients=self._buffer,
                places=weights.places(),
                collect=weights.gradients.collect,
                group=_group_of(processes, section.delay),
                steps_per_epoch=steps_per_epoch,
                replica_update=self._replica_update,
                weights=_ExchangedWeights(weights, averages or {}),
            )
        )
        self._running = running or _Alone()
        # A method may implement the delay itself.
        self._steps_late = 0 if self._running.delays else section.delay
        self._delay: Optional[Delay] = None
        if self._steps_late:
            # `running`, not `_running`: without other replicas Delay starts no thread.
            self._delay = Delay(self._buffer, self._steps_late, running)
        # A late exchange begins when the gradient is put aside, not within a backward pass.
        self.arm: Optional[Callable[[], None]] = None
        if self._delay is None and self._running.overlaps:
            self.arm = self._running.arm
        # How many micro batches a gradient is the sum of once it is exchanged.
        self._summed = batch.micro_batches if method.sums else batch.accumulation
        self.set_shares(batch)

    def set_shares(self, batch: Batch) -> None:
        """Let replicas compute the shares of `batch` from the next step on.

        The gradients have their sums already.
        """
        self._running.set_shares(batch.shares, self._weights.gradients.sums)

    def __call__(
        self,
        step: int,
        loss_scale_by_steps: torch.Tensor,
        lr: float,
    ) -> Optional[torch.Tensor]:
        """Exchange the gradient that lies in the weights' buffer; or the update of it.

        Args:
            step: the update's first step, from 0.
            loss_scale_by_steps: float32 [], the loss scale that the gradient was computed with,
                times the steps of the update.
            lr: learning rate of the update.

        Returns:
            The divisor of the gradient that lies in the buffer now, float32 []; None where no
            gradient is due yet.
        """
        divisor = loss_scale_by_steps * self._summed
        if self._replica_update is not None:
            # It makes the update within the exchange, and so needs the rate before.
            self._replica_update.lr = lr
        if self._delay is not None:
            return self._delay.advance(step, divisor)
        self._running(self._buffer, step, divisor)
        return divisor

    def disarm(self) -> None:
        """Take back `arm`, also after the backward pass; every replica that has armed calls."""
        self._running.disarm()

    def weights_replaced(self) -> None:
        """Take note that all replicas go on from other weights, which lie in the buffer already."""
        self._running.weights_replaced()

    def after_update(self, step: int) -> None:
        """Do what follows the update that begins with `step`, once it is made."""
        self._running.after_update(step)

    def rate(self, lr: float) -> float:
        """Return the learning rate of what was exchanged: updates have theirs, `lr`, already."""
        return lr if self._replica_update is None else 1.0

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the mean over replicas of a buffer, `flat`, laid out as the weights.

        It is the buffer itself where replicas have the same. All replicas call.
        """
        mean = self._running.mean(flat)
        return flat if mean is None else mean

    def norms(self, applied: Norms) -> Norms:
        """Return the norms of an update. All stages call.

        Args:
            applied: what the weights know; replicas may have made the update before.
        """
        return applied if self._replica_update is None else self._replica_update.norms(applied)

    def state_dict(self) -> Dict[str, dict]:
        """Return the state that all replicas share; what is empty is left out.

        Returns:
            `delayed`, gradients still to be applied, oldest first, and `exchange`, {kind:
            {parameter: tensor}}.
        """
        saved: Dict[str, Dict[str, Any]] = {}
        if self._delay is not None:
            self._delay.wait()
            # All are sums over replicas by now, also those that a thread has just exchanged.
            delayed: Dict[str, Dict[str, Any]] = {}
            for number, entry in enumerate(self._delay.entries):
                delayed[str(number)] = {
                    "gradient": self._weights.by_name(entry.gradient),
                    "divisor": entry.divisor.to("cpu", copy=True),
                }
            if delayed:
                saved["delayed"] = delayed
        common = self._running.common_state()
        if common:
            saved["exchange"] = {name: self._weights.by_name(flat) for name, flat in common.items()}
        return saved

    def load_state_dict(self, saved: dict) -> None:
        """Load the result of `state_dict`; other names in `saved` are ignored.

        Raises:
            ValueError: names what does not fit.
        """
        delayed = saved.get("delayed", {})
        # One is applied in each step and one added: a longer queue would stay longer for ever.
        if len(delayed) > self._steps_late:
            raise ValueError(
                f"{len(delayed)} gradients are still to be applied, but exchange.delay is {self._steps_late}"
            )
        if self._delay is not None:
            self._delay.wait()
            self._delay.entries.clear()
            for entry in delayed.values():
                gradient = self._flat(entry["gradient"])
                divisor = entry["divisor"].to(self._buffer.device, copy=True)
                self._delay.entries.append(Late(gradient, divisor))
        # The tensors of the state are the exchange's memory, and are written to.
        common = saved.get("exchange", {})
        tensors = self._running.common_state()
        if tensors.keys() != common.keys():
            name = sorted(tensors.keys() ^ common.keys())[0]
            fault = "missing" if name in tensors else "of another exchange"
            raise ValueError(f"exchange: {name} is {fault}")
        for name, flat in tensors.items():
            flat.copy_(self._flat(common[name]))

    def own_state(self) -> Dict[str, torch.Tensor]:
        """Return the state of this replica for later steps, by name.

        Returns:
            [length] each, laid out as the weights.
        """
        return self._running.state()

    def replica_states(self) -> Iterator[dict]:
        """Yield the state of each replica for later steps: see engines/base.py."""
        tensors = self._running.state()
        place = self._processes.topology
        if not tensors:
            return
        if self._delay is not None:
            self._delay.wait()
        # One at a time: the main process has no memory for the states of all replicas.
        for replica in range(place.replicas):
            sent = {}
            if place.replica == replica:
                sent = {name: self._weights.by_name(flat) for name, flat in tensors.items()}
            ranks = range(replica * place.stages, (replica + 1) * place.stages)
            yield merged(self._processes.gather_to_main(sent, ranks))

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        """Load the state of `count` replicas that `read` returns: see engines/base.py.

        Shares are added, so that the sum over replicas, or their mean where that counts, stays.

        Raises:
            ValueError: the states do not fit; on all replicas.
        """
        tensors = self._running.state()
        means = self._running.states_are_means
        if count and not tensors:
            fault = "exchange.method keeps none"
            raise ValueError(f"{count} replicas have a state of their own; {fault}")
        if not tensors or (means and not count):
            return  # such replicas begin with the common state
        sums = self._summed_states(list(tensors), count, read)
        # Shares keep the sum over replicas. A mean of them is divided by their number, which may have
        # changed.
        replicas = self._processes.topology.replicas
        scale = replicas / count if means else 1.0
        for name, flat in tensors.items():
            flat.copy_(sums[name].mul_(scale))
        self._running.loaded()

    def _summed_states(
        self,
        names: Sequence[str],
        count: int,
        read: Callable[[int], dict],
    ) -> Dict[str, torch.Tensor]:
        """Return the sum of the shares of some replicas' states whose images this one computes now.

        Args:
            names: of the state's tensors.
            count: number of the replicas.
            read: returns their states on the main rank.

        Returns:
            float32 [length] by name.

        Raises:
            ValueError: a state does not fit; on all replicas.
        """
        place = self._processes.topology
        sums = {name: torch.zeros_like(self._buffer) for name in names}
        fault = ""
        for number in range(count):
            state = self._processes.from_main(functools.partial(read, number))
            share = _overlap(number, count, place.replica, place.replicas)
            if not share:
                continue
            # A fault waits for the end: the other replicas still have to be sent their states.
            try:
                for name, total in sums.items():
                    total.add_(self._flat(state.get(name, {})), alpha=share)
            except ValueError as error:
                fault = str(error)
        for message in self._processes.gather(fault):
            if message:
                raise ValueError(message)
        return sums

    def close(self) -> None:
        """End the thread of late gradients or weights."""
        if self._delay is not None:
            self._delay.close()
        self._running.close()

    def _flat(self, tensors: Dict[str, torch.Tensor]) -> torch.Tensor:
        """Return a buffer laid out as the weights, with the tensors that belong to this stage."""
        flat = torch.zeros_like(self._buffer)
        self._weights.load_flat(flat, self._weights.own(tensors))
        return flat


def _group_of(processes: Processes, delay: int) -> Group:
    """Return the replicas of this stage; None for a single one.

    A late gradient is exchanged in a thread of its own, which needs a group of its own: messages of
    two threads in one group would meet in any order.
    """
    if processes.topology.replicas == 1:
        return None
    return processes.further_replica_group() if delay else processes.replica_group


def _replica_update(
    weights: WeightState,
    optimizer: HasSlots,
    parameters: Mapping[str, nn.Parameter],
    sections: UpdateSections,
    *,
    processes: Processes,
) -> ReplicaUpdate:
    """Return what makes a replica's part of an update, before it is exchanged.

    See GradientExchange for the arguments; `optimizer` is the recipe's.
    """
    section = sections.exchange
    assert isinstance(section, Sparse), "only what selects from an update has a sketch of it"
    whole: List[str] = []
    if section.whole_1d:
        whole = [name for name, tensor in parameters.items() if tensor.dim() == 1]
    return weights.create_replica_update(
        optimizer,
        clip_norm=sections.optimizer.clip_norm,
        buckets=section.sketch,
        replicas=processes.topology.replicas,
        add_up=processes.sum_over_replicas,
        whole=whole,
    )


def _overlap(old: int, olds: int, new: int, news: int) -> float:
    """Return the share of the images of replica `old` of `olds` that replica `new` of `news` has.

    Replicas take a step's micro batches in order, each as many as the others.
    """
    # In parts of 1 / (olds x news) of a step, in which all bounds are whole numbers.
    first = max(old * news, new * olds)
    last = min((old + 1) * news, (new + 1) * olds)
    return max(0, last - first) / news
