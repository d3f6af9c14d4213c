"""The work of a replica that selects, on a small model."""

import pytest
import torch
from torch import nn

from benchmarks import selection
from benchmarks.selection import DENSE, GRADIENT, UPDATE, Work


@pytest.mark.parametrize(
    ("name", "moved"), [(DENSE, range(1200, 1241)), (GRADIENT, range(1, 1241)), (UPDATE, [1])]
)
def test_each_kind_makes_updates_of_as_many_weights_as_it_selects(name, moved, monkeypatch):
    """A thousandth of 1,240 is one.

    Where that is of the gradient, LARS stretches the others' weight decay with it.
    """
    shapes = {"conv.weight": (40, 30), "conv.bias": (40,)}
    monkeypatch.setattr(
        selection,
        "b4_parameters",
        lambda: {n: nn.Parameter(torch.ones(s)) for n, s in shapes.items()},
    )
    monkeypatch.setattr(selection, "norm_parameters", lambda model: [])
    monkeypatch.setattr(selection, "build", lambda *_: None)
    work = Work(name)
    before = work._state.flat.clone()
    work.prepare()
    work(0)
    assert int((work._state.flat != before).sum()) in moved
