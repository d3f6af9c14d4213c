"""The exchange of sparse gradients: each replica sends its largest values and keeps the rest for later steps."""

from __future__ import annotations

from typing import Dict, List, Optional

import torch
from torch import distributed

from parallel.exchange import Running, Setup
from parallel.reduce import all_finite
from parallel.selection import largest
from parallel.sparse import Sparse, SparseSum
from recipe import exchange
from recipe.randomness import bits32, key

# Histograms of magnitudes: bins by exponent and three bits of the mantissa, each at most an eighth wide.
_BINS = 2048
_SHIFT = 20
_SAMPLE = 1 << 18  # of a stage's values: with 0.001 of them above the threshold, their number is exact to 6 %


class SparseExchange(Running):
    """Sums over replicas what each sends of its gradient, or update; the rest stays in a residual of its own.

    With g the replica's part of the mean gradient, or its update, and r its residual: a = r + g; s = the k entries of
    a that are largest in magnitude; the result is the sum of all replicas' s (`SparseSum`); r = a - s, and what merging
    leaves out. So sum(g) = sum of results + sum(r), to float32 rounding. Without `conserve` the published rule holds:
    an entry of s goes back to its replica only if it is not in the result.

    Entries that are sent whole leave no residual; the momentum of a contribution goes on. A gradient that is not finite
    on any replica or stage changes nothing here, and leaves NaN in the buffer.

    Sources: gTop-k: Shi et al., 1901.04359, algorithm 4; the published rule is its lines 7 to 10. Conserving rule:
    docs/exchange.md. Momentum on replicas: Lin et al., 1712.01887 (DGC), section 3.
    """

    def __init__(self, setup: Setup, section: exchange.Sparse):
        place, length = setup.processes.topology, len(setup.gradients)
        whole = [
            torch.arange(start, start + parameter.numel(), device=setup.gradients.device)
            for start, parameter in setup.places
            if section.dense_1d and parameter.dim() == 1
        ]
        self._dense = torch.cat(whole) if whole else None  # places that are always sent whole
        elements = sum(parameter.numel() for _, parameter in setup.places) - sum(map(len, whole))
        self._setup, self._section, self._stage = setup, section, place.stage
        self._elements = setup.processes.gather(elements)[: place.stages]  # of each stage
        self._everyone = setup.processes.further_group()
        self._conserves = getattr(section, "conserve", True)
        self._sum = SparseSum(setup.group, pattern=getattr(section, "pattern", "gather"), wire=section.sent)
        self.residual = torch.zeros_like(setup.gradients)
        self._shares: Optional[StageShares] = None
        if section.stage_share == "threshold" and place.stages > 1:
            self._shares = StageShares(length, place.stages, place.stage, self._everyone)

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """As in Running. The residual is stored divided by `divisor`: loss scale and batch may change."""
        finite = all_finite(buffer, self._everyone)
        _zero_unless(finite, buffer)
        density = self._section.density_at(step, self._setup.steps_per_epoch)
        if self._setup.contribution is None:
            self.residual.addcdiv_(buffer, divisor)
        else:
            self._setup.contribution(self.residual, buffer, divisor, finite, density)
        if density >= 1:
            self._add_up(buffer.copy_(self.residual))
            _zero_unless(~finite, self.residual)
            buffer.mul_(divisor)
        else:
            whole = None
            if self._dense is not None:
                whole = self.residual[self._dense]  # of this step alone: zeros if that is not finite
                self.residual[self._dense] = 0.0
                self._add_up(whole)
            for part in self._exchange_largest(buffer, density, finite):
                buffer.index_add_(0, part.indices, part.values * divisor)
            if whole is not None:
                buffer[self._dense] = whole * divisor
        buffer[0] = torch.where(finite, buffer[0], float("nan"))

    def state(self) -> Dict[str, torch.Tensor]:
        contribution = self._setup.contribution
        return {"residual": self.residual, **(contribution.state() if contribution is not None else {})}

    def _add_up(self, tensor: torch.Tensor) -> None:
        if self._setup.group is not None:
            distributed.all_reduce(tensor, group=self._setup.group)

    def _exchange_largest(self, buffer: torch.Tensor, density: float, finite: torch.Tensor) -> List[Sparse]:
        """Parts of the sum of the replicas' largest entries; clears the buffer, and leaves the rest in the residual."""
        indices = largest(self.residual, self._count(density))
        own = Sparse(indices, self.residual[indices])
        scratch = buffer.zero_().view(torch.int32)
        parts, left_out = self._sum(own, scratch)
        sent = finite
        if not self._conserves:
            scratch[parts[0].indices] = 1
            sent = finite & (scratch[indices] > 0)
            scratch[parts[0].indices] = 0
        self.residual[indices] = torch.where(sent, 0.0, own.values)
        for part in left_out if self._conserves else ():
            self.residual.index_add_(0, part.indices, torch.where(finite, part.values, 0.0))
        return parts

    def _count(self, density: float) -> int:
        """Entries that each replica of this stage sends; the same on all of them."""
        own = round(density * self._elements[self._stage])
        if self._shares is not None:
            count = round(density * sum(self._elements))
            own = self._shares(self.residual, max(count, len(self._elements)))[self._stage]
        return min(max(1, own), len(self.residual))


class StageShares:
    """Estimates, from a fixed sample of every stage, how many of a model's largest values lie in each."""

    def __init__(self, length: int, stages: int, stage: int, everyone: distributed.ProcessGroup):
        """Args: length: elements of the buffer of this process's `stage`. everyone: all replicas and stages."""
        self._stages, self._stage, self._everyone = stages, stage, everyone
        self._places: Optional[torch.Tensor] = None  # None: all
        if length > _SAMPLE:
            self._places = (bits32(key("stage shares"), torch.arange(_SAMPLE)) * length) >> 32
        self._weight = length / min(length, _SAMPLE)

    def __call__(self, values: torch.Tensor, count: int) -> List[int]:
        """Number of values that each stage sends of the replica's `count`; the same on all replicas and stages.

        Every process calls, with its stage's values, float32 [length]. Waits for the device.
        """
        sampled = values if self._places is None else values[self._places.to(values.device)]
        magnitudes = (sampled.view(torch.int32) & 0x7FFFFFFF) >> _SHIFT
        counts = torch.zeros(self._stages, _BINS, dtype=torch.float64, device=values.device)
        counts[self._stage] = torch.bincount(magnitudes, minlength=_BINS).double() * self._weight
        distributed.all_reduce(counts, group=self._everyone)
        replicas = distributed.get_world_size(self._everyone) // self._stages
        return divided(counts.cpu() / replicas, count)


def divided(histograms: torch.Tensor, count: int) -> List[int]:
    """`count` divided over stages in proportion to what each has among the largest values.

    Args: histograms: float64 [stages, bins], values of each stage by magnitude, ascending. count: at least the number
    of stages: every stage gets one or more.
    """
    whole = histograms.sum(0)
    above = whole.flip(0).cumsum(0).flip(0)  # values in this bin and in those above it
    border = int((above >= min(float(count), above[0].item())).nonzero()[-1])
    beyond = histograms[:, border + 1 :].sum(1)
    part = (count - beyond.sum()) / whole[border]
    exact = (beyond + part * histograms[:, border]).tolist()
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) < count:  # what rounding down took
        counts[max(range(len(counts)), key=lambda stage: exact[stage] - counts[stage])] += 1
    while sum(counts) > count:  # what stages got that have none of the largest
        counts[counts.index(max(counts))] -= 1
    return counts


def _zero_unless(wanted: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill the tensor with zeros unless `wanted`, bool []; on a GPU the host does not wait to know."""
    if tensor.device.type != "cpu":
        tensor.copy_(torch.where(wanted, tensor, 0.0))
    elif not wanted:
        tensor.zero_()
