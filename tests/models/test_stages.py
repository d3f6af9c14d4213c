"""A model cut into parts: the same numbers, the same state, whatever the cut."""

import pytest
import torch
from torch import nn

from models.balance import split_names
from models.efficientnet import build
from models.stages import BlockList
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "classes": 10}
NAMES = ["preprocess", "stem", "blocks.0.0", "blocks.1.0", "head"]


@pytest.fixture
def model():
    return build(Model(dropout=0.5, drop_path=0.5, **SMALL), seed=0)


@pytest.fixture
def images():
    return torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_model_cut_between_any_two_blocks_computes_the_same(model, images, training):
    """The same operations in the same order, random layers included: equality is bitwise."""
    model.train(training)
    expected = model(images)
    for cut in model.names[1:]:
        first, second = (model.part(names) for names in split_names(model.names, [cut]))
        assert second.names[0] == cut
        assert torch.equal(second(first(images)), expected), cut
    x = images
    for name in model.names:
        x = model.part([name])(x)
    assert torch.equal(x, expected)


def test_state_dicts_of_the_parts_are_a_partition_of_the_whole(model):
    """And a part loads its share of another model's state."""
    whole = model.state_dict()
    for cuts in (["stem"], ["blocks.0.0"], ["blocks.3.0"], ["head"], ["blocks.1.0", "blocks.4.0", "head"]):
        parts = [model.part(names).state_dict() for names in split_names(model.names, cuts)]
        assert [key for part in parts for key in part] == list(whole)
        assert all(part[key].data_ptr() == whole[key].data_ptr() for part in parts for key in part)
    other = build(Model(**SMALL), seed=1)
    part = other.part(split_names(model.names, ["blocks.3.0"])[1])
    part.load_state_dict({key: whole[key] for key in part.state_dict()})
    drawn = [key for key in whole if ("conv" in key or "classifier" in key) and key.endswith("weight")]
    for key in drawn:  # norms and biases start as ones and zeros, equal for every seed
        assert torch.equal(other.state_dict()[key], whole[key]) == (key in part.state_dict())


def test_blocks_run_in_their_order_and_names_nest():
    blocks = BlockList([("b.1", nn.Linear(2, 3)), ("a", nn.Linear(3, 4)), ("b.0.x", nn.Linear(4, 5))])
    assert blocks.names == ["b.1", "a", "b.0.x"]
    assert set(blocks.state_dict()) == {f"{name}.{kind}" for name in blocks.names for kind in ("weight", "bias")}
    assert blocks(torch.zeros(1, 2)).shape == (1, 5)
    assert blocks.block("b.0.x").out_features == 5
    for unknown in ("b", "b.0", "c", ""):
        with pytest.raises(KeyError):
            blocks.block(unknown)
