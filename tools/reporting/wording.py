"""How figures and times are written on the page."""

from __future__ import annotations

from typing import Optional


def share(value: Optional[float]) -> Optional[str]:
    """0.9972 as `99.72 %`; None for what is not known."""
    return None if value is None or value != value else f"{100 * value:.2f} %"


def when(time: object) -> str:
    """`2026-11-22T04:34:01+00:00` as `2026-11-22 04:34:01 UTC`."""
    return str(time or "not noted").replace("T", " ").replace("+00:00", " UTC")


def listed(value: object) -> str:
    """A value of environment.json in one line."""
    if isinstance(value, list):
        return ", ".join(str(each) for each in value) or "none"
    return "not known" if value is None else str(value)
