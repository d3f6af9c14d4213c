"""Damage, as disks, networks and people do it to bytes; some calls `trip` when a reader runs code from its input."""

import random
import re
from typing import List

calls: List[bytes] = []
_HERE = "benchmarks.fuzz.mutations"
_PICKLE = f"c{_HERE}\ntrip\n(tR.".encode()
_PICKLES = (_PICKLE, b"\x80\x02" + _PICKLE)
_CODE = (f"__import__('{_HERE}').fuzz.mutations.trip()".encode(), f"!!python/object/apply:{_HERE}.trip []".encode())
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TEXTS = (
    b"\0", b"'", b'"', b"{", b"[", b"null", b"-1", b"1e400", b"nan", b"../../", b"!!python/object", b"\xff\xfe", b"\n",
    b"[" * 3000, b"\\ud800", *_CODE, *_PICKLES,
)  # fmt: skip
_VALUE = re.compile(rb'(?<=[:\[,(])\s*("[^"]*"|[-+.\w]+|\[\]|\{\})')  # of JSON, and as YAML and SQL have them
_OTHERS = (
    b"null", b"true", b"0", b"-1", b"1e999", b"-0.5", b"9" * 400, b"NaN", b'""', b'"a"', b"[]", b"[1]", b"{}",
    b'{"a": 1}', b'"\\u0000"', b'"\\ud800"',
)  # fmt: skip
_KINDS = (
    "flip", "flip", "truncate", "cut", "repeat", "zero", "number", "number", "text", "retype", "retype", "run",
    "splice",
)  # fmt: skip


def trip() -> None:
    calls.append(b"executed")


def mutated(seeds: List[bytes], draws: random.Random) -> bytes:
    """One of the seeds after one to four kinds of damage at random places; sometimes nothing but noise."""
    if draws.random() < 0.01:
        return draws.randbytes(draws.randrange(2000))
    data = bytearray(draws.choice(seeds))
    for _ in range(draws.choice((1, 1, 1, 2, 2, 4))):
        _damage(data, draws.choice(_KINDS), seeds, draws)
    return bytes(data)


def _damage(data: bytearray, kind: str, seeds: List[bytes], draws: random.Random) -> None:
    values = list(_VALUE.finditer(data)) if kind == "retype" else []
    start = draws.randrange(len(data) + 1)
    end = start + draws.randint(1, 64)
    if values:  # another value in the place of one, of another type or beyond its range
        place = draws.choice(values)
        data[place.start(1) : place.end(1)] = draws.choice(_OTHERS)
    elif kind == "truncate":
        del data[start:]
    elif kind == "cut":
        del data[start:end]
    elif kind == "repeat":
        data[start:start] = data[start:end] * draws.randint(1, 20)
    elif kind == "zero":  # a block that a disk has lost
        size = min(draws.randint(1, 512), len(data) - start)
        data[start : start + size] = bytes(size)
    elif kind == "number":  # at the edge of what its bytes can hold
        width = draws.choice((1, 2, 4))
        number = draws.choice(_NUMBERS) & (1 << 8 * width) - 1
        data[start : start + width] = number.to_bytes(width, draws.choice(("big", "little")))
    elif kind == "text":
        data[start:start] = draws.choice(_TEXTS)
    elif kind == "run":  # a pickle in the place of all, or of all behind a first line, which may be a name
        data[data.find(b"\n") + 1 if draws.random() < 0.8 else 0 :] = draws.choice(_PICKLES) + draws.randbytes(2)
    elif kind == "splice":  # the end of another file
        other = draws.choice(seeds)
        data[start:] = other[draws.randrange(len(other) + 1) :]
    else:  # bits
        for _ in range(draws.randint(1, 8) if data else 0):
            data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
