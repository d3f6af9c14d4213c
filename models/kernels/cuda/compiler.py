"""CUDA C++ of ours, compiled for a GPU by NVRTC and kept in the user's cache for other processes.

NVRTC comes with torch for CUDA; no toolkit and no nvcc are needed. A GPU is not needed either.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path
from typing import Callable, List, Mapping, Sequence, Tuple

import torch

from common import binaries, progress

_FOLDER = "compiled-cuda"  # in the cache
_MOST_FILES = 64  # there: a model has some ten variants, for each kind of GPU
_SECONDS = 60.0  # to wait for a process that compiles the same; it takes some five


class CompilerError(Exception):
    """NVRTC is missing, or refuses a source or an architecture."""


def fault() -> str:
    """Return why nothing can be compiled on this machine, in a line; "" where it can."""
    try:
        _version()
    except (OSError, CompilerError) as error:
        return str(error)
    return ""


def binary(source: Path, macros: Mapping[str, int], capability: Tuple[int, int]) -> bytes:
    """Return the machine code of a .cu file, from the user's cache or compiled now.

    Args:
        source: the file; it may include .h files beside it.
        macros: names and values that it is given.
        capability: the GPU's compute capability, (9, 0).

    Raises:
        OSError: NVRTC cannot be loaded, or the source cannot be read.
        CompilerError: it fails.
    """
    headers = {file.name: file.read_bytes() for file in sorted(source.parent.glob("*.h"))}
    content = source.read_bytes()
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in macros.items()]
    contents = [content.decode(), {name: text.decode() for name, text in headers.items()}]
    key = binaries.digest(source.name, contents, options, _version())
    kept = binaries.place(_FOLDER, f"{source.stem}-{key[:32]}.cubin")
    made = binaries.read(kept, key)
    if made is None:
        waiting = binaries.alone(kept, _SECONDS)
        with progress.lines(lambda: f"compiling {source.name} for this GPU"), waiting:
            made = binaries.read(kept, key)  # compiled by another process meanwhile
            if made is None:
                made = _compiled(source.name, content, headers, options)
                binaries.keep(kept, key, made, _MOST_FILES)
    elif kept is not None:
        binaries.used(kept)
    return made


def _compiled(
    name: str,
    content: bytes,
    headers: Mapping[str, bytes],
    options: Sequence[str],
) -> bytes:
    """Compile a source.

    Args:
        name: for messages.
        content: of the file.
        headers: names and contents of the files that it may include.
        options: of NVRTC.

    Returns:
        A cubin.

    Raises:
        CompilerError: with NVRTC's messages.
    """
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            content,
            name.encode(),
            len(headers),
            _strings(list(headers.values())),
            _strings([header.encode() for header in headers]),
        )
    )
    try:
        arguments = _strings([option.encode() for option in options])
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            messages = log.rstrip(b"\0").decode(errors="replace").strip()
            raise CompilerError(messages or f"NVRTC cannot compile {name}")
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(
    program: ctypes.c_void_p,
    size_of: Callable[..., int],
    get: Callable[..., int],
) -> bytes:
    """Return a text of a program, by NVRTC's functions for its size and its content."""
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(get(program, text))
    return text.raw


def _strings(values: List[bytes]) -> ctypes.Array:
    """Return an array of strings for C."""
    return (ctypes.c_char_p * len(values))(*values)


def _check(result: int) -> None:
    """Raise CompilerError unless NVRTC's `result` is 0."""
    if result:
        raise CompilerError(f"NVRTC: {_nvrtc().nvrtcGetErrorString(result).decode()}")


@functools.lru_cache(maxsize=None)
def _version() -> Tuple[int, int]:
    """Return NVRTC's version. Raises OSError, CompilerError."""
    major = ctypes.c_int()
    minor = ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@functools.lru_cache(maxsize=None)
def _nvrtc() -> ctypes.CDLL:
    """Return NVRTC. Raises OSError, CompilerError."""
    if torch.version.cuda is None:
        raise CompilerError("this PyTorch is not for CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    path = name
    for folder in _folders():
        if (folder / name).exists():
            # It looks for its built-in headers where the loader does, which does not know this
            # folder; one that is loaded is found by its name.
            for builtins in folder.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            path = str(folder / name)
            break
    nvrtc = ctypes.CDLL(path)
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def _folders() -> List[Path]:
    """Return folders of NVIDIA's packages, in which torch's wheels have its libraries."""
    found = importlib.util.find_spec("nvidia")
    places = [] if found is None else found.submodule_search_locations or []
    return [folder for place in places for folder in sorted(Path(place).glob("*/lib"))]
