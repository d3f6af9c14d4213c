"""Damage, as disks, networks and people do it to bytes."""

from __future__ import annotations

import random
import re
from typing import List

from benchmarks.fuzz import canary

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TEXTS = (
    b"\0", b"'", b'"', b"{", b"[", b"null", b"-1", b"1e400", b"nan", b"../../", b"!!python/object", b"\xff\xfe", b"\n",
    b"[" * 3000, b"\\ud800", *canary.TEXTS, *canary.PICKLES,
)  # fmt: skip
_VALUE = re.compile(rb'(?<=[:\[,(])\s*("[^"]*"|[-+.\w]+|\[\]|\{\})')  # of JSON, and as YAML and SQL have them
_OTHERS = (
    b"null", b"true", b"0", b"-1", b"1e999", b"-0.5", b"9" * 400, b"NaN", b'""', b'"a"', b"[]", b"[1]", b"{}",
    b'{"a": 1}', b'"\\u0000"', b'"\\ud800"',
)  # fmt: skip


def mutated(seeds: List[bytes], draws: random.Random) -> bytes:
    """One of the seeds after one to four kinds of damage at random places; sometimes nothing but noise."""
    if draws.random() < 0.01:
        return draws.randbytes(draws.randrange(2000))
    data = bytearray(draws.choice(seeds))
    for _ in range(draws.choice((1, 1, 1, 2, 2, 4))):
        draws.choice(_DAMAGE)(data, seeds, draws)
    return bytes(data)


def _flip(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    for _ in range(draws.randint(1, 8)):
        if data:
            data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)


def _truncate(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    del data[draws.randrange(len(data) + 1) :]


def _cut(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    start = draws.randrange(len(data) + 1)
    del data[start : start + draws.randint(1, 64)]


def _repeat(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    start = draws.randrange(len(data) + 1)
    part = data[start : start + draws.randint(1, 64)]
    data[start:start] = part * draws.randint(1, 20)


def _zero(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    """A block that a disk has lost."""
    start = draws.randrange(len(data) + 1)
    size = min(draws.randint(1, 512), len(data) - start)
    data[start : start + size] = bytes(size)


def _number(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    """A number at the edge of what its bytes can hold."""
    width = draws.choice((1, 2, 4))
    number = draws.choice(_NUMBERS) & (1 << 8 * width) - 1
    start = draws.randrange(len(data) + 1)
    data[start : start + width] = number.to_bytes(width, draws.choice(("big", "little")))


def _text(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    start = draws.randrange(len(data) + 1)
    data[start:start] = draws.choice(_TEXTS)


def _retype(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    """Another value in the place of one, of another type or beyond its range."""
    found = list(_VALUE.finditer(data))
    if not found:
        return _flip(data, seeds, draws)
    place = draws.choice(found)
    data[place.start(1) : place.end(1)] = draws.choice(_OTHERS)


def _run(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    """A pickle in the place of all, or of all behind a first line, which may be a name."""
    data[data.find(b"\n") + 1 if draws.random() < 0.8 else 0 :] = draws.choice(canary.PICKLES) + draws.randbytes(2)


def _splice(data: bytearray, seeds: List[bytes], draws: random.Random) -> None:
    """The end of another file."""
    other = draws.choice(seeds)
    data[draws.randrange(len(data) + 1) :] = other[draws.randrange(len(other) + 1) :]


_DAMAGE = (_flip, _flip, _truncate, _cut, _repeat, _zero, _number, _number, _text, _retype, _retype, _run, _splice)
