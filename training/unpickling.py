"""Files that torch.save wrote, opened without running code from them.

torch's weights_only loader makes tensors, containers and numbers. Other programs also store settings and NumPy numbers
beside their weights. Nothing here reads those: stand-ins that ignore what they are given take their place, so that
neither argparse nor NumPy ever sees content from a file.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any, Dict, Iterator, List, NoReturn, Tuple

import torch

from common.errors import CheckpointError
from common.files import stored_plainly

_OF_ANY_LENGTH = (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n")  # weights_only makes these, too
_NAMED = re.compile(r"(?:GLOBAL|class) ([\w.]+)")  # in torch's messages, of 2.0.1 and of newer ones
_NO_WEIGHTS = "not weights: neither a checkpoint of this program nor a state dict"
_SWELLS = "is packed as torch.save packs no weights, perhaps a TorchScript program"
_ALONE = "save the state dict by itself: torch.save(model.state_dict(), FILE)"


class _Ignored:
    """Stands for a number, a path or settings; whatever it is made from is dropped."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Mapping:
    """Stands for a kind of dictionary: an ordinary one is made in its place."""

    def __new__(cls, *arguments: Any) -> Any:
        return OrderedDict()


class _Sequence:
    """Stands for a kind of list: an ordinary one is made in its place."""

    def __new__(cls, *arguments: Any) -> Any:
        return []


# Classes by module, in files of timm, torchvision's references, Lightning, Accelerate and others.
_STAND_INS = {
    _Ignored: {
        "argparse": ("Namespace",),
        "types": ("SimpleNamespace",),
        "builtins": ("bool", "dict", "float", "frozenset", "int", "list", "range", "slice", "str", "tuple"),
        "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
        "decimal": ("Decimal",),
        "fractions": ("Fraction",),
        "uuid": ("UUID",),
        "numpy": ("dtype", "ndarray"),
        **dict.fromkeys(("numpy.core.multiarray", "numpy._core.multiarray"), ("scalar", "_reconstruct")),
        **dict.fromkeys(
            ("pathlib", "pathlib._local"),
            ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"),
        ),
        "typing": ("Any",),
        "omegaconf.base": ("ContainerMetadata", "Metadata"),
        "omegaconf.dictconfig": ("DictConfig",),
        "omegaconf.listconfig": ("ListConfig",),
        "omegaconf.nodes": (
            *("AnyNode", "BooleanNode", "BytesNode", "EnumNode", "FloatNode", "IntegerNode", "PathNode", "StringNode"),
        ),
    },
    _Mapping: {
        "collections": ("defaultdict",),
        "easydict": ("EasyDict",),
        "yacs.config": ("CfgNode",),
        **dict.fromkeys(("lightning.fabric.utilities.data", "lightning_fabric.utilities.data"), ("AttributeDict",)),
        **dict.fromkeys(
            ("lightning.pytorch.utilities.parsing", "pytorch_lightning.utilities.parsing"), ("AttributeDict",)
        ),
    },
    _Sequence: {"collections": ("deque",)},
}


def _by_name() -> Dict[str, type]:
    found = {}
    for stand_in, modules in _STAND_INS.items():
        for module, names in modules.items():
            found.update({f"{module}.{name}": stand_in for name in names})
    return found


STAND_INS = _by_name()  # of the full name of a class or function


def unpickled(path: Path) -> object:
    """Return what torch.save wrote into a file of this program; None if it is no such file, or could run code.
    Raises CheckpointError: the file cannot be read."""
    try:
        return _loaded(path)
    except _Refused:
        return None


def unpickled_of_others(path: Path) -> object:
    """Return what torch.save wrote into a file, by whatever program, with stand-ins for settings and NumPy's numbers.
    Raises CheckpointError: the file cannot be read, is no such file, or holds what could run code."""
    try:
        with _standing_in():
            return _loaded(path)
    except _Refused as error:
        _refuse(path, str(error))


class _Refused(Exception):
    """torch cannot open a file, or not without running code from it; the message is torch's."""


def _loaded(path: Path) -> object:
    with reading(path), open(path, "rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols that are not ours
        try:
            if _swells(stream):
                raise _Refused(_SWELLS)
            return torch.load(stream, map_location="cpu", weights_only=True)
        except (OSError, MemoryError, _Refused):
            raise
        except Exception as error:  # torch raises nearly everything about files that are not its own
            raise _Refused(str(error)) from None


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """Let torch's loader make stand-ins within the block. torch 2.0.1, which IPUs need, has no means for it."""
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        yield
        return
    allowed: List[Tuple[type, str]] = [(stand_in, name) for name, stand_in in STAND_INS.items()]
    with safe_globals(allowed):
        yield


def _refuse(path: Path, message: str) -> NoReturn:
    """Raise CheckpointError with the reason in torch's message, as far as it has one."""
    found = _NAMED.search(message)
    if message == _SWELLS:
        raise CheckpointError(f"{path}: {_SWELLS}; {_ALONE}")
    if found is None:
        raise CheckpointError(f"{path}: {_NO_WEIGHTS}")
    name = found.group(1)
    if name in STAND_INS:
        fault = f"holds {name}, which torch {torch.__version__} cannot leave out"
        raise CheckpointError(f"{path}: {fault}; read the file with torch 2.6 or newer, or {_ALONE}")
    raise CheckpointError(f"{path}: holds {name}, and to load that could run code; {_ALONE}")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises CheckpointError for what cannot be read within the block."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def _swells(stream: IO[bytes]) -> bool:
    """Whether a file of a few bytes could take any amount of memory; leaves the stream at its start."""
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        swells = any(content.find(word) >= 0 for word in _OF_ANY_LENGTH)
        archive = content[:4] == b"PK\3\4"
    if archive and not swells:
        with zipfile.ZipFile(stream) as opened:
            swells = not stored_plainly(opened, os.fstat(stream.fileno()).st_size)
        stream.seek(0)
    return swells
