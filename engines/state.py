"""State of a model of which each process has a part: names, shapes and state dictionaries."""

from __future__ import annotations

from typing import Dict, Iterable, List, Mapping, Set, Tuple

import torch

from models.base import BlockList


def shapes(model: BlockList) -> Dict[str, Tuple[int, ...]]:
    """Return the shapes of a `model`'s parameters and persistent buffers, by name."""
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_parts(saved: dict, parts: Iterable[str], averages: Iterable[str]) -> None:
    """Check that a saved state has all of its parts.

    Args:
        saved: the state.
        parts: keys that it must have.
        averages: names that its averages must have.

    Raises:
        ValueError: one is missing; names it.
    """
    for part in parts:
        if part not in saved:
            raise ValueError(f"{part} is missing")
    for name in averages:
        if name not in saved["averages"]:
            raise ValueError(f"averages.{name} is missing")


def check_shapes(
    weights: Mapping[str, torch.Tensor],
    expected: Mapping[str, Tuple[int, ...]],
) -> None:
    """Check that tensors are those of a model.

    Args:
        weights: by name.
        expected: shapes by name, of which `weights` may lack some.

    Raises:
        ValueError: a name or shape is not among the expected.
    """
    for name, tensor in weights.items():
        if name not in expected:
            raise ValueError(f"{name} is unknown")
        if tuple(tensor.shape) != expected[name]:
            shape = list(tensor.shape)
            raise ValueError(f"{name} is {shape}, the model's is {list(expected[name])}")


def persistent_buffers(model: BlockList) -> Dict[str, torch.Tensor]:
    """Return the running statistics of a `model` by name.

    Other buffers are constants, such as the mean of the pixels, which belong to the recipe.
    """
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Return copies of `tensors` on the CPU, by the same names."""
    # Also of tensors that are there already: the next step changes these.
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def load_buffers(buffers: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Fill `buffers` with the tensors of the same names in `saved`.

    Raises:
        ValueError: a name is missing or unknown.
    """
    if buffers.keys() != saved.keys():
        # Sets have no order: sorted, the message is the same on all processes.
        name = sorted(buffers.keys() ^ saved.keys())[0]
        raise ValueError(f"{name} is {'missing' if name in buffers else 'unknown'}")
    for name, buffer in buffers.items():
        buffer.copy_(saved[name])


def merged(states: List[dict]) -> dict:
    """Merge nested dictionaries that differ in the names of tensors.

    Args:
        states: of several processes; of what more than one has the first counts.
    """
    whole: dict = {}
    for state in states:
        for key, value in state.items():
            if isinstance(value, dict):
                whole[key] = merged([whole.get(key, {}), value])
            else:
                whole.setdefault(key, value)
    return whole


def without(state: dict, names: Set[str]) -> dict:
    """Return a nested dictionary, here `state`, without the tensors of some names."""
    kept = {}
    for key, value in state.items():
        if key not in names:
            kept[key] = without(value, names) if isinstance(value, dict) else value
    return kept
