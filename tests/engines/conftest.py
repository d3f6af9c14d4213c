"""Engines of the tiny recipe."""

import pytest

from engines import factory
from recipe.batch import divide


@pytest.fixture
def create(tiny):
    """create(*overrides): an engine of the tiny recipe."""

    def made(*overrides):
        recipe = tiny(*overrides)
        return factory.create(recipe, divide(recipe))

    return made
