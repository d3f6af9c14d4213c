"""The blocks as numbers, against the modules themselves: counted on the meta device, in training mode."""

import pytest
import torch

from models import shapes
from models.costs import count
from models.efficientnet import build
from recipe.config import Model

OLD = torch.__version__.startswith("2.0.")  # keeps copies that later versions do without
B4 = {"name": "efficientnet_b4"}
ORIGINAL = {"group_size": 1, "expansion": 6, "norm": "batch"}


@pytest.mark.parametrize(
    ("sections", "image_size"),
    [
        (B4, 380),
        ({**B4, "padding": "torch"}, 381),
        ({**B4, "norm": "layer", "classes": 7}, 63),
        ({**B4, "width": 0.85, "depth": 0.7, "drop_path": 0.0, "dropout": 0.0}, 97),
        ({"name": "efficientnet_b0", "width": 0.5, "depth": 0.4, "classes": 10, "expansion": 3}, 28),
        ({"name": "efficientnet_b7", "group_size": 32}, 64),
        ({**B4, **ORIGINAL}, 100),
        ({**B4, "proxy_norm": True}, 100),
    ],
    ids=["b4", "torch padding", "layer", "narrow and short", "b0", "b7", "depthwise batch", "proxy"],
)
def test_shapes_are_those_of_the_modules(sections, image_size):
    """To the last element. What is kept is the difference that two images more make: batch and proxy normalisation
    keep something of a micro batch as a whole besides."""
    model = Model(**sections)
    with torch.device("meta"):
        modules = build(model, seed=0)
    fewer, more = (count(modules, image_size, micro) for micro in (2, 4))
    found = shapes.blocks(model, image_size)
    assert list(found) == list(fewer)
    for name, shape in found.items():
        parameters = list(modules.block(name).parameters())
        assert fewer[name].forward == 2 * shape.multiply_adds, name
        assert fewer[name].output == 4 * 2 * shape.output, name
        assert sum(each.numel() for each in parameters) == shape.parameters, name
        assert sum(each.numel() for each in parameters if each.dim() == 1) == shape.vectors, name
        if OLD:
            continue
        assert more[name].saved - fewer[name].saved == 4 * 2 * shape.saved, name
        if sections.get("norm") != "batch" and not sections.get("proxy_norm"):
            assert fewer[name].saved == 4 * 2 * shape.saved, name


def test_the_published_models_size():
    """The G16 model of Graphcore's examples has 19.33 million parameters; timm's B4 has 19,341,616."""
    assert sum(shape.parameters for shape in shapes.blocks(Model(**B4), 380).values()) == 19_328_168
    original = shapes.blocks(Model(**B4, **ORIGINAL), 380)
    assert sum(shape.parameters for shape in original.values()) == 19_341_616


def test_channels_are_rounded_as_timm_rounds_them():
    from timm.models._efficientnet_builder import round_channels

    for width in (0.1, 0.35, 0.5, 1.0, 1.1, 1.4, 2.0, 3.7):
        for channels in (16, 24, 32, 40, 80, 112, 192, 320, 1280):
            assert shapes.round_channels(channels, width) == round_channels(channels, multiplier=width, divisor=8)
