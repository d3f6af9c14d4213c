"""Which packages the GPU suite needs beside torch, and how to bring them where there is no network. Imports none."""

import importlib.util
from typing import List

from common.errors import ConfigError

# By the name that is imported; what torch brings along (numpy, typing_extensions, triton) is not here.
_NEEDED = {"pydantic": "pydantic", "yaml": "pyyaml", "timm": "timm", "torchvision": "torchvision"}


def check(command: str) -> None:
    """Raises ConfigError: something is not installed; one line says what, and how to bring it."""
    absent = ", ".join(package for name, package in _NEEDED.items() if missing([name]))
    if absent:
        remedy = "bring wheels (docs/gpu.md), then: python -m pip install --no-index --no-deps wheels/*.whl"
        raise ConfigError(f"{command}: not installed: {absent}; {remedy}")


def missing(names: List[str]) -> List[str]:
    """Those of the modules that cannot be imported."""
    return [name for name in names if not _found(name)]


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package that holds the module is missing
        return False
