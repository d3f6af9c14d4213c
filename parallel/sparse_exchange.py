"""The exchange of sparse gradients: each replica sends its largest values, keeps the rest."""

from __future__ import annotations

from typing import Dict, List, Optional

import torch
from torch import distributed

from parallel.exchange import Running, Setup
from parallel.groups import Group
from parallel.reduce import all_finite
from parallel.selection import largest
from parallel.sparse import Sparse, SparseSum
from recipe import exchange
from recipe.randomness import bits32, key

# Histograms of magnitudes: bins by exponent and three bits of the mantissa, an eighth wide at most.
_BINS = 2048
_SHIFT = 20
# Values of a stage's sample: with 0.001 of them above the threshold, their number is exact to 6 %.
_SAMPLE = 1 << 18


class SparseExchange(Running):
    """Sums over replicas what each sends of its gradient, or update.

    The rest stays in a residual of its own.

    With g the replica's part of the mean gradient, or its update, and r its residual: a = r + g; s
    = the k entries of a that are largest in magnitude; the result is the sum of all replicas' s
    (`SparseSum`); r = a - s, and what merging leaves out. So sum(g) = sum of results + sum(r), to
    float32 rounding. Without `conserve` the published rule holds: an entry of s goes back to its
    replica only if it is not in the result.

    Entries that are sent whole leave no residual; the momentum of a replica update goes on. A
    gradient that is not finite on any replica or stage changes nothing here, and leaves NaN in the
    buffer.

    Sources: gTop-k: Shi et al., 1901.04359, algorithm 4; the published rule is its lines 7 to 10.
    Conserving rule: docs/exchange.md. Momentum on replicas: Lin et al., 1712.01887 (DGC), section
    3.
    """

    def __init__(self, setup: Setup, section: exchange.Sparse):
        """
        Args:
            setup: of the engine.
            section: of the recipe.
        """
        place = setup.processes.topology
        length = len(setup.gradients)
        self._setup = setup
        self._section = section
        self._stage = place.stage
        self._conserves = getattr(section, "conserve", True)
        # Places that are always sent whole, int64, and how many values each stage selects from.
        self._dense: Optional[torch.Tensor] = None
        whole = _places_of_vectors(setup) if section.dense_1d else []
        if whole:
            self._dense = torch.cat(whole)
        elements = sum(parameter.numel() for _, parameter in setup.places) - sum(map(len, whole))
        # By rank, of which the first ones are the stages of replica 0; all replicas are alike.
        self._elements = setup.processes.gather(elements)[: place.stages]
        self._everyone = setup.processes.further_group()
        self._shares: Optional[StageShares] = None
        if section.stage_share == "threshold" and place.stages > 1:
            self._shares = StageShares(length, place.stages, place.stage, everyone=self._everyone)
        pattern = getattr(section, "pattern", "gather")
        self._sum = SparseSum(setup.group, pattern=pattern, wire=section.sent)
        self.residual = torch.zeros_like(setup.gradients)

    @torch.no_grad()
    def __call__(self, buffer: torch.Tensor, step: int, divisor: torch.Tensor) -> None:
        """Replace the gradient by the sum over replicas of what each sends.

        The residual is stored divided by `divisor`: loss scale and batch may change.

        Args:
            buffer, step, divisor: see Running.
        """
        # All stages must know: a residual that one of them changed could not be taken back.
        finite = all_finite(buffer, self._everyone)
        _zero_unless(finite, buffer)
        density = self._section.density_at(step, self._setup.steps_per_epoch)
        # Add this replica's mean gradient, or its update, to what it has kept.
        if self._setup.replica_update is None:
            self.residual.addcdiv_(buffer, divisor)
        else:
            self._setup.replica_update(self.residual, buffer, divisor, finite, density)
        if density >= 1:
            self._exchange_everything(buffer, divisor, finite)
        else:
            self._exchange_sparsely(buffer, divisor, finite, density)
        # The engine looks for what is not finite after the exchange, as it does with other methods.
        buffer[0] = torch.where(finite, buffer[0], float("nan"))

    def state(self) -> Dict[str, torch.Tensor]:
        state = {"residual": self.residual}
        if self._setup.replica_update is not None:
            state.update(self._setup.replica_update.state())
        return state

    def _exchange_everything(
        self,
        buffer: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        """Write the sum of all that replicas have kept; keep nothing, or all if not `finite`."""
        self._add_up(buffer.copy_(self.residual))
        _zero_unless(~finite, self.residual)
        buffer.mul_(divisor)

    def _exchange_sparsely(
        self,
        buffer: torch.Tensor,
        divisor: torch.Tensor,
        finite: torch.Tensor,
        density: float,
    ) -> None:
        """Write the sum of the largest entries, and of those that are always sent whole."""
        whole: Optional[torch.Tensor] = None
        if self._dense is not None:
            # They are of this step alone: zeros if it is not finite.
            whole = self.residual[self._dense]
            self.residual[self._dense] = 0.0
            self._add_up(whole)
        for part in self._exchange_largest(buffer, density, finite):
            buffer.index_add_(0, part.indices, part.values * divisor)
        if whole is not None:
            buffer[self._dense] = whole * divisor

    def _add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the replicas, in place."""
        if self._setup.group is not None:
            distributed.all_reduce(tensor, group=self._setup.group)

    def _exchange_largest(
        self,
        buffer: torch.Tensor,
        density: float,
        finite: torch.Tensor,
    ) -> List[Sparse]:
        """Return parts of the sum of the replicas' largest entries.

        Leaves the rest in the residual.

        Args:
            buffer: float32 [length]; holds zeros afterwards.
            density: share of the entries that a replica sends.
            finite: bool []; if not the residual stays as it was.
        """
        # Places that are sent whole hold 0 by now, so they are chosen last.
        indices = largest(self.residual, self._count(density))
        selected = Sparse(indices, self.residual[indices])
        # The gradient is in the residual by now, so that its buffer is free.
        scratch = buffer.zero_().view(torch.int32)
        parts, left_out = self._sum(selected, scratch)
        sent = finite
        if not self._conserves:
            # The published rule: what is not in the result goes back to its replica.
            scratch[parts[0].indices] = 1
            sent = finite & (scratch[indices] > 0)
            scratch[parts[0].indices] = 0
        self.residual[indices] = torch.where(sent, 0.0, selected.values)
        if self._conserves:
            for part in left_out:
                values = torch.where(finite, part.values, 0.0)
                self.residual.index_add_(0, part.indices, values)
        return parts

    def _count(self, density: float) -> int:
        """Return the entries that each replica of this stage sends; the same on all of them."""
        count = round(density * self._elements[self._stage])
        if self._shares is not None:
            # At least one for each stage, which `divided` relies on.
            of_model = max(round(density * sum(self._elements)), len(self._elements))
            count = self._shares(self.residual, of_model)[self._stage]
        return min(max(1, count), len(self.residual))


def _places_of_vectors(setup: Setup) -> List[torch.Tensor]:
    """Return the places in the buffer of each parameter of one dimension, int64."""
    places = []
    for start, parameter in setup.places:
        if parameter.dim() == 1:
            end = start + parameter.numel()
            places.append(torch.arange(start, end, device=setup.gradients.device))
    return places


class StageShares:
    """Estimates from a fixed sample how many of a model's largest values lie in each stage."""

    def __init__(self, length: int, stages: int, stage: int, everyone: Group):
        """
        Args:
            length: elements of the buffer of this process's stage.
            stages: of a replica.
            stage: of this process.
            everyone: all replicas and stages.
        """
        self._stages = stages
        self._stage = stage
        self._everyone = everyone
        self._places: Optional[torch.Tensor] = None  # None: all
        if length > _SAMPLE:
            draws = bits32(key("stage shares"), torch.arange(_SAMPLE))
            self._places = (draws * length) >> 32
        self._weight = length / min(length, _SAMPLE)  # values that one of the sample stands for

    def __call__(self, values: torch.Tensor, count: int) -> List[int]:
        """Divide a replica's number of values over its stages. Every process calls.

        Waits for the device.

        Args:
            values: float32 [length], of this process's stage.
            count: values that a replica sends.

        Returns:
            The number that each stage sends; the same on all replicas and stages.
        """
        sampled = values
        if self._places is not None:
            sampled = values[self._places.to(values.device)]
        # Without their sign, the bits of floats are in the order of the magnitudes.
        magnitudes = (sampled.view(torch.int32) & 0x7FFFFFFF) >> _SHIFT
        # [stages, bins]: values by magnitude; each process fills its stage's row.
        counts = torch.zeros(self._stages, _BINS, dtype=torch.float64, device=values.device)
        histogram = torch.bincount(magnitudes, minlength=_BINS).double()
        counts[self._stage] = histogram * self._weight
        distributed.all_reduce(counts, group=self._everyone)
        replicas = distributed.get_world_size(self._everyone) // self._stages
        return divided(counts.cpu() / replicas, count)


def divided(histograms: torch.Tensor, count: int) -> List[int]:
    """Divide a number of values over stages in proportion to what each has among the largest.

    Args:
        histograms: float64 [stages, bins], values of each stage by magnitude, ascending.
        count: at least the number of stages: every stage gets one or more.

    Returns:
        The number of each stage; their sum is `count`.
    """
    # The bin that the least of the largest values is in, of which a part counts.
    whole = histograms.sum(0)
    # Values in each bin and in those above it.
    above = whole.flip(0).cumsum(0).flip(0)
    reached = above >= min(float(count), above[0].item())
    border = int(reached.nonzero()[-1])
    beyond = histograms[:, border + 1 :].sum(1)
    part = (count - beyond.sum()) / whole[border]
    exact = (beyond + part * histograms[:, border]).tolist()
    # Rounding down takes some away, and stages that have none of the largest get one.
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) < count:
        missing = [share - number for share, number in zip(exact, counts)]
        counts[missing.index(max(missing))] += 1
    while sum(counts) > count:
        counts[counts.index(max(counts))] -= 1
    return counts


def _zero_unless(wanted: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill the tensor with zeros unless `wanted`, bool [].

    On a GPU the host does not wait to know.
    """
    if tensor.device.type != "cpu":
        tensor.copy_(torch.where(wanted, tensor, 0.0))
    elif not wanted:
        tensor.zero_()
