"""Our launches as operators of torch, for compilers, which then do not look into them."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

_NAMESPACE = "large_batch_efficientnet"


def operator(schema: str, shapes: Callable) -> Callable[[Callable], Callable]:
    """Make a function of tensors an operator where torch.compile or torch.export reads its caller.

    Elsewhere it is called as it is: an operator's dispatch takes longer than the launches of a
    small layer.

    Args:
        schema: of the operator, `(Tensor x, int groups) -> Tensor`; results are new tensors.
        shapes: takes the same arguments by position, and returns tensors like the results without
            computing them.

    Returns:
        A decorator.
    """

    def decorate(function: Callable) -> Callable:
        """Return what calls `function`, or its operator."""
        # Named after file and function: two files may have functions of one name.
        file = function.__module__.rpartition(".")[2]
        name = f"{_NAMESPACE}::{file}{function.__name__}"
        compiled = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        compiled.register_fake(shapes)

        # Compilers read this condition as true, and only the call of the operator.
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*arguments, **named)
            return function(*arguments, **named)

        return call

    return decorate
