"""Where a step's gradients are added up: one flat float32 buffer, in the order that the recipe asks for."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from optim.layout import Layout

_ONE_BY_ONE = ("cpu",)  # types of devices where an operator costs less than another pass over the gradients


class Gradients:
    """Float32 gradients of a module's parameters over the micro batches of a step.

    As they come, micro batches are added to one running sum. In tree order each has a buffer of its own first, and
    `TreeSum` adds them. With float32 compute on a CPU autograd adds into the buffer by itself: `.grad` is a view of it.
    On GPUs autograd leaves new tensors, which few kernels take in together.
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
        one_by_one = layout.device.type in _ONE_BY_ONE
        self._added_by_autograd = one_by_one and self._parameters[0].dtype == torch.float32
        self._arrivals = None if one_by_one else _Arrivals(self._parameters, layout)
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
            if self._arrivals is not None and self._arrivals.complete:
                self.flat.add_(self._arrivals.take())
                return
            for number in range(len(self._parameters)):
                self.collect(number)
            return
        leaf = self._parts[part]
        if not self._added_by_autograd:
            leaf.take()
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
        part.open()
        self._show(part.parameters, part.views)

    def _show(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        if self._added_by_autograd:
            for parameter, view in zip(parameters, views):
                parameter.grad = view


class _Arrivals:
    """What a backward pass leaves in some parameters on a GPU, in one buffer of their dtype, by few kernels."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout):
        self._parameters, self._layout = parameters, layout
        self._places: List[torch.Tensor] = []

    @property
    def complete(self) -> bool:
        """Whether all parameters have a gradient, none of which was collected before."""
        return all(parameter.grad is not None for parameter in self._parameters)

    def take(self) -> torch.Tensor:
        """The gradients, [length], until the next call; the parameters have none any more."""
        gradients = [parameter.grad for parameter in self._parameters]
        if not self._places:
            self._flat = self._layout.zeros(gradients[0].dtype)
            # Torch copies one by one where strides differ, also those of dimensions of size 1.
            self._places = [
                view.as_strided(view.shape, gradient.stride()) if gradient.is_contiguous() else view
                for view, gradient in zip(self._layout.views(self._flat), gradients)
            ]
        torch._foreach_copy_(self._places, gradients)
        for parameter in self._parameters:
            parameter.grad = None
        return self._flat


class _Part:
    """Some consecutive parameters, the elements of the flat buffer from the first of them on, and their tree."""

    def __init__(self, parameters: Dict[str, nn.Parameter], flat: torch.Tensor, accumulation: int):
        self.parameters, self._layout = list(parameters.values()), Layout(parameters)
        self.flat = flat[: self._layout.length]
        self.tree = TreeSum(self._layout.length, accumulation, self._layout.device)
        self.views: List[torch.Tensor] = []  # of the current leaf
        one_by_one = self._layout.device.type in _ONE_BY_ONE
        self._arrivals = None if one_by_one else _Arrivals(self.parameters, self._layout)

    def open(self) -> None:
        """A leaf for the next micro batch."""
        self._leaf = self.tree.leaf()
        self.views = self._layout.views(self._leaf)

    def take(self) -> None:
        """The parameters' gradients into the leaf."""
        if self._arrivals is not None:
            self._leaf.copy_(self._arrivals.take())
            return
        for parameter, view in zip(self.parameters, self.views):
            view.copy_(parameter.grad)
            parameter.grad = None


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
