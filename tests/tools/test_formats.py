"""Figures as text."""

import pytest

from tools import formats


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.duration(1234.5), "1,234 s"),
        (formats.duration(0.0123), "12.3 ms"),
        (formats.duration(4.2e-5), "42 us"),
        (formats.duration(-0.0294), "-29.4 ms"),
        (formats.number(12345.6), "12,346"),
        (formats.number(331.4231), "331.4"),
        (formats.percent(-0.001), "0 %"),
        (formats.percent(-0.2012, 1), "-20.1 %"),
        (formats.scaled(1.25e8, "bit/s"), "125 Mbit/s"),
        (formats.scaled(1234e9, "B"), "1,234 GB"),
    ],
)
def test_figures_have_units_and_few_digits(text, expected):
    assert text == expected
