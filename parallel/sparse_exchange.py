"""The exchange of sparse gradients: each replica sends its largest values and keeps the rest for later steps."""

from __future__ import annotations

from typing import Callable, Dict, NamedTuple, Optional, Sequence

import torch
from torch import distributed

from parallel.exchange import Running
from parallel.selection import largest
from parallel.shares import StageShares
from parallel.sparse import Sparse, SparseSum, Total


class Rules(NamedTuple):
    """Rules of a sparse exchange; see recipe/exchange.py.

    pattern: "gather" (Top-k), "tree" or "butterfly" (gTop-k). wire: torch.float32 or torch.float16. density: of update
    `step`, from 0; 1 sends the whole gradient. conserve: gTop-k keeps what merging leaves out. momentum: of the
    momentum correction; None without. masks: momentum of what is sent starts again from 0. by_threshold: stages
    share the values to send by where the largest are, not by size.
    """

    pattern: str
    wire: torch.dtype
    density: Callable[[int], float]
    conserve: bool = True
    momentum: Optional[float] = None
    masks: bool = False
    by_threshold: bool = False


class SparseExchange(Running):
    """Sums over replicas what each sends of its accumulated gradient; the rest stays in a residual of its own.

    With g the replica's part of the mean gradient and r its residual, in each update: a = r + g; s = the k entries of
    a that are largest in magnitude; the sum of all replicas' s (`SparseSum`) is the gradient of the update; r = a - s,
    and what merging leaves out. So sum(g) = sum of updates + sum(r), to float32 rounding, where `conserve` holds or
    the pattern is "gather". Without it an entry of s that is not in the result goes back to each replica that sent
    it, and one that is in the result is gone, though a part of it may have been left out: the published rule.

    Momentum correction: v = momentum v + g; a = r + v. Entries that are sent whole, in dense steps or because
    their parameter is, leave no residual; their momentum goes on, so that they get plain momentum SGD.

    A gradient that is not finite on any replica or stage changes nothing here, and leaves NaN in the buffer.

    Sources: gTop-k: Shi et al., 1901.04359, algorithm 4; the published rule is its lines 7 to 10. Conserving rule:
    docs/exchange.md. Momentum correction and masking: Lin et al., 1712.01887 (DGC), section 3.
    """

    def __init__(
        self,
        rules: Rules,
        length: int,
        elements: Sequence[int],
        stage: int,
        dense: Sequence[range],
        group: Optional[distributed.ProcessGroup],
        everyone: Optional[distributed.ProcessGroup],
        device: torch.device,
    ):
        """
        Args:
            length: elements of the flat buffer, those that only fill it up included.
            elements: parameters of each stage that are exchanged sparsely.
            stage: of this process.
            dense: places in the buffer that are always sent whole.
            group: of the replicas of this stage; None for a replica that is alone.
            everyone: all replicas and stages, used for nothing else; None for a process that is alone.
        """
        self._rules, self._elements, self._stage = rules, list(elements), stage
        self._group, self._everyone = group, everyone
        self._sum = SparseSum(group, pattern=rules.pattern, wire=rules.wire)
        self.residual = torch.zeros(length, dtype=torch.float32, device=device)
        self.velocity = torch.zeros_like(self.residual) if rules.momentum is not None else None
        self._shares: Optional[StageShares] = None
        if rules.by_threshold and len(self._elements) > 1:
            self._shares = StageShares(length, len(self._elements), stage, everyone)
        ranges = [torch.arange(each.start, each.stop, device=device) for each in dense]
        self._dense = torch.cat(ranges) if ranges else None

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Replaces this replica's gradient by what all replicas send of theirs, the same bits on all of them.

        Args:
            buffer: float32 [length], the sum over this replica's micro batches, times the loss scale.
            step: number of the update, from 0.
            divisor: float32 [], of the buffer: the loss scale times the micro batches of all replicas. The residual is
                kept divided by it, so that neither may change.
        """
        finite = self._all_finite(buffer)
        _zero_unless(finite, buffer)
        self._take_in(buffer, divisor, finite)
        density = self._rules.density(step)
        if density >= 1:
            self._exchange_all(buffer, finite)
            buffer.mul_(divisor)
        else:
            whole = self._exchange_dense()
            total = self._exchange_largest(buffer, self._count(density), finite)
            for part in total.parts:
                buffer.index_add_(0, part.indices, part.values * divisor)
            if whole is not None:
                buffer[self._dense] = whole * divisor
        buffer[0] = torch.where(finite, buffer[0], float("nan"))

    def state(self) -> Dict[str, torch.Tensor]:
        state = {"residual": self.residual, "velocity": self.velocity}
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    def _all_finite(self, buffer: torch.Tensor) -> torch.Tensor:
        lowest, highest = torch.aminmax(buffer)
        finite = torch.isfinite(lowest) & torch.isfinite(highest)
        if self._everyone is None:
            return finite
        faults = (~finite).float()
        distributed.all_reduce(faults, group=self._everyone)
        return faults == 0

    def _take_in(self, buffer: torch.Tensor, divisor: torch.Tensor, finite: torch.Tensor) -> None:
        """Add the buffer's gradient, zeros if it is not `finite`, to the residual."""
        if self.velocity is None:
            torch.addcdiv(self.residual, buffer, divisor, out=self.residual)
            return
        self.velocity.mul_(torch.where(finite, self._rules.momentum, 1.0))
        torch.addcdiv(self.velocity, buffer, divisor, out=self.velocity)
        torch.addcmul(self.residual, self.velocity, finite.float(), out=self.residual)

    def _exchange_all(self, buffer: torch.Tensor, finite: torch.Tensor) -> None:
        buffer.copy_(self.residual)
        _sum_dense(buffer, self._group)
        _zero_unless(~finite, self.residual)

    def _exchange_dense(self) -> Optional[torch.Tensor]:
        """The sum over replicas of what is always sent whole, taken out of the residual."""
        if self._dense is None:
            return None
        own = self.residual[self._dense]  # of this step alone: zeros if that is not finite
        self.residual[self._dense] = 0.0
        _sum_dense(own, self._group)
        return own

    def _exchange_largest(self, buffer: torch.Tensor, count: int, finite: torch.Tensor) -> Total:
        """The sum of the replicas' largest entries; leaves the buffer empty, and the rest in the residual."""
        indices = largest(self.residual, count)
        own = Sparse(indices, self.residual[indices])
        scratch = buffer.zero_().view(torch.int32)
        total = self._sum(own, scratch)
        conserves = self._rules.conserve or self._rules.pattern == "gather"
        sent = finite if conserves else finite & _contained(indices, total.parts[0].indices, scratch)
        self.residual[indices] = torch.where(sent, 0.0, own.values)
        for part in total.residual if conserves else ():
            self.residual.index_add_(0, part.indices, torch.where(finite, part.values, 0.0))
        if self.velocity is not None and self._rules.masks:
            self.velocity[indices] = torch.where(sent, 0.0, self.velocity[indices])
        return total

    def _count(self, density: float) -> int:
        """Entries that each replica of this stage sends; the same on all of them."""
        if self._shares is not None:
            count = round(density * sum(self._elements))
            own = self._shares(self.residual, max(count, len(self._elements)))[self._stage]
        else:
            own = round(density * self._elements[self._stage])
        return min(max(1, own), len(self.residual))


def _zero_unless(wanted: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fills the tensor with zeros unless `wanted`, bool []; on a GPU the host does not wait to know."""
    if tensor.device.type != "cpu":
        tensor.copy_(torch.where(wanted, tensor, 0.0))
    elif not wanted:
        tensor.zero_()


def _sum_dense(tensor: torch.Tensor, group: Optional[distributed.ProcessGroup]) -> None:
    if group is not None:
        distributed.all_reduce(tensor, group=group)


def _contained(indices: torch.Tensor, others: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Mask of the `indices` that are among `others`, bool. scratch: int32, zeros; zeros again afterwards."""
    scratch[others] = 1
    found = scratch[indices] > 0
    scratch[others] = 0
    return found
