"""Our launches as operators of torch, for compilers, which then neither look into them nor into Triton."""

from __future__ import annotations

import functools
from typing import Callable

import torch

_NAMESPACE = "large_batch_efficientnet"


def operator(schema: str, shapes: Callable) -> Callable[[Callable], Callable]:
    """Makes a function of tensors an operator where torch.compile or torch.export reads the code that calls it.
    Elsewhere it is called as it is: an operator's dispatch takes longer than the launches of a small layer.

    Args: schema: of the operator, `(Tensor x, int groups) -> Tensor`; results are new tensors. shapes: takes the same
    arguments, and returns tensors like the results without computing them.
    """

    def decorate(function: Callable) -> Callable:
        name = f"{_NAMESPACE}::{function.__module__.rpartition('.')[2]}{function.__name__}"
        found = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        found.register_fake(shapes)

        @functools.wraps(function)
        def call(*arguments):
            return found(*arguments) if torch.compiler.is_compiling() else function(*arguments)

        return call

    return decorate
