"""MATLAB's files of version 5, as far as ImageNet's devkit needs them: arrays of structs of numbers and texts.

Damaged files end scipy's reader (1.17) by SIGSEGV, or make it hang or fill the memory.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Iterator

import numpy as np

_MOST_BYTES = 16 << 20  # of all variables unpacked; ImageNet's have a few
_MATRIX, _COMPRESSED = 14, 15  # kinds of an element
_STRUCT, _CHAR, _NUMBERS = 2, 4, range(6, 16)  # classes of a matrix
_DTYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_TEXTS = {1: "ascii", 2: "ascii", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le"}


def structs(content: bytes, name: str) -> list[dict[str, Any]]:
    """The array of structs of that name, a dictionary for each: texts, numbers and lists of numbers; None for others.

    Raises ValueError, and errors of struct and zlib, for files that are damaged, of another kind or larger than 16 MB.
    """
    if content[126:128] != b"IM":
        raise ValueError("no file of MATLAB 5, or of a big-endian machine")
    left = _MOST_BYTES
    for kind, data in _elements(content[128:]):
        if kind == _COMPRESSED:
            data = zlib.decompressobj().decompress(data, left + 1)
            left -= len(data)
            if left < 0:
                raise ValueError(f"more than {_MOST_BYTES >> 20} MB when unpacked")
            ((kind, data),) = _elements(data)
        found, value = _matrix(data) if kind == _MATRIX else ("", None)
        if found == name:
            return [dict(row) for row in value]
    raise ValueError(f"no {name} in it")


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and data of each element. Raises ValueError where one ends beyond the content."""
    at = 0
    while at < len(content):
        kind, size = struct.unpack_from("<II", content, at)
        at += 8
        if kind >> 16:  # a small one: its data lie within the tag
            kind, size, at = kind & 0xFFFF, kind >> 16, at - 4
            end = at + 4
        else:
            end = at + size + (0 if kind == _COMPRESSED else -size % 8)
        if at + size > len(content):
            raise ValueError("it ends too early")
        yield kind, content[at : at + size]
        at = end


def _matrix(content: bytes) -> tuple[str, Any]:
    """Name and value of a matrix."""
    if not content:
        return "", None  # an empty one has not even flags
    (_, flags), _, (_, name), *rest = _elements(content)
    kind, value = flags[0], None
    if kind == _STRUCT:
        (_, length), (_, names), *rest = rest
        step = int.from_bytes(length, "little") or 1
        fields = [names[at : at + step].split(b"\0")[0].decode("ascii") for at in range(0, len(names), step)]
        values = [_matrix(data)[1] for _, data in rest]
        value = [dict(zip(fields, values[at : at + len(fields)])) for at in range(0, len(values), len(fields) or 1)]
    elif kind == _CHAR and rest:
        value = rest[0][1].decode(_TEXTS[rest[0][0]])
    elif kind in _NUMBERS and rest:
        numbers = np.frombuffer(rest[0][1], _DTYPES[rest[0][0]]).tolist()
        value = numbers[0] if len(numbers) == 1 else numbers
    return name.decode("ascii"), value
