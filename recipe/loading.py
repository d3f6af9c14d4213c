"""From YAML files and command-line overrides to a checked recipe; errors are one line: place, key and remedy."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Container, Sequence

import yaml
from pydantic import ValidationError

from common.errors import ConfigError
from common.files import expanded
from common.yaml_text import Dumper, parse_yaml, read_yaml
from recipe import idle, suggestions, timm_weights
from recipe.config import ALTERNATIVES, Recipe
from recipe.ipu.poprun import stages_of_launcher
from recipe.kinds import Kind
from recipe.overrides import COMMAND_LINE, parse
from recipe.section import first_fault

_ROOT = Path(__file__).resolve().parent.parent
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*):-(?P<default>[^{}]*)\}")
_ANY_CLASSES = 2  # in the place of `auto`, until the images are known


def find(path: str | Path) -> Path:
    """`path` where there is such a file here, else that of the repository if there is one."""
    own = _ROOT / path
    return own if os.path.exists(own) and not os.path.exists(path) else Path(path)


def load(path: str | Path, overrides: Sequence[str] = (), used: Container[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: of the file, see `find`; it may extend others.
        overrides: texts such as "section.key=value".
        used: keys that the caller uses, even where a run would not.

    Raises:
        ConfigError: a file cannot be read, or the recipe is wrong or names a key that has no effect.
    """
    path = find(path)
    layers = _chain(path)
    named = len(layers) - (not idle.is_resolved(layers[-1][1]))
    return _checked(layers, overrides, default=str(path), named=named, used=used)


def loads(text: str, place: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe that `dump` wrote as `text`, then `overrides`; errors call it `place`. Raises ConfigError."""
    return _checked([(place, _mapping(parse_yaml(text, place), place))], overrides, default=place, named=1)


def _checked(layers: list, overrides: Sequence[str], default: str, named: int, used: Container[str] = ()) -> Recipe:
    """Check the recipe of layers, (place, mapping) each, of which the later ones win; then the overrides.

    Args: named: number of the first layer whose keys must have an effect. used: of these, those that the caller uses.
    """
    merged: dict = {section: {} for section in Recipe.model_fields}
    origin: dict = {}
    levels: dict = {}
    # Names first: they decide which keys there are, and a new one unsets the keys of the old.
    overrides = sorted(overrides, key=lambda text: not text.partition("=")[0].endswith((".name", ".init_from")))
    typed = [(COMMAND_LINE, {each.section: {each.key: each.value}}) for each in map(parse, overrides)]
    for number, (place, layer) in enumerate([*layers, *typed]):
        try:
            _merge(merged, layer)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from None
        for section, content in layer.items():
            keys = [f"{section}.{key}" for key in content or ()]
            origin.update(dict.fromkeys([section, *keys], place))
            levels.update(dict.fromkeys(keys, min(number, len(layers))))
    _settle_stages(merged["parallel"])
    try:
        if merged["model"].get("classes") == "auto":
            merged["model"]["classes"] = _ANY_CLASSES
            merged["model"]["classes"] = Recipe.model_validate(merged).data.count_classes()
        recipe = Recipe.model_validate(merged)
    except ValidationError as error:
        (section, *rest), words = first_fault(error, suggestions.for_unknown)
        name = ".".join(map(str, (section, *rest[:1])))
        where = f"{name}: {''.join(f'[{part}]' for part in rest[1:])}".rstrip()
        raise ConfigError(f"{origin.get(name) or origin.get(section) or default}: {where} {words}") from None
    for key, fault in idle.faults(recipe, merged, levels, first=named):
        if key not in used:
            raise ConfigError(f"{origin[key]}: {key} {fault}")
    return recipe


def _settle_stages(parallel: dict) -> None:
    """Replace `stages: auto` by the launcher's number, and a list of cuts for another number by auto."""
    if parallel.get("stages") == "auto":
        parallel["stages"] = stages_of_launcher(os.environ) or 1
        if isinstance(parallel.get("split"), list) and len(parallel["split"]) != parallel["stages"] - 1:
            parallel["split"] = "auto"


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load` reads back to an equal recipe."""
    return yaml.dump(recipe.model_dump(mode="json", by_alias=True), Dumper=Dumper, sort_keys=False, width=110)


def _chain(path: Path) -> list:
    """(place, mapping) of `path` and the files it extends, the base first."""
    layers: list = []
    seen: list = []
    child, base = None, path.name
    while base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: extends: {base!r} is not the name of a file")
        try:
            path = path.parent / expanded(base)
        except ValueError as error:
            raise ConfigError(f"{path}: extends: {error}") from None
        place = f"{child}: extends {path}" if child else str(path)
        remedy = (
            "correct the name or make the file" if child else "name an existing recipe, e.g. configs/quickstart.yaml"
        )
        layer = _mapping(read_yaml(path, place, remedy), str(path))
        if os.path.realpath(path) in seen:
            raise ConfigError(f"{child}: extends itself through {path}; break the circle")
        seen.append(os.path.realpath(path))
        child, base = str(path), layer.pop("extends", None)
        # What a run stored has no variables any more: a text that looks like one was typed so.
        layers.insert(0, (child, layer if idle.is_resolved(layer) else _with_variables(layer)))
    return layers


def _with_variables(value: Any) -> Any:
    """Return a file's content with `${NAME:-DEFAULT}` replaced by the environment's NAME, or by DEFAULT where NAME is
    not set or empty, as shells do it. What a run stores has the outcome, so that it does not change with the
    environment."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda found: os.environ.get(found["name"]) or found["default"], value)
    if isinstance(value, list):
        return [_with_variables(each) for each in value]
    if isinstance(value, dict):
        return {key: _with_variables(each) for key, each in value.items()}
    return value


def _mapping(layer: Any, place: str) -> dict:
    if not isinstance(layer, (dict, type(None))):
        raise ConfigError(f"{place}: not a recipe: expected sections such as `run:` and `model:`")
    return layer or {}


def _merge(merged: dict, layer: dict) -> None:
    """Lay `layer` over `merged`, section by section. Raises ConfigError."""
    for section, content in layer.items():
        if section not in merged:
            raise ConfigError(f"{section}: unknown key{suggestions.for_unknown(section)}")
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
