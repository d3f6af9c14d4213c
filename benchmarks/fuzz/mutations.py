"""Damage, as disks, networks and people do it to bytes.

Some of it calls `trip` when a reader runs code from its input.
"""

import random
import re
from typing import List

calls: List[bytes] = []  # one for each call of `trip`
_HERE = "benchmarks.fuzz.mutations"
_PICKLE = f"c{_HERE}\ntrip\n(tR.".encode()
_PICKLES = (_PICKLE, b"\x80\x02" + _PICKLE)
_CODE = (
    f"__import__('{_HERE}').fuzz.mutations.trip()".encode(),
    f"!!python/object/apply:{_HERE}.trip []".encode(),
)
# At the edges of what one, two and four bytes can hold.
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TEXTS = (
    b"\0",
    b"'",
    b'"',
    b"{",
    b"[",
    b"null",
    b"-1",
    b"1e400",
    b"nan",
    b"../../",
    b"!!python/object",
    b"\xff\xfe",
    b"\n",
    b"[" * 3000,
    b"\\ud800",
    *_CODE,
    *_PICKLES,
)
# A value of JSON; YAML and SQL have them in the same places.
_VALUE = re.compile(rb'(?<=[:\[,(])\s*("[^"]*"|[-+.\w]+|\[\]|\{\})')
_OTHER_VALUES = (
    b"null",
    b"true",
    b"0",
    b"-1",
    b"1e999",
    b"-0.5",
    b"9" * 400,
    b"NaN",
    b'""',
    b'"a"',
    b"[]",
    b"[1]",
    b"{}",
    b'{"a": 1}',
    b'"\\u0000"',
    b'"\\ud800"',
)
# Kinds of damage; those that stand here twice are drawn twice as often.
_KINDS = (
    "flip",
    "flip",
    "truncate",
    "cut",
    "repeat",
    "zero",
    "number",
    "number",
    "text",
    "retype",
    "retype",
    "run",
    "splice",
)
_DAMAGES = (1, 1, 1, 2, 2, 4)  # how many an input has


def trip() -> None:
    """Note that a reader has run code from its input."""
    calls.append(b"executed")


def mutated(seeds: List[bytes], draws: random.Random) -> bytes:
    """Return one of the seeds after damage at random places; sometimes nothing but noise.

    Args:
        seeds: whole files.
        draws: for all that is random.
    """
    if draws.random() < 0.01:
        return draws.randbytes(draws.randrange(2000))
    data = bytearray(draws.choice(seeds))
    for _ in range(draws.choice(_DAMAGES)):
        _damage(data, draws.choice(_KINDS), seeds, draws)
    return bytes(data)


def _damage(data: bytearray, kind: str, seeds: List[bytes], draws: random.Random) -> None:
    """Damage `data` in place, in one of _KINDS."""
    # Kinds that need no place draw one as well: else a seed would give other inputs than before.
    values = list(_VALUE.finditer(data)) if kind == "retype" else []
    start = draws.randrange(len(data) + 1)
    end = start + draws.randint(1, 64)
    if values:
        place = draws.choice(values)
        data[place.start(1) : place.end(1)] = draws.choice(_OTHER_VALUES)
    elif kind == "truncate":
        del data[start:]
    elif kind == "cut":
        del data[start:end]
    elif kind == "repeat":
        data[start:start] = data[start:end] * draws.randint(1, 20)
    elif kind == "zero":
        _zero(data, start, draws)
    elif kind == "number":
        _set_number(data, start, draws)
    elif kind == "text":
        data[start:start] = draws.choice(_TEXTS)
    elif kind == "run":
        _put_pickle(data, draws)
    elif kind == "splice":
        other = draws.choice(seeds)
        data[start:] = other[draws.randrange(len(other) + 1) :]
    else:
        # Also where there is no value of which to change the type.
        _flip_bits(data, draws)


def _zero(data: bytearray, start: int, draws: random.Random) -> None:
    """Put zeros in the place of a block, as of one that a disk has lost."""
    size = min(draws.randint(1, 512), len(data) - start)
    data[start : start + size] = bytes(size)


def _set_number(data: bytearray, start: int, draws: random.Random) -> None:
    """Put a number in the place of some bytes, at the edge of what they can hold."""
    width = draws.choice((1, 2, 4))
    largest = (1 << 8 * width) - 1
    number = draws.choice(_NUMBERS) & largest
    data[start : start + width] = number.to_bytes(width, draws.choice(("big", "little")))


def _put_pickle(data: bytearray, draws: random.Random) -> None:
    """Put a pickle in the place of all, or of all behind a first line, which may be a name."""
    pickled = draws.choice(_PICKLES) + draws.randbytes(2)
    keeps_first_line = draws.random() < 0.8
    start = data.find(b"\n") + 1 if keeps_first_line else 0
    data[start:] = pickled


def _flip_bits(data: bytearray, draws: random.Random) -> None:
    """Flip up to eight bits."""
    if not data:
        return
    for _ in range(draws.randint(1, 8)):
        place = draws.randrange(len(data))
        data[place] ^= 1 << draws.randrange(8)
