"""Digest of the tensors in trees of dictionaries, such as checkpoints: equal only if all bits are."""

from __future__ import annotations

import hashlib
from typing import Iterable, Iterator, Tuple

import torch


def digest(trees: Iterable[object]) -> str:
    """SHA-256 of names, dtypes, shapes and values of all tensors, in the order of the names within each tree."""
    found = hashlib.sha256()
    for tree in trees:
        for name, tensor in sorted(_tensors(tree)):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _tensors(tree: object, name: str = "") -> Iterator[Tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict):
        for key, branch in tree.items():
            yield from _tensors(branch, f"{name}/{key}")
