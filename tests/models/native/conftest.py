"""Tests of this folder need our functions in C++, so a C++ compiler."""

import shutil
import sys

import pytest
import torch

from models.native import library


@pytest.fixture(autouse=True, scope="session")
def _functions(_own_cache):
    """Skips where there are none.

    A Linux machine with a compiler has them: else a fault in them would skip all.
    """
    fault = library.fault()
    if fault:
        expected = sys.platform == "linux" and sys.version_info >= (3, 9) and shutil.which("c++")
        assert not expected, fault
        pytest.skip(f"no functions for CPUs here: {fault}")


@pytest.fixture
def with_threads():
    """with_threads(compute): tensors, {name: tensor}, by one thread; those by two and by three have
    the same bits."""
    before = torch.get_num_threads()

    def computed(compute):
        torch.set_num_threads(1)
        found = compute()
        for threads in (2, 3):
            torch.set_num_threads(threads)
            again = compute()
            differing = [
                name for name, tensor in found.items() if not torch.equal(again[name], tensor)
            ]
            assert not differing, f"{threads} threads: {differing}"
        torch.set_num_threads(before)
        return found

    yield computed
    torch.set_num_threads(before)
