"""From YAML files and command-line overrides to a checked recipe; errors are one line: place, key and remedy."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any, Sequence

import yaml
from pydantic import ValidationError

from recipe import timm_weights
from recipe.config import ALTERNATIVES, Recipe
from recipe.errors import ConfigError
from recipe.kinds import Kind
from recipe.poprun import stages_of_launcher
from recipe.section import first_fault

_ROOT = Path(__file__).resolve().parent.parent
_COMMAND_LINE = "command line"
_MOST_VALUES = 10_000  # with what aliases repeat; a recipe has some hundreds
_LONG = 1000  # characters of a text that count as one value more
_ANY_CLASSES = 2  # in the place of `auto`, until the images are known
_DEEPEST = 32  # levels of lists and mappings; Python's own limit changes with what a process has imported


class _Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: PyYAML takes 1e-5 for a string, on and no for booleans, 010 for 8."""

    depth = 0
    values = 0  # so far, each as often as it is repeated

    def compose_node(self, parent, index):
        event = self.peek_event()
        is_alias = isinstance(event, yaml.AliasEvent)
        if getattr(event, "tag", None) is not None:
            self._refuse(event, f"tag {event.tag} has no place in a recipe")
        if self.depth == _DEEPEST:
            self._refuse(event, f"lists and mappings are nested more than {_DEEPEST} levels deep")
        before = self.values
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        long = len(node.value) // _LONG if isinstance(node, yaml.ScalarNode) else 0
        self.values += getattr(node, "values", 1) if is_alias else 1 + long  # none yet: within itself
        if self.values > _MOST_VALUES:
            self._refuse(event, f"more than {_MOST_VALUES:,} values, with what aliases repeat")
        if not is_alias:
            node.values = self.values - before
        return node

    def _refuse(self, event, problem):
        raise yaml.composer.ComposerError(None, None, problem, event.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or `_Loader` would take for something else, as in `name: '1e5'`."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] == "tag:yaml.org,2002:null"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false)$"), list("tf"))
    # Longer ones become floats, as Python refuses to read and to print integers of thousands of digits.
    _class.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]{1,300}$"), list("-+0123456789"))
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"),
        list("-+.0123456789"),
    )


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str) or key in seen:
            fault = f"key {key} is given twice" if isinstance(key, str) else f"key {key!r} is not text"
            raise yaml.constructor.ConstructorError(None, None, fault, key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def find(path: str | Path) -> Path:
    """`path` where there is such a file here, else that of the repository if there is one."""
    own = _ROOT / path
    return own if os.path.exists(own) and not os.path.exists(path) else Path(path)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in `path` (see `find`), what it extends, and `overrides` ("section.key=value"). Raises ConfigError."""
    path = find(path)
    return _checked(_chain(path), overrides, default=str(path))


def loads(text: str, place: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that `dump` wrote as `text`, then `overrides`; errors call it `place`. Raises ConfigError."""
    return _checked([(place, _mapping(parse_yaml(text, place), place))], overrides, default=place)


def _checked(layers: list, overrides: Sequence[str], default: str) -> Recipe:
    """The recipe of layers, (place, mapping) each, of which the later ones win; then the overrides."""
    merged: dict = {section: {} for section in Recipe.model_fields}
    origin: dict = {}
    # Names first: they decide which keys there are, and a new one unsets the keys of the old.
    overrides = sorted(overrides, key=lambda text: not text.partition("=")[0].endswith((".name", ".init_from")))
    for place, layer in [*layers, *map(_override, overrides)]:
        try:
            _merge(merged, layer)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        for section, content in layer.items():
            origin.update(dict.fromkeys([section, *(f"{section}.{key}" for key in content or ())], place))
    _settle_stages(merged["parallel"])
    try:
        if merged["model"].get("classes") == "auto":
            merged["model"]["classes"] = _ANY_CLASSES
            merged["model"]["classes"] = Recipe.model_validate(merged).data.count_classes()
        return Recipe.model_validate(merged)
    except ValidationError as error:
        (section, *rest), words = first_fault(error, _suggest)
        name = ".".join(map(str, (section, *rest[:1])))
        where = f"{name}: {''.join(f'[{part}]' for part in rest[1:])}".rstrip()
        raise ConfigError(f"{origin.get(name) or origin.get(section) or default}: {where} {words}") from None


def _settle_stages(parallel: dict) -> None:
    """Replace `stages: auto` by the launcher's number, and a list of cuts for another number by auto."""
    if parallel.get("stages") == "auto":
        parallel["stages"] = stages_of_launcher(os.environ) or 1
        if isinstance(parallel.get("split"), list) and len(parallel["split"]) != parallel["stages"] - 1:
            parallel["split"] = "auto"


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
    return yaml.dump(recipe.model_dump(mode="json", by_alias=True), Dumper=_Dumper, sort_keys=False, width=110)


def read_yaml(path: Path, place: str, remedy: str) -> Any:
    """The content of a file; errors call it `place`. Raises ConfigError with the remedy where it cannot be read."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}; {remedy}") from None
    except ValueError:  # also for a name that no file can have
        raise ConfigError(f"{place}: not a text file; it must be YAML in UTF-8") from None


def _chain(path: Path) -> list:
    """(place, mapping) of `path` and the files it extends, the base first."""
    layers: list = []
    seen: list = []
    child, base = None, path.name
    while base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: extends: {base!r} is not the name of a file")
        path = path.parent / base
        place = f"{child}: extends {path}" if child else str(path)
        remedy = (
            "correct the name or make the file" if child else "name an existing recipe, e.g. configs/quickstart.yaml"
        )
        layer = _mapping(read_yaml(path, place, remedy), str(path))
        if os.path.realpath(path) in seen:
            raise ConfigError(f"{child}: extends itself through {path}; break the circle")
        seen.append(os.path.realpath(path))
        child, base = str(path), layer.pop("extends", None)
        layers.insert(0, (child, layer))
    return layers


def _mapping(layer: Any, place: str) -> dict:
    if not isinstance(layer, (dict, type(None))):
        raise ConfigError(f"{place}: not a recipe: expected sections such as `run:` and `model:`")
    return layer or {}


def _override(text: str) -> tuple:
    name, equals, value = text.partition("=")
    parts = name.split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise ConfigError(f"{_COMMAND_LINE}: {text!r} is not an override; write section.key=value, e.g. run.seed=1")
    if not value.strip():
        raise ConfigError(f"{_COMMAND_LINE}: {name}: the value is empty; write {name}=null to unset it")
    return _COMMAND_LINE, {parts[0]: {parts[1]: parse_yaml(value, f"{_COMMAND_LINE}: {name}")}}


def _merge(merged: dict, layer: dict) -> None:
    """Lay `layer` over `merged`, section by section. Raises ConfigError."""
    for section, content in layer.items():
        if section not in merged:
            raise ConfigError(f"{section}: unknown key{_suggest(section)}")
        if content is None:
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{section}: expected keys below it, found {content!r}")
        for group in ALTERNATIVES:
            names = [name.split(".")[1] for name in group if name.startswith(section + ".")]
            named = [name for name in names if content.get(name) is not None]
            if len(named) > 1:
                raise ConfigError(f"{section}: {' and '.join(named)} are both given; keep one")
            for name in names if named else ():
                merged[section].pop(name, None)
        weights = timm_weights.parse(content.get("init_from")) if section == "model" else None
        given = {**timm_weights.keys(weights.name), **content} if weights else content
        annotation = Recipe.model_fields[section].annotation
        if issubclass(annotation, Kind) and annotation.changed(merged[section], given):
            merged[section] = {key: value for key, value in merged[section].items() if key in annotation.model_fields}
        merged[section].update(given)


def _suggest(section: str, key: str | None = None) -> str:
    """Suggestion for an unknown section or key: the nearest name, else all names."""
    keys = {name: list(field.annotation.fields()) for name, field in Recipe.model_fields.items()}
    outer, _, inner = section.partition(".")
    if inner in keys.get(outer, ()):
        return f"; write it as `{outer}: {{{inner}: ...}}`"
    near = {name: name for name in keys} if key is None else {name: f"{section}.{name}" for name in keys[section]}
    for choices in (near, {name: f"{other}.{name}" for other in keys for name in keys[other]}):
        matches = difflib.get_close_matches(key or section, choices, n=1)
        if matches:
            return f"; did you mean {choices[matches[0]]}?"
    return f"; {section} has {', '.join(near)}" if key is not None else f"; the sections are {', '.join(near)}"
