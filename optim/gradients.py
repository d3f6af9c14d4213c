"""Where a step's gradients are added up: one flat float32 buffer, in the order that the recipe asks for."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from optim.layout import Layout


class Gradients:
    """Float32 gradients of a module's parameters over the micro batches of a step.

    As they come, micro batches are added to one running sum. In tree order each has a buffer of its own first, and
    `TreeSum` adds them. With float32 compute autograd adds into the buffer by itself: `.grad` is a view of it.
    """

    def __init__(
        self,
        parameters: Dict[str, nn.Parameter],
        layout: Layout,
        accumulation: Optional[int],
        parts: Sequence[Sequence[str]],
    ):
        """
        Args:
            parameters: by name, all of one dtype and device.
            layout: of the parameters in the buffer.
            accumulation: micro batches of a step, for the tree order; None adds as they come.
            parts: names of the parameters that get a micro batch's gradients at once, in the order of `parameters`.
        """
        self._parameters = list(parameters.values())
        first = self._parameters[0]
        self._added_by_autograd = first.dtype == torch.float32
        self.flat = layout.zeros(torch.float32)
        self.views = layout.views(self.flat)
        self._parts: List[_Part] = []
        self._trees: List[TreeSum] = []
        if accumulation is not None:
            self._parts = _divided(parameters, layout, parts)
            self._trees = [TreeSum(part.end - part.start, accumulation, first.device) for part in self._parts]
            self._accumulation, self._done = accumulation, [0] * len(self._parts)

    def zero(self) -> None:
        """Empties the accumulators, before the first micro batch of a step."""
        if self._trees:
            self._done = [0] * len(self._parts)
            for number in range(len(self._parts)):
                self._open(number)
            return
        self.flat.zero_()
        if self._added_by_autograd:
            for parameter, view in zip(self._parameters, self.views):
                parameter.grad = view

    def accumulate(self, part: int = 0) -> None:
        """Takes in the gradients that a micro batch's backward pass left in the parameters of a part."""
        if self._trees:
            self._add_leaf(part)
        elif not self._added_by_autograd:
            for number in range(len(self._parameters)):
                self.collect(number)

    def collect(self, number: int) -> None:
        """Takes in the gradient of one parameter, by its number; not for the tree order."""
        parameter = self._parameters[number]
        if not self._added_by_autograd and parameter.grad is not None:
            self.views[number].add_(parameter.grad)
            parameter.grad = None

    def _open(self, number: int) -> None:
        """A buffer for the part's next micro batch."""
        part = self._parts[number]
        part.views = _views(self._trees[number].leaf(), part.parameters, part.starts)
        if self._added_by_autograd:
            for parameter, view in zip(part.parameters, part.views):
                parameter.grad = view

    def _add_leaf(self, number: int) -> None:
        part, tree = self._parts[number], self._trees[number]
        if not self._added_by_autograd:
            for parameter, view in zip(part.parameters, part.views):
                view.copy_(parameter.grad)
                parameter.grad = None
        tree.add()
        self._done[number] += 1
        if self._done[number] < self._accumulation:
            self._open(number)
        else:
            self.flat[part.start : part.end].copy_(tree.total)


class _Part:
    """A range of the flat buffer, its parameters, where each begins in it, and views of the current leaf."""

    def __init__(self, start: int, end: int, parameters: List[nn.Parameter], starts: List[int]):
        self.start, self.end, self.parameters, self.starts = start, end, parameters, starts
        self.views: List[torch.Tensor] = []


def _divided(parameters: Dict[str, nn.Parameter], layout: Layout, parts: Sequence[Sequence[str]]) -> List[_Part]:
    edges = [layout.starts[names[0]] for names in parts] + [layout.length]
    return [
        _Part(start, end, [parameters[name] for name in names], [layout.starts[name] - start for name in names])
        for start, end, names in zip(edges, edges[1:], parts)
    ]


def _views(flat: torch.Tensor, parameters: Sequence[nn.Parameter], starts: Sequence[int]) -> List[torch.Tensor]:
    return [
        flat[start : start + parameter.numel()].view(parameter.shape) for parameter, start in zip(parameters, starts)
    ]


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
