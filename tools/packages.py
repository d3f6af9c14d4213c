"""Packages that an environment may lack: docs/coming_from.md lists them."""

from __future__ import annotations

import importlib.util

from common.errors import ConfigError


def lacking(*packages: str) -> str:
    """Return which of some packages is not installed, and the remedy; nothing if all are.

    Args:
        packages: by the names by which they are imported and installed.
    """
    # None is loaded: some take seconds.
    for package in packages:
        if importlib.util.find_spec(package) is None:
            fault = f"the package {package} is not installed"
            return f"{fault}; pip install {' '.join(packages)}"
    return ""


def check(needs: str, *packages: str) -> None:
    """Check that packages are installed; to be called before any work.

    Args:
        needs: what needs them, the first words of the line.
        packages: as for `lacking`.

    Raises:
        ConfigError: one is not.
    """
    fault = lacking(*packages)
    if fault:
        raise ConfigError(f"{needs}: {fault}")
