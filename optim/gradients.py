"""Where a step's gradients are added up: one flat float32 buffer, in the order that the recipe asks for."""

from __future__ import annotations

from collections import deque
from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from optim.layout import Layout
from recipe.shares import additions_by_leaf

_ONE_BY_ONE = ("cpu",)  # types of devices where an operator costs less than another pass over the gradients


class Gradients:
    """Float32 gradients of a module's parameters over the micro batches of a step.

    As they come, micro batches are added to one running sum. In tree order each has a buffer of its own first, and
    `TreeSum` adds them. With float32 compute on a CPU autograd adds into the buffer by itself: `.grad` is a view of it.
    On GPUs autograd leaves new tensors, which few kernels take in together.

    sums: float32 [length] each, of the largest subtrees in this process's share of a step's micro batches, in order;
    one but in tree order. flat: the first of them.
    """

    def __init__(
        self,
        parameters: Dict[str, nn.Parameter],
        layout: Layout,
        leaves: Optional[Sequence[int]],
        parts: Sequence[Sequence[str]],
    ):
        """
        Args:
            parameters: by name, all of one dtype and device. layout: of them in the buffer.
            leaves: micro batches of each of the sums, for the tree order; None adds as they come.
            parts: names of the parameters that get a micro batch's gradients at once, in the order of `parameters`.
        """
        self._parameters = list(parameters.values())
        one_by_one = layout.device.type in _ONE_BY_ONE
        self._added_by_autograd = one_by_one and self._parameters[0].dtype == torch.float32
        self._arrivals = None if one_by_one else _Arrivals(self._parameters, layout)
        self.flat = layout.zeros(torch.float32)
        self.views, self.sums = layout.views(self.flat), [self.flat]
        self._parts: List[_Part] = []
        if leaves is not None:
            named = ({name: parameters[name] for name in names} for names in parts)
            self._parts = [_Part(each, layout.places[next(iter(each))][0]) for each in named]
            self.divide(leaves)

    def divide(self, leaves: Sequence[int]) -> None:
        """From the next step on there are as many sums, of so many micro batches each; for the tree order."""
        self._leaves, more = leaves, len(leaves) - len(self.sums)
        self.sums = [*self.sums[: len(leaves)], *(torch.zeros_like(self.flat) for _ in range(more))]

    def zero(self) -> None:
        """Empties the accumulators, before the first micro batch of a step."""
        for part in self._parts:
            part.begin(self._leaves, self.sums)
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
        own = self._parts[part]
        if not self._added_by_autograd:
            own.take()
        own.tree.add()
        if not own.tree.complete or own.finish():
            self._open(own)

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
    """Some consecutive parameters, elements of the flat buffers from the first of them on, and their tree."""

    def __init__(self, parameters: Dict[str, nn.Parameter], start: int):
        self.parameters, self._layout = list(parameters.values()), Layout(parameters)
        self.tree = TreeSum(self._layout.length, self._layout.device)
        self.views: List[torch.Tensor] = []  # of the current leaf
        self._place = slice(start, start + self._layout.length)
        one_by_one = self._layout.device.type in _ONE_BY_ONE
        self._arrivals = None if one_by_one else _Arrivals(self.parameters, self._layout)

    def begin(self, leaves: Sequence[int], sums: Sequence[torch.Tensor]) -> None:
        """Begin a step. Args: sums: where those of so many leaves each are to be stored."""
        self._coming = list(zip(leaves, sums))
        self.tree.begin(leaves[0])

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

    def finish(self) -> bool:
        """Store a sum that is complete; return whether another one follows."""
        _, stored = self._coming.pop(0)
        stored[self._place].copy_(self.tree.total)
        if self._coming:
            self.tree.begin(self._coming[0][0])
        return bool(self._coming)


class TreeSum:
    """Sum of the float32 gradients of some micro batches, as the binary tree of `recipe/shares.py`."""

    def __init__(self, length: int, device: torch.device):
        """Args: length: elements of a gradient. device: of the buffers, which are made when they are first needed."""
        self._length, self._device = length, device
        self._sums: List[torch.Tensor] = []  # of the leaves so far, oldest first
        self._free: List[torch.Tensor] = []

    def begin(self, leaves: int) -> None:
        """Begin the sum of so many micro batches, at least 1: floor(log2(leaves)) + 1 buffers are enough."""
        self._free += self._sums
        self._sums, self._additions = [], deque(additions_by_leaf(leaves))

    def leaf(self) -> torch.Tensor:
        """Zeros, float32 [length], for the gradient of the next micro batch; `add` comes before the next leaf."""
        if self._free:
            leaf = self._free.pop().zero_()
        else:
            leaf = torch.zeros(self._length, dtype=torch.float32, device=self._device)
        self._sums.append(leaf)
        return leaf

    def add(self) -> None:
        for _ in range(self._additions.popleft()):
            newer = self._sums.pop()
            self._sums[-1].add_(newer)
            self._free.append(newer)

    @property
    def complete(self) -> bool:
        """Whether all micro batches were added."""
        return not self._additions

    @property
    def total(self) -> torch.Tensor:
        """The sum, float32 [length]; valid after the last add(), until begin()."""
        assert self.complete, f"{len(self._additions)} micro batches were not added"
        return self._sums[0]
