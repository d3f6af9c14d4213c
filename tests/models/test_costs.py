"""What blocks cost, against closed forms and torch's own counters; the best cut, against a search through all cuts."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

from models.costs import BlockCost, Cut, balance, count, measure, median, multiply_adds
from models.efficientnet import build
from models.stages import BlockList, split_names
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "classes": 10}
STEM, BLOCK = BlockCost(1, 2, 10, 5, 7), BlockCost(3, 6, 100, 20, 50)


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


def search(costs, stages, in_flight, recompute, per_parameter, memory):
    """The best cut by trying all, from the definition: (fits, slowest stage, largest memory), and its names."""
    names = list(costs)
    before = dict(zip(names[1:], names))
    found = []
    for cuts in itertools.combinations(names[1:], stages - 1):
        parts = split_names(names, cuts)
        if not all(any(costs[name].parameters for name in part) for part in parts):
            continue
        slowest, largest = 0, 0
        for stage, part in enumerate(parts):
            seconds, held, transient = 0, 0, 0
            for name in part:
                cost = costs[name]
                seconds += cost.forward + cost.backward
                if name in recompute:
                    seconds += cost.forward
                    held += costs[before[name]].output if name in before else 0
                    transient = max(transient, cost.saved)
                else:
                    held += cost.saved
            state = per_parameter * sum(costs[name].parameters for name in part)
            slowest, largest = max(slowest, seconds), max(largest, in_flight[stage] * held + transient + state)
        fits = memory is None or largest <= memory
        found.append((not fits, (slowest, largest) if fits else (largest, slowest), cuts))
    misfit, best, _ = min(found)
    return not misfit, best


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_is_the_best_of_all(seed):
    """Small whole numbers, so that sums are exact and ties are frequent."""
    draw = random.Random(seed)
    blocks, stages = draw.randint(4, 9), draw.randint(1, 4)
    costs = {
        str(block): BlockCost(
            draw.randint(0, 5), draw.randint(0, 9), draw.randint(0, 40), draw.randint(0, 9), draw.choice((0, 1, 5, 20))
        )
        for block in range(blocks)
    }
    costs["1"] = costs["1"]._replace(parameters=3)
    recompute = frozenset(name for name in costs if draw.random() < draw.choice((0, 0, 0.5)))
    in_flight = [draw.randint(1, 5) for _ in range(stages)]
    able = sum(cost.parameters > 0 for cost in costs.values())
    for memory in (None, draw.randint(50, 200), draw.randint(100, 500), 1):
        arguments = {"in_flight": in_flight, "recompute": recompute, "bytes_per_parameter": 2, "memory": memory}
        if stages > able:
            with pytest.raises(ValueError, match=f"^{stages} stages are more than the {able} blocks that have param"):
                balance(costs, stages, **arguments)
            continue
        cut = balance(costs, stages, **arguments)
        fits, best = search(costs, stages, in_flight, recompute, 2, memory)
        assert cut.fits == fits
        assert ((max(cut.seconds), max(cut.bytes)) if fits else (max(cut.bytes), max(cut.seconds))) == best
        assert len(split_names(list(costs), cut.cuts)) == len(cut.seconds) == len(cut.bytes) == stages


def test_less_memory_moves_the_cut_until_nothing_fits():
    """Four like blocks; under 1F1B the first stage holds two micro batches and the second one."""
    costs = dict.fromkeys("abcd", BlockCost(1, 2, 100, 10, 1))
    even, narrow, hopeless = (
        balance(costs, 2, in_flight=[2, 1], bytes_per_parameter=0, memory=memory) for memory in (400, 399, 299)
    )
    assert even == Cut(["c"], [6, 6], [400, 200], 400) and even.fits and even.imbalance == 0
    assert narrow == Cut(["b"], [3, 9], [200, 300], 399) and narrow.fits and narrow.imbalance == 0.5
    assert hopeless == Cut(["b"], [3, 9], [200, 300], 299) and not hopeless.fits


def test_recomputing_pays_the_forward_pass_twice_and_keeps_the_input():
    costs = {"preprocess": BlockCost(0, 0, 0, 4, 0), "stem": STEM, "a": BLOCK, "b": BLOCK}
    arguments = {"in_flight": [8], "bytes_per_parameter": 12}
    state = 12 * (7 + 50 + 50)
    assert balance(costs, 1, **arguments) == Cut([], [21], [8 * 210 + state])
    assert balance(costs, 1, recompute={"a"}, **arguments) == Cut([], [24], [8 * (10 + 5 + 100) + 100 + state])
    everything = Cut([], [28], [8 * (4 + 5 + 20) + 100 + state])  # preprocess keeps the images, which do not count
    assert balance(costs, 1, recompute=set(costs), **arguments) == everything


def test_no_stage_is_without_parameters():
    costs = {"preprocess": BlockCost(100, 0, 0, 4, 0), "stem": STEM, "a": BLOCK}
    assert balance(costs, 2, in_flight=[1, 1]).cuts == ["a"]
    with pytest.raises(ValueError) as caught:
        balance(costs, 3, in_flight=[1, 1, 1])
    assert str(caught.value) == "3 stages are more than the 2 blocks that have parameters"
    with pytest.raises(AssertionError, match="1 counts in flight for 2 stages"):
        balance(costs, 2, in_flight=[1])


def test_a_cut_is_described_in_one_line():
    cut = Cut(["blocks.2.1"], [0.0961, 0.1039], [120_400_000, 8_000_000])
    line = (
        "split [blocks.2.1] (measured): stages take 48 % and 52 % of the time, 3.9 % from even; memory 120 and 8.0 MB"
    )
    assert cut.describe() == line
    assert cut._replace(memory=100_000_000).describe() == f"{line}: no cut fits into 100 MB, this one needs least"
    assert Cut(["a", "b"], [1, 1, 2], [10**10] * 3).describe("counted") == (
        "split [a, b] (counted): stages take 25 %, 25 % and 50 % of the time, 50.0 % from even; "
        "memory 10,000, 10,000 and 10,000 MB"
    )
    assert Cut([], [1], [10**7]).describe() == (
        "split [] (measured): one stage takes all of the time, 0.0 % from even; memory 10 MB"
    )


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


def test_phases_that_come_one_after_the_other_are_balanced_each():
    """Cut at b, sums are 6 and 7, cut at c 9 and 4. But phases take 5 + 5.5 where it is cut at b, 6 + 3.5 at c."""
    costs = {"a": BlockCost(5, 1, 1, 1, 1), "b": BlockCost(1, 2, 1, 1, 1), "c": BlockCost(0.5, 3.5, 1, 1, 1)}
    assert balance(costs, 2, in_flight=[1, 1]).cuts == ["b"]
    assert balance(costs, 2, in_flight=[1, 1], phases=True).cuts == ["c"]


@pytest.mark.parametrize("seed", range(20))
def test_no_move_of_a_border_makes_phases_faster(seed):
    draw = random.Random(seed)
    names = [f"b{number}" for number in range(12)]
    costs = {name: BlockCost(draw.uniform(0.5, 2), draw.uniform(0.5, 2), 1, 1, 1) for name in names}

    def slowness(edges):
        parts = split_names(names, [names[edge] for edge in edges])
        return sum(max(sum(costs[name][phase] for name in part) for part in parts) for phase in (0, 1))

    by_sums, (one, other) = (
        [names.index(cut) for cut in balance(costs, 3, in_flight=[1] * 3, phases=phases).cuts]
        for phases in (False, True)
    )
    assert slowness((one, other)) <= slowness(by_sums)
    for moved in ((one + 1, other), (one - 1, other), (one, other + 1), (one, other - 1)):
        if 0 < moved[0] < moved[1] < len(names):
            assert slowness(moved) >= slowness((one, other)) - 1e-9
