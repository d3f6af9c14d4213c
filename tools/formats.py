"""Figures as text: with their unit, and no more digits than a measurement has."""


def duration(value: float) -> str:
    """`1,235 s`, `2.5 s`, `12.3 ms`, `42 us`."""
    size = abs(value)
    if size >= 1:
        return f"{value:,.3g} s" if size < 100 else f"{value:,.0f} s"
    return f"{1e3 * value:.3g} ms" if size >= 1e-3 else f"{1e6 * value:.3g} us"


def number(value: float) -> str:
    """`12,346`, `331.4`."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def percent(share: float, digits: int = 0) -> str:
    """`37 %`; without a minus before 0."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f} %"


def scaled(value: float, unit: str) -> str:
    """`1.2 GB`, `125 Mbit/s`: by the decimal prefix that leaves one to three digits before the point."""
    factor, prefix = next((each for each in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= each[0]), (1.0, ""))
    value /= factor
    return f"{value:,.0f} {prefix}{unit}" if value >= 100 else f"{value:.3g} {prefix}{unit}"
