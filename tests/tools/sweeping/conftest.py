"""Fixtures of sweeps.

Studies open faster: Optuna would import the migrations of its tables anew for each of them.
"""

from unittest import mock

import pytest

from tests.tools.sweeping.sweeps import Sweep
from tools.sweeping import report, scheduler


@pytest.fixture(scope="module", autouse=True)
def migrations_loaded_once():
    from alembic.script import ScriptDirectory

    from benchmarks.fuzz.folders import _migrations

    with mock.patch.object(ScriptDirectory, "from_config", return_value=_migrations()):
        yield


@pytest.fixture
def some(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(scheduler, "_POLL_SECONDS", 0.02)
    return Sweep(tmp_path, capfd)


@pytest.fixture
def undrawn(monkeypatch):
    """To draw takes longer than all trials together."""
    monkeypatch.setattr(report, "draw_picture", lambda *arguments: None)
