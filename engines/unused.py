"""Parameters that no loss of an update depends on.

An update leaves them as they are, as torch's optimizers do.
"""

from __future__ import annotations

import functools
from typing import Iterable, List, NamedTuple, Sequence, Set, Tuple

import torch
from torch import nn


class _Saved(NamedTuple):
    """A copy of a part of a buffer, which belongs to the parameter of a number."""

    part: torch.Tensor
    number: int
    copy: torch.Tensor


class UnusedParameters:
    """The parameters that get no gradient in an update, and their values before it.

    A gradient of zeros is a gradient. Without any, neither weight decay nor momentum moves a
    parameter, and nothing that is kept for it changes. Whether another replica has a gradient is
    known on the device only, after an exchange of messages: so an update is made of all parameters,
    and undone, without waiting, where no replica had one.
    """

    def __init__(self, places: Sequence[Tuple[int, nn.Parameter]], device: torch.device):
        """
        Args:
            places: first element of each parameter in a flat buffer, and the parameter.
            device: of the buffers.
        """
        self._spans = [slice(start, start + parameter.numel()) for start, parameter in places]
        self._used: Set[int] = set()
        self._all = torch.ones(len(places), device=device)
        self._saved: List[_Saved] = []
        for number, (_, parameter) in enumerate(places):
            note = functools.partial(_note, self._used, number)
            parameter.register_post_accumulate_grad_hook(note)

    def forget(self) -> None:
        """Begin another update."""
        self._used.clear()

    def save(self, buffers: Iterable[torch.Tensor]) -> None:
        """Copy what an update may change of the parameters that have no gradient here.

        Args:
            buffers: flat, laid out as the weights.
        """
        self._saved = []
        for flat in buffers:
            for number, span in enumerate(self._spans):
                # Usually all are used, and nothing is copied.
                if number not in self._used:
                    part = flat[span]
                    self._saved.append(_Saved(part, number, part.clone()))

    def used(self) -> torch.Tensor:
        """Return which parameters have a gradient here, to be summed over replicas.

        Returns:
            float32 [parameters], 1 for each that has one, else 0.
        """
        # The usual case sends nothing from the host.
        if len(self._used) == len(self._spans):
            return self._all
        used = [float(number in self._used) for number in range(len(self._spans))]
        return torch.tensor(used, device=self._all.device)

    def restore(self, used: torch.Tensor) -> bool:
        """Put back what was saved of the parameters for which no replica has a gradient.

        Args:
            used: sum of the results of `used` over replicas.

        Returns:
            True if anything was saved.
        """
        # By a mask: whether to put back is known on the device alone.
        for part, number, copy in self._saved:
            part.copy_(torch.where(used[number] > 0, part, copy))
        changed = bool(self._saved)
        self._saved = []
        return changed


def _note(used: Set[int], number: int, _: nn.Parameter) -> None:
    used.add(number)
