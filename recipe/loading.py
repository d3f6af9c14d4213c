"""From YAML files and command-line overrides to a checked recipe; errors are one line: place, key
and remedy.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Container, Dict, List, NamedTuple, Sequence

from pydantic import ValidationError

from common.errors import ConfigError
from common.files import expanded
from common.yaml_text import as_yaml, parse_yaml, read_yaml
from recipe import idle, suggestions, timm_models, timm_weights
from recipe.config import ALTERNATIVES, SECTIONS, Recipe
from recipe.ipu.poprun import stages_of_launcher
from recipe.kinds import Kind
from recipe.network import Model
from recipe.overrides import COMMAND_LINE, parse, read_value, takes_text
from recipe.section import first_fault

_ROOT = Path(__file__).resolve().parent.parent
_VARIABLE = re.compile(r"\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*):-(?P<default>[^{}]*)\}")
_ANY_CLASSES = 2  # in the place of `auto`, until the images are known


class _Layer(NamedTuple):
    """Sections that one file or override gives, and the place that errors call it."""

    place: str
    content: Dict[str, Any]


def find(path: str | Path) -> Path:
    """Return `path` where there is such a file here, else that of the repository if there is one."""
    in_repository = _ROOT / path
    if not os.path.exists(path) and os.path.exists(in_repository):
        return in_repository
    return Path(path)


def load(path: str | Path, overrides: Sequence[str] = (), used: Container[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: of the file, see `find`; it may extend others.
        overrides: texts such as "section.key=value".
        used: keys that the caller uses, even where a run would not.

    Raises:
        ConfigError: a file cannot be read, or the recipe is wrong or names a key that has no
            effect.
    """
    path = find(path)
    layers = _chain(path)
    # Keys of the file itself must have an effect, those that it inherits need not. A run's
    # config.yaml names every key: there only overrides show what somebody wants.
    named = len(layers) if idle.is_resolved(layers[-1].content) else len(layers) - 1
    layering = _Layering(layers, overrides)
    recipe = layering.recipe(default=str(path))
    layering.check_effects(recipe, named, used)
    return recipe


def of_weights(init_from: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe by which weights of timm are scored: their model, and images as timm
    prepares them.

    Args:
        init_from: `timm:NAME` or `timm:NAME:FILE`.
        overrides: texts such as "data.root=/imagenet".

    Raises:
        ConfigError: timm has no such model, or an override is wrong or has no effect.
    """
    weights = timm_weights.parse(init_from)
    assert weights is not None, init_from
    model: Dict[str, Any] = {"init_from": init_from}
    scoring = timm_models.scoring(weights.name)
    if scoring is not None and scoring.classes > 0:  # some weights have no classifier
        model["classes"] = scoring.classes
    # Nothing is trained, but every recipe has a length and a rate.
    layer = _Layer(init_from, {"run": {"epochs": 1}, "model": model, "schedule": {"peak": 0.1}})
    layering = _Layering([layer], overrides)
    recipe = layering.recipe(default=init_from)
    layering.check_effects(recipe, named=1)
    return recipe


def loads(text: str, place: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that `dump` wrote, with overrides.

    Args:
        text: YAML, as of `dump`.
        place: what errors call it.
        overrides: texts such as "section.key=value".

    Raises:
        ConfigError: the recipe is wrong, or an override names a key that has no effect.
    """
    layering = _Layering([_Layer(place, _mapping(parse_yaml(text, place), place))], overrides)
    recipe = layering.recipe(default=place)
    layering.check_effects(recipe, named=1)
    return recipe


class _Layering:
    """Layers of sections, of which the later ones win, then overrides, with the origin of each key."""

    def __init__(self, layers: Sequence[_Layer], overrides: Sequence[str]):
        self._merged: Dict[str, Dict[str, Any]] = {section: {} for section in SECTIONS}
        self._origins: Dict[str, str] = {}  # place by section and by section.key
        # Index of the last layer that gives a key; overrides count as one layer.
        self._levels: Dict[str, int] = {}
        # Names first: they decide which keys there are, and a new one unsets the keys of the old.
        names = [text for text in overrides if _is_name(text)]
        others = [text for text in overrides if not _is_name(text)]
        typed = [parse(text) for text in [*names, *others]]
        for index, layer in enumerate(layers):
            self._lay(layer, index)
        for override in typed:
            content = {override.section: {override.key: override.value}}
            self._lay(_Layer(COMMAND_LINE, content), level=len(layers))
        _settle_stages(self._merged["parallel"])

    def _lay(self, layer: _Layer, level: int) -> None:
        """Lay a layer over all before it. Raises ConfigError with its place."""
        try:
            _merge(self._merged, _without_implied(layer.content))
        except ConfigError as error:
            raise ConfigError(f"{layer.place}: {error}") from None
        for section, content in layer.content.items():
            # Errors name the layer that gave the value, which may be none of the last one's.
            keys = [f"{section}.{key}" for key in content or ()]
            self._origins.update(dict.fromkeys([section, *keys], layer.place))
            self._levels.update(dict.fromkeys(keys, level))

    def recipe(self, default: str) -> Recipe:
        """Return the recipe. Raises ConfigError; `default` is the place of keys that no layer
        gives.
        """
        model = self._merged["model"]
        try:
            # The classes are counted in the images, whose section is checked with all others: a
            # first recipe has a number in their place.
            if model.get("classes") == "auto":
                model["classes"] = _ANY_CLASSES
                model["classes"] = Recipe.model_validate(self._merged).data.count_classes()
            return Recipe.model_validate(self._merged)
        except ValidationError as error:
            location, words = first_fault(error, suggestions.for_unknown)
        except UnicodeEncodeError:
            raise self._no_character(default) from None
        # section, key, and positions within a list; the fault of a whole section ends with it
        section = str(location[0])
        name = ".".join(map(str, location[:2]))
        origin = self._origins.get(name) or self._origins.get(section) or default
        indices = "".join(f"[{part}]" for part in location[2:])
        where = f"{name}: {indices}".rstrip()
        raise ConfigError(f"{origin}: {where} {words}")

    def _no_character(self, default: str) -> ConfigError:
        """Return the error of a value for which pydantic has none: it cannot repeat what it found
        where that has half a surrogate pair, which an escape within quotes gives, as "\\ud800".
        """
        for section, content in self._merged.items():
            for key, value in content.items():
                # Texts may have it: in a path it stands for a byte that is no UTF-8.
                if takes_text(section, key) or not _has_surrogate(value):
                    continue
                name = f"{section}.{key}"
                origin = self._origins.get(name, default)
                return ConfigError(
                    f"{origin}: {name}: {value!r} has half a surrogate pair; remove it"
                )
        return ConfigError(f"{default}: half a surrogate pair (\\ud800 to \\udfff); remove it")

    def check_effects(self, recipe: Recipe, named: int, used: Container[str] = ()) -> None:
        """Raise ConfigError for a key without effect that the user has named.

        Args:
            recipe: that came of these layers.
            named: index of the first layer whose keys must have an effect.
            used: of these keys, those that the caller uses.
        """
        for key, fault in idle.faults(recipe, self._merged, self._levels, first=named):
            if key not in used:
                raise ConfigError(f"{self._origins[key]}: {key} {fault}")


def _has_surrogate(value: Any) -> bool:
    """Return whether a value is a text that UTF-8 has no bytes for."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def _is_name(override: str) -> bool:
    """Return whether an override names a kind, or weights whose name stands for keys."""
    key, _, _ = override.partition("=")
    return key.endswith((".name", ".init_from"))


def _settle_stages(parallel: Dict[str, Any]) -> None:
    """Replace `stages: auto` by the launcher's number, and a list of cuts for another number by
    auto.
    """
    # Here, as the launcher's number is none of the schema: a stored recipe has a number.
    if parallel.get("stages") != "auto":
        return
    stages = stages_of_launcher(os.environ) or 1
    parallel["stages"] = stages
    split = parallel.get("split")
    if isinstance(split, list) and len(split) != stages - 1:
        parallel["split"] = "auto"


def dump(recipe: Recipe) -> str:
    """Return `recipe` with all keys as YAML that `load` reads back to an equal recipe."""
    return as_yaml(recipe.model_dump(mode="json", by_alias=True))


def _chain(path: Path) -> List[_Layer]:
    """Return the layers of a file and of those that it extends, the base first."""
    # Remedies differ: the user typed the first name, a file of ours or theirs has the others.
    layers: List[_Layer] = []
    read: List[str] = []  # real paths, so that a circle is found whatever the links
    place = str(path)
    remedy = "name an existing recipe, e.g. configs/quickstart.yaml"
    while True:
        layer = _mapping(read_yaml(path, place, remedy), str(path))
        if os.path.realpath(path) in read:
            raise ConfigError(f"{layers[0].place}: extends itself through {path}; break the circle")
        read.append(os.path.realpath(path))
        # What a run stored has no variables any more: a text that looks like one was typed so.
        content = layer if idle.is_resolved(layer) else _with_variables(layer, str(path))
        layers.insert(0, _Layer(str(path), content))
        if "extends" not in content:
            return layers
        child = path
        path = _extended(child, content.pop("extends"))
        place = f"{child}: extends {path}"
        remedy = "correct the name or make the file"


def _extended(child: Path, base: Any) -> Path:
    """Return the path of the file that `child` extends by `extends: base`."""
    if not isinstance(base, str):
        fault = f"extends: {base!r} is not the name of a file; name one, or remove the key"
        raise ConfigError(f"{child}: {fault}")
    try:
        return child.parent / expanded(base)
    except ValueError as error:
        raise ConfigError(f"{child}: extends: {error}") from None


def _with_variables(layer: Dict[str, Any], place: str) -> Dict[str, Any]:
    """Replace `${NAME:-DEFAULT}` by the environment's NAME, or by DEFAULT where NAME is not set or
    empty.

    So do shells. What a run stores has the outcome, so that it does not change with the
    environment. A value that is a variable and nothing else is read as on a command line: of a key
    that is no text as YAML, and null or nothing unsets the key.

    Args:
        layer: sections of a file.
        place: of the file.

    Raises:
        ConfigError: an outcome is no YAML.
    """
    content = _replaced(layer)
    for section, keys in layer.items():
        if not isinstance(keys, dict):
            continue
        for key, value in keys.items():
            if isinstance(value, str) and _VARIABLE.fullmatch(value):
                outcome = content[section][key]
                content[section][key] = read_value(section, key, outcome or "null", place)
    return content


def _replaced(value: Any) -> Any:
    """Return a value of a file with its variables replaced: see `_with_variables`."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: os.environ.get(match["name"]) or match["default"], value)
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    return value


def _mapping(layer: Any, place: str) -> Dict[str, Any]:
    """Return the sections of a layer, none for an empty file. Raises ConfigError."""
    if layer is None:
        return {}  # an empty file
    if not isinstance(layer, dict):
        raise ConfigError(f"{place}: not a recipe: expected sections such as `run:` and `model:`")
    return layer


def _merge(merged: Dict[str, Dict[str, Any]], layer: Dict[str, Any]) -> None:
    """Lay the sections of a layer over those of `merged`. Raises ConfigError."""
    # First what names of weights stand for, as keys that the layer gives itself win over it.
    _unset_training_sizes(merged, layer)
    layer = _with_images_of_weights(layer)
    for section, content in layer.items():
        if section not in merged:
            raise ConfigError(f"{section}: unknown key{suggestions.for_unknown(section)}")
        if content is None:
            # A section with nothing below it, as an empty `data:` in a file.
            continue
        if not isinstance(content, dict):
            raise ConfigError(f"{section}: expected keys below it, found {content!r}")
        _unset_alternatives(merged[section], section, content)
        # The name of timm's weights stands for keys of the model, over which those of the layer are
        # laid.
        weights = timm_weights.parse(content.get("init_from")) if section == "model" else None
        laid = content
        if weights:
            family = content.get("name", merged[section].get("name"))
            laid = {**timm_weights.keys(weights.name, family), **content}
        # A momentum of LARS, say, is none for SGD: only keys common to all kinds outlive a change.
        base = SECTIONS[section]
        if issubclass(base, Kind) and base.changed(merged[section], laid):
            common = base.model_fields
            merged[section] = {
                key: value for key, value in merged[section].items() if key in common
            }
        merged[section].update(laid)


def _with_images_of_weights(layer: Dict[str, Any]) -> Dict[str, Any]:
    """Return a layer with the keys of images that the weights which it names stand for.

    Keys that the layer gives itself win.
    """
    model = layer.get("model")
    # A run's config.yaml has all keys: one that it lacks is younger than the run.
    if not isinstance(model, dict) or idle.is_resolved(layer):
        return layer
    weights = timm_weights.parse(model.get("init_from"))
    if weights is None:
        return layer
    laid = dict(layer)
    for section, keys in timm_weights.image_keys(weights.name).items():
        given = layer.get(section) or {}
        if not isinstance(given, dict):
            continue  # which is refused below
        if section == "data" and model.get("image_size") is not None:
            keys = {**keys, "image_sizes": None}  # one size for all: the given one
        laid[section] = {**keys, **given}
    return laid


def _without_implied(layer: Dict[str, Any]) -> Dict[str, Any]:
    """Return a run's config.yaml without the keys of the model that follow from its name anyway.

    Otherwise they would outlive another name that is laid over it: B4 would get the width of B0.
    """
    model = layer.get("model")
    if not isinstance(model, dict) or not idle.is_resolved(layer):
        return layer
    family = Model.kinds.get(str(model.get("name")), Model)
    implied = family.implied(model)
    given = {
        key: value for key, value in model.items() if key not in implied or value != implied[key]
    }
    return {**layer, "model": given}


def _unset_training_sizes(lower: Dict[str, Dict[str, Any]], layer: Dict[str, Any]) -> None:
    """Remove the training size of timm's weights from `lower` where `layer` gives model.image_size,
    which is then the size of training, too.
    """
    model = layer.get("model")
    if not isinstance(model, dict) or model.get("image_size") is None:
        return
    weights = timm_weights.parse(lower["model"].get("init_from"))
    sizes = lower["data"].get("image_sizes")
    if weights and sizes and sizes == timm_weights.training_sizes(weights.name):
        del lower["data"]["image_sizes"]


def _unset_alternatives(lower: Dict[str, Any], section: str, content: Dict[str, Any]) -> None:
    """Remove from `lower` the keys in whose place `content` gives another. Raises ConfigError if it
    gives two.
    """
    for group in ALTERNATIVES:
        # run.epochs=2 over a recipe of steps means two epochs: the steps of lower layers go. Two in
        # one layer would leave it to chance which counts.
        names = [name.split(".")[1] for name in group if name.startswith(f"{section}.")]
        named = [name for name in names if content.get(name) is not None]
        if len(named) > 1:
            raise ConfigError(f"{section}: {' and '.join(named)} are both given; keep one")
        if named:
            for name in names:
                lower.pop(name, None)
