"""Replicas that make updates of their own between two means of their weights."""

from __future__ import annotations

from typing import Callable, Dict, Optional, Tuple

import torch
from torch import distributed

from parallel.exchange import Running, Weights
from parallel.quantized import QuantizedSum


class LocalSteps(Running):
    """Takes the mean of the replicas' weights after every so many updates, each made of the replica's own gradient.

    Fragments are equal parts of the weights, each with its own update at which its mean is taken: of H updates and F
    fragments, fragment j after those where (t + 1 + j H / F) mod H = 0, so that links have less to carry at a time.

    Momentum stays with each replica. With an outer optimizer the mean is not taken as it is: with a the weights after
    the mean before, the same on all replicas, and m the mean of now,

        d = a - m;  v = outer_momentum v + d;  weights = a - outer_lr (d + outer_momentum v)

    What is stored as float16 is rounded by the same bits on all replicas. In few bits replicas send how far their
    weights are from a; what that rounds off they add the next time.

    Sources: Stich, 1805.09767 (local SGD); dense steps first: Lin et al., 1808.07217 (post-local SGD); outer Nesterov
    momentum: Douillard et al., 2311.08105 (DiLoCo); fragments: Douillard et al., 2501.18512 (Streaming DiLoCo).
    """

    states_are_means = True

    def __init__(
        self,
        weights: Weights,
        group: Optional[distributed.ProcessGroup],
        *,
        every: int,
        fragments: int,
        dense: Callable[[int], bool],
        outer: Optional[Tuple[float, float]],
        bits: Optional[int] = None,
    ):
        """
        Args:
            weights: of this replica's stage.
            group: of the replicas that compute this stage; None for a replica that is alone.
            every: updates between two means of a fragment. fragments: at most so many.
            dense: whether update `step` is made of all replicas' gradients, and weights stay equal.
            outer: rate and momentum of the outer optimizer; None takes the mean.
            bits: in which the way since the mean before is sent, 8 or 4; None sends weights as float32.
        """
        assert 1 <= fragments <= every, (fragments, every)
        self._weights, self._group, self._every, self._is_dense, self._outer = weights, group, every, dense, outer
        self._replicas = 1 if group is None else distributed.get_world_size(group)
        length = len(weights.flat)
        borders = [length * number // fragments for number in range(fragments + 1)]
        self._fragments = list(zip(borders, borders[1:]))
        self._common: Dict[str, torch.Tensor] = {}
        if outer is not None or bits:
            self._common["anchor"] = weights.flat.to(torch.float32, copy=True)
        if outer is not None:
            self._common["outer_momentum"] = torch.zeros_like(self._common["anchor"])
        self._quantized = QuantizedSum(group, bits) if bits else None
        self._residual = torch.zeros_like(self._common["anchor"]) if bits else None

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
            if self._common:
                self._common["anchor"].copy_(self._weights.flat)
            return
        for number, (start, end) in enumerate(self._fragments):
            if (step + 1 + number * self._every // len(self._fragments)) % self._every == 0:
                self._combine(start, end, step)

    def mean(self, flat: torch.Tensor) -> Optional[torch.Tensor]:
        return None if self._group is None else self._mean(flat)

    def state(self) -> Dict[str, torch.Tensor]:
        residual = {} if self._residual is None else {"residual": self._residual}
        return {**self._weights.own_state(), **residual}

    def loaded(self) -> None:
        self._weights.refresh()

    def common_state(self) -> Dict[str, torch.Tensor]:
        return self._common

    def _mean(self, flat: torch.Tensor) -> torch.Tensor:
        found = flat.to(torch.float32, copy=True)
        if self._group is None:
            return found
        distributed.all_reduce(found, group=self._group)
        return found.mul_(1 / self._replicas)

    def _combine(self, start: int, end: int, step: int) -> None:
        new = self._mean_of_all(start, end)
        if self._outer is not None:
            lr, momentum = self._outer
            anchor, velocity = (self._common[name][start:end] for name in ("anchor", "outer_momentum"))
            moved = anchor - new
            velocity.mul_(momentum).add_(moved)
            new = anchor - lr * moved.add_(velocity, alpha=momentum)
        self._weights.store(start, end, new, step)
        if self._common:
            self._common["anchor"][start:end] = self._weights.flat[start:end]

    def _mean_of_all(self, start: int, end: int) -> torch.Tensor:
        """The mean of the replicas' weights, float32, to the rounding of few bits."""
        own = self._weights.flat[start:end]
        if self._quantized is None:
            return self._mean(own)
        anchor, residual = self._common["anchor"][start:end], self._residual[start:end]
        return anchor + self._quantized(own.float() - anchor + residual, residual) / self._replicas
