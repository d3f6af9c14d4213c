"""What processes agree on in a step: named numbers, added up by one message."""

from __future__ import annotations

from typing import Callable, Dict, Mapping, NamedTuple

import torch


class Agreement(NamedTuple):
    """An update as all processes know it; tensors stay on the device.

    finite: bool [], whether all gradients of all processes are finite.
    loss: float64 [], sum of the mean losses of the micro batches of all replicas.
    correct: int64 [], images whose best guess is right.
    """

    finite: torch.Tensor
    loss: torch.Tensor
    correct: torch.Tensor


def add_up(
    add: Callable[[torch.Tensor], torch.Tensor],
    numbers: Mapping[str, torch.Tensor],
) -> Dict[str, torch.Tensor]:
    """Add up the numbers of all processes, each of which calls with the same names and shapes.

    Args:
        add: sums a float64 [length] tensor over all processes.
        numbers: float64 tensors by name, on the device.

    Returns:
        The sums, by the same names and of the same shapes.
    """
    # In one tensor: a message takes its latency, however short it is.
    message = torch.cat([tensor.flatten() for tensor in numbers.values()])
    lengths = [tensor.numel() for tensor in numbers.values()]
    sums = add(message).split(lengths)
    return {name: part.view(numbers[name].shape) for name, part in zip(numbers, sums)}
