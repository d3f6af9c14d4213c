"""State of a model of which each process has a part: state dicts, and running statistics of all replicas."""

from __future__ import annotations

from typing import Dict, Iterable, List, Sequence, Set, Tuple

import torch

from models.base import BlockList
from parallel.processes import Processes


def shapes(model: BlockList) -> Dict[str, Tuple[int, ...]]:
    """Shapes of a model's parameters and persistent buffers, by name."""
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_parts(saved: dict, parts: Iterable[str], averages: Iterable[str]) -> None:
    """Raise ValueError naming a part of a saved state, or one of its averages, that is missing."""
    for part in parts:
        if part not in saved:
            raise ValueError(f"{part} is missing")
    for name in averages:
        if name not in saved["averages"]:
            raise ValueError(f"averages.{name} is missing")


def check_shapes(weights: Dict[str, torch.Tensor], expected: Dict[str, Tuple[int, ...]]) -> None:
    """Raise ValueError for a tensor whose name or shape is not among the expected."""
    for name, tensor in weights.items():
        if name not in expected:
            raise ValueError(f"{name} is unknown")
        if tuple(tensor.shape) != expected[name]:
            raise ValueError(f"{name} is {list(tensor.shape)}, the model's is {list(expected[name])}")


def persistent_buffers(model: BlockList) -> Dict[str, torch.Tensor]:
    """Running statistics; constants such as the mean of the pixels belong to the recipe."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def load_buffers(buffers: Dict[str, torch.Tensor], saved: Dict[str, torch.Tensor]) -> None:
    """Fill `buffers` by name. Raises ValueError naming one that is missing or unknown."""
    if buffers.keys() != saved.keys():
        name = sorted(buffers.keys() ^ saved.keys())[0]
        raise ValueError(f"{name} is {'missing' if name in buffers else 'unknown'}")
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])


def merged(states: List[dict]) -> dict:
    """Merge nested dictionaries that differ in the names of tensors; of what several have the first counts."""
    whole: dict = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, dict):
                whole[key] = merged([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole


def without(state: dict, names: Set[str]) -> dict:
    """A nested dictionary without the tensors of these names."""
    return {
        key: without(value, names) if isinstance(value, dict) else value
        for key, value in state.items()
        if key not in names
    }


def combine_statistics(
    buffers: Dict[str, torch.Tensor],
    before: Sequence[torch.Tensor],
    momentum: float,
    shares: Sequence[range],
    processes: Processes,
) -> None:
    """Make each replica's running statistics those of one process that has seen all micro batches of the step.

    A replica's m micro batches move a statistic from R to D^m R + T, with D = 1 - momentum. One process, which takes
    the N micro batches of all replicas one after the other, would end at D^N R + the sum over replicas of D^l T, with l
    micro batches that come later: that is put into `buffers`.

    Args: before: the same before the step, equal on all replicas. shares: of the replicas.
    """
    place, decay = processes.topology, 1 - momentum
    if place.replicas == 1:
        return
    start, end = (torch.cat([each.flatten().double() for each in part]) for part in (before, buffers.values()))
    share, count = shares[place.replica], shares[-1].stop
    own = (end - start * decay ** len(share)) * decay ** (count - share.stop)
    processes.sum_over_replicas(own)
    combined = own + start * decay**count
    for buffer, values in zip(buffers.values(), combined.split([buffer.numel() for buffer in buffers.values()])):
        buffer.copy_(values.view_as(buffer))
