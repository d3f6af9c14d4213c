"""Which packages the GPU suite needs beside torch, and how to bring them where there is no network. Imports none."""

import importlib.util
from typing import List

from common.errors import ConfigError

# By the name that is imported; what torch brings along (numpy, typing_extensions, triton) is not
# here.
_NEEDED = {"pydantic": "pydantic", "yaml": "pyyaml", "timm": "timm", "torchvision": "torchvision"}


def check(command: str) -> None:
    """Check that all packages are installed.

    Args:
        command: what needs them, the first words of the line.

    Raises:
        ConfigError: some are not; one line says which, and how to bring them.
    """
    absent = [_NEEDED[name] for name in missing(list(_NEEDED))]
    if absent:
        fault = f"{command}: not installed: {', '.join(absent)}"
        remedy = "bring wheels (docs/gpu.md), then: python -m pip install --no-index --no-deps wheels/*.whl"
        raise ConfigError(f"{fault}; {remedy}")


def missing(names: List[str]) -> List[str]:
    """Return those modules of `names` that cannot be imported."""
    return [name for name in names if not _can_be_imported(name)]


def _can_be_imported(name: str) -> bool:
    """Return whether a module is there, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # the package that holds the module is missing
        return False
