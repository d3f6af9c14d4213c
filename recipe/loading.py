"""From YAML files and command-line overrides to a checked recipe.

A file may `extend` another; overrides (`section.key=value`) come last. Every error is one line that
names the place (file, or command line), the key and the remedy.
"""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any, Sequence

import yaml
from pydantic import BaseModel, ValidationError

from recipe.config import ALTERNATIVES, Recipe
from recipe.errors import ConfigError

_COMMAND_LINE = "command line"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: PyYAML takes 1e-5 for a string, on and no for booleans, 010 for 8."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] == "tag:yaml.org,2002:null"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with its `extends` chain, then `overrides` ("section.key=value") applied.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type or range, circular `extends`.
    """
    merged: dict = {}
    origin: dict = {}
    for place, layer in [*_chain(Path(path)), *(_override(text) for text in overrides)]:
        _merge(merged, layer, place, origin)
    try:
        return Recipe.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_first_line(error, origin, default=str(path))) from None


def parse_yaml(text: str, place: str) -> Any:
    """`text` as YAML 1.2 scalars, lists and mappings. Raises ConfigError that names `place` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}:{mark.line + 1}" if mark else place
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {' '.join(problem.split())}") from None


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load` reads back to an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json", by_alias=True), sort_keys=False, width=110)


def _chain(path: Path) -> list:
    """(place, mapping) of `path` and the files it extends, the base first."""
    layers: list = []
    seen: list = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(f"{layers[0][0]}: extends itself through {path}; break the circle")
        seen.append(path.resolve())
        layer = _read(path)
        base = layer.pop("extends", None)
        layers.insert(0, (str(path), layer))
        if base is None:
            return layers
        if not isinstance(base, str):
            raise ConfigError(f"{path}: extends: {base!r} is not the name of a file")
        path = path.parent / base


def _read(path: Path) -> dict:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "name an existing recipe, e.g. --config configs/quickstart.yaml"
        raise ConfigError(f"{path}: {error.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; a recipe is YAML in UTF-8") from None
    layer = parse_yaml(text, str(path))
    if layer is None:
        return {}
    if not isinstance(layer, dict):
        raise ConfigError(f"{path}: not a recipe: expected sections such as `run:` and `model:`")
    return layer


def _override(text: str) -> tuple:
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise ConfigError(f"{_COMMAND_LINE}: {text!r} is not an override; write section.key=value, e.g. run.seed=1")
    return _COMMAND_LINE, {parts[0]: {parts[1]: parse_yaml(value, f"{_COMMAND_LINE}: {name}")}}


def _merge(merged: dict, layer: dict, place: str, origin: dict) -> None:
    """Lays `layer` over `merged`, section by section, and notes in `origin` where each key came from."""
    for section, content in layer.items():
        origin[section] = place
        if content is None:
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{place}: {section}: expected keys below it, found {content!r}{_suggest(section)}")
        target = merged.setdefault(section, {})
        for group in ALTERNATIVES:
            names = [name.split(".")[1] for name in group if name.startswith(section + ".")]
            if any(content.get(name) is not None for name in names):
                for name in names:
                    target.pop(name, None)
        target.update(content)
        origin.update({f"{section}.{name}": place for name in content})


def _first_line(error: ValidationError, origin: dict, default: str) -> str:
    """The first fault as one line, and how many more there are."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    name = ".".join(str(part) for part in fault["loc"][:2])
    place = origin.get(name) or origin.get(name.split(".")[0]) or default
    if fault["type"] == "extra_forbidden":
        line = f"{place}: {name}: unknown key{_suggest(name)}"
    else:
        line = f"{place}: {name}: {_wording(fault)}"
    return line + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")


def _wording(fault: dict) -> str:
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    message = fault["msg"].replace("Input should be", "must be").replace("Value should", "must")
    index = "".join(f"[{part}]" for part in fault["loc"][2:])
    shown = fault["input"]
    if isinstance(shown, float) and not math.isfinite(shown):
        shown = str(shown)
    return f"{index + ' ' if index else ''}{message}, found {shown!r}"


def _suggest(name: str) -> str:
    """`; did you mean ...?`: the nearest of the same section's keys, else of all keys and sections."""
    sections = {key: field.annotation for key, field in Recipe.model_fields.items()}
    section = name.split(".")[0]
    siblings = [f"{section}.{key}" for key in _names(sections[section])] if section in sections else []
    everything = [f"{other}.{key}" for other, model in sections.items() for key in _names(model)]
    for candidates in (siblings, everything if "." in name else list(sections)):
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.7)
        if near:
            return f"; did you mean {near[0]}?"
    if section in sections:
        return f"; {section} has {', '.join(_names(sections[section]))}"
    return f"; the sections are {', '.join(sections)}"


def _names(section: type[BaseModel]) -> list:
    return [field.alias or name for name, field in section.model_fields.items()]
