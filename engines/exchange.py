"""A replica's gradients between its last backward pass and the update: exchanged, and possibly delayed."""

from __future__ import annotations

import functools
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, Mapping, NamedTuple, Optional

import torch
from torch import nn

from engines.devices import DTYPES
from engines.state import merged
from optim import factory
from optim.norms import Norms
from optim.replica_update import ReplicaUpdate
from optim.weight_state import WeightState
from parallel import exchange
from parallel.exchange import Running, Setup
from parallel.processes import Processes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.optimization import Sgd

_SUBTRACT = Sgd(momentum=0.0, weight_decay=0.0, skip=[])  # of updates that are made before they are exchanged


def create_weights(
    recipe: Recipe,
    parameters: Mapping[str, nn.Parameter],
    norms: Iterable[str],
    *,
    hidden: Mapping[str, int],
    **options: Any,
) -> WeightState:
    """The weights of a recipe with the optimizer of what is exchanged: gradients, or the updates that replicas made.

    Args:
        norms: names of the normalisations' parameters.
        hidden: result of `optim.factory.hidden_layers` for the whole model.
        options: of WeightState.
    """
    section = _SUBTRACT if recipe.exchange.compresses_update(recipe.optimizer) else recipe.optimizer
    return WeightState(
        parameters.items(),
        lambda named: factory.create(section, named, norms, hidden),
        dtype=DTYPES[recipe.precision.weights],
        rounding=recipe.precision.rounding,
        seed=recipe.run.seed,
        clip_norm=section.clip_norm,
        **options,
    )


class _Alone(Running):
    """Of a replica that has nothing to exchange."""

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        pass


class _Entry(NamedTuple):
    """A gradient that is still to be applied, the divisor that makes a mean of it, and its exchange if not yet done."""

    gradient: torch.Tensor
    divisor: torch.Tensor
    exchange: Optional[Future] = None

    def finish(self) -> None:
        """Wait for the exchange. Raises its error."""
        if self.exchange is not None:
            self.exchange.result()


class Delay:
    """Takes a step's gradient and returns that of `steps` steps before.

    On a CPU one thread exchanges the gradients, in order and one at a time, beside the next step's computation; an
    exchange therefore needs a process group that nothing else uses meanwhile. If one fails, the next call raises its
    error, and no later one begins: it would meet the other replicas' earlier ones. On other devices a gradient is
    exchanged when it is taken.

    entries: gradients to be applied, oldest first.
    """

    def __init__(self, gradients: torch.Tensor, steps: int, exchange: Optional[Callable[..., None]]):
        """
        Args:
            gradients: float32 [length], the buffer of a step's gradients and of the update; it stays the same tensor.
            steps: >= 1: as many buffers are kept beside it.
            exchange: sums a buffer over the replicas, in place, given the number of the update and the divisor; None
                where there are no other replicas.
        """
        self._gradients, self._steps, self._exchange = gradients, steps, exchange
        self.entries: Deque[_Entry] = deque()
        # The interpreter waits for this thread before it ends: amid torch's code it would abort the process.
        in_thread = exchange is not None and gradients.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Replace the gradient in the buffer, of update `step`, by that of `steps` calls before, summed over replicas;
        in the first steps, when none is due, by zeros.

        Args: divisor: float32 [], of the former. Returns: that of the latter, if one is due.
        """
        for entry in self.entries:
            if entry.exchange is not None and entry.exchange.done():
                entry.finish()
        new, divisor, due = self._gradients.clone(), divisor.clone(), None
        if len(self.entries) < self._steps:
            self._gradients.zero_()
        else:
            self.entries[0].finish()
            gradient, due, _ = self.entries.popleft()
            self._gradients.copy_(gradient)
        self.entries.append(_Entry(new, divisor, self._start(new, step, divisor)))
        return due

    def wait(self) -> None:
        """Wait until no exchange is under way. Raises the error of one that failed."""
        for entry in self.entries:
            entry.finish()

    def close(self) -> None:
        """End the thread once all that was taken is exchanged: the other replicas wait for it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, *arguments: Any) -> Optional[Future]:
        """Exchange a gradient after those before it, with as many of torch's threads as the main thread has."""
        exchange, threads = self._exchange, torch.get_num_threads()
        if self._thread is None:
            if exchange is not None:
                exchange(*arguments)
            return None
        before = self.entries[-1] if self.entries else None

        def in_turn() -> None:
            if before is not None:
                before.finish()  # not if that one failed
            torch.set_num_threads(threads)
            exchange(*arguments)

        return self._thread.submit(in_turn)


class GradientExchange:
    """Puts the gradient of the whole batch in the place of the replica's own; as late as `exchange.delay` says.

    arm: to be called before the last backward pass of a step where the exchange can begin within it; else None.
    """

    def __init__(
        self,
        weights: WeightState,
        parameters: Mapping[str, nn.Parameter],
        norms: Iterable[str],
        recipe: Recipe,
        batch: Batch,
        processes: Processes,
        steps_per_epoch: Optional[int],
        averages: Optional[Dict[str, torch.Tensor]] = None,
    ):
        """Args: weights: of `create_weights`, with the same parameters and norms. steps_per_epoch: None for an engine
        that does not train. averages: of the weights, by name, laid out as these."""
        self._weights, self._processes = weights, processes
        self._buffer = weights.gradients.flat
        section, method = recipe.exchange, exchange.of(recipe.exchange)
        # A late gradient is exchanged in a thread of its own, which needs a group of its own.
        single = processes.topology.replicas == 1
        group = None if single else processes.further_replica_group() if section.delay else processes.replica_group
        self._replica_update: Optional[ReplicaUpdate] = None
        if section.compresses_update(recipe.optimizer):
            self._replica_update = weights.create_replica_update(
                factory.create(recipe.optimizer, dict(parameters), norms),
                clip_norm=recipe.optimizer.clip_norm,
                buckets=section.sketch,
                replicas=processes.topology.replicas,
                add_up=processes.sum_over_replicas,
                whole=[name for name, each in parameters.items() if section.whole_1d and each.dim() == 1],
            )
        exchanged = SimpleNamespace(flat=weights.flat, store=weights.store, refresh=weights.refresh)
        exchanged.own_state = lambda: {**weights.own_state(), **(averages or {})}
        setup = Setup(
            *(batch, processes, self._buffer, weights.places(), weights.gradients.collect),
            *(group, steps_per_epoch, self._replica_update, exchanged),
        )
        running = method.create(setup)
        self._running = running or _Alone()
        self._late = 0 if self._running.delays else section.delay
        self._delay = Delay(self._buffer, self._late, running) if self._late else None
        overlaps = self._delay is None and self._running.overlaps
        self.arm: Optional[Callable[[], None]] = self._running.arm if overlaps else None
        self.after_update = self._running.after_update  # to be called when update `step` has been made
        self._summed = batch.micro_batches if method.sums else batch.accumulation
        self.divide(batch)

    def divide(self, batch: Batch) -> None:
        """From the next step on replicas compute the shares of `batch`. The gradients have their sums already."""
        self._running.divide(batch.shares, self._weights.gradients.sums)

    def __call__(self, step: int, scale: torch.Tensor, lr: float) -> Optional[torch.Tensor]:
        """Exchange the gradient of update `step`, from 0, that lies in the weights' buffer; or the update of it.

        Args: scale: float32 [], the loss scale it was computed with. lr: learning rate of the update. Returns: the
        divisor of the gradient that lies in the buffer now, float32 []; None where no gradient is due yet.
        """
        divisor = scale * self._summed
        if self._replica_update is not None:
            self._replica_update.lr = lr
        if self._delay is not None:
            return self._delay.advance(step, divisor)
        self._running(self._buffer, step, divisor)
        return divisor

    def rate(self, lr: float) -> float:
        """Learning rate of what was exchanged: updates have theirs already."""
        return lr if self._replica_update is None else 1.0

    def mean(self, flat: torch.Tensor) -> torch.Tensor:
        """The mean over replicas of a buffer laid out as the weights; itself where replicas have the same. All call."""
        mean = self._running.mean(flat)
        return flat if mean is None else mean

    def norms(self, applied: Norms) -> Norms:
        """Norms of an update, of which replicas may have made what `applied` does not know. All stages call."""
        return applied if self._replica_update is None else self._replica_update.norms(applied)

    def state_dict(self) -> Dict[str, dict]:
        """State that all replicas share: `delayed`, gradients still to be applied, oldest first, and `exchange`, {kind:
        {parameter: tensor}}; either is left out where there is none."""
        delayed = {}
        if self._delay is not None:
            self._delay.wait()
            for number, (gradient, divisor, _) in enumerate(self._delay.entries):
                own = {"gradient": self._weights.by_name(gradient), "divisor": divisor.to("cpu", copy=True)}
                delayed[str(number)] = own
        common = {name: self._weights.by_name(flat) for name, flat in self._running.common_state().items()}
        return {name: found for name, found in (("delayed", delayed), ("exchange", common)) if found}

    def load_state_dict(self, saved: dict) -> None:
        """Load the result of `state_dict`; other names are ignored. Raises ValueError naming what does not fit."""
        entries, common = list(saved.get("delayed", {}).values()), saved.get("exchange", {})
        if len(entries) > self._late:
            raise ValueError(f"{len(entries)} gradients are still to be applied, but exchange.delay is {self._late}")
        if self._delay is not None:
            self._delay.wait()
            device = self._buffer.device
            loaded = [(self._flat(each["gradient"]), each["divisor"].to(device, copy=True)) for each in entries]
            self._delay.entries = deque(_Entry(*each) for each in loaded)
        own = self._running.common_state()
        if own.keys() != common.keys():
            name = sorted(own.keys() ^ common.keys())[0]
            raise ValueError(f"exchange: {name} is {'missing' if name in own else 'of another exchange'}")
        for name, flat in own.items():
            flat.copy_(self._flat(common[name]))

    def own_state(self) -> Dict[str, torch.Tensor]:
        """State of this replica for later steps, by name: [length] each, laid out as the weights."""
        return self._running.state()

    def replica_states(self) -> Iterator[dict]:
        """State of each replica for later steps: see engines/base.py."""
        own, place = self._running.state(), self._processes.topology
        if not own:
            return
        if self._delay is not None:
            self._delay.wait()
        for replica in range(place.replicas):
            sent = {}
            if place.replica == replica:
                sent = {name: self._weights.by_name(flat) for name, flat in own.items()}
            ranks = range(replica * place.stages, (replica + 1) * place.stages)
            yield merged(self._processes.gather_to_main(sent, ranks))

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        """Load the state of `count` replicas: see engines/base.py. Shares are added, so that the sum over replicas, or
        their mean where that counts, stays."""
        own, place, means = self._running.state(), self._processes.topology, self._running.states_are_means
        if count and not own:
            raise ValueError(f"{count} replicas have kept a part of their gradients; exchange.method is not sparse")
        if not own or (means and not count):
            return  # such replicas begin with the common state
        sums = {name: torch.zeros_like(flat, dtype=torch.float32) for name, flat in own.items()}
        fault = ""
        for number in range(count):
            state = self._processes.from_main(functools.partial(read, number))
            share = _overlap(number, count, place.replica, place.replicas)
            try:
                for name, total in sums.items() if share else ():
                    total.add_(self._flat(state.get(name, {})), alpha=share)
            except ValueError as error:
                fault = str(error)  # the others still have to be sent theirs
        for each in filter(None, self._processes.gather(fault)):
            raise ValueError(each)
        scale = place.replicas / count if means else 1.0
        for name, flat in own.items():
            flat.copy_(sums[name].mul_(scale))
        self._running.loaded()

    def close(self) -> None:
        """End the thread of late gradients or weights."""
        if self._delay is not None:
            self._delay.close()
        self._running.close()

    def _flat(self, tensors: Dict[str, torch.Tensor]) -> torch.Tensor:
        """A buffer laid out as the weights are, with the tensors that belong to this stage. Raises ValueError."""
        flat = torch.zeros_like(self._buffer)
        self._weights.load_flat(flat, self._weights.own(tensors))
        return flat


def _overlap(old: int, olds: int, new: int, news: int) -> float:
    """Share of the images of replica `old` of `olds` that replica `new` of `news` computes: replicas take a step's
    micro batches in order, each as many as the others."""
    first, last = max(old * news, new * olds), min((old + 1) * news, (new + 1) * olds)
    return max(0, last - first) / news
