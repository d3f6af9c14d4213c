"""Where a step's gradients are added up: one flat float32 buffer, in the order that the recipe asks for."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from optim.accumulation import TreeSum
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
