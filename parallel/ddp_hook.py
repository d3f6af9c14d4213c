"""Sparse exchange in one's own training loop: a hook for torch's DistributedDataParallel.

model = DistributedDataParallel(module)
model.register_comm_hook(SparseState(density=0.01), sparse_hook)
"""

from typing import Any, Dict, Union

import torch
from torch import distributed
from torch.futures import Future

from parallel.exchange import Setup
from parallel.groups import Group
from parallel.processes import Processes
from parallel.sparse_exchange import SparseExchange
from parallel.topology import Topology
from recipe import exchange
from recipe.exchange import GTopK, TopK


class _OneStage(Processes):
    """The processes as an exchange asks for them: this hook knows one stage only."""

    def __init__(self, group: Group):
        super().__init__(Topology(), torch.device("cpu"))
        self._everyone = group

    def further_group(self) -> Group:
        """Return the replicas: between two buckets nothing else is sent in their group."""
        return self._everyone


class SparseState:
    """State of `sparse_hook`, which sends the largest values of each bucket and keeps the rest.

    Of a bucket's n elements density x n are sent. The result is the mean over replicas, the same
    bits on all of them. Residuals are float32, one for each bucket; they are not in the module's
    state dict, so a resumed loop begins with empty ones. Gradients that are not finite on any
    replica change no residual and leave NaN. For optimizers that are linear in the gradient, as SGD
    is; LARS needs the engine's `compress: update` (docs/exchange.md).

    exchanges: those of the buckets, by their index.

    Sources: Top-k: Lin et al., 1712.01887; gTop-k: Shi et al., 1901.04359; `SparseExchange` has the
    rules.
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
            dense_steps: first updates that send everything; at least 2, as DDP forms its buckets
                anew in the second.

        Raises:
            ValueError: `dense_steps` is below 2.
        """
        if dense_steps < 2:
            raise ValueError(
                f"dense_steps must be at least 2, found {dense_steps}: DDP forms its buckets anew"
            )
        self._group = distributed.group.WORLD if group is None else group
        self._section = _section(density, pattern, wire)
        self._processes = _OneStage(self._group)
        self._dense_steps = dense_steps
        self._step = 0
        self.exchanges: Dict[int, SparseExchange] = {}

    def average(self, gradients: torch.Tensor, bucket: int, last: bool) -> torch.Tensor:
        """Average a bucket's gradients over replicas.

        Args:
            gradients: [n], of any floating dtype; overwritten in dense steps.
            bucket: its index.
            last: whether it is the update's last bucket.

        Returns:
            The mean, [n], in the dtype of the gradients.
        """
        replicas = distributed.get_world_size(self._group)
        # Residuals belong to buckets, whose last form DDP finds in its second update.
        if self._step < self._dense_steps:
            # Divided first, as DDP does: a sum might be beyond float16.
            mean = gradients.div_(replicas)
            distributed.all_reduce(mean, group=self._group)
        else:
            flat = gradients.float()
            divisor = torch.tensor(float(replicas), device=flat.device)
            self._exchange_of(bucket, flat)(flat, self._step, divisor)
            mean = flat.div_(replicas).to(gradients.dtype)
        self._step += last
        return mean

    def _exchange_of(self, bucket: int, flat: torch.Tensor) -> SparseExchange:
        """Return the exchange of a bucket, which its first gradients create."""
        if bucket not in self.exchanges:
            setup = Setup(
                batch=None,
                processes=self._processes,
                gradients=flat,
                places=[(0, flat)],
                collect=None,
                group=self._group,
                steps_per_epoch=None,
            )
            self.exchanges[bucket] = SparseExchange(setup, self._section)
        return self.exchanges[bucket]


def _section(density: float, pattern: str, wire: Union[torch.dtype, int]) -> exchange.Sparse:
    """Return the section of a recipe that says the same as these arguments of SparseState."""
    keys: Dict[str, Any] = {"density": density, "compress": "gradient"}
    if isinstance(wire, int):
        keys["bits"] = wire
    else:
        keys["wire"] = str(wire).partition(".")[2]
    if pattern == "gather":
        return TopK(**keys)
    keys["pattern"] = pattern
    return GTopK(**keys)


def sparse_hook(state: SparseState, bucket: distributed.GradBucket) -> Future[torch.Tensor]:
    """Average the gradients of a `bucket` over replicas with `state`, as DDP asks for it."""
    future: Future[torch.Tensor] = Future()
    future.set_result(state.average(bucket.buffer(), bucket.index(), bucket.is_last()))
    return future
