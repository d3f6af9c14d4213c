"""Fixture of the IPU tests: the double of PopTorch, importable for one test."""

import multiprocessing
import sys
from pathlib import Path

import pytest

DOUBLE = Path(__file__).with_name("double")
_PACKAGES = ("poptorch", "popdist", "horovod", "signatures")


def _forget():
    for name in list(sys.modules):
        if name.split(".")[0] in _PACKAGES:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_process_stays():
    """The double's data loaders end with their test, so that tests which count processes find their own only."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture
def double(monkeypatch):
    """The double's poptorch; popdist and horovod.torch can be imported beside it. All three are gone afterwards."""
    _forget()
    monkeypatch.syspath_prepend(str(DOUBLE))
    multiprocessing.set_forkserver_preload(["torch"])  # the processes of its loaders start in no time
    import poptorch

    yield poptorch
    _forget()
