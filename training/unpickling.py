"""Files that torch.save wrote, opened without running code from them.

torch's weights_only loader makes tensors, containers and numbers. Other programs also store
settings and NumPy numbers beside their weights. Nothing here reads those: stand-ins that ignore
their arguments take their place, so that neither argparse nor NumPy ever sees content from a file.
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
from typing import IO, Any, Dict, Iterator, NoReturn, Tuple

import torch

from common.errors import CheckpointError
from common.files import stored_plainly

# Pickled names of a type whose objects weights_only makes with any length that a file says.
_OF_ANY_LENGTH = (b"cbuiltins\nbytearray\n", b"c__builtin__\nbytearray\n")
_ZIP = b"PK\3\4"  # the first bytes of a zip file
_NAMED = re.compile(r"(?:GLOBAL|class) ([\w.]+)")  # in torch's messages, of 2.0.1 and of newer ones
_NO_WEIGHTS = "not weights: neither a checkpoint of this program nor a state dict"
_SWELLS = "is packed as torch.save packs no weights, perhaps a TorchScript program"
_BY_ITSELF = "save the state dict by itself: torch.save(model.state_dict(), FILE)"


class _Ignored:
    """Stands for a number, a path or settings; whatever it is made from is dropped."""

    def __init__(self, *arguments: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


class _Mapping:
    """Stands for a kind of dictionary: an ordinary one is made in its place."""

    # What __new__ returns is of another class, so that Python calls no __init__; pickle fills it.
    def __new__(cls, *arguments: Any) -> Any:
        return OrderedDict()


class _Sequence:
    """Stands for a kind of list: an ordinary one is made in its place."""

    def __new__(cls, *arguments: Any) -> Any:
        return []


class _Refused(Exception):
    """torch cannot open a file, or not without running code from it; the message is torch's."""


_Modules = Dict[str, Tuple[str, ...]]  # names by module

_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_NUMPY_NUMBERS = ("scalar", "_reconstruct")
_ATTRIBUTE_DICT = ("AttributeDict",)

# In files of timm, torchvision's references, Lightning, Accelerate and others.
_IGNORED: _Modules = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "builtins": (
        "bool",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "range",
        "slice",
        "str",
        "tuple",
    ),
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "uuid": ("UUID",),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": _NUMPY_NUMBERS,
    "numpy._core.multiarray": _NUMPY_NUMBERS,
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "typing": ("Any",),
    "omegaconf.base": ("ContainerMetadata", "Metadata"),
    "omegaconf.dictconfig": ("DictConfig",),
    "omegaconf.listconfig": ("ListConfig",),
    "omegaconf.nodes": (
        "AnyNode",
        "BooleanNode",
        "BytesNode",
        "EnumNode",
        "FloatNode",
        "IntegerNode",
        "PathNode",
        "StringNode",
    ),
}
_MAPPINGS: _Modules = {
    "collections": ("defaultdict",),
    "easydict": ("EasyDict",),
    "yacs.config": ("CfgNode",),
    "lightning.fabric.utilities.data": _ATTRIBUTE_DICT,
    "lightning_fabric.utilities.data": _ATTRIBUTE_DICT,
    "lightning.pytorch.utilities.parsing": _ATTRIBUTE_DICT,
    "pytorch_lightning.utilities.parsing": _ATTRIBUTE_DICT,
}
_SEQUENCES: _Modules = {"collections": ("deque",)}


def _by_name() -> Dict[str, type]:
    """Return the stand-in for each class or function, by its full name."""
    # Named in full, as torch's list of safe globals wants them.
    tables = ((_Ignored, _IGNORED), (_Mapping, _MAPPINGS), (_Sequence, _SEQUENCES))
    stand_ins: Dict[str, type] = {}
    for stand_in, modules in tables:
        for module, names in modules.items():
            for name in names:
                stand_ins[f"{module}.{name}"] = stand_in
    return stand_ins


# torch compares these names with those in a file; it imports none of the modules.
STAND_INS = _by_name()  # full name of a class or function -> what is made in its place


def unpickled(path: Path) -> object:
    """Return what torch.save wrote into a file of this program.

    Args:
        path: of the file.

    Returns:
        The content; None if it is no such file, or could run code.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        return _load(path)
    except _Refused:
        return None


def unpickled_of_others(path: Path) -> object:
    """Return what torch.save wrote into a file, by whatever program.

    Args:
        path: of the file.

    Returns:
        The content, with stand-ins for settings and NumPy's numbers.

    Raises:
        CheckpointError: the file cannot be read, is no such file, or holds what could run code.
    """
    try:
        with _standing_in():
            return _load(path)
    except _Refused as error:
        _refuse(path, str(error))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError for what cannot be read within the block.

    Args:
        path: of the file, for the error.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read: {reason}") from None


def _load(path: Path) -> object:
    """Return what torch's weights_only loader makes of a file; raise _Refused where it does not."""
    with reading(path), open(path, "rb") as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickle protocols that are not ours
        try:
            if _swells(stream):
                raise _Refused(_SWELLS)
            return torch.load(stream, map_location="cpu", weights_only=True)
        except (OSError, MemoryError, _Refused):
            raise
        except Exception as error:  # torch raises nearly everything about files of others
            raise _Refused(str(error)) from None


@contextlib.contextmanager
def _standing_in() -> Iterator[None]:
    """Let torch's loader make stand-ins within the block; torch 2.0.1, for IPUs, cannot do so."""
    safe_globals = getattr(torch.serialization, "safe_globals", None)
    if safe_globals is None:
        yield
        return
    with safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
        yield


def _refuse(path: Path, message: str) -> NoReturn:
    """Raise CheckpointError with the reason in torch's message, as far as it has one."""
    # torch's messages name the class that it refuses; the user learns whether that can be mended.
    if message == _SWELLS:
        raise CheckpointError(f"{path}: {_SWELLS}; {_BY_ITSELF}")
    match = _NAMED.search(message)
    if match is None:
        raise CheckpointError(f"{path}: {_NO_WEIGHTS}")
    name = match.group(1)
    if name not in STAND_INS:
        fault = f"holds {name}, and to load that could run code"
        raise CheckpointError(f"{path}: {fault}; {_BY_ITSELF}")
    fault = f"holds {name}, which torch {torch.__version__} cannot leave out"
    remedy = f"read the file with torch 2.6 or newer, or {_BY_ITSELF}"
    raise CheckpointError(f"{path}: {fault}; {remedy}")


def _swells(stream: IO[bytes]) -> bool:
    """Return whether a file of a few bytes could take any amount of memory.

    Leaves the stream at its start.
    """
    # Mapped, not read: a checkpoint may be large.
    with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if any(content.find(name) >= 0 for name in _OF_ANY_LENGTH):
            return True
        is_archive = content[: len(_ZIP)] == _ZIP
    if not is_archive:
        return False
    size = os.fstat(stream.fileno()).st_size
    with zipfile.ZipFile(stream) as archive:
        swells = not stored_plainly(archive, size)
    stream.seek(0)
    return swells
