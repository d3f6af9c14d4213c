"""Remedies for unknown names in a recipe: which keys may have been meant."""

from __future__ import annotations

import difflib
from typing import Dict, List

from common.text import either
from recipe import foreign_words
from recipe.config import SECTIONS
from recipe.kinds import Kind

# Likeness, by difflib's ratio, from which on a key of another section may have been meant. Within
# the section that was named difflib's own limit of 0.6 is enough.
_CLOSE = 0.8


def for_unknown(section: str, key: str | None = None) -> str:
    """Return the remedy for an unknown section, or for an unknown key of a section.

    A key of that very name in another section comes before similar names in this one: whoever
    writes `schedule.epochs` means `run.epochs`.

    Args:
        section: as it is written.
        key: None where the section is unknown.
    """
    keys = _keys()
    if key is None:
        # On a command line `run.seed` is right; in a file it is a section of that name.
        outer, _, inner = section.partition(".")
        if inner in keys.get(outer, ()):
            return f"; write it as `{outer}: {{{inner}: ...}}`"
        meant = difflib.get_close_matches(section, keys, n=1) or _anywhere(section)
        known = f"; the sections are {', '.join(keys)}"
    else:
        # A word that other programs have is no misspelling of one of ours.
        similar = (
            [] if key in foreign_words.KEYS else difflib.get_close_matches(key, keys[section], n=1)
        )
        meant = _named(key) + [f"{section}.{name}" for name in similar]
        meant = meant or _anywhere(key)
        known = f"; {section} has {', '.join(keys[section])}"
    return f"; did you mean {either(meant)}?" if meant else known


def for_override(name: str, value: str) -> str:
    """Return the remedy for `name=value` without a section: the override that was meant, else the
    form of one.

    Args:
        name: what stands before the =.
        value: what stands behind it.
    """
    section = SECTIONS.get(name)
    # `optimizer=sgd` is meant for the key that names the kind.
    if section is not None and issubclass(section, Kind):
        meant = [f"{name}.{section.tag}"]
        is_translated = False
    else:
        meant = [] if "." in name else _anywhere(name)
        is_translated = name in foreign_words.KEYS
    if not meant or not value:
        return "write section.key=value, e.g. run.seed=1"
    if is_translated:
        return _translated(meant)
    overrides = [f"{key}={value}" for key in meant]
    return f"did you mean {either(overrides)}?"


def for_flag(word: str) -> str:
    """Return the remedy for a flag that a command does not have: the key that may have been meant.

    Args:
        word: as `--lr` or `--batch-size=64`.

    Returns:
        `did you mean schedule.peak=...? ...`, or nothing.
    """
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    meant = _anywhere(name)
    return _translated(meant) if meant else ""


def _translated(keys: List[str]) -> str:
    """Return the remedy for a word of another program, whose values may differ from ours."""
    overrides = [f"{key}=..." for key in keys]
    return (
        f"did you mean {either(overrides)}? docs/coming_from.md translates words of other programs"
    )


def _keys() -> Dict[str, List[str]]:
    """Return the keys of each section, of all its kinds and parts."""
    # Not made once: files of users may define further kinds after this one is imported.
    return {name: list(section.fields()) for name, section in SECTIONS.items()}


def _named(key: str) -> List[str]:
    """Return the keys of all sections that have exactly this name."""
    return [f"{section}.{key}" for section, keys in _keys().items() if key in keys]


def _anywhere(key: str) -> List[str]:
    """Return the keys of this name, or that other programs call so, else those of the most similar
    name in any section.
    """
    same = _named(key) or list(foreign_words.KEYS.get(key, ()))
    if same:
        return same
    names = [name for keys in _keys().values() for name in keys]
    similar = difflib.get_close_matches(key, names, n=1, cutoff=_CLOSE)
    return _named(similar[0]) if similar else []
