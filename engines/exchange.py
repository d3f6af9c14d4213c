"""A replica's gradients between its last backward pass and the update: exchanged, and possibly delayed."""

from __future__ import annotations

from typing import Callable, Dict, Iterator, List, Optional

import torch

from engines.delay import Delay
from engines.state import merged
from optim.base import HasSlots
from optim.half_weights import WeightState
from optim.norms import Norms
from optim.replica_update import ReplicaUpdate
from parallel import exchange
from parallel.exchange import Setup
from parallel.processes import Processes
from recipe.config import Recipe
from recipe.division import Batch
from recipe.errors import UserError


class GradientExchange:
    """Puts the gradient of the whole batch in the place of the replica's own; as late as `exchange.delay` says.

    arm: to be called before the last backward pass of a step where the exchange can begin within it; else None.
    """

    def __init__(
        self,
        weights: WeightState,
        recipe: Recipe,
        batch: Batch,
        processes: Processes,
        steps_per_epoch: Optional[int],
        optimizer: Optional[HasSlots] = None,
        averages: Optional[Dict[str, torch.Tensor]] = None,
    ):
        """
        Args:
            steps_per_epoch: for the densities by epoch; None for an engine that does not train.
            optimizer: of the weights' parameters, whose updates replicas make before they send; None: gradients are
                sent.
            averages: of the weights, by name, laid out as these.
        """
        self._weights, self._processes = weights, processes
        self._buffer = weights.gradients.flat
        delay = recipe.exchange.delay
        single = processes.topology.replicas == 1
        # A late gradient is exchanged in a thread of its own, which needs a group of its own.
        group = None if single else processes.further_replica_group() if delay else processes.replica_group
        method = exchange.of(recipe.exchange)
        self._update: Optional[ReplicaUpdate] = None
        if optimizer is not None:
            self._update = weights.replica_update(
                optimizer,
                clip_norm=recipe.optimizer.clip_norm,
                buckets=recipe.exchange.sketch,
                replicas=processes.topology.replicas,
                add_up=processes.sum_over_replicas,
            )
        gradients, places = weights.gradients, weights.places()
        self._running = method.create(
            Setup(
                *(recipe, batch, processes, gradients.flat, places, gradients.collect, group, steps_per_epoch),
                self._update,
                _Weights(weights, averages or {}),
            )
        )
        late = delay and not (self._running is not None and self._running.delays)
        self._delay = Delay(self._buffer, delay, self._running) if late else None
        overlaps = self._delay is None and self._running is not None and self._running.overlaps
        self.arm: Optional[Callable[[], None]] = self._running.arm if overlaps else None
        self._summed = batch.micro_batches if method.sums else batch.accumulation

    def __call__(self, step: int, scale: torch.Tensor, lr: float) -> Optional[torch.Tensor]:
        """Exchange the gradient of update `step`, from 0, that lies in the weights' buffer; or the update of it.

        Args: scale: float32 [], the loss scale it was computed with. lr: learning rate of the update.

        Returns:
            What the gradient that lies in the buffer now has to be divided by, float32 []; None where no gradient is
            due yet.
        """
        divisor = scale * self._summed
        if self._update is not None:
            self._update.lr = lr
        if self._delay is not None:
            return self._delay.advance(step, divisor)
        if self._running is not None:
            self._running(self._buffer, step, divisor)
        return divisor

    def after_update(self, step: int) -> None:
        """To be called when update `step` has been made."""
        if self._running is not None:
            self._running.after_update(step)

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        """As that of parallel.exchange.Running."""
        return None if self._running is None else self._running.mean(flat)

    def norms(self, applied: Norms) -> Norms:
        """Norms of an update, of which replicas may have made what `applied` does not know. All stages call."""
        return applied if self._update is None else self._update.norms(applied)

    def state_dict(self) -> List[dict]:
        """Gradients that are still to be applied, oldest first; the same on all replicas."""
        entries = self._delay.state_dict() if self._delay is not None else []
        return [{**entry, "gradient": self._weights.by_name(entry["gradient"])} for entry in entries]

    def load_state_dict(self, entries: List[dict]) -> None:
        """Load the result of `state_dict`. Raises ValueError naming a tensor that does not fit."""
        if self._delay is not None:
            self._delay.load_state_dict([{**entry, "gradient": self._flat(entry["gradient"])} for entry in entries])
        elif entries:
            raise ValueError(f"{len(entries)} gradients are still to be applied, but exchange.delay is 0")

    def common_state(self) -> Dict[str, Dict[str, torch.Tensor]]:
        """What the exchange keeps for later steps that is the same on all replicas: {kind: {parameter: tensor}}."""
        common = {} if self._running is None else self._running.common_state()
        return {name: self._weights.by_name(flat) for name, flat in common.items()}

    def load_common_state(self, saved: Dict[str, Dict[str, torch.Tensor]]) -> None:
        """Load the result of `common_state`. Raises ValueError naming what does not fit."""
        common = {} if self._running is None else self._running.common_state()
        if common.keys() != saved.keys():
            name = sorted(common.keys() ^ saved.keys())[0]
            raise ValueError(f"exchange: {name} is {'missing' if name in common else 'of another exchange'}")
        for name, flat in common.items():
            flat.copy_(self._flat(saved[name]))

    def replica_states(self) -> Iterator[dict]:
        """State of each replica for later steps: see engines/base.py."""
        own, place = self._own_state(), self._processes.topology
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
        """Load the state of `count` replicas: see engines/base.py.

        A replica takes the same share of the values as of the images: where the number of replicas changes, those of
        several are added, or those of one divided, so that the sum over replicas stays; or the mean, where that counts.
        """
        place, own = self._processes.topology, self._own_state()
        if not own:
            if count:
                raise ValueError(f"{count} replicas have kept a part of their gradients; exchange.method is not sparse")
            return
        if not count and self._running.states_are_means:
            return  # all replicas begin with the common state
        sums = {name: torch.zeros_like(flat, dtype=torch.float32) for name, flat in own.items()}
        fault = ""
        for number, state in enumerate(self._states_for_own_images(count, read)):
            if state is None:
                continue
            share = _overlap(number, count, place.replica, place.replicas)
            try:
                for name, total in sums.items():
                    total.add_(self._flat(state.get(name, {})), alpha=share)
            except ValueError as error:
                fault = str(error)  # the others still have to be sent theirs
        fault = next(filter(None, self._processes.gather(fault)), "")
        if fault:
            raise ValueError(fault)
        scale = place.replicas / count if self._running.states_are_means else 1.0
        for name, flat in own.items():
            flat.copy_(sums[name].mul_(scale))
        self._running.loaded()

    def _states_for_own_images(self, count: int, read: Callable[[int], dict]) -> Iterator[Optional[dict]]:
        """The state of each old replica on those ranks that take a share of it, elsewhere None.

        What `read` raises is raised on all ranks, after the last: until then ranks wait for what they are sent.
        """
        place, failures = self._processes.topology, []

        def state_or_nothing() -> dict:
            try:
                return {} if failures else read(number)
            except UserError as error:
                failures.append(error)
                return {}

        def raise_failure() -> None:
            if failures:
                raise failures[0]

        for number in range(count):
            takers = [replica for replica in range(place.replicas) if _overlap(number, count, replica, place.replicas)]
            ranks = [replica * place.stages + stage for replica in takers for stage in range(place.stages)]
            state = self._processes.distribute(state_or_nothing, ranks)
            yield state if place.rank in ranks else None
        self._processes.from_main(raise_failure)

    def close(self) -> None:
        """End the thread of late gradients or weights."""
        if self._delay is not None:
            self._delay.close()
        if self._running is not None:
            self._running.close()

    def _own_state(self) -> Dict[str, torch.Tensor]:
        return self._running.state() if self._running is not None else {}

    def _flat(self, tensors: Dict[str, torch.Tensor]) -> torch.Tensor:
        """A buffer laid out as the weights are, with the tensors that belong to this stage. Raises ValueError."""
        flat = torch.zeros_like(self._buffer)
        self._weights.load_flat(flat, self._weights.own(tensors))
        return flat


class _Weights:
    """The weights as in parallel.exchange.Setup, with their averages."""

    def __init__(self, weights: WeightState, averages: Dict[str, torch.Tensor]):
        self._weights, self._averages = weights, averages
        self.store, self.refresh = weights.store, weights.refresh

    @property
    def flat(self) -> torch.Tensor:
        return self._weights.flat

    def own_state(self) -> Dict[str, torch.Tensor]:
        return {**self._weights.own_state(), **self._averages}


def _overlap(old: int, olds: int, new: int, news: int) -> float:
    """Share of the images of replica `old` of `olds` that replica `new` of `news` computes: replicas take a step's
    micro batches in order, each as many as the others."""
    first, last = max(old * news, new * olds), min((old + 1) * news, (new + 1) * olds)
    return max(0, last - first) / news
