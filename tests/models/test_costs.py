"""What blocks cost, against closed forms and torch's own counters."""

import time

import pytest
import torch
from torch import nn

from models.balance import BlockCost
from models.costs import count, measure, median, multiply_adds
from models.efficientnet import build
from models.stages import BlockList
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "classes": 10}


@pytest.fixture(params=["group", "batch"])
def model(request):
    norms = {"norm": request.param, "proxy_norm": request.param == "group"}
    return build(Model(dropout=0.5, drop_path=0.5, **norms, **SMALL), seed=0)


@pytest.fixture
def images():
    return torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Float(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.fixture
def plain():
    """Of layers that keep their input and nothing else: [2, 3, 8, 8] -> [2, 4, 6, 6] -> [2, 5]."""
    return BlockList(
        [
            ("preprocess", Float()),
            ("conv", nn.Conv2d(3, 4, 3)),
            ("twice", nn.Sequential(nn.SiLU(), nn.Conv2d(4, 4, 1, bias=False))),
            ("linear", nn.Sequential(nn.Flatten(), nn.Linear(4 * 6 * 6, 5))),
        ]
    )


PLAIN_BYTES = {  # name: saved, output
    "preprocess": (0, 2 * 3 * 8 * 8 * 4),
    "conv": (2 * 3 * 8 * 8 * 4, 2 * 4 * 6 * 6 * 4),
    "twice": (2 * (2 * 4 * 6 * 6 * 4), 2 * 4 * 6 * 6 * 4),
    "linear": (2 * 4 * 6 * 6 * 4, 2 * 5 * 4),
}


def test_measured_bytes_are_those_of_a_closed_form(plain):
    costs = measure(plain, torch.zeros(2, 3, 8, 8, dtype=torch.uint8), repetitions=1)
    assert {name: (cost.saved, cost.output) for name, cost in costs.items()} == PLAIN_BYTES
    assert [cost.parameters for cost in costs.values()] == [0, 4 * 3 * 9 + 4, 16, 144 * 5 + 5]


def test_parameters_in_one_buffer_are_no_saved_bytes(plain):
    """Of a view autograd keeps the whole storage: the weights of all layers."""
    gather(plain)
    costs = measure(plain, torch.zeros(2, 3, 8, 8, dtype=torch.uint8), repetitions=1)
    assert {name: (cost.saved, cost.output) for name, cost in costs.items()} == PLAIN_BYTES


def test_counted_costs_are_those_of_a_closed_form(plain):
    costs = count(plain, image_size=8, micro=2)
    assert {name: (cost.saved, cost.output) for name, cost in costs.items()} == PLAIN_BYTES
    forward = {"preprocess": 0, "conv": 2 * 36 * 4 * 27, "twice": 2 * 36 * 16, "linear": 2 * 144 * 5}
    assert {name: cost.forward for name, cost in costs.items()} == forward
    assert all(cost.backward == 2 * cost.forward for cost in costs.values())


def test_counting_gives_the_bytes_that_are_measured(model, images):
    """Which tensors autograd keeps does not depend on the device: the meta device stands for the real one."""
    counted, measured = count(model, 32, len(images)), measure(model, images, repetitions=1)
    assert list(counted) == list(measured) == model.names
    for name in model.names:
        assert counted[name][2:] == measured[name][2:], name
        assert measured[name].saved > 0 or name == "preprocess"


def test_counted_costs_of_a_known_model():
    """timm's EfficientNet-B0 has 5,288,548 parameters; forward agrees with torch's count, checked below."""
    with torch.device("meta"):
        model = build(Model(name="efficientnet_b0", group_size=1, expansion=6, norm="batch", proxy_norm=False), seed=0)
    costs = count(model, image_size=224, micro=2)
    assert sum(cost.parameters for cost in costs.values()) == 5_288_548
    assert {name: cost.forward for name, cost in costs.items()} == {
        name: 2 * each for name, each in multiply_adds(model, 224).items()
    }
    assert costs["preprocess"] == BlockCost(0, 0, 0, 2 * 3 * 224 * 224 * 4, 0)
    assert costs["stem"].output == 2 * 32 * 112 * 112 * 4


def test_times_are_of_the_blocks_own_passes(images):
    """A block that sleeps in one direction is told from its neighbours; sleeps are long against everything else."""
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

    class Sleeping(nn.Module):
        def __init__(self, *seconds):
            super().__init__()
            self.seconds, self.weight = seconds, nn.Parameter(torch.ones(()))

        def forward(self, x):
            return Sleep.apply(x * self.weight, self.seconds)

    model = BlockList([("preprocess", Float()), ("a", Sleeping(pause, 0.0)), ("b", Sleeping(0.0, pause))])
    costs = measure(model, images, repetitions=3)
    assert costs["preprocess"].backward == 0
    assert costs["a"].forward > pause > costs["a"].backward > 0
    assert costs["b"].backward > pause > costs["b"].forward > 0


def test_measuring_and_counting_leave_no_trace(model, images):
    """To the bit and to the object: an engine's gradients are views of a buffer that it keeps adding to."""
    model.draws.step, model.draws.micro_batch = 7, 5
    model.block("head").eval()  # one block unlike the others
    model(images).sum().backward()
    flat = gather(model)
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    buffers = list(model.buffers())
    training = [module.training for module in model.modules()]
    generator = torch.random.get_rng_state()
    with torch.no_grad():
        measure(model, images, repetitions=2)
        count(model, 32, 3)
    assert (model.draws.step, model.draws.micro_batch) == (7, 5)
    assert [module.training for module in model.modules()] == training
    assert all(one is other for one, other in zip(model.buffers(), buffers))
    for parameter, (gradient, before) in zip(model.parameters(), gradients):
        assert parameter.grad is gradient and torch.equal(gradient, before)
        assert gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(tensor, state[name]), name
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert not any(module._forward_hooks for module in model.modules())


def gather(model):
    """Parameters and gradients become views of one buffer each, as an engine's are; the buffer of the gradients."""
    parameters = list(model.parameters())
    weights, gradients = (torch.zeros(sum(parameter.numel() for parameter in parameters)) for _ in range(2))
    start = 0
    for parameter in parameters:
        part = slice(start, start + parameter.numel())
        weights[part] = parameter.detach().flatten()
        if parameter.grad is not None:
            gradients[part] = parameter.grad.flatten()
        parameter.data = weights[part].view(parameter.shape)
        parameter.grad = gradients[part].view(parameter.shape)
        start = part.stop
    return gradients


def test_a_block_that_fails_leaves_no_trace_either(images):
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("out of memory")

    model = build(Model(norm="batch", proxy_norm=False, **SMALL), seed=0).eval()
    broken = BlockList([(name, model.block(name)) for name in model.names] + [("fails", Fails())]).eval()
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for run in (lambda: measure(broken, images), lambda: count(broken, 32, 3)):
        with pytest.raises(RuntimeError, match="out of memory"):
            run()
        assert not any(module.training or module._forward_hooks for module in broken.modules())
        assert all(torch.equal(buffer, state[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize(
    "sections",
    [
        {"name": "efficientnet_b4"},
        {"name": "efficientnet_b0", "group_size": 1, "expansion": 6, "padding": "torch"},
        {**SMALL, "image_size": 33},
    ],
    ids=["b4 g16", "b0", "small, odd size"],
)
def test_multiply_adds_are_half_of_torchs_flops(sections):
    """torch counts convolutions and matrix products too, at the level of operators, and two per multiply-add."""
    recipe = Model(**sections)
    counter = pytest.importorskip("torch.utils.flop_counter", reason="newer than torch 2.0.1")
    with torch.device("meta"):
        model = build(recipe, seed=0)
        x = torch.zeros(1, 3, recipe.image_size, recipe.image_size, dtype=torch.uint8)
    counts = multiply_adds(model, recipe.image_size)
    assert list(counts) == model.names
    model.eval()
    for name in model.names:
        with counter.FlopCounterMode(display=False) as flops, torch.no_grad():
            x = model.block(name)(x)
        assert counts[name] == flops.get_total_flops() / 2, name


@pytest.mark.parametrize(
    ("name", "published"), [("efficientnet_b0", 0.39e9), ("efficientnet_b3", 1.8e9), ("efficientnet_b4", 4.2e9)]
)
def test_multiply_adds_are_the_published_ones(name, published):
    """1905.11946, table 2, which calls them FLOPS. It gives two digits, and the pools, norms and activations,
    which it counts and we do not, are a few percent: ten cover both."""
    with torch.device("meta"):
        model = build(Model(name=name, group_size=1, expansion=6), seed=0)
    assert sum(multiply_adds(model, Model(name=name).image_size).values()) == pytest.approx(published, rel=0.1)


def test_counting_leaves_the_model_as_it_was(model, images):
    for training in (True, False):
        model.train(training)
        expected = model(images)
        multiply_adds(model, 32)
        assert model.training == training
        assert all(module.training == training for module in model.modules())
        assert not any(module._forward_hooks for module in model.modules())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(model(images), expected)
    with pytest.raises(RuntimeError):
        multiply_adds(model.part(["head"]), 32)
    assert not any(module._forward_hooks for module in model.modules())


def test_of_what_several_processes_measure_the_median_counts():
    measured = [
        {"a": BlockCost(forward, 2.0, 3, 4, 5), "b": BlockCost(1.0, backward, 0, 0, 0)}
        for forward, backward in ((1.0, 9.0), (7.0, 1.0), (2.0, 4.0))
    ]
    assert median(measured) == {"a": BlockCost(2.0, 2.0, 3, 4, 5), "b": BlockCost(1.0, 4.0, 0, 0, 0)}
