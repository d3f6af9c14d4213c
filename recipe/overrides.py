"""Values that a command line gives keys of a recipe: `section.key=value`, of which no character is
dropped.

A key that takes text (a name, a path, a word) has the value exactly as it is typed:
`data.root=/photos #1`. Quotes around the whole value are removed, as in YAML, so a text that begins
and ends with the same quote is quoted once more; `null` unsets a key that may be unset. Other keys
take the value as YAML.
"""

from __future__ import annotations

import functools
from typing import (
    AbstractSet,
    Any,
    Iterator,
    List,
    Literal,
    NamedTuple,
    Set,
    Tuple,
    Type,
    Union,
)

from typing_extensions import Annotated, get_args, get_origin

from common.errors import ConfigError
from common.yaml_text import parse_value
from recipe import suggestions
from recipe.config import SECTIONS
from recipe.kinds import Kind
from recipe.parts import Parts
from recipe.section import Section

COMMAND_LINE = "command line"
_NULL = "null"
_QUOTES = ("'", '"')
_NONE = type(None)


class Override(NamedTuple):
    """One override. value: as a recipe file would have it."""

    section: str
    key: str
    value: Any


def parse(text: str) -> Override:
    """Read an override.

    Args:
        text: `section.key=value`.

    Raises:
        ConfigError: it has another form, or its value is empty or is not whole YAML.
    """
    name, equals, value = text.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and section and dot and key) or "." in key:
        raise ConfigError(
            f"{COMMAND_LINE}: {text!r} is not an override; {suggestions.for_override(name, value)}"
        )
    if not value.strip():
        raise ConfigError(
            f"{COMMAND_LINE}: {name}: the value is empty; write {name}=null to unset it"
        )
    return Override(section, key, read_value(section, key, value, COMMAND_LINE))


def read_value(section: str, key: str, text: str, place: str) -> Any:
    """Return the value that a text gives a key.

    Args:
        section: of the key.
        key: known or not.
        text: as it is typed.
        place: what errors call the layer.

    Raises:
        ConfigError: the key takes no text, and this is no whole YAML.
    """
    options = _options_of(section, key)
    where = f"{place}: {section}.{key}"
    # YAML would cut a text at " #", and read 1e3 as a number.
    if _are_texts(options):
        return _text(text, where, nullable=_NONE in options)
    return parse_value(text, where, plain_items=List[str] in options)


def takes_text(section: str, key: str) -> bool:
    """Return whether the values of a key are texts: beside null it takes nothing else."""
    return _are_texts(_options_of(section, key))


def _are_texts(options: AbstractSet[Any]) -> bool:
    """Return whether values of these types, see `_options_of`, are texts or null."""
    return options - {_NONE} == {str}


def _text(value: str, place: str, nullable: bool) -> str | None:
    """Return a typed text without the quotes around it; None for a null where the key may be unset."""
    if nullable and value == _NULL:
        return None
    if len(value) > 1 and value[0] in _QUOTES and value[-1] == value[0]:
        try:
            quoted = parse_value(value, place)
        except ConfigError:  # quotes that belong to the text, as in "a" or "b"
            return value
        return quoted if isinstance(quoted, str) else value
    return value


def _options_of(section: str, key: str) -> AbstractSet[Any]:
    """Return the types that a key takes in any kind of its section; text for an unknown key, which
    others refuse.
    """
    base = SECTIONS.get(section)
    if base is None:
        return {str}
    if issubclass(base, Kind):
        # The kind may be another than the recipe's: a later override can still name it.
        return _options_in(tuple(base.kinds.values()), key)
    if issubclass(base, Parts):
        return _options_in((base.whole,), key)
    return _options_in((base,), key)


# Sweeps override the same keys for each trial. By classes that are others once files of users have
# added kinds or parts of theirs.
@functools.lru_cache(maxsize=1024)
def _options_in(classes: Tuple[Type[Section], ...], key: str) -> AbstractSet[Any]:
    """Return the types that a key takes in any of these classes; text if none has it."""
    options: Set[Any] = set()
    for each in classes:
        keys = each.fields()
        if key not in keys:
            continue
        options.update(_options(keys[key].annotation))
        if issubclass(each, Kind) and key in each.own_keys():
            options.add(_NONE)  # stands for the kind's default
    return options or {str}


def _options(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, and those of a Literal's values."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin is Union:
        for option in get_args(annotation):
            yield from _options(option)
    elif origin is Literal:
        yield from map(type, get_args(annotation))
    else:
        yield annotation
