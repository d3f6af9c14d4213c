"""The bar of a step is as wide as the terminal, and each part as wide as its share."""

import pytest

from tools.diagnosis import telling
from tools.diagnosis.looks import LOOKS
from tools.diagnosis.splitting import PARTS


def parts(**seconds):
    return {**dict.fromkeys(PARTS, 0.0), **seconds}


def test_the_bar_has_the_parts_in_their_shares():
    bar = telling._bar(parts(compute=0.5, input=0.25, exchange=0.125, rest=0.125), 80)
    assert bar.plain == "C" * 40 + "I" * 20 + "X" * 10 + "r" * 10


@pytest.mark.parametrize("width", [20, 79, 80, 200])
def test_the_bar_is_as_wide_as_asked_for_however_parts_round(width):
    bar = telling._bar(parts(compute=1 / 3, update=1 / 3, bubble=1 / 7, straggling=0.001, rest=-0.2), width)
    assert len(bar.plain) == width and "r" not in bar.plain


def test_letters_tell_all_parts_apart():
    assert list(LOOKS) == list(PARTS)
    assert len({look[0] for look in LOOKS.values()}) == len(PARTS)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1234.5, "1,234 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 us"), (-0.0294, "-29.4 ms"), (0.0, "0 us")],
)
def test_times_have_units(seconds, text):
    assert telling._time(seconds) == text


def test_nothing_has_no_sign():
    assert telling._percent(-0.001) == "0 %"
    assert telling._percent(-0.2) == "-20 %"
