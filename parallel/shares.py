"""Division among stages of the values that a replica sends: as many as each has of the largest."""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import distributed

from recipe.randomness import bits32, key

_BINS = 2048  # by exponent and three bits of the mantissa: each is at most an eighth wide
_SHIFT = 20
_SAMPLE = 1 << 18  # of a stage's values: with 0.001 of them above the threshold, their number is known to 6 %


class StageShares:
    """Estimates, from a fixed sample of every stage, how many of a model's largest values lie in each."""

    def __init__(self, length: int, stages: int, stage: int, everyone: distributed.ProcessGroup):
        """
        Args:
            length: elements of this stage's buffer, fillers (zeros) included.
            stages, stage: their number, and that of this process.
            everyone: all replicas and stages.
        """
        self._stages, self._stage, self._everyone = stages, stage, everyone
        self._places: Optional[torch.Tensor] = None  # None: all
        if length > _SAMPLE:
            drawn = bits32(key("stage shares"), torch.arange(_SAMPLE))
            self._places = (drawn * length) >> 32
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

    Args:
        histograms: float64 [stages, bins], values of each stage by magnitude, ascending.
        count: at least the number of stages: every stage gets one or more.
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
