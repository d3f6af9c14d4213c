"""What blocks cost: measured, against closed forms; counted, against the modules and torch's own
counter."""

import time

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from models import shapes
from models.balance import BlockCost
from models.base import BlockList
from models.costs import measure, median
from models.efficientnet import build
from recipe.config import Model

OLD = torch.__version__.startswith("2.0.")  # keeps copies that later versions do without
SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "classes": 10}
B4 = {"name": "efficientnet_b4"}
ORIGINAL = {"group_size": 1, "expansion": 6, "norm": "batch"}


def random_images(micro, size):
    return torch.randint(
        0,
        256,
        (micro, 3, size, size),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(0),
    )


class Float(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize("gathered", [False, True])
def test_measured_bytes_are_those_of_a_closed_form(gathered):
    """Of layers that keep their input and nothing else: [2, 3, 8, 8] -> [2, 4, 6, 6] -> [2, 5].

    Of a view autograd keeps the whole storage, with parameters in one buffer the weights of all
    layers: they do not count.
    """
    plain = BlockList(
        [
            ("preprocess", Float()),
            ("conv", nn.Conv2d(3, 4, 3)),
            ("twice", nn.Sequential(nn.SiLU(), nn.Conv2d(4, 4, 1, bias=False))),
            ("linear", nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 5))),
        ]
    )
    if gathered:
        vector_to_parameters(parameters_to_vector(plain.parameters()).detach(), plain.parameters())
    images = 2 * 3 * 8 * 8 * 4
    maps = 2 * 4 * 6 * 6 * 4
    assert {
        name: cost[2:] for name, cost in measure(plain, random_images(2, 8), repetitions=1).items()
    } == {
        "preprocess": (0, images, 0),
        "conv": (images, maps, 4 * 3 * 9 + 4),
        "twice": (2 * maps, maps, 16),
        "linear": (maps, 2 * 5 * 4, 144 * 5 + 5),
    }


@pytest.mark.clock
def test_times_are_of_the_blocks_own_passes():
    """A block that sleeps in one direction is told from its neighbours; sleeps are long against
    everything else."""
    pause = 0.02

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds):
            ctx.seconds = seconds[1]
            time.sleep(seconds[0])
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(ctx.seconds)
            return gradient, None

    class Sleeping(nn.Linear):
        def forward(self, x):
            return Sleep.apply(super().forward(x), self.seconds)

    model = BlockList([("preprocess", Float()), ("a", Sleeping(32, 32)), ("b", Sleeping(32, 32))])
    model.a.seconds = (pause, 0.0)
    model.b.seconds = (0.0, pause)
    costs = measure(model, random_images(3, 32), repetitions=3)
    assert costs["preprocess"].backward == 0
    assert costs["a"].forward > pause > costs["a"].backward > 0
    assert costs["b"].backward > pause > costs["b"].forward > 0


def test_measuring_leaves_no_trace():
    """To the bit and to the object: an engine's gradients are views of a buffer that it keeps
    adding to."""
    model = build(Model(dropout=0.5, drop_path=0.5, norm="batch", **SMALL), seed=0)
    images = random_images(3, 32)
    model.draws.step = 7
    model.draws.micro_batch = 5
    model.block("head").eval()  # one block unlike the others
    model(images).sum().backward()
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state = {
        name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    training = [module.training for module in model.modules()]
    generator = torch.random.get_rng_state()
    with torch.no_grad():
        measure(model, images, repetitions=2)
    assert (model.draws.step, model.draws.micro_batch) == (7, 5)
    assert [module.training for module in model.modules()] == training
    for parameter, (gradient, before) in zip(model.parameters(), gradients):
        assert parameter.grad is gradient and torch.equal(gradient, before)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(torch.random.get_rng_state(), generator)


def test_of_what_several_processes_measure_the_median_counts():
    measured = [{"a": BlockCost(*times, 3, 4, 5)} for times in ((1.0, 9.0), (7.0, 1.0), (2.0, 4.0))]
    assert median(measured) == {"a": BlockCost(2.0, 4.0, 3, 4, 5)}


@pytest.mark.parametrize(
    ("sections", "image_size"),
    [
        ({**B4, "width": 0.3, "depth": 0.3, "padding": "torch", "norm": "layer", "classes": 7}, 63),
        (
            {
                "name": "efficientnet_b7",
                "width": 0.5,
                "depth": 0.2,
                "group_size": 32,
                "expansion": 3,
                "drop_path": 0,
            },
            28,
        ),
        ({**B4, "width": 0.25, "depth": 0.3, **ORIGINAL}, 40),
        ({**B4, "width": 0.25, "depth": 0.3, "proxy_norm": True}, 40),
    ],
    ids=["layer, torch padding", "b7", "depthwise batch", "proxy"],
)
def test_counted_bytes_and_parameters_are_those_of_the_modules(sections, image_size):
    """To the last element."""
    model = Model(**sections)
    modules = build(model, seed=0)
    found = shapes.blocks(model, image_size)
    measured = measure(modules, random_images(3, image_size), repetitions=1)
    counted = shapes.costs(model, image_size, 3, itemsize=4)
    assert list(counted) == list(measured) == modules.names
    for name, cost in counted.items():
        assert cost[3:] == measured[name][3:], name
        assert OLD or cost.saved == measured[name].saved, name
    for name, shape in found.items():
        assert (
            sum(each.numel() for each in modules.block(name).parameters() if each.dim() == 1)
            == shape.vectors
        ), name


@pytest.mark.parametrize(
    "sections",
    [
        B4,
        {"name": "efficientnet_b0", **ORIGINAL, "padding": "torch"},
        {**SMALL, "image_size": 33, "proxy_norm": True},
    ],
    ids=["b4 g16", "b0", "small, odd size"],
)
def test_multiply_adds_are_half_of_torchs_flops(sections):
    """torch counts convolutions and matrix products too, at the level of operators, and two per
    multiply-add."""
    recipe = Model(**sections)
    counter = pytest.importorskip("torch.utils.flop_counter", reason="newer than torch 2.0.1")
    with torch.device("meta"):
        model = build(recipe, seed=0).eval()
        x = torch.zeros(1, 3, recipe.image_size, recipe.image_size, dtype=torch.uint8)
    for name, cost in shapes.costs(recipe, recipe.image_size, micro=3, itemsize=2).items():
        with counter.FlopCounterMode(display=False) as flops, torch.no_grad():
            x = model.block(name)(x)
        assert cost.forward == 3 * flops.get_total_flops() / 2, name
        assert cost.backward == 2 * cost.forward
