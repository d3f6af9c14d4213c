"""Replicas that make updates of their own between two means of their weights."""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Dict, List, Optional

import torch
from torch import distributed

from parallel.exchange import Running, Setup
from parallel.reduce import Group, QuantizedSum
from recipe.exchange import Local


class LocalSteps(Running):
    """Takes the mean of the replicas' weights after every so many updates, each made of the replica's own gradient.

    Fragments are equal parts of the weights: of H updates and F fragments, the mean of fragment j is taken after those
    where (t + 1 + j H / F) mod H = 0. Momentum stays with each replica. An outer optimizer moves on from a, the weights
    after the mean before, the same on all replicas, along the way to the mean m:

        d = a - m;  v = outer_momentum v + d;  weights = a - outer_lr (d + outer_momentum v)

    With a delay of D the mean of weights as they were after update t is taken after update t + D, and the way that the
    replica's own weights have gone since t is added. On a CPU a thread sends meanwhile. In few bits replicas send how
    far their weights are from a; what that rounds off they add the next time.

    Sources: Stich, 1805.09767 (local SGD); dense steps first: Lin et al., 1808.07217 (post-local SGD); outer Nesterov
    momentum: Douillard et al., 2311.08105 (DiLoCo); fragments and delay: Douillard et al., 2501.18512 (Streaming
    DiLoCo, with alpha = 0).
    """

    states_are_means, delays = True, True

    def __init__(self, setup: Setup, section: Local):
        weights, group = setup.weights, setup.processes.replica_group if setup.group is not None else None
        every, fragments, delay, bits = section.local_steps, section.fragments, section.delay, section.bits
        assert 1 <= fragments <= every > delay >= 0, (fragments, every, delay)
        self._weights, self._group, self._every, self._delay = weights, group, every, delay
        self._is_dense = functools.partial(section.is_dense, steps_per_epoch=setup.steps_per_epoch)
        outer = section.outer == "nesterov"
        self._outer = (section.outer_lr, section.outer_momentum) if outer else None
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        borders = [len(weights.flat) * number // fragments for number in range(fragments + 1)]
        self._fragments = list(map(slice, borders, borders[1:]))
        self._sending_group = setup.group if delay else group
        start = weights.flat.to(torch.float32, copy=True)
        self._common: Dict[str, torch.Tensor] = {}
        self._own: Dict[str, torch.Tensor] = {}
        if delay:  # of the fragments on their way: this replica's weights as sent, and the mean
            self._own["sent"], self._common["arriving"] = start.clone(), start.clone()
        self._under_way: Dict[int, Future] = {}
        in_thread = delay and group is not None and weights.flat.device.type == "cpu"
        self._thread = ThreadPoolExecutor(1, "exchange") if in_thread else None
        if outer or bits:
            self._common["anchor"] = start
        if outer:
            self._common["outer_momentum"] = torch.zeros_like(start)
        if bits:
            self._own["residual"] = torch.zeros_like(start)
        self._quantized = QuantizedSum(self._sending_group, bits) if bits else None

    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """As in Running: of dense steps the sum over replicas, of others as if all replicas had this one's gradient."""
        if self._group is None:
            return
        if self._is_dense(step):
            distributed.all_reduce(buffer, group=self._group)
        else:
            buffer.mul_(self._replicas)

    @torch.no_grad()
    def after_update(self, step: int) -> None:
        if self._is_dense(step):
            if "anchor" in self._common:
                self._common["anchor"].copy_(self._weights.flat)
            return
        for number in self._fragments_after(step - self._delay):
            self._take(number, step)
        for number in self._fragments_after(step) if self._delay else []:
            self._send(number)

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        return None if self._group is None else _mean(flat, self._group)

    def state(self) -> Dict[str, torch.Tensor]:
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
        """Fragments whose mean is that of the weights after update `step`."""
        if step < 0 or self._is_dense(step):
            return []
        count = len(self._fragments)
        return [number for number in range(count) if (step + 1 + number * self._every // count) % self._every == 0]

    def _send(self, number: int) -> None:
        """Begin the mean of a fragment's weights as they are now."""
        part, threads = self._fragments[number], torch.get_num_threads()
        own = self._own["sent"][part].copy_(self._weights.flat[part])

        @torch.no_grad()
        def send() -> None:
            torch.set_num_threads(threads)
            self._common["arriving"][part] = self._mean_of_all(own, part)

        if self._thread is None:
            send()
        else:
            self._under_way[number] = self._thread.submit(send)

    def _take(self, number: int, step: int) -> None:
        """Replace a fragment's weights by their mean; of late ones keep the way that they have gone since."""
        part = self._fragments[number]
        own, since = self._weights.flat[part], None
        if self._delay:
            self._wait(number)
            new, since = self._common["arriving"][part].clone(), own - self._own["sent"][part]
        else:
            new = self._mean_of_all(own, part)
        if self._outer is not None:
            lr, momentum = self._outer
            anchor, velocity = self._common["anchor"][part], self._common["outer_momentum"][part]
            moved = anchor - new
            velocity.mul_(momentum).add_(moved)
            new = anchor - lr * moved.add_(velocity, alpha=momentum)
        self._weights.store(part.start, part.stop, new if since is None else new + since, step)
        if "anchor" in self._common:
            self._common["anchor"][part] = self._weights.flat[part] if since is None else new

    def _mean_of_all(self, own: torch.Tensor, part: slice) -> torch.Tensor:
        """The mean of the replicas' weights, float32, to the rounding of few bits. Args: own: this replica's."""
        if self._quantized is None:
            return _mean(own, self._sending_group)
        anchor, residual = self._common["anchor"][part], self._own["residual"][part]
        return anchor + self._quantized(own.float() - anchor + residual, residual) / self._replicas

    def _wait(self, *numbers: int) -> None:
        """Wait until these fragments have arrived. Raises the error of what failed."""
        for number in numbers:
            if number in self._under_way:
                self._under_way.pop(number).result()


def _mean(flat: torch.Tensor, group: Group) -> torch.Tensor:
    """The mean over replicas, float32."""
    found = flat.to(torch.float32, copy=True)
    if group is not None:
        distributed.all_reduce(found, group=group)
        found.mul_(1 / distributed.get_world_size(group))
    return found
