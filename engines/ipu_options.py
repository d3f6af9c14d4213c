"""Sets PopTorch's options from the settings of recipe/ipu.py. Both are arguments: nothing here imports PopTorch."""

from __future__ import annotations

import functools
from typing import Any, Sequence

import torch

from recipe.ipu import Chain, Name, Setting


def made(poptorch: Any, options: Any, settings: Sequence[Setting], is_main: bool) -> Any:
    """Make all settings on `options`, in order. Args: is_main: whether this is the first process of a run."""
    for setting in settings:
        if setting.main_only and not is_main:
            continue
        *path, method = setting.call.split(".")[1:]
        target = functools.reduce(getattr, path, options)
        getattr(target, method)(*resolved(poptorch, list(setting.arguments)))
    return options


def resolved(poptorch: Any, value: Any) -> Any:
    """Replace the names in `value` by the objects they stand for."""
    if isinstance(value, Name):
        module, *path = value.path.split(".")
        return functools.reduce(getattr, path, {"poptorch": poptorch, "torch": torch}[module])
    if isinstance(value, Chain):
        made = resolved(poptorch, Name(value.start))()
        for method, arguments in value.calls:
            made = getattr(made, method)(*resolved(poptorch, list(arguments)))
        return made
    if isinstance(value, list):
        return [resolved(poptorch, each) for each in value]
    return value
