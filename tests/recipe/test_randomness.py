"""Draws that must be as good as random, the same in every number library, and the same for ever.

The mixers are compared with the published functions, whose quality is published, too.
"""

import ctypes
import math

import numpy as np
import torch

from recipe.randomness import MASK32, Stream, bits32, key, mix32

KEYS = (0, 1, MASK32, MASK32 + 1, 2**63, 2**64 - 1, key("test"))
COUNTERS = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, MASK32)


def lowbias32(x):
    """The published C function, in C's arithmetic."""
    c = ctypes.c_uint32
    x ^= x >> 16
    x = c(x * 0x7FEB352D).value
    x ^= x >> 15
    x = c(x * 0x846CA68B).value
    return x ^ x >> 16


def test_mix32_is_the_published_function():
    for x in (*COUNTERS, *range(0, 2**32, 12_345_677)):
        assert mix32(x) == lowbias32(x)


def test_integers_arrays_and_tensors_draw_alike():
    counters = list(COUNTERS)
    for draw in KEYS:
        expected = [bits32(draw, counter) for counter in counters]
        assert all(isinstance(word, int) and 0 <= word <= MASK32 for word in expected)
        for dtype in (np.int64, np.uint64):
            drawn = bits32(draw, np.array(counters, dtype=dtype))
            assert drawn.dtype == dtype
            assert drawn.tolist() == expected
        assert bits32(draw, torch.tensor(counters)).tolist() == expected


def test_words_of_a_name_are_separated():
    names = [
        (),
        ("",),
        ("", ""),
        ("ab",),
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        (1,),
        ("1",),
        (1, 1),
        (11,),
        (-1,),
    ]
    assert len({key(*name) for name in names}) == len(names)
    assert len({key("draw", seed, step) for seed in range(10) for step in range(1000)}) == 10_000


def test_streams_are_splitmix64():
    """The first numbers for 1234567, as published on many pages with the algorithm."""
    stream = Stream(1234567)
    assert [stream.bits() for _ in range(5)] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_ranges_of_streams():
    stream = Stream(0)
    assert {stream.integer(3) for _ in range(100)} == {0, 1, 2} and stream.integer(1) == 0
    drawn = [stream.uniform(-3.0, 5.0) for _ in range(10_000)]
    assert -3 <= min(drawn) < -2.98 and 4.98 < max(drawn) <= 5
    big = [stream.integer(3 << 62) for _ in range(3_000)]
    assert abs(np.mean([number >> 62 for number in big]) - 1) < 5 * math.sqrt(2 / 3 / 3_000)


def test_draws_never_change():
    """Recorded from the first version: a run must repeat with every later one."""
    assert key("order", 0, 1) == 1953072085611776627
    assert key("rounding", 2**63 - 1, -5, "head.classifier.weight") == 11075250359147797750
    assert [bits32(key("order", 0, 1), counter) for counter in (0, 1, MASK32)] == [
        954161266,
        4216476126,
        1155621590,
    ]
    stream = Stream(key("augment", 0, 0, 0))
    assert [stream.bits() for _ in range(2)] == [7288200862830324941, 15314193309312609247]
