"""The sum of a step's gradients: one flat float32 buffer, added up in the recipe's order."""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from optim.layout import Layout
from recipe.shares import additions_by_leaf

# Types of devices where an operator costs less than another pass over the gradients.
_ONE_BY_ONE = ("cpu",)


class Gradients:
    """Float32 gradients of a module's parameters over the micro batches of a step.

    As they come, micro batches are added to one running sum. In tree order each has a buffer of its
    own first, and `TreeSum` adds them. With float32 compute on a CPU autograd adds into the buffer
    by itself: `.grad` is a view of it. On GPUs autograd leaves new tensors, which few kernels add
    up together.

    sums: float32 [length] each, of the largest subtrees in this process's share of a step's micro
        batches, in order; one but in tree order.
    flat: the first of them.
    views: the parameters' parts of it.
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
            parameters: by name, all of one dtype and device.
            layout: of them in the buffer.
            leaves: micro batches of each of the sums, for the tree order; None adds as they come.
            parts: names of the parameters that get a micro batch's gradients at once, in the order
                of `parameters`.
        """
        self._parameters = list(parameters.values())

        # How a micro batch's gradients arrive: autograd adds them into the buffer, or they come as
        # tensors, which are gathered first where a launch for each of them would cost more.
        one_by_one = layout.device.type in _ONE_BY_ONE
        self._added_by_autograd = one_by_one and self._parameters[0].dtype == torch.float32
        self._arrivals = None if one_by_one else _Arrivals(self._parameters, layout)

        self.flat = layout.zeros(torch.float32)
        self.views = layout.views(self.flat)
        self.sums = [self.flat]

        # In tree order: a tree for each part, because a process with several parts of a pipeline
        # gets their gradients at different times.
        self._parts: List[_Part] = []
        if leaves is not None:
            for names in parts:
                start, _ = layout.places[names[0]]
                self._parts.append(_Part({name: parameters[name] for name in names}, start))
            self.set_leaves(leaves)

    def set_leaves(self, leaves: Sequence[int]) -> None:
        """Set the number of sums from the next step on; for the tree order.

        Args:
            leaves: micro batches of each.
        """
        self._leaves = leaves
        # Sums that stay keep their memory: the first is `flat`, of which others hold views.
        self.sums = self.sums[: len(leaves)]
        while len(self.sums) < len(leaves):
            self.sums.append(torch.zeros_like(self.flat))

    def zero(self) -> None:
        """Empty the accumulators, before the first micro batch of a step."""
        # In tree order nothing is cleared here: each leaf comes as zeros, each sum is overwritten.
        for part in self._parts:
            part.begin(self._leaves, self.sums)
            self._open(part)
        if not self._parts:
            self.flat.zero_()
            self.show()

    def show(self) -> None:
        """Have autograd add into the buffer; not for the tree order.

        Needed after the parameters' gradients were set to None.
        """
        self._show(self._parameters, self.views)

    def accumulate(self, part: int = 0) -> None:
        """Add the gradients that a micro batch's backward pass left in the parameters.

        Args:
            part: number of the parameters' part; in tree order.
        """
        if self._parts:
            self._accumulate_part(self._parts[part])
        elif self._arrivals is not None and self._arrivals.complete:
            self.flat.add_(self._arrivals.take())
        else:
            # A CPU, where autograd has added float32 gradients already; or an exchange that begins
            # within the backward pass has collected some.
            for number in range(len(self._parameters)):
                self.collect(number)

    def _accumulate_part(self, part: _Part) -> None:
        """Add a micro batch's gradients to a part's tree, and open the next leaf, if any."""
        if not self._added_by_autograd:
            part.take()
        part.tree.add()
        # After the last leaf of the last sum nothing is opened: no micro batch follows.
        if not part.tree.complete or part.finish():
            self._open(part)

    def collect(self, number: int) -> None:
        """Add the gradient of one parameter, by its `number`; not for the tree order."""
        parameter = self._parameters[number]
        if not self._added_by_autograd and parameter.grad is not None:
            self.views[number].add_(parameter.grad)
            parameter.grad = None

    def _open(self, part: _Part) -> None:
        """Give a part a buffer for its next micro batch."""
        part.open()
        self._show(part.parameters, part.views)

    def _show(self, parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
        """Make the parameters' gradients these views, where autograd adds into them."""
        if self._added_by_autograd:
            for parameter, view in zip(parameters, views):
                parameter.grad = view


class _Arrivals:
    """Gathers the gradients of some parameters on a GPU in one buffer of their dtype."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout):
        self._parameters = parameters
        self._layout = layout
        self._places: List[torch.Tensor] = []  # parts of the buffer, by the gradients' strides

    @property
    def complete(self) -> bool:
        """Return whether all parameters have a gradient, none of which was collected before."""
        return all(parameter.grad is not None for parameter in self._parameters)

    def take(self) -> torch.Tensor:
        """Move the gradients into the buffer, [length], which is valid until the next call."""
        gradients = [_gradient(parameter) for parameter in self._parameters]
        # The buffer is made once the first gradients show in which strides autograd leaves them.
        if not self._places:
            self._flat = self._layout.zeros(gradients[0].dtype)
            # Torch copies one by one where strides differ, also those of dimensions of size 1.
            for view, gradient in zip(self._layout.views(self._flat), gradients):
                if gradient.is_contiguous():
                    view = view.as_strided(view.shape, gradient.stride())
                self._places.append(view)
        torch._foreach_copy_(self._places, gradients)
        for parameter in self._parameters:
            parameter.grad = None
        return self._flat


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient that a backward pass has left in the parameter."""
    gradient = parameter.grad
    assert gradient is not None, "the backward pass reaches all parameters of a part at once"
    return gradient


class _Part:
    """Some consecutive parameters, their elements of the flat buffers, and their tree."""

    def __init__(self, parameters: Dict[str, nn.Parameter], start: int):
        """
        Args:
            parameters: by name.
            start: the first one's first element in the flat buffers.
        """
        self.parameters = list(parameters.values())
        self._layout = Layout(parameters)
        self.tree = TreeSum(self._layout.length, self._layout.device)
        self.views: List[torch.Tensor] = []  # of the current leaf
        self._place = slice(start, start + self._layout.length)
        one_by_one = self._layout.device.type in _ONE_BY_ONE
        self._arrivals = None if one_by_one else _Arrivals(self.parameters, self._layout)

    def begin(self, leaves: Sequence[int], sums: Sequence[torch.Tensor]) -> None:
        """Begin a step.

        Args:
            leaves: micro batches of each sum.
            sums: where they are to be stored.
        """
        self._coming: Deque[Tuple[int, torch.Tensor]] = deque(zip(leaves, sums))
        self.tree.begin(leaves[0])

    def open(self) -> None:
        """Begin a leaf for the next micro batch."""
        self._leaf = self.tree.leaf()
        self.views = self._layout.views(self._leaf)

    def take(self) -> None:
        """Move the parameters' gradients into the leaf."""
        if self._arrivals is not None:
            self._leaf.copy_(self._arrivals.take())
            return
        for parameter, view in zip(self.parameters, self.views):
            view.copy_(_gradient(parameter))
            parameter.grad = None

    def finish(self) -> bool:
        """Store a sum that is complete; return whether another one follows."""
        _, stored = self._coming.popleft()
        # A copy, as the tree's buffers serve the next sum.
        stored[self._place].copy_(self.tree.total)
        if not self._coming:
            return False
        leaves, _ = self._coming[0]
        self.tree.begin(leaves)
        return True


class TreeSum:
    """Sum of the float32 gradients of some micro batches, as the tree of `recipe/shares.py`."""

    def __init__(self, length: int, device: torch.device):
        """
        Args:
            length: elements of a gradient.
            device: of the buffers, which are created when they are first needed.
        """
        self._length = length
        self._device = device
        self._sums: List[torch.Tensor] = []  # of the leaves so far, oldest first
        self._free: List[torch.Tensor] = []

    def begin(self, leaves: int) -> None:
        """Begin the sum of some micro batches.

        Args:
            leaves: their number, at least 1: floor(log2(leaves)) + 1 buffers are enough.
        """
        # The buffers of the sum before serve again: a step allocates nothing after the first.
        self._free += self._sums
        self._sums = []
        self._additions = deque(additions_by_leaf(leaves))

    def leaf(self) -> torch.Tensor:
        """Return zeros for the next micro batch's gradient; `add` comes before the next leaf.

        Returns:
            float32 [length].
        """
        if self._free:
            leaf = self._free.pop().zero_()
        else:
            leaf = torch.zeros(self._length, dtype=torch.float32, device=self._device)
        self._sums.append(leaf)
        return leaf

    def add(self) -> None:
        """Add the last leaf to the tree."""
        # Subtrees that this leaf completes. They depend on the number of leaves alone, and so do
        # the bits of the sum.
        for _ in range(self._additions.popleft()):
            newer = self._sums.pop()
            self._sums[-1].add_(newer)
            self._free.append(newer)

    @property
    def complete(self) -> bool:
        """Return whether all micro batches were added."""
        return not self._additions

    @property
    def total(self) -> torch.Tensor:
        """Return the sum, float32 [length]; valid after the last add(), until begin()."""
        assert self.complete, f"{len(self._additions)} micro batches were not added"
        return self._sums[0]
