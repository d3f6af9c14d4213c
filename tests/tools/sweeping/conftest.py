"""Studies open faster: Optuna would import the migrations of its tables anew for each of them."""

from unittest import mock

import pytest


@pytest.fixture(scope="module", autouse=True)
def migrations_loaded_once():
    from alembic.script import ScriptDirectory

    from benchmarks.fuzz.folders import _migrations

    with mock.patch.object(ScriptDirectory, "from_config", return_value=_migrations()):
        yield
