"""Sparse exchange in a training loop of one's own: a communication hook for torch's DistributedDataParallel.

model = DistributedDataParallel(module)
model.register_comm_hook(SparseState(density=0.01), sparse_hook)
"""

from types import SimpleNamespace
from typing import Dict, Union

import torch
from torch import distributed
from torch.futures import Future

from parallel.exchange import Setup
from parallel.reduce import Group
from parallel.sparse_exchange import SparseExchange
from parallel.topology import Topology
from recipe.exchange import Exchange


class SparseState:
    """State of `sparse_hook`, which sends the largest values of each bucket and keeps the rest for later updates.

    Of a bucket's n elements density x n are sent. The result is the mean over replicas, the same bits on all of them.
    Residuals are float32, one for each bucket; they are not in the module's state dict, so a resumed loop begins with
    empty ones. Gradients that are not finite on any replica change no residual and leave NaN. For optimizers that are
    linear in the gradient, as SGD is; LARS needs the engine's `compress: update` (docs/exchange.md).

    Sources: Top-k: Lin et al., 1712.01887; gTop-k: Shi et al., 1901.04359; `SparseExchange` has the rules.
    """

    def __init__(
        self,
        group: Group = None,
        *,
        density: float,
        pattern: str = "gather",
        wire: Union[torch.dtype, int] = torch.float32,
        dense_steps: int = 2,
    ):
        """
        Args:
            group: of the replicas; None: all processes.
            density: share of a bucket's values that a replica sends, in (0, 1].
            pattern: "gather" (Top-k), or "tree", "butterfly" or "owners" (gTop-k).
            wire: type of the values that travel: float32, float16, or 8 or 4 bits.
            dense_steps: first updates that send everything; at least 2, as DDP forms its buckets anew in the second.
        """
        if dense_steps < 2:
            raise ValueError(f"dense_steps must be at least 2, found {dense_steps}: DDP forms its buckets anew")
        self._group = distributed.group.WORLD if group is None else group
        keys = {"bits": wire} if isinstance(wire, int) else {"wire": str(wire).partition(".")[2]}
        keys |= {"method": "topk"} if pattern == "gather" else {"method": "gtopk", "pattern": pattern}
        self._section = Exchange(density=density, compress="gradient", **keys)
        self._processes = SimpleNamespace(
            topology=Topology(), gather=lambda value: [value], further_group=lambda: self._group
        )
        self._dense_steps, self._step = dense_steps, 0
        self.exchanges: Dict[int, SparseExchange] = {}

    def average(self, gradients: torch.Tensor, bucket: int, last: bool) -> torch.Tensor:
        """Return the mean of a bucket's gradients over replicas. Args: last: whether it is the update's last bucket."""
        replicas = distributed.get_world_size(self._group)
        if self._step < self._dense_steps:
            distributed.all_reduce(gradients, group=self._group)
            result = gradients.div_(replicas)
        else:
            flat = gradients.float()
            if bucket not in self.exchanges:
                setup = Setup(None, self._processes, flat, [(0, flat)], None, self._group, None)
                self.exchanges[bucket] = SparseExchange(setup, self._section)
            self.exchanges[bucket](flat, self._step, torch.tensor(float(replicas), device=flat.device))
            result = flat.div_(replicas).to(gradients.dtype)
        self._step += last
        return result


def sparse_hook(state: SparseState, bucket: distributed.GradBucket) -> Future[torch.Tensor]:
    """The mean of a bucket's gradients over replicas, as DDP asks for it."""
    future: Future[torch.Tensor] = Future()
    future.set_result(state.average(bucket.buffer(), bucket.index(), bucket.is_last()))
    return future
