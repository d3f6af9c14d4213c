"""Replicas that make updates of their own between two means of their weights."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, NamedTuple, Optional

import torch
from torch import distributed

from parallel.exchange import Running, Setup
from parallel.groups import Group
from parallel.quantized import QuantizedSum
from recipe.exchange import Local


class _Outer(NamedTuple):
    """Learning rate and momentum of the outer optimizer."""

    lr: float
    momentum: float


class LocalSteps(Running):
    """Takes the mean of the replicas' weights once in so many updates of each replica alone.

    Fragments are equal parts of the weights: of H updates and F fragments, the mean of fragment j
    is taken after those where (t + 1 + j H / F) mod H = 0. Momentum stays with each replica. An
    outer optimizer moves on from a, the weights after the mean before, the same on all replicas,
    along the way to the mean m:

        d = a - m;  v = outer_momentum v + d;  weights = a - outer_lr (d + outer_momentum v)

    With a delay of D the mean of weights as they were after update t is taken after update t + D,
    and the way that the replica's own weights have gone since t is added. On a CPU a thread sends
    meanwhile. In few bits replicas send how far their weights are from a; what that rounds off they
    add the next time.

    Sources: Stich, 1805.09767 (local SGD); dense steps first: Lin et al., 1808.07217 (post-local
    SGD); outer Nesterov momentum: Douillard et al., 2311.08105 (DiLoCo); fragments and delay:
    Douillard et al., 2501.18512 (Streaming DiLoCo, with alpha = 0).
    """

    states_are_means = True
    delays = True

    def __init__(self, setup: Setup, section: Local):
        """
        Args:
            setup: with the weights; `group` is used where means are late, beside the processes'
                `replica_group`.
            section: of the recipe.
        """
        every = section.local_steps
        fragments = section.fragments
        delay = section.delay
        assert 1 <= fragments <= every > delay >= 0, (fragments, every, delay)
        assert setup.weights is not None, "an engine gives them"
        self._weights = setup.weights
        self._every = every
        self._delay = delay
        self._is_dense = functools.partial(section.is_dense, steps_per_epoch=setup.steps_per_epoch)
        # Late means travel beside the sums of dense steps, so they have a group of their own.
        self._group: Group = None
        if setup.group is not None:
            self._group = setup.processes.replica_group
        self._sending_group = setup.group if delay else self._group
        self._replicas = 1 if self._group is None else distributed.get_world_size(self._group)
        self._fragments = _equal_parts(len(self._weights.flat), fragments)
        # On a CPU a thread sends late means.
        self._under_way: Dict[int, Future] = {}  # by fragment
        self._thread: Optional[ThreadPoolExecutor] = None
        if delay and self._group is not None and self._weights.flat.device.type == "cpu":
            self._thread = ThreadPoolExecutor(1, "exchange")
        self._outer: Optional[_Outer] = None
        if section.outer == "nesterov":
            self._outer = _Outer(section.outer_lr, section.outer_momentum)
        self._quantized: Optional[QuantizedSum] = None
        if section.bits:
            self._quantized = QuantizedSum(self._sending_group, section.bits)
        # State, float32 [length] each: what all replicas of a stage have in common, and what is
        # this one's alone.
        self._common: Dict[str, torch.Tensor] = {}
        self._own: Dict[str, torch.Tensor] = {}
        self._create_state()

    def _create_state(self) -> None:
        """Create what the run keeps between updates, as it is before the first."""
        start = self._weights.flat.to(torch.float32, copy=True)
        # Of the fragments on their way: this replica's weights as sent, and the mean.
        if self._delay:
            self._own["sent"] = start.clone()
            self._common["arriving"] = start.clone()
        # The weights after the mean before, from which an outer optimizer goes on, and from which
        # few bits tell the way.
        if self._outer is not None or self._quantized is not None:
            self._common["anchor"] = start
        if self._outer is not None:
            self._common["outer_momentum"] = torch.zeros_like(start)
        if self._quantized is not None:
            self._own["residual"] = torch.zeros_like(start)

    def weights_replaced(self) -> None:
        """Go on from the weights as they are: replicas have gone no way from them yet."""
        # What a thread still sends is of the weights before, and would be written later.
        self._wait(*self._under_way)
        copies = {**self._own, **self._common}
        for name in ("sent", "arriving", "anchor"):
            if name in copies:
                copies[name].copy_(self._weights.flat)

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Sum the gradients of dense steps, the same bits on all replicas.

        In others act as if all replicas had this one's gradient: each then makes an update alone.

        Args:
            buffer, step, divisor: see Running.
        """
        if self._group is None:
            return
        if self._is_dense(step):
            distributed.all_reduce(buffer, group=self._group)
        else:
            buffer.mul_(self._replicas)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        """Take the means that are due after the update of `step`, then send those that begin."""
        # Dense steps leave all replicas the same weights, from which the first mean starts.
        if self._is_dense(step):
            if "anchor" in self._common:
                self._common["anchor"].copy_(self._weights.flat)
            return
        for number in self._fragments_after(step - self._delay):
            self._take(number, step)
        if self._delay:
            for number in self._fragments_after(step):
                self._send(number)

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the mean over replicas of `flat`; see Running. A single replica returns None."""
        if self._group is None:
            return None
        return _mean(flat, self._group)

    def state(self) -> Dict[str, torch.Tensor]:
        # A thread writes to it until the means on their way have arrived.
        self._wait(*self._under_way)
        return {**self._weights.own_state(), **self._own}

    def loaded(self) -> None:
        self._weights.refresh()

    def common_state(self) -> Dict[str, torch.Tensor]:
        self._wait(*self._under_way)
        return self._common

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _fragments_after(self, step: int) -> List[int]:
        """Return the fragments whose mean is that of the weights after the update of `step`."""
        if step < 0 or self._is_dense(step):
            return []
        count = len(self._fragments)
        due = []
        for number in range(count):
            # Fragments take turns within the `local_steps` updates.
            ahead = number * self._every // count
            if (step + 1 + ahead) % self._every == 0:
                due.append(number)
        return due

    def _send(self, number: int) -> None:
        """Begin the mean of a fragment's weights as they are now."""
        part = self._fragments[number]
        # A copy: updates go on while it is sent.
        sent = self._own["sent"][part].copy_(self._weights.flat[part])
        # Torch counts threads, and switches gradients off, for each thread by itself.
        threads = torch.get_num_threads()

        @torch.no_grad()
        def send() -> None:
            torch.set_num_threads(threads)
            self._common["arriving"][part] = self._mean_of_all(sent, part)

        if self._thread is None:
            send()
        else:
            self._under_way[number] = self._thread.submit(send)

    def _take(self, number: int, step: int) -> None:
        """Replace a fragment's weights by their mean.

        Of late ones keep the way that they have gone since.
        """
        # The mean: of the weights as they are, or, if it is late, as they were when it was begun.
        part = self._fragments[number]
        weights = self._weights.flat[part]
        since: Optional[torch.Tensor] = None
        if self._delay:
            self._wait(number)
            new = self._common["arriving"][part].clone()
            since = weights - self._own["sent"][part]
        else:
            new = self._mean_of_all(weights, part)
        if self._outer is not None:
            new = self._outer_step(self._outer, new, part)
        # What this replica has changed since then is added again.
        values = new if since is None else new + since
        # A batch that grows is refused beside local steps, so a step is the index of its update.
        self._weights.store(part.start, part.stop, values, index=step)
        if "anchor" in self._common:
            # Without a delay the anchor is what was stored, which may be rounded.
            self._common["anchor"][part] = self._weights.flat[part] if since is None else new

    def _outer_step(self, outer: _Outer, mean: torch.Tensor, part: slice) -> torch.Tensor:
        """Return a fragment's weights after a step of the outer optimizer towards the mean.

        See the class.
        """
        anchor = self._common["anchor"][part]
        velocity = self._common["outer_momentum"][part]
        moved = anchor - mean
        velocity.mul_(outer.momentum).add_(moved)
        return anchor - outer.lr * moved.add_(velocity, alpha=outer.momentum)

    def _mean_of_all(self, weights: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the mean of the replicas' weights, float32, to the rounding of few bits.

        Args:
            weights: this replica's, of the fragment.
            part: the fragment's place.
        """
        if self._quantized is None:
            return _mean(weights, self._sending_group)
        # Replicas are close to each other: of the way from the anchor few bits say more than of the
        # weights themselves.
        anchor = self._common["anchor"][part]
        residual = self._own["residual"][part]
        moved = weights.float() - anchor + residual
        return anchor + self._quantized(moved, residual) / self._replicas

    def _wait(self, *numbers: int) -> None:
        """Wait until these fragments have arrived. Raises the error of what failed."""
        for number in numbers:
            if number in self._under_way:
                self._under_way.pop(number).result()


def _equal_parts(length: int, count: int) -> List[slice]:
    """Return the places of `count` equal parts of a buffer."""
    borders = [length * number // count for number in range(count + 1)]
    return [slice(start, end) for start, end in zip(borders, borders[1:])]


def _mean(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the mean over replicas, float32."""
    mean = flat.to(torch.float32, copy=True)
    if group is not None:
        distributed.all_reduce(mean, group=group)
        mean.mul_(1 / distributed.get_world_size(group))
    return mean
