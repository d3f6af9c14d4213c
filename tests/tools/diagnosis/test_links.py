"""Every kind of exchange can be made from any recipe, and is predicted as exchange.method=auto predicts it."""

import pytest

from engines import choice
from engines.choice import Gradient
from parallel.costs import Link
from recipe import batch, loading
from recipe.exchange import Exchange
from tests.conftest import QUICKSTART
from tools.diagnosis import links

RECIPES = [
    (), ("exchange.method=half", "exchange.wire=bfloat16"), ("exchange.order=tree",), ("exchange.method=none",),
    ("exchange.method=auto",), ("exchange.method=topk", "exchange.wire=float16", "exchange.density=0.01"),
    ("exchange.method=gtopk", "exchange.pattern=butterfly", "exchange.momentum_correction=true",
     "exchange.factor_masking=true", "exchange.dense_1d=true", "exchange.density_warmup=[0.5]", "exchange.delay=1"),
]  # fmt: skip


@pytest.mark.parametrize("overrides", RECIPES)
def test_each_method_has_a_section_that_goes_with_the_recipe(overrides):
    recipe = loading.load(QUICKSTART, overrides)
    sections = links._sections(recipe)
    auto = sections.pop("auto")
    predicted = choice.predict(auto, 4, Gradient(1000, 0), Link(1e-4, 1e-8), 0.0, 0.0)
    assert [candidate.name for candidate in predicted if candidate.name not in sections] == []
    for name, section in sections.items():
        assert links.name_of(section) == name
        # As if it had been written: model_copy checks nothing.
        batch.divide(recipe.model_copy(update={"exchange": Exchange(**section.model_dump())}))
        assert section.delay == 0


def test_what_the_recipe_says_of_its_own_method_is_kept():
    recipe = loading.load(QUICKSTART, RECIPES[-1])
    own = links._sections(recipe)["gtopk butterfly"]
    expected = recipe.exchange.model_copy(update={"density_warmup": [], "delay": 0})
    assert own == expected


def test_half_travels_as_the_recipe_says():
    recipe = loading.load(QUICKSTART, RECIPES[1])
    assert links._sections(recipe)["half"].wire == "bfloat16"
