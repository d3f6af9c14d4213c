"""Payloads that call `trip` when a reader of damaged files runs code from them."""

from __future__ import annotations

calls: list[bytes] = []

_HERE = "benchmarks.fuzz.canary"
_PICKLE = f"c{_HERE}\ntrip\n(tR.".encode()

PICKLES = (_PICKLE, b"\x80\x02" + _PICKLE)
TEXTS = (f"__import__('{_HERE}').fuzz.canary.trip()".encode(), f"!!python/object/apply:{_HERE}.trip []".encode())


def trip() -> None:
    calls.append(b"executed")
