"""configs/schema.json, which editors check recipes with as they are typed."""

import json

import pytest

from common.yaml_text import parse_yaml
from recipe import schema
from recipe.config import Recipe
from recipe.loading import loads
from tests.conftest import RECIPES

SCHEMA = json.loads(schema.text())


TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
    "null": type(None),
}  # fmt: skip


def fits(value, node):
    """Whether `value` obeys the JSON Schema `node`: the keywords that pydantic writes, and no
    more."""
    if "$ref" in node:
        node = {**SCHEMA["$defs"][node["$ref"].rpartition("/")[2]], **node}
    if "anyOf" in node:
        return any(fits(value, option) for option in node["anyOf"])
    if "const" in node or "enum" in node:
        return value in node.get("enum", [node.get("const")])
    if not isinstance(value, TYPES[node["type"]]) or (
        isinstance(value, bool) and node["type"] != "boolean"
    ):
        return False
    if isinstance(value, dict):
        return all(
            key in node["properties"] and fits(each, node["properties"][key])
            for key, each in value.items()
        )
    items = node.get("prefixItems", [])
    return not isinstance(value, list) or all(
        fits(item, items[place] if items else node["items"]) for place, item in enumerate(value)
    )


def test_the_file_is_current():
    assert schema.PATH.read_text(encoding="utf-8") == schema.text(), "run python -m recipe.schema"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_our_recipes_follow_it(path):
    layer = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    assert fits(layer, SCHEMA)
    head = path.read_text(encoding="utf-8").splitlines()[0]
    assert head.startswith("# yaml-language-server: $schema=")
    assert (path.parent / head.partition("=")[2]).resolve() == schema.PATH
    for wrong in ({"seed": "many"}, {"sed": 1}, {"seed": True}):
        assert not fits({**layer, "run": wrong}, SCHEMA)


def test_it_describes_every_key_and_requires_none():
    assert set(SCHEMA["properties"]) == {*Recipe.model_fields, "extends"}
    for section, field in Recipe.model_fields.items():
        node = SCHEMA["properties"][section]
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        for variant in node.get("anyOf", [node]):
            assert set(variant["properties"]) == set(field.annotation.fields())
            assert "required" not in variant
        assert node["description"]


def test_it_takes_null_for_keys_of_other_kinds_and_ignored_keys_of_other_sources():
    layer = {
        "optimizer": {
            "name": "sgd",
            "momentum": 0.9,
            "trust": None,
            "alpha": None,
            "clip_norm": None,
        },
        "exchange": {
            "method": "dense",
            "density": 0.001,
            "pattern": "tree",
            "wire": None,
            "density_warmup": [],
        },
        "data": {
            "source": "digits",
            "root": None,
            "train_folder": "train",
            "glyph_size": 32,
            "train_images": None,
        },
    }
    assert fits(layer, SCHEMA)
    loads(json.dumps({"run": {"steps": 1}, "schedule": {"peak": 1}, **layer}), "older")
