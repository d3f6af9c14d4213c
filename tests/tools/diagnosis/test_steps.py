"""Steps that are measured: smaller than the recipe's, and without its exchange, whatever the recipe
says of its run."""

import pytest

from recipe import batch
from tools.diagnosis.steps import Setup


@pytest.mark.parametrize(
    "overrides",
    [
        ["exchange.order=tree", "parallel.elastic=true"],
        ["exchange.order=tree", "parallel.shares=measured"],
        ["batch.schedule=noise", "batch.largest=256", "batch.rate_rule=sqrt"],
    ],
)
def test_a_recipe_whose_steps_change_has_small_steps_without_an_exchange(tiny, overrides):
    recipe = tiny("batch.global=64", "batch.micro=16", *overrides)
    setup = Setup(
        recipe,
        batch.divide(recipe, 1),
        processes=None,
        device=None,
        lengths=None,
        source=None,
    )
    smaller = setup.settled().silent().shrunk(1)
    assert (smaller.batch.micro, smaller.batch.accumulation) == (16, 1)
    assert smaller.recipe.batch.global_ == 16
    assert setup.settled().shrunk(2).recipe.exchange == recipe.exchange
