"""Parameters that no loss of an update depends on: an update leaves them as they are, as torch's optimizers do."""

from __future__ import annotations

import functools
from typing import Iterable, List, Sequence, Set, Tuple

import torch
from torch import nn


class UnusedParameters:
    """Knows which parameters get no gradient in an update, and puts back what the update has made of them.

    A gradient of zeros is a gradient. Without any, neither weight decay nor momentum moves a parameter, and nothing
    that is kept for it changes. Whether another replica has a gradient is known on the device only, after an exchange
    of messages: so an update is made of all parameters, and undone, without waiting, where nobody had one.
    """

    def __init__(self, places: Sequence[Tuple[int, nn.Parameter]], device: torch.device):
        """Args: places: first element of each parameter in a flat buffer, and the parameter."""
        self._spans = [slice(start, start + parameter.numel()) for start, parameter in places]
        self._used: Set[int] = set()
        self._all = torch.ones(len(places), device=device)
        self._saved: List[Tuple[torch.Tensor, int, torch.Tensor]] = []  # part of a buffer, its parameter, a copy
        for number, (_, parameter) in enumerate(places):
            parameter.register_post_accumulate_grad_hook(functools.partial(_note, self._used, number))

    def forget(self) -> None:
        """Begin another update."""
        self._used.clear()

    def save(self, buffers: Iterable[torch.Tensor]) -> None:
        """Copy what an update may change of the parameters that have no gradient here.

        Args: buffers: flat, as the weights lie.
        """
        missing = [number for number in range(len(self._spans)) if number not in self._used]
        parts = [(flat[self._spans[number]], number) for flat in buffers for number in missing]
        self._saved = [(part, number, part.clone()) for part, number in parts]

    def used(self) -> torch.Tensor:
        """Return 1 for each parameter that has a gradient here, else 0: float32 [parameters], to be summed over
        replicas."""
        if len(self._used) == len(self._spans):
            return self._all
        used = [float(number in self._used) for number in range(len(self._spans))]
        return torch.tensor(used, device=self._all.device)

    def restore(self, used: torch.Tensor) -> bool:
        """Put back what was saved of the parameters that no replica has a gradient of; return whether any was saved.

        Args: used: the sum over replicas.
        """
        for part, number, saved in self._saved:
            part.copy_(torch.where(used[number] > 0, part, saved))
        changed = bool(self._saved)
        self._saved = []
        return changed


def _note(used: Set[int], number: int, _: nn.Parameter) -> None:
    used.add(number)
