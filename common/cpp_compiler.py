"""C++ functions of ours, compiled by this machine's C++ compiler and kept in the user's cache for
other processes.

A library is taken from the cache only if it was made of these sources, by this compiler with these
flags, for this processor, and if its bytes are those that were written. They are copied and checked
before they are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from common import binaries, progress

_SUFFIXES = (".cpp", ".h")
_SECONDS = 120.0  # for a compiler; it takes two to twenty, and many times that on a busy machine
_MOST_BYTES = 1 << 20  # that a compiler may print
_POLL_SECONDS = 0.02
_FOLDER = "compiled"  # in the cache
_MOST_FILES = 16  # in the cache: hosts with other processors may share it


class CompilerError(Exception):
    """A compiler cannot be named, fails, does not end or prints too much, or what it made is no
    library of ours.
    """


@functools.lru_cache(maxsize=None)
def library(source: Path, functions: Tuple[str, ...], flags: Tuple[str, ...]) -> ctypes.CDLL:
    """Return the library of a C++ file, from the user's cache or compiled now; the same object for
    the same arguments.

    The compiler is CXX, else c++. If several processes ask at once, one compiles and the others
    wait for it.

    Args:
        source: the file; it may include .h files beside it.
        functions: names that the library must have.
        flags: of the compiler. -march=native becomes AVX2 if torch is restricted to that
            (ATEN_CPU_CAPABILITY).

    Raises:
        OSError: the compiler cannot be started, or what it makes cannot be written or loaded.
        CompilerError: it fails, exceeds a limit of time or of what it prints, or a function is
            missing.
    """
    command = [*_compiler(), *_for_torch(flags)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Copies are compiled: a file that is edited meanwhile cannot come under the digest of what
        # it was.
        digests = {
            file.name: _copied(file, folder)
            for file in source.parent.iterdir()
            if file.suffix in _SUFFIXES
        }
        # The macros name the compiler's version and each set of instructions that the processor
        # has.
        macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull], folder / "messages")
        known = macros.decode(errors="replace")
        key = binaries.digest(command, functions, source.name, digests, known)
        kept = None
        if b"#define" in macros:
            kept = binaries.place(_FOLDER, f"{source.stem}-{key[:32]}.so")
        loaded = _loaded(kept, key, folder)
        if loaded is not None:
            return loaded
        # Around the wait as well: the rank that shows progress may not be the one that compiles.
        waiting = binaries.alone(kept, _SECONDS)
        with progress.lines(lambda: f"compiling {source.name} for this processor"), waiting:
            loaded = _loaded(kept, key, folder)  # compiled by another process meanwhile
            if loaded is None:
                loaded, binary = _compiled(command, folder / source.name, functions)
                binaries.keep(kept, key, binary, _MOST_FILES)
        return loaded


def _compiled(
    command: Sequence[str], source: Path, functions: Sequence[str]
) -> Tuple[ctypes.CDLL, bytes]:
    """Compile a file beside itself. Returns: the library, loaded, and its content."""
    made = source.with_suffix(".so")
    _run([*command, str(source), "-o", str(made)], source.parent / "messages")
    library = ctypes.CDLL(str(made))
    for name in functions:
        if not hasattr(library, name):
            raise CompilerError(f"{command[0]} made a library without {name}")
    return library, made.read_bytes()


def _copied(file: Path, folder: Path) -> str:
    """Copy a file into a folder. Returns: the digest of its content."""
    content = file.read_bytes()
    (folder / file.name).write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def _compiler() -> List[str]:
    """Return the command's first words. Raises CompilerError."""
    try:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise CompilerError(f"CXX={os.environ['CXX']}: {error}") from None


def _for_torch(flags: Sequence[str]) -> List[str]:
    """Return the flags, restricted to the instructions that torch's own kernels use."""
    restricted = os.environ.get("ATEN_CPU_CAPABILITY") == "avx2"
    return [
        "-march=x86-64-v3" if restricted and flag == "-march=native" else flag for flag in flags
    ]


def _run(command: Sequence[str], messages: Path) -> bytes:
    """Run a compiler within limits of time and of what it prints into the file `messages`, which is
    returned.

    Raises OSError, CompilerError: it cannot be started, exits with a code other than 0, or exceeds
    a limit.
    """
    # In a session of its own, so that what a compiler starts can be ended with it. Nothing is read
    # from a terminal.
    with open(messages, "wb") as stream, subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stream,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            _wait(command[0], process, messages)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    printed = messages.read_bytes()
    if process.returncode:
        text = printed.decode(errors="replace").strip()
        raise CompilerError(
            text or f"{command[0]} ended with {process.returncode} and printed nothing"
        )
    return printed


def _wait(compiler: str, process: subprocess.Popen, messages: Path) -> None:
    """Wait until a compiler ends. Raises CompilerError where it takes too long or prints too much."""
    # A compiler that hangs, or prints without end, must not hold up or fill a machine.
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise CompilerError(f"{compiler} was ended after {_SECONDS:.0f} s without a result")
        if messages.stat().st_size > _MOST_BYTES:
            raise CompilerError(
                f"{compiler} was ended after it had printed {_MOST_BYTES >> 20} MiB"
            )
        time.sleep(_POLL_SECONDS)


def _loaded(kept: Optional[Path], key: str, folder: Path) -> Optional[ctypes.CDLL]:
    """Load a library from the cache by a copy in `folder`.

    None: none is there, or it is damaged, or it cannot be loaded here, as with an older C library
    on another host that shares the cache.
    """
    binary = binaries.read(kept, key)
    if kept is None or binary is None:
        return None
    with contextlib.suppress(OSError):
        copy = folder / "kept.so"
        copy.write_bytes(binary)
        library = ctypes.CDLL(str(copy))
        binaries.used(kept)
        return library
    return None
