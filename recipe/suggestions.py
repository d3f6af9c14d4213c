"""Remedies for unknown names in a recipe: which keys may have been meant."""

from __future__ import annotations

import difflib
from typing import Dict, List, Sequence

from recipe.config import Recipe
from recipe.kinds import Kind


def for_unknown(section: str, key: str | None = None) -> str:
    """Return the remedy for an unknown section, or for an unknown key of a section.

    A key of that very name in another section comes before similar names in this one: whoever writes `schedule.epochs`
    means `run.epochs`.
    """
    keys = _keys()
    outer, _, inner = section.partition(".")
    if key is None and inner in keys.get(outer, ()):
        return f"; write it as `{outer}: {{{inner}: ...}}`"
    if key is None:
        meant = difflib.get_close_matches(section, keys, n=1) or _anywhere(section)
        known = f"; the sections are {', '.join(keys)}"
    else:
        similar = difflib.get_close_matches(key, keys[section], n=1)
        meant = _named(key) + [f"{section}.{each}" for each in similar]
        meant = meant or _anywhere(key)
        known = f"; {section} has {', '.join(keys[section])}"
    return f"; did you mean {_either(meant)}?" if meant else known


def for_override(name: str, value: str) -> str:
    """Return the remedy for `name=value` without a section: the override that was meant, else the form of one."""
    annotation = _annotations().get(name)
    if annotation is not None and issubclass(annotation, Kind):
        meant = [f"{name}.{annotation.tag}"]
    else:
        meant = [] if "." in name else _anywhere(name)
    if not meant or not value:
        return "write section.key=value, e.g. run.seed=1"
    return f"did you mean {_either([f'{each}={value}' for each in meant])}?"


def _annotations() -> Dict[str, type]:
    return {section: field.annotation for section, field in Recipe.model_fields.items()}


def _keys() -> Dict[str, List[str]]:
    return {section: list(annotation.fields()) for section, annotation in _annotations().items()}


def _named(key: str) -> List[str]:
    """Return the keys of all sections that have exactly this name."""
    return [f"{section}.{key}" for section, keys in _keys().items() if key in keys]


def _anywhere(key: str) -> List[str]:
    """Return the keys of this name, else those of the most similar name in any section."""
    names = [each for keys in _keys().values() for each in keys]
    similar = difflib.get_close_matches(key, names, n=1)
    return _named(key) or [each for match in similar for each in _named(match)]


def _either(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
