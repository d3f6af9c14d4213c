"""Weights and momentum in float16 against float32 ones, bit for bit or in the mean; what is saved and loaded."""

import io
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.efficientnet import build
from optim import factory
from optim.half_weights import WeightState
from optim.lars import LARS
from recipe.config import Model, Optimizer

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SHAPES = {"conv.weight": (6, 3, 3, 3), "norm.weight": (6,), "head.weight": (10, 6), "head.bias": (10,)}
# Weights and momentum of every kind; the compute dtype comes from each test.
KINDS = [(HALF, "stochastic"), (HALF, "nearest"), (SINGLE, "stochastic")]


def random_values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def module_parameters(compute=SINGLE, names=tuple(SHAPES)):
    """Of float16 values in any dtype, so that states of all dtypes start from the same weights."""
    values = random_values(0)
    return {name: nn.Parameter(values[name].half().to(compute)) for name in names}


def lars(parameters):
    """The published recipe's; at rate 8 a step is 0.8 % of the weights' norm, some ten spacings of float16."""
    return factory.create(Optimizer(), parameters, ["norm.weight"])


def plain(parameters):
    """No trust ratio, no weight decay, no momentum from one step to the next: weights less rate times gradient."""
    return LARS([{"params": parameters.values(), "adapt": False}], lr=0.0, momentum=0.0)


def weight_state(parameters, dtype=HALF, rounding="stochastic", seed=0, create=lars):
    return WeightState(parameters.items(), create, dtype=dtype, rounding=rounding, seed=seed)


def backward(parameters, gradients):
    """A backward pass of which each parameter gets its gradient, whatever its value."""
    sum((parameter * gradients[name].to(parameter.dtype)).sum() for name, parameter in parameters.items()).backward()


def take_step(state, parameters, step, gradients=None, lr=8.0, divisor=1.0, micro_batches=1):
    state.gradients.zero()
    for _ in range(micro_batches):
        backward(parameters, gradients or random_values(1 + step))
        state.gradients.accumulate()
    return state.update(step, lr, torch.tensor(divisor), measure=True)


def flattened(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


def bits_of(state):
    """The state as integers: NaNs and the signs of zeros count."""
    flat = {key: flattened(tensors) for key, tensors in state.state_dict().items()}
    return {key: values.view(torch.int16 if values.dtype == HALF else torch.int32) for key, values in flat.items()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys() == {"weights", "momentum_buffer"}
    for key, values in actual.items():
        assert torch.equal(values, expected[key]), key


def test_in_float32_throughout_it_is_plain_lars():
    """Five steps of five roundings each, of values not above 4, in either: 2 x 25 x 4 x 2**-24 = 1.2e-5 at most."""
    parameters, others = module_parameters(), module_parameters()
    state, optimizer = weight_state(parameters, SINGLE), lars(others)
    for step in range(5):
        gradients = random_values(1 + step)
        take_step(state, parameters, step, gradients, lr=1.0 + step, divisor=256.0)
        for name, parameter in others.items():
            parameter.grad = gradients[name] / 256
        for group in optimizer.param_groups:
            group["lr"] = 1.0 + step
        optimizer.step()
        for name, parameter in others.items():
            assert parameter.abs().max() < 4
            torch.testing.assert_close(parameters[name], parameter, rtol=0, atol=1.2e-5)
            momentum = optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(state.state_dict()["momentum_buffer"][name], momentum, rtol=0, atol=1.2e-5)


def test_the_mean_of_the_stochastic_update_is_the_float32_update():
    """From the same float16 state, over 400 seeds. Hoeffding: a mean of 400 roundings is off by 0.15 of the spacing
    with a probability of 2 exp(-2 * 400 * 0.15**2) = 3e-8; the average error of all elements, of which each has a
    standard deviation of at most 0.5 / sqrt(400), by 5 standard deviations with 6e-7."""
    seeds = 400
    start = random_values(9)
    saved = {"weights": start, "momentum_buffer": {name: 0.01 * value for name, value in random_values(8).items()}}
    saved = {key: {name: value.half() for name, value in tensors.items()} for key, tensors in saved.items()}

    def updated(dtype, seed):
        parameters = module_parameters()
        state = weight_state(parameters, dtype, seed=seed)
        state.load_state_dict(saved)
        take_step(state, parameters, 0)
        return {key: flattened(tensors).double().numpy() for key, tensors in state.state_dict().items()}

    exact = updated(SINGLE, 0)
    many = [updated(HALF, seed) for seed in range(seeds)]
    for key, expected in exact.items():
        errors = np.mean([result[key] for result in many], axis=0) - expected
        errors /= np.maximum(np.spacing(np.abs(expected).astype(np.float16)).astype(np.float64), 2.0**-24)
        assert np.abs(errors).max() < 0.15
        assert abs(errors.mean()) < 5 * 0.5 / np.sqrt(seeds * errors.size)
        assert np.std([result[key] for result in many], axis=0).max() > 0


def test_updates_too_small_for_float16_are_lost_to_nearest_rounding_only():
    """256 updates of a 64th of the spacing move a weight by 4 spacings. Each rounding adds a variance of about
    1/64, in all 4 or less; the mean over 1,024 weights then has a standard deviation of 2/32, tolerated 5 times."""
    spacing = 2.0**-10
    moved = {}
    for rounding in ("stochastic", "nearest"):
        parameters = {"bias": nn.Parameter(torch.full((1024,), 1.5))}
        state = weight_state(parameters, HALF, rounding, create=plain)
        for step in range(256):
            take_step(state, parameters, step, {"bias": torch.full((1024,), spacing / 64)}, lr=1.0)
        moved[rounding] = (1.5 - state.state_dict()["weights"]["bias"].double().mean().item()) / spacing
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(4, abs=5 * 2 / 32)


def test_rounding_to_nearest_gives_the_half_of_the_float32_update():
    """Bitwise, for one update from the same float16 state."""
    results = []
    for dtype in (HALF, SINGLE):
        parameters = module_parameters()
        state = weight_state(parameters, dtype, "nearest")
        take_step(state, parameters, 0)
        results.append({key: flattened(tensors).half() for key, tensors in state.state_dict().items()})
    assert_same_bits(*results)
    assert not torch.equal(results[0]["weights"], flattened(module_parameters()).half())


@pytest.mark.parametrize("compute", [SINGLE, HALF, BRAIN], ids=str)
@pytest.mark.parametrize(("dtype", "rounding"), KINDS, ids=str)
def test_the_working_copy_is_the_state_in_the_compute_dtype(dtype, rounding, compute):
    """From the start, after updates, after a step that is left out, and after loading."""
    parameters = module_parameters(compute)
    state = weight_state(parameters, dtype, rounding)

    def assert_refreshed():
        for name, weight in state.state_dict()["weights"].items():
            assert parameters[name].dtype == compute
            assert weight.dtype == dtype
            assert torch.equal(parameters[name], weight.to(compute))

    assert_refreshed()
    for step in range(3):
        before = flattened(parameters)
        take_step(state, parameters, step)
        assert not torch.equal(flattened(parameters), before)
        assert_refreshed()
    take_step(state, parameters, 3, {name: value * torch.inf for name, value in random_values(1).items()})
    assert_refreshed()
    state.load_state_dict({"weights": random_values(5), "momentum_buffer": random_values(6)})
    assert_refreshed()


def test_the_weights_start_as_the_modules_rounded_to_the_state():
    """A third is in no dtype; 1e-8 is below what float16 has."""
    parameters = {"a": nn.Parameter(torch.tensor([1 / 3, 1e-8, -2.0]))}
    state = weight_state(parameters, HALF)
    expected = torch.tensor([1 / 3, 1e-8, -2.0]).half()
    assert torch.equal(state.state_dict()["weights"]["a"], expected)
    assert torch.equal(parameters["a"], expected.float())


@pytest.mark.parametrize("compute", [SINGLE, HALF, BRAIN], ids=str)
def test_gradients_accumulate_in_float32(compute):
    """3,072 ones: added up in float16 they stop at 2,048, in bfloat16 at 256. Sums of integers are exact, and the
    norm of 4 threes is 6."""
    parameters = {"a": nn.Parameter(torch.ones(4, dtype=compute))}
    state = weight_state(parameters)
    _, norms = take_step(state, parameters, 0, {"a": torch.ones(4)}, divisor=1024.0, micro_batches=3072)
    assert norms.gradient.item() == 6


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
def test_a_step_starts_without_the_gradients_of_the_last(compute):
    parameters = module_parameters(compute)
    state = weight_state(parameters)
    first = take_step(state, parameters, 0, random_values(1))[1].gradient
    assert take_step(state, parameters, 1, random_values(1))[1].gradient == first


def test_gradients_are_divided_by_scale_and_accumulation_in_float32():
    """The quotient 2**-26 is zero in float16; the norm of four of them is 2**-25."""
    parameters = {"a": nn.Parameter(torch.ones(4, dtype=HALF))}
    state = weight_state(parameters)
    _, norms = take_step(state, parameters, 0, {"a": torch.full((4,), 2.0**-16)}, divisor=2.0**10)
    assert norms.gradient.item() == 2.0**-25


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize(("dtype", "rounding"), KINDS, ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(dtype, rounding, bad, compute):
    """Bitwise; and the next step is as if there had been none before it."""
    parameters = module_parameters(compute)
    state = weight_state(parameters, dtype, rounding)
    finite, _ = take_step(state, parameters, 0)
    assert finite.item() is True
    before, working = bits_of(state), flattened(parameters)
    gradients = random_values(2)
    gradients["head.bias"][-1] = bad
    finite, _ = take_step(state, parameters, 1, gradients)
    assert finite.item() is False
    assert_same_bits(bits_of(state), before)
    assert torch.equal(flattened(parameters), working)

    take_step(state, parameters, 2)
    undisturbed = module_parameters(compute)
    other = weight_state(undisturbed, dtype, rounding)
    take_step(other, undisturbed, 0)
    take_step(other, undisturbed, 2)
    assert_same_bits(bits_of(state), bits_of(other))


def test_an_overflow_of_the_sum_counts_as_not_finite():
    """Each float32 gradient is finite, twice it is not."""
    parameters = module_parameters()
    state = weight_state(parameters)
    huge = {name: torch.full(shape, 3e38) for name, shape in SHAPES.items()}
    before = bits_of(state)
    finite, _ = take_step(state, parameters, 0, huge, micro_batches=2)
    assert finite.item() is False
    assert_same_bits(bits_of(state), before)


def saved(state):
    """Through a file that may hold only tensors."""
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(("dtype", "rounding"), KINDS, ids=str)
def test_a_run_that_was_saved_and_loaded_goes_on_bitwise(dtype, rounding, compute):
    parameters = module_parameters(compute)
    state = weight_state(parameters, dtype, rounding)
    for step in range(3):
        take_step(state, parameters, step)
    file = saved(state)
    for step in range(3, 6):
        take_step(state, parameters, step)

    resumed_parameters = {name: nn.Parameter(torch.zeros(shape, dtype=compute)) for name, shape in SHAPES.items()}
    resumed = weight_state(resumed_parameters, dtype, rounding)
    resumed.load_state_dict(file)
    for step in range(3, 6):
        take_step(resumed, resumed_parameters, step)
    assert_same_bits(bits_of(resumed), bits_of(state))
    assert torch.equal(flattened(resumed_parameters), flattened(parameters))


def test_a_saved_state_is_a_copy_in_the_dtype_of_the_state():
    parameters = module_parameters()
    state = weight_state(parameters)
    given = state.state_dict()
    take_step(state, parameters, 0)
    for name, shape in SHAPES.items():
        assert torch.equal(given["weights"][name], module_parameters()[name].half())
        assert torch.equal(given["momentum_buffer"][name], torch.zeros(shape, dtype=HALF))


def test_a_state_of_another_dtype_is_rounded_to_nearest():
    given = {"weights": random_values(3), "momentum_buffer": random_values(4)}
    state = weight_state(module_parameters(), HALF)
    state.load_state_dict(given)
    halves = saved(state)
    for key, tensors in given.items():
        assert torch.equal(flattened(halves[key]), flattened(tensors).half())
    single = weight_state(module_parameters(), SINGLE)
    single.load_state_dict(halves)
    for key, tensors in saved(single).items():
        assert torch.equal(flattened(tensors), flattened(halves[key]).float())


def damaged(key, name, tensor):
    """A state of other weights in which one tensor is another, or missing if None."""
    state = {"weights": random_values(3), "momentum_buffer": random_values(4)}
    if name is None:
        del state[key]
    elif tensor is None:
        del state[key][name]
    else:
        state[key][name] = tensor
    return state


@pytest.mark.parametrize("key", ["weights", "momentum_buffer"])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("head.weight", torch.zeros(6, 10), r"head.weight is \[6, 10\], the model's is \[10, 6\]"),
        ("head.bias", torch.zeros(1), r"head.bias is \[1\], the model's is \[10\]"),
        ("head.bias", None, "head.bias is missing"),
        ("tail.bias", torch.zeros(10), "tail.bias is unknown"),
        (None, None, "is missing"),
    ],
    ids=["turned", "shorter", "missing", "unknown", "none at all"],
)
def test_a_state_that_does_not_fit_is_refused_whole(key, name, tensor, message):
    """Named by its first fault, and nothing of it is taken over."""
    parameters = module_parameters()
    state = weight_state(parameters)
    before = bits_of(state)
    with pytest.raises(ValueError, match=message if name else f"{key} {message}"):
        state.load_state_dict(damaged(key, name, tensor))
    assert_same_bits(bits_of(state), before)
    assert torch.equal(flattened(parameters), flattened(module_parameters()))


def test_what_belongs_to_others_in_a_state_is_let_be():
    state = weight_state(module_parameters())
    before = bits_of(state)
    state.load_state_dict({**saved(state), "loss_scale": {"scale": torch.ones(())}})
    assert_same_bits(bits_of(state), before)


@pytest.mark.parametrize(("dtype", "each"), [(HALF, 2), (SINGLE, 4)], ids=str)
def test_a_weight_and_its_momentum_persist_in_four_bytes_with_float16(dtype, each):
    state = weight_state(module_parameters(), dtype)
    assert state.bytes_per_parameter == 2 * each
    saved = [tensor for tensors in state.state_dict().values() for tensor in tensors.values()]
    elements = sum(parameter.numel() for parameter in module_parameters().values())
    assert sum(tensor.numel() * tensor.element_size() for tensor in saved) == 2 * each * elements


def test_rows_that_are_not_full_take_little_memory():
    """EfficientNet-B4 G16: fewer than one in 4,000 elements of a buffer is padding."""
    with torch.device("meta"):
        parameters = dict(build(Model(), 0).named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    assert count == 19_328_168
    assert count < len(weight_state(parameters).flat) < count * 1.00025


@pytest.mark.parametrize(
    "names", [["head.weight"], ["head.bias", "head.weight", "conv.weight"], [*SHAPES][::-1]], ids=str
)
def test_the_presence_and_order_of_others_changes_nothing(names):
    """So a model cut into stages takes the steps of a whole one: bitwise, the random bits included."""
    results = []
    for chosen in (tuple(SHAPES), names):
        parameters = module_parameters(names=chosen)
        state = weight_state(parameters)
        for step in range(3):
            take_step(state, parameters, step)
        results.append({key: {"": tensors["head.weight"]} for key, tensors in state.state_dict().items()})
    for key, tensors in results[0].items():
        assert torch.equal(tensors[""], results[1][key][""])


@pytest.mark.parametrize(("first", "second"), [({"seed": 0}, {"seed": 1}), ({"step": 0}, {"step": 1})], ids=str)
def test_seed_and_step_choose_the_random_bits(first, second):
    results = []
    for draw in (first, second):
        parameters = module_parameters()
        state = weight_state(parameters, seed=draw.get("seed", 5))
        take_step(state, parameters, draw.get("step", 5), random_values(1))
        results.append(state.state_dict()["weights"]["conv.weight"])
    assert not torch.equal(*results)


def test_weights_and_momentum_have_bits_of_their_own():
    """Weight and momentum become -x and x, with x halfway between two float16 values: by the same bits never of the
    same magnitude, by independent ones half the time; tolerated is 5 times the standard deviation 0.5 / 64."""
    parameters = {"bias": nn.Parameter(torch.zeros(4096))}
    state = weight_state(parameters, create=plain)
    take_step(state, parameters, 0, {"bias": torch.full((4096,), 1 + 2.0**-11)}, lr=1.0)
    weights, momenta = (tensors["bias"] for tensors in state.state_dict().values())
    assert (weights == -momenta).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 64)


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
def test_the_norms_are_those_of_gradient_weights_and_update(compute):
    """Against float64. The update is the one before it is rounded; a difference of float32 weights, it errs by
    2**-24 of a weight, near 3 at most, of its own norm of 0.1 or more: by 2e-6."""
    parameters = module_parameters(compute)
    state = weight_state(parameters)
    exact_parameters = module_parameters()
    exact = weight_state(exact_parameters, SINGLE)
    gradients = {name: value.half().float() for name, value in random_values(1).items()}
    before = flattened(parameters).double()
    _, norms = take_step(state, parameters, 0, gradients, divisor=4.0)
    take_step(exact, exact_parameters, 0, gradients, divisor=4.0)
    expected = flattened(exact_parameters).double() - before
    assert norms.gradient.item() == pytest.approx(flattened(gradients).double().norm().item() / 4, rel=1e-6)
    assert norms.weight.item() == pytest.approx(before.norm().item(), rel=1e-6)
    assert norms.update.item() == pytest.approx(expected.norm().item(), rel=1e-5)
    assert norms.trust.keys() == {"conv.weight", "head.weight"}
    for name, ratio in norms.trust.items():
        w = module_parameters()[name].detach().double().norm().item()
        g = gradients[name].double().norm().item() / 4
        assert ratio.item() == pytest.approx(0.001 * w / (g + 2.5e-6 * w), rel=1e-6)


@pytest.mark.parametrize("compute", [SINGLE, HALF], ids=str)
@pytest.mark.parametrize(("dtype", "rounding"), KINDS, ids=str)
def test_nothing_waits_for_the_device(dtype, rounding, compute, monkeypatch):
    """On tensors without values, as those that a device has not computed yet, reading one raises. Without Triton,
    whose kernels need values."""
    monkeypatch.setitem(sys.modules, "optim.kernels.lars", None)
    with FakeTensorMode():
        parameters = {
            name: nn.Parameter(torch.zeros(shape, dtype=compute, device="cuda")) for name, shape in SHAPES.items()
        }
        state = weight_state(parameters, dtype, rounding)
        state.gradients.zero()
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        state.gradients.accumulate()
        finite, _ = state.update(0, 1.0, torch.ones((), device="cuda"), measure=True)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(finite)
