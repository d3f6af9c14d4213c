"""Models without memory have the names and shapes of those with it, and so has what they
compute."""

import pytest
import torch
from torch import nn

from models.families import build
from models.meta import without_memory
from recipe import loading
from tests.conftest import QUICKSTART, TINY


def model_of(*overrides):
    return build(loading.load(QUICKSTART, [*TINY, *overrides]).model, 0)


def forms(tensors):
    return [(tuple(each.shape), each.dtype, each.stride()) for each in tensors]


@pytest.mark.parametrize(
    "keys", [(), ("model.norm=batch",), ("model.norm=layer",), ("model.proxy_norm=true",)], ids=str
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_names_shapes_and_layouts_are_those_of_a_model_with_memory(keys, layout):
    expected = model_of(*keys)
    state = torch.get_rng_state()
    with without_memory():
        model = model_of(*keys)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(model.state_dict()) == list(expected.state_dict())
    assert forms(model.state_dict().values()) == forms(expected.state_dict().values())
    assert all(each.is_meta for each in model.state_dict().values())

    images = torch.zeros(2, 3, 24, 24, dtype=torch.uint8).to(memory_format=layout)
    outputs = []
    with torch.no_grad():
        for name in expected.names:
            images = expected.block(name)(images)
            outputs.append(images)
    found = []
    with torch.no_grad(), without_memory():
        images = torch.zeros(2, 3, 24, 24, dtype=torch.uint8).to(memory_format=layout)
        for name in model.names:
            images = model.block(name)(images)
            found.append(images)
    assert forms(found) == forms(outputs)


def test_behind_it_values_are_drawn_and_normalised_again():
    with without_memory():
        assert nn.Linear(3, 3).weight.is_meta
    torch.manual_seed(0)
    drawn = torch.empty(2, 4, 3, 3).normal_()
    assert drawn.std() > 0.5
    torch.testing.assert_close(
        nn.GroupNorm(1, 4)(drawn).mean(), torch.tensor(0.0), rtol=0, atol=1e-6
    )
