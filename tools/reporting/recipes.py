"""Recipes as tables: what one sets otherwise than the defaults, and in what several differ."""

from __future__ import annotations

import json
from typing import Any, Dict, List, NamedTuple, Sequence

from recipe.batch import peak_learning_rate
from recipe.by_name import COMPOUND_SCALES, OPTIMIZERS, SCHEDULES
from recipe.config import Recipe

# Of several runs they always differ.
_OF_THE_PLACE = ("run.name", "run.output")
# What a name stands for is the default of the keys that follow it.
_BY_NAME = {"model": COMPOUND_SCALES, "optimizer": OPTIMIZERS, "schedule": SCHEDULES}


class Setting(NamedTuple):
    """A key whose value is not its default, both as text."""

    key: str
    value: str
    default: str
    description: str


def settings(recipe: Recipe) -> List[Setting]:
    """What the recipe says otherwise than the schema, in the order of the schema.

    The default of a key that follows a name (of the model, the optimizer or the schedule) is that of the name given.
    """
    found = []
    given = recipe.model_dump(mode="json", by_alias=True)
    for section, field in Recipe.model_fields.items():
        defaults = field.annotation.model_construct().model_dump(mode="json", by_alias=True)
        defaults.update(_BY_NAME.get(section, {}).get(given[section].get("name"), {}))
        for name, key in field.annotation.model_fields.items():
            shown = key.alias or name
            value, default = given[section][shown], defaults[shown]
            if value != default:
                found.append(Setting(f"{section}.{shown}", text(value), text(default), key.description or ""))
    return found


def differences(recipes: Sequence[Recipe]) -> List[tuple]:
    """(key, value in each recipe, as text) of the keys that differ, and what follows from them; nothing for one recipe.

    The name and the folder of a run are left out.
    """
    rows = []
    dumped: List[Dict[str, Any]] = [recipe.model_dump(mode="json", by_alias=True) for recipe in recipes]
    for section, keys in dumped[0].items():
        for key in keys:
            values = [text(each[section][key]) for each in dumped]
            if len(set(values)) > 1 and f"{section}.{key}" not in _OF_THE_PLACE:
                rows.append((f"{section}.{key}", values))
    peaks = [f"{peak_learning_rate(recipe):.6g}" for recipe in recipes]
    if len(set(peaks)) > 1 and all(key != "schedule.peak" for key, _ in rows):
        rows.append(("peak learning rate, as it follows", peaks))
    return rows


def text(value: Any) -> str:
    """A value in one line, as a recipe could have it."""
    if isinstance(value, list):
        return f"[{', '.join(text(each) for each in value)}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value if isinstance(value, str) else json.dumps(value)
