"""Fixture of the IPU tests: the double of PopTorch, importable for one test; and images that its
processes read."""

import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.world import fork_server

DOUBLE = Path(__file__).with_name("double")
_PACKAGES = ("poptorch", "popdist", "horovod", "signatures")


def _forget():
    for name in list(sys.modules):
        if name.split(".")[0] in _PACKAGES:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _no_process_stays():
    """The double's data loaders end with their test, so that tests which count processes find their
    own only."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture
def double(monkeypatch):
    """The double's poptorch; popdist and horovod.torch can be imported beside it.

    All three are gone afterwards.
    """
    _forget()
    monkeypatch.syspath_prepend(str(DOUBLE))
    fork_server()  # so that the processes of its loaders start in no time
    import poptorch

    yield poptorch
    _forget()


class Hanging(torch.utils.data.Dataset):
    """Image 4 never comes, as from a file system that has gone.

    Here, where processes that read import little.
    """

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 4:
            time.sleep(1000)
        return torch.zeros(1), torch.tensor(0)
