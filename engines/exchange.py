"""A replica's gradients between its last backward pass and the update: exchanged, and possibly delayed."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Deque, Dict, Iterator, List, NamedTuple, Optional

import torch

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

_CHUNK = 1 << 18  # elements that are moved at once

# Sums a buffer over the replicas, in place, given the number of the update and the divisor.
Exchange = Callable[[torch.Tensor, int, torch.Tensor], None]


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
    ):
        """
        Args:
            steps_per_epoch: for the densities by epoch; None for an engine that does not train.
            optimizer: of the weights' parameters, whose updates replicas make before they send; None: gradients are
                sent.
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
            )
        )
        self._delay = Delay(self._buffer, delay, self._running) if delay else None
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
        several are added, or those of one divided, so that the sum over replicas stays.
        """
        place, own = self._processes.topology, self._own_state()
        if not own:
            if count:
                raise ValueError(f"{count} replicas have kept a part of their gradients; exchange.method is not sparse")
            return
        sums = {name: torch.zeros_like(flat) for name, flat in own.items()}
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
        for name, flat in own.items():
            flat.copy_(sums[name])

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
        """End the thread of late gradients."""
        if self._delay is not None:
            self._delay.close()

    def _own_state(self) -> Dict[str, torch.Tensor]:
        return self._running.state() if self._running is not None else {}

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


# Gradients that are applied some steps late, so that their exchange runs beside the next step's computation -----------


class _Entry(NamedTuple):
    """A gradient that is still to be applied, and its exchange."""

    gradient: torch.Tensor
    divisor: torch.Tensor
    done: Future


class Delay:
    """Takes a step's gradient and returns that of `steps` steps before.

    On a CPU one thread exchanges the gradients, in order and one at a time; an exchange therefore needs a process group
    that nothing else uses meanwhile. If one fails, the next call raises its error, and no later one begins: it would
    meet the other replicas' earlier ones. On other devices a gradient is exchanged when it is taken.
    """

    def __init__(self, gradients: torch.Tensor, steps: int, exchange: Optional[Exchange]):
        """
        Args:
            gradients: float32 [length], the buffer in which a step's gradients are summed, and from which the update is
                made; it stays the same tensor. `steps` buffers of its size are kept beside it.
            steps: >= 1.
            exchange: None where there are no other replicas.
        """
        assert steps >= 1 and gradients.dtype == torch.float32 and gradients.dim() == 1, (steps, gradients.shape)
        self._gradients, self._steps = gradients, steps
        self._exchange = exchange
        self._entries: Deque[_Entry] = deque()  # oldest first
        # The interpreter waits for this thread before it ends: amid torch's code it would abort the process.
        in_thread = exchange is not None and gradients.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None

    def advance(self, step: int, divisor: torch.Tensor) -> Optional[torch.Tensor]:
        """Replace the gradient in the buffer by that of `steps` calls before, summed over the replicas.

        Args:
            step: the update that the gradient in the buffer was computed for.
            divisor: float32 [], what it has to be divided by in the end.

        Returns:
            The divisor of the gradient that lies in the buffer now; None in the first steps, when none is due and the
            buffer is zero.
        """
        for entry in self._entries:
            if entry.done.done():
                entry.done.result()  # raises the error of its exchange
        divisor = divisor.clone()
        if len(self._entries) < self._steps:
            due, gradient = None, self._gradients.clone()
            self._gradients.zero_()
        else:
            self._entries[0].done.result()
            gradient, due, _ = self._entries.popleft()
            _swap(self._gradients, gradient)
        self._entries.append(_Entry(gradient, divisor, self._start(gradient, step, divisor)))
        return due

    def wait(self) -> None:
        """Wait until no exchange is under way. Raises the error of one that failed."""
        for entry in self._entries:
            entry.done.result()

    def state_dict(self) -> List[dict]:
        """Gradients to be applied, oldest first: {"gradient": float32 [length], "divisor": float32 []}.

        All are exchanged, and so the same on all replicas. Copies, on the CPU.
        """
        self.wait()
        return [
            {"gradient": entry.gradient.to("cpu", copy=True), "divisor": entry.divisor.to("cpu", copy=True)}
            for entry in self._entries
        ]

    def load_state_dict(self, saved: List[dict]) -> None:
        """Load the result of `state_dict`. Raises ValueError if it is more than fits here, or of another length."""
        if len(saved) > self._steps:
            raise ValueError(f"{len(saved)} gradients are still to be applied, but exchange.delay is {self._steps}")
        if any(entry["gradient"].shape != self._gradients.shape for entry in saved):
            raise ValueError(
                f"the gradients still to be applied do not have the model's {len(self._gradients)} elements"
            )
        self.wait()
        device = self._gradients.device
        self._entries = deque(
            _Entry(entry["gradient"].to(device, copy=True), entry["divisor"].to(device, copy=True), _done())
            for entry in saved
        )

    def close(self) -> None:
        """End the thread once all that was taken is exchanged: the other replicas wait for it."""
        if self._thread is not None:
            self._thread.shutdown()

    def _start(self, gradient: torch.Tensor, step: int, divisor: torch.Tensor) -> Future:
        """The exchange of a gradient, in the thread if there is one."""
        if self._thread is not None:
            before = self._entries[-1].done if self._entries else _done()
            call = (self._exchange, gradient, step, divisor)
            return self._thread.submit(_after, before, torch.get_num_threads(), *call)
        if self._exchange is not None:
            self._exchange(gradient, step, divisor)
        return _done()


def _after(before: Future, threads: int, exchange: Exchange, gradient: torch.Tensor, step: int, divisor: torch.Tensor):
    """Exchange a gradient, unless the exchange before it failed; with as many of torch's threads as the main thread."""
    before.result()
    torch.set_num_threads(threads)
    exchange(gradient, step, divisor)


def _done() -> Future:
    done: Future = Future()
    done.set_result(None)
    return done


def _swap(left: torch.Tensor, right: torch.Tensor) -> None:
    """Swap contents without a third buffer of their size."""
    for one, other in zip(left.split(_CHUNK), right.split(_CHUNK)):
        copy = one.clone()
        one.copy_(other)
        other.copy_(copy)
