"""Exponential averages of the weights, kept beside them in float32, never used in training."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch


class WeightAverage:
    """The average of weights w_1 ... w_n with weights decay^(n - k), divided by their sum.

    So the first weights are the first average. In the offline average of the G16 recipe (0.97 over
    the checkpoints of epochs) the first one has a share of 0.97^(n - 1) instead: 2e-5 after 350
    epochs, but half of all after 23.

    Source: Polyak and Juditsky (1992) for averaging; the division is Adam's bias correction
    (1412.6980, section 3).

    tensors: the average.
    count: how many weights it is of, int64 [].
    """

    def __init__(self, decay: float, sources: Sequence[torch.Tensor]):
        """
        Args:
            decay: in (0, 1).
            sources: floating-point tensors whose shapes and devices `add` will be given.
        """
        self._decay = decay
        self.tensors: List[torch.Tensor] = []
        for source in sources:
            self.tensors.append(torch.zeros_like(source, dtype=torch.float32))
        device = self.tensors[0].device
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(
        self,
        sources: Sequence[torch.Tensor],
        counts: Optional[torch.Tensor] = None,
    ) -> None:
        """Add the current weights, without waiting for the device.

        Args:
            sources: laid out as at the start, and finite.
            counts: bool or int64 [], how many times the weights count. 0 leaves the average as it
                is: the update was skipped. None is 1.
        """
        if counts is None:
            times = torch.ones_like(self.count)
        else:
            times = counts.to(torch.int64)
        # Counted first: the sum that divides includes the new weights.
        self.count = self.count + times
        # 1 for the first, (1 - decay) in the long run; 0 where nothing counts, and lerp then
        # changes no bit.
        # In float64: with a decay near 1 float32 would have few digits of 1 - decay^count.
        new = 1 - self._decay ** times.double()
        all_of_them = 1 - self._decay ** self.count.clamp(min=1).double()
        share = (new / all_of_them).float()
        for tensor, source in zip(self.tensors, sources):
            tensor.lerp_(source.float(), share)
