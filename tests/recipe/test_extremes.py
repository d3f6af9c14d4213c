"""Numbers beyond all reason, and texts that are none: a recipe with one has a plan, or is refused
in one line."""

import json
from contextlib import suppress

import pytest

from common.errors import OneLineError
from optim import schedule
from recipe import batch, loading
from tests.conftest import QUICKSTART, ROOT

SCHEMA = json.loads((ROOT / "configs" / "schema.json").read_text(encoding="utf-8"))
IMAGES = 1437  # of the quickstart


def referred(node):
    while "$ref" in node:
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def kinds_of(node):
    """The node, and all that it may be instead."""
    node = referred(node)
    yield node
    for word in ("anyOf", "oneOf"):
        for option in node.get(word, ()):
            yield from kinds_of(option)


def keys(takes=lambda types: True):
    """All keys, as section.key, whose types fulfil a condition."""
    found = set()
    for section, content in SCHEMA["properties"].items():
        for kind in kinds_of(content):
            for key, value in kind.get("properties", {}).items():
                if takes({option.get("type") for option in kinds_of(value)}):
                    found.add(f"{section}.{key}")
    return sorted(found)


def numbers():
    """All keys that may be numbers, as section.key."""
    return keys(lambda types: {"number", "integer"} & types)


def test_keys_of_all_sections_are_tried():
    assert {"batch.global", "schedule.decay_epochs", "exchange.dense_epochs", "run.threads"} <= set(
        numbers()
    )


@pytest.mark.parametrize("number", ["1e308", "1e-320", "9" * 30, "9" * 400])
def test_a_number_has_a_plan_or_one_line(number):
    for key in numbers():
        with suppress(OneLineError):
            recipe = loading.load(QUICKSTART, [f"{key}={number}"])
            batch.describe(recipe)
            lengths = batch.lengths(recipe, IMAGES)
            schedule.create(recipe, lengths)(lengths.total - 1)
            for every in (recipe.evaluation.every_epochs, recipe.checkpoint.every_epochs):
                batch.in_steps(every, None, None, lengths.steps_per_epoch, recipe.batch.global_)


@pytest.mark.parametrize("number", ["1e308", "1e-320"])
def test_epochs_of_an_exponential_decay_are_bounded(number):
    """Its keys are those of another kind of schedule than the quickstart's."""
    with pytest.raises(OneLineError, match="decay_epochs"):
        loading.load(QUICKSTART, ["schedule.name=exponential", f"schedule.decay_epochs={number}"])


def test_half_a_surrogate_pair_is_a_text_or_has_one_line():
    """An escape within quotes gives it, for which UTF-8 has no bytes: pydantic cannot say what it
    found there."""
    refused = {}
    for key in keys():
        try:
            loading.load(QUICKSTART, [f'{key}="\\ud800"'])
        except OneLineError as error:
            refused[key] = str(error)
    assert refused["parallel.recompute"].endswith(
        "parallel.recompute: '\\ud800' has half a surrogate pair; remove it"
    )
    assert {"batch.micro", "run.name", "optimizer.name"} <= set(
        refused
    ) and "run.output" not in refused


def test_the_key_with_half_a_surrogate_pair_is_named_not_one_with_an_empty_text():
    with pytest.raises(OneLineError, match=r"parallel\.recompute: '.ud800' has half"):
        loading.load(QUICKSTART, ['batch.micro=""', 'parallel.recompute="\\ud800"'])


def test_a_path_may_have_bytes_that_are_no_utf_8():
    recipe = loading.load(QUICKSTART, ["data.source=folder", "data.root=/photos\udcff"])
    assert loading.loads(loading.dump(recipe), "config.yaml").data.root == "/photos\udcff"
