"""Python files of a user's own that add kinds to recipes: --import FILE on a command line.

Only command lines name them: a recipe that could would run code of whoever wrote it.
"""

import argparse
import importlib
import importlib.util
import os
import sys
from typing import Any, List, Optional, Sequence, Union

from common.errors import ConfigError

_FLAG = "--import"
_SUFFIX = ".py"
_imported: List[str] = []


class ImportFile(argparse.Action):
    """Imports the file that a flag names, as the command line is read: before any recipe is."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Union[str, Sequence[Any], None],
        option_string: Optional[str] = None,
    ) -> None:
        """Import the file named by `values`. Raises ConfigError, see `import_file`."""
        import_file(str(values))


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add --import to a command's parser."""
    about = "Python file that adds an optimizer, a model, ...; may be given several times"
    parser.add_argument(_FLAG, action=ImportFile, metavar="FILE.py", help=about)


def import_file(path: str) -> None:
    """Import a Python file under its own name, once.

    Its folder is added to the end of sys.path, so that worker processes find it by that name, and so
    that it may import its neighbours.

    Args:
        path: of the file.

    Raises:
        ConfigError: there is no such file, its name is no identifier with `.py`, or another module
            has the name.
        Exception: whatever the file raises.
    """
    place = os.path.realpath(path)
    name, suffix = os.path.splitext(os.path.basename(place))
    if not os.path.isfile(place):
        raise ConfigError(f"{_FLAG} {path}: no such file; name a Python file")
    if suffix != _SUFFIX or not name.isidentifier():
        raise ConfigError(f"{_FLAG} {path}: no Python file; name one like my_optimizer{_SUFFIX}")
    if place in _imported:
        return
    folder = os.path.dirname(place)
    if folder not in map(os.path.realpath, sys.path):
        sys.path.append(folder)
    found = _found(name)
    if found != place:
        other = f"this Python has a module {name} ({found})"
        raise ConfigError(f"{_FLAG} {path}: {other}; give the file another name")
    _imported.append(place)
    importlib.import_module(name)


def words() -> List[str]:
    """Return the words by which a command of ours imports the same files as this one."""
    return [word for place in _imported for word in (_FLAG, place)]


def _found(name: str) -> str:
    """Return the file that `import name` would run, or what else it would take."""
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        specification = importlib.util.find_spec(name)
        origin = specification.origin if specification else None
    return os.path.realpath(origin) if origin and os.path.isfile(origin) else str(origin)
