"""Sums the gradients of a step's micro batches in one fixed order, however many replicas share them."""

from __future__ import annotations

from typing import List, Optional

import torch


class TreeSum:
    """Sum of the float32 gradients of `accumulation` micro batches, as one binary tree.

    With accumulation = q * 2**p, q odd, the micro batches (leaves) form 2**p groups of q consecutive ones. In a group
    sums of equal size are added as soon as there are two of them, as in a binary counter; what remains at its end is
    added from the newest to the oldest: 7 leaves give ((0+1)+(2+3)) + ((4+5)+6). The groups are added as a perfect
    binary tree. The error grows with the depth of the tree, ceil(log2(accumulation)), not with accumulation.

    So replicas that share a step evenly, each with consecutive micro batches, compute subtrees of one process's tree
    wherever their number is a power of two that divides the step's micro batches: added as a perfect binary tree
    (parallel/reduce.py, order "tree") they give the bits of one process. With any other number of replicas the sum is
    deterministic as well, but its last bits depend on that number.

    Source: Higham, The accuracy of floating point summation, SIAM J. Sci. Comput. 14 (1993), pairwise summation.
    """

    def __init__(self, length: int, accumulation: int, device: torch.device):
        """
        Args:
            length: elements of a gradient.
            accumulation: micro batches of this replica in a step, at least 1.
            device: of the buffers; at most floor(log2(accumulation)) + 1 of them are made, when first needed.
        """
        assert accumulation > 0
        self._length, self._accumulation, self._device = length, accumulation, device
        self._group = accumulation >> _trailing_zeros(accumulation)
        self._sums: List[torch.Tensor] = []  # of the leaves so far, oldest first
        self._free: List[torch.Tensor] = []
        self._leaf: Optional[torch.Tensor] = None
        self._added = 0

    def leaf(self) -> torch.Tensor:
        """Zeros, float32 [length], for the gradient of the next micro batch; one of few tensors, again and again."""
        assert self._leaf is None, "add() ends a leaf before the next one"
        if self._added == self._accumulation:
            self._free.append(self._sums.pop())
            self._added = 0
        if self._free:
            self._leaf = self._free.pop().zero_()
        else:
            self._leaf = torch.zeros(self._length, dtype=torch.float32, device=self._device)
        return self._leaf

    def add(self) -> None:
        """The leaf is complete; its memory belongs to the sum from now on."""
        assert self._leaf is not None, "leaf() comes first"
        self._sums.append(self._leaf)
        self._leaf = None
        self._added += 1
        for _ in range(self._carries()):
            newer = self._sums.pop()
            self._sums[-1].add_(newer)
            self._free.append(newer)

    @property
    def total(self) -> torch.Tensor:
        """The sum of the step, float32 [length]; valid after the last add(), until the next leaf()."""
        assert self._added == self._accumulation, f"{self._added} of {self._accumulation} micro batches were added"
        return self._sums[0]

    def _carries(self) -> int:
        """Additions that the leaf which came last completes."""
        groups, place = divmod(self._added, self._group)
        if place:
            return _trailing_zeros(place)
        return bin(self._group - 1).count("1") + _trailing_zeros(groups)


def _trailing_zeros(number: int) -> int:
    return (number & -number).bit_length() - 1
