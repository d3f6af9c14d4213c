"""YAML as recipes, sweeps and machines have it: YAML 1.2's scalars, bounded in size and depth,
faults in one line.
"""

from __future__ import annotations

import copy
import functools
import re
from pathlib import Path
from typing import Any

import yaml

from common.errors import ConfigError
from common.files import read_regular

_MOST_BYTES = 1 << 20  # of a file; a recipe has some thousands
_MOST_VALUES = 10_000  # with what aliases repeat; a recipe has some hundreds
_LONG = 1000  # characters of a text that count as one value more
# Levels of lists and mappings; Python's own limit changes with what a process has imported.
_DEEPEST = 32
_TEXT = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: PyYAML takes 1e-5 for a string, on and no for booleans, 010 for 8."""

    depth = 0
    values = 0  # so far, each as often as it is repeated

    def compose_node(self, parent, index):
        """Compose a node as PyYAML does, and count its values: aliases repeat those of their
        anchor.
        """
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if getattr(event, "tag", None) is not None:
            self._refuse(event, f"tag {event.tag} has no place in a recipe")
        if self.depth == _DEEPEST:
            self._refuse(event, f"lists and mappings are nested more than {_DEEPEST} levels deep")
        before = self.values
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if is_alias:
            # An anchor that is repeated within itself has no count yet.
            self.values += getattr(node, "values", 1)
        else:
            self.values += 1
            if isinstance(node, yaml.ScalarNode):
                self.values += len(node.value) // _LONG
        if self.values > _MOST_VALUES:
            self._refuse(event, f"more than {_MOST_VALUES:,} values, with what aliases repeat")
        if not is_alias:
            node.values = self.values - before
        return node

    def _refuse(self, event, problem):
        """Raise an error that has the place of an event."""
        raise yaml.composer.ComposerError(None, None, problem, event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or `_Loader` would take for something else, as in `name:
    '1e5'`.
    """


_Libyaml: Any = yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper


class _FastDumper(_Libyaml):
    """Writes printable ASCII as `_Dumper` does, in a sixth of the time."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] == "tag:yaml.org,2002:null"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper, _FastDumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf")
    )
    # Longer ones become floats, as Python refuses to read and to print integers of thousands of
    # digits.
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]{1,300}$"), list("-+0123456789")
    )
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    """Make a dictionary; refuse a key that is no text, or is given twice."""
    # PyYAML keeps the last of two equal keys: whoever wrote the first would wonder.
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str) or key in seen:
            fault = (
                f"key {key} is given twice" if isinstance(key, str) else f"key {key!r} is not text"
            )
            raise yaml.constructor.ConstructorError(None, None, fault, key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


class _Comment(yaml.YAMLError):
    """A comment where it is taken for a part of a value."""


class _ValueLoader(_Loader):
    """One value of a command line, in which a comment would be a part that is silently dropped."""

    def scan_to_next_token(self):
        before = self.pointer
        super().scan_to_next_token()
        self._refuse_comment(before)

    def scan_block_scalar_ignored_line(self, start_mark):
        before = self.pointer
        super().scan_block_scalar_ignored_line(start_mark)
        self._refuse_comment(before)

    def _refuse_comment(self, before):
        """Raise _Comment if the scanner has just skipped one."""
        # PyYAML keeps a text whole in its buffer, so what lies between two positions is what was
        # skipped.
        skipped = self.buffer[before : self.pointer]
        _, mark, comment = skipped.partition("#")
        if mark:
            raise _Comment(
                f"{mark}{comment} would be dropped as a comment; leave it out, or quote the whole text"
            )


def parse_yaml(text: str, place: str) -> Any:
    """Return `text` as YAML 1.2 scalars, lists and mappings. Raises ConfigError that names `place`
    and the line.
    """
    try:
        # Callers change what they are given, so that each gets a copy of its own.
        return copy.deepcopy(_content(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(_fault(error, f"{place}:{mark.line + 1}" if mark else place)) from None


# A sweep, or a plan for several machines, reads the files that its recipes extend again and again,
# and PyYAML needs ten milliseconds for one.
@functools.lru_cache(maxsize=16)
def _content(text: str) -> Any:
    """Return `text` as scalars, lists and mappings, which are remembered. Raises YAMLError."""
    return yaml.load(text, Loader=_Loader)


def as_yaml(content: Any) -> str:
    """Return scalars, lists and mappings as YAML that `parse_yaml` reads back."""
    # libyaml breaks lines with other characters elsewhere, and refuses bytes of a path that are no
    # UTF-8.
    is_plain = "\\" not in ascii(content)
    dumper = _FastDumper if is_plain else _Dumper
    return yaml.dump(content, Dumper=dumper, sort_keys=False, width=110)


def parse_value(text: str, place: str, plain_items: bool = False) -> Any:
    """Parse one value of a command line.

    Args:
        text: YAML without a comment.
        place: what errors call it.
        plain_items: whether the items of a list are texts, also where they look like numbers.

    Raises:
        ConfigError: the text is no YAML, or a comment is in it.
    """
    try:
        # Callers change what they are given, so that each gets a copy of its own.
        return copy.deepcopy(_value(text, plain_items))
    except _Comment as error:
        raise ConfigError(f"{place}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(_fault(error, place)) from None


# A sweep, or a plan for several machines, gives the same overrides again and again.
@functools.lru_cache(maxsize=256)
def _value(text: str, plain_items: bool) -> Any:
    """Return one value, which is remembered. Raises YAMLError."""
    loader = _ValueLoader(text)
    try:
        node = loader.get_single_node()
        if plain_items and isinstance(node, yaml.SequenceNode):
            for item in node.value:
                if isinstance(item, yaml.ScalarNode):
                    item.tag = _TEXT
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _fault(error: yaml.YAMLError, place: str) -> str:
    """Return one line for an error of PyYAML."""
    problem = getattr(error, "problem", None) or str(error)
    return f"{place}: not valid YAML: {' '.join(problem.split())}"


def read_yaml(path: Path, place: str, remedy: str) -> Any:
    """Read a file.

    Args:
        path: of a regular file.
        place: what errors call it.
        remedy: what to do where it cannot be read.

    Raises:
        ConfigError: it cannot be read, is larger than a megabyte, or is not YAML.
    """
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}; {remedy}") from None
    except ValueError:  # also for a name that no file can have
        raise ConfigError(f"{place}: not a text file; it must be YAML in UTF-8") from None
    return parse_yaml(text, str(path))
