"""Whatever a recipe says, it becomes a recipe or an error of one line; and the arithmetic holds for all numbers."""

import math

import pytest
import yaml

from recipe import loading
from recipe.batch import divide, lengths
from recipe.config import Recipe
from recipe.errors import ConfigError, DataError
from tests.conftest import QUICKSTART

hypothesis = pytest.importorskip("hypothesis", reason="has no releases for this Python")
st = hypothesis.strategies
often = hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)

SECTIONS = st.sampled_from([*Recipe.model_fields, "extends", "unknown"])
KEYS = st.sampled_from(
    sorted({key for field in Recipe.model_fields.values() for key in field.annotation.fields()} | {"global", "x"})
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["auto", "lars", "sgd", "cpu", "1e5", "0x1", "1_0", "~", "=", "<<", "2001-01-01"])
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
RECIPES = st.dictionaries(SECTIONS, st.dictionaries(KEYS, VALUES, max_size=4) | VALUES, max_size=4)


def taken_or_refused_in_one_line(load, *arguments):
    """What is taken is the same when dumped and loaded."""
    try:
        recipe = load(*arguments)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert loading.loads(loading.dump(recipe), "again") == recipe


@hypothesis.settings(often, max_examples=40)
@hypothesis.given(RECIPES)
def test_any_structure_is_a_recipe_or_an_error_of_one_line(structure):
    taken_or_refused_in_one_line(loading.loads, yaml.safe_dump(structure, allow_unicode=True), "here")


@often
@hypothesis.given(SECTIONS, KEYS, SCALARS | st.lists(SCALARS, max_size=3))
def test_any_override_is_taken_or_refused_and_what_is_taken_is_kept(section, key, value):
    override = f"{section}.{key}={yaml.safe_dump(value).splitlines()[0]}"
    taken_or_refused_in_one_line(loading.load, QUICKSTART, [override])


COUNTS = st.integers(1, 5000)


@often
@hypothesis.given(st.integers(1, 10**7), COUNTS, COUNTS)
def test_batches_that_do_not_divide_name_the_nearest_that_do(total, micro, replicas):
    hypothesis.assume(total % (micro * replicas))
    recipe = loading.load(QUICKSTART, [f"batch.global={total}", f"batch.micro={micro}", "data.mixup=0"])
    with pytest.raises(ConfigError) as caught:
        divide(recipe, replicas)
    nearest = [int(word) for word in str(caught.value).partition("nearest: ")[2].split(" or ")]
    portion = micro * replicas
    assert all(each % portion == 0 and 0 < abs(each - total) < portion for each in nearest)
    assert max(nearest) > total and (len(nearest) == 2) == (total > portion)


@often
@hypothesis.given(st.integers(1, 10**8), st.integers(1, 10**5), st.floats(0.01, 1000))
def test_no_image_is_lost_from_the_books(images, total, epochs):
    overrides = [f"batch.global={total}", "batch.micro=1", f"run.epochs={epochs!r}", "schedule.warmup_epochs=0"]
    recipe = loading.load(QUICKSTART, overrides)
    try:
        found = lengths(recipe, images)
    except DataError:
        assert images < total
        return
    assert found.steps_per_epoch * total + found.dropped == images and 0 <= found.dropped < total
    assert math.isclose(found.total, max(1, epochs * found.steps_per_epoch), rel_tol=1e-12, abs_tol=0.5 + 1e-6)
