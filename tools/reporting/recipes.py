"""Recipes as tables: settings that differ from the defaults, and keys in which several recipes differ."""

from __future__ import annotations

import json
from typing import Any, List, Sequence, Tuple

from recipe.batch import peak_learning_rate
from recipe.config import Recipe

_OF_THE_PLACE = ("run.name", "run.output")  # differ in any two runs


def settings(recipe: Recipe) -> List[Tuple[str, str, str, str]]:
    """(key, value, default, description) of the keys that differ from their defaults, in the order of the schema.

    The default of a key that follows a name (of the model, the optimizer or the schedule) is that of the name given.
    """
    found = []
    for section, keys in recipe.model_dump(mode="json", by_alias=True).items():
        part = getattr(recipe, section)
        defaults, fields = part.defaults(), type(part).fields()
        for key, value in keys.items():
            if value != defaults[key]:
                description = " ".join((fields[key].description or "").split())
                found.append((f"{section}.{key}", text(value), text(defaults[key]), description))
    return found


def differences(recipes: Sequence[Recipe]) -> List[Tuple[str, List[str]]]:
    """(key, value in each recipe, as text) of the keys that differ, and what follows from them.

    The name and the folder of a run are left out.
    """
    rows = []
    dumped = [recipe.model_dump(mode="json", by_alias=True) for recipe in recipes]
    for section in Recipe.model_fields:
        for key in dict.fromkeys(key for each in dumped for key in each[section]):
            values = [text(each[section].get(key)) for each in dumped]
            if len(set(values)) > 1 and f"{section}.{key}" not in _OF_THE_PLACE:
                rows.append((f"{section}.{key}", values))
    peaks = [f"{peak_learning_rate(recipe):.6g}" for recipe in recipes]
    if len(set(peaks)) > 1 and all(key != "schedule.peak" for key, _ in rows):
        rows.append(("peak learning rate, as it follows", peaks))
    return rows


def text(value: Any) -> str:
    """A value in one line, as a recipe could have it."""
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, float):
        return f"{value:.10g}"
    return value if isinstance(value, str) else json.dumps(value)
