"""The JSON Schema of a recipe file, for editors: `python -m recipe.schema` writes
configs/schema.json.
"""

import json
from pathlib import Path

from recipe.config import Recipe

PATH = Path(__file__).resolve().parent.parent / "configs" / "schema.json"


def text() -> str:
    """Return the schema of one YAML layer, in which nothing is required, because a file may extend
    another.
    """
    # The layer's own key is none of a recipe: recipe/loading.py takes it away.
    schema = Recipe.model_json_schema(by_alias=True)
    schema["title"] = "Recipe"
    schema["properties"]["extends"] = {
        "type": "string",
        "description": "recipe that this one is laid over",
    }
    return json.dumps(_as_layer(schema), indent=1) + "\n"


def _as_layer(node: object) -> object:
    """Return a part of the schema without titles, which repeat the keys, and with texts in one line."""
    if isinstance(node, dict):
        return {key: _as_layer(value) for key, value in node.items() if key != "title"}
    if isinstance(node, list):
        return [_as_layer(item) for item in node]
    if isinstance(node, str):
        return " ".join(node.split())  # docstrings of keys have several lines
    return node


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
