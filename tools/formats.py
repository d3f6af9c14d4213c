"""Figures as text: with their unit, and no more digits than a measurement has."""

_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def duration(value: float) -> str:
    """Return a `value` in seconds as text: `1,235 s`, `2.5 s`, `12.3 ms`, `42 us`."""
    # Differences may be negative.
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f} s"
    if size >= 1:
        return f"{value:,.3g} s"
    if size >= 1e-3:
        return f"{1e3 * value:.3g} ms"
    return f"{1e6 * value:.3g} us"


def number(value: float) -> str:
    """Return a `value` with about four digits: `12,346`, `331.4`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(share: float, digits: int = 0) -> str:
    """Return a `share` of 1 as a percentage: `37 %`.

    Args:
        share: which is never shown as minus 0.
        digits: behind the point.
    """
    rounded = round(100 * share, digits) + 0.0  # adding 0 makes -0.0 positive
    return f"{rounded:.{digits}f} %"


def scaled(value: float, unit: str) -> str:
    """Return a `value` with a prefix before its `unit`: `1.2 GB`, `125 Mbit/s`.

    The decimal prefix is the one that leaves one to three digits before the point.
    """
    for factor, prefix in _PREFIXES:  # noqa: B007, the last serves for all that is smaller
        if value >= factor:
            break
    value /= factor
    # Three digits of 123.4 are 123, but of 1234 they would be 1.23e+03.
    figure = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{figure} {prefix}{unit}"
