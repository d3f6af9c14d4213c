"""What sings when a file that is read runs code: payloads that are put among the damage call `sing`."""

from __future__ import annotations

songs: list[bytes] = []

_HERE = "benchmarks.fuzz.canary"
_PICKLE = f"c{_HERE}\nsing\n(tR.".encode()

PICKLES = (_PICKLE, b"\x80\x02" + _PICKLE)
TEXTS = (
    f"__import__('{_HERE}').fuzz.canary.sing()".encode(),
    f"!!python/object/apply:{_HERE}.sing []".encode(),
)


def sing() -> None:
    """Notes that code of a file has run."""
    songs.append(b"executed")
