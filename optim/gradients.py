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
            parameters: by name, all of one dtype and device. layout: of them in the buffer.
            accumulation: micro batches of a step, for the tree order; None adds as they come.
            parts: names of the parameters that get a micro batch's gradients at once, in the order of `parameters`.
        """
        self._parameters = list(parameters.values())
        self._added_by_autograd = self._parameters[0].dtype == torch.float32
        self.flat = layout.zeros(torch.float32)
        self.views = layout.views(self.flat)
        self._parts: List[_Part] = []
        if accumulation is not None:
            self._parts = [
                _Part({name: parameters[name] for name in names}, self.flat[layout.places[names[0]][0] :], accumulation)
                for names in parts
            ]

    def zero(self) -> None:
        """Empties the accumulators, before the first micro batch of a step."""
        for part in self._parts:
            self._open(part)
        if not self._parts:
            self.flat.zero_()
            self.show()

    def show(self) -> None:
        """Has autograd add into the buffer, also where somebody has set the parameters' gradients to None; not for the
        tree order."""
        self._show(self._parameters, self.views)

    def accumulate(self, part: int = 0) -> None:
        """Takes in the gradients that a micro batch's backward pass left in the parameters of a part."""
        if not self._parts:
            for number in range(len(self._parameters)):
                self.collect(number)
            return
        leaf = self._parts[part]
        if not self._added_by_autograd:
            for parameter, view in zip(leaf.parameters, leaf.views):
                view.copy_(parameter.grad)
                parameter.grad = None
        leaf.tree.add()
        if leaf.tree.complete:
            leaf.flat.copy_(leaf.tree.total)
        else:
            self._open(leaf)

    def collect(self, number: int) -> None:
        """Takes in the gradient of one parameter, by its number; not for the tree order."""
        parameter = self._parameters[number]
        if not self._added_by_autograd and parameter.grad is not None:
            self.views[number].add_(parameter.grad)
            parameter.grad = None

    def _open(self, part: _Part) -> None:
        """A buffer for the part's next micro batch."""
        part.views = part.layout.views(part.tree.leaf())
        self._show(part.parameters, part.views)

    def _show(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        if self._added_by_autograd:
            for parameter, view in zip(parameters, views):
                parameter.grad = view


class _Part:
    """Some consecutive parameters, the elements of the flat buffer from the first of them on, and their tree."""

    def __init__(self, parameters: Dict[str, nn.Parameter], flat: torch.Tensor, accumulation: int):
        self.parameters, self.layout = list(parameters.values()), Layout(parameters)
        self.flat = flat[: self.layout.length]
        self.tree = TreeSum(self.layout.length, accumulation, self.layout.device)
        self.views: List[torch.Tensor] = []  # of the current leaf


class TreeSum:
    """Sum of the float32 gradients of `accumulation` micro batches, as one binary tree.

    With accumulation = q * 2**p, q odd, the micro batches (leaves) form 2**p groups of q consecutive ones. In a group
    sums of equal size are added as soon as there are two of them, as in a binary counter; what remains at its end is
    added from the newest to the oldest: 7 leaves give ((0+1)+(2+3)) + ((4+5)+6). The groups are added as a perfect
    binary tree. The error grows with the depth of the tree, ceil(log2(accumulation)), not with accumulation.

    Replicas with consecutive micro batches compute subtrees of one process's tree where their number is a power of two
    that divides the step's micro batches: added as a perfect binary tree (parallel/reduce.py) they give its bits.

    Source: Higham, The accuracy of floating point summation, SIAM J. Sci. Comput. 14 (1993), pairwise summation.
    """

    def __init__(self, length: int, accumulation: int, device: torch.device):
        """
        Args:
            length: elements of a gradient. accumulation: micro batches of this replica in a step, at least 1.
            device: of the buffers; at most floor(log2(accumulation)) + 1 of them are made, when first needed.
        """
        self._length, self._accumulation, self._device = length, accumulation, device
        self._group = accumulation >> _trailing_zeros(accumulation)
        self._sums: List[torch.Tensor] = []  # of the leaves so far, oldest first
        self._free: List[torch.Tensor] = []
        self._added = 0

    def leaf(self) -> torch.Tensor:
        """Zeros, float32 [length], for the gradient of the next micro batch; `add` comes before the next leaf."""
        if self.complete:
            self._free.append(self._sums.pop())
            self._added = 0
        if self._free:
            leaf = self._free.pop().zero_()
        else:
            leaf = torch.zeros(self._length, dtype=torch.float32, device=self._device)
        self._sums.append(leaf)
        return leaf

    def add(self) -> None:
        self._added += 1
        groups, place = divmod(self._added, self._group)
        completed = bin(self._group - 1).count("1") + _trailing_zeros(groups)  # additions, at the end of a group
        for _ in range(_trailing_zeros(place) if place else completed):
            newer = self._sums.pop()
            self._sums[-1].add_(newer)
            self._free.append(newer)

    @property
    def complete(self) -> bool:
        """Whether all micro batches of the step were added."""
        return self._added == self._accumulation

    @property
    def total(self) -> torch.Tensor:
        """The sum of the step, float32 [length]; valid after the last add(), until the next leaf()."""
        assert self.complete, f"{self._added} of {self._accumulation} micro batches were added"
        return self._sums[0]


def _trailing_zeros(number: int) -> int:
    return (number & -number).bit_length() - 1
