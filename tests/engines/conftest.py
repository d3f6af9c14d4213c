"""Engines of the tiny recipe."""

import pytest

from engines import factory
from recipe.batch import divide


@pytest.fixture
def engine(tiny):
    """engine(*overrides): an engine of the tiny recipe."""

    def create(*overrides):
        recipe = tiny(*overrides)
        return factory.create(recipe, divide(recipe))

    return create


@pytest.fixture
def create(engine):
    """As `engine`, for tests that call the engine that it makes so."""
    return engine
