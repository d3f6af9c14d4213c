"""State in float16 against float32, bit for bit or in the mean, with every optimizer; what is saved
and loaded."""

import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from models.efficientnet import build
from models.meta import without_memory
from optim.lars import LARS as LarsOptimizer
from optim.weight_state import WeightState
from recipe.config import Model
from tests.optim import states
from tests.optim.states import (
    FORMATS,
    HALF,
    LARS,
    SECTIONS,
    SHAPES,
    SINGLE,
    random_values,
    take_step,
    weight_state,
)
from tests.tensors import assert_bitwise_equal

every_optimizer = pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
every_format = pytest.mark.parametrize(("dtype", "rounding", "compute"), FORMATS, ids=str)
# Each optimizer in one or two formats, and those with and without OptimizerUpdate in all of them.
some_pairs = pytest.mark.parametrize(
    ("section", "dtype", "rounding", "compute"),
    [
        pytest.param(section, *form, id=f"{name} {form}")
        for place, (name, section) in enumerate(SECTIONS.items())
        for number, form in enumerate(FORMATS)
        if name in ("lars", "lamb") or number in (0, place % 5)
    ],
)
COMPUTE = (SINGLE, HALF, states.BRAIN)
every_compute = pytest.mark.parametrize("compute", COMPUTE, ids=str)


def plain(parameters):
    """No trust ratio, no weight decay, no momentum from one step to the next: weights less rate
    times gradient."""
    optimizer = LarsOptimizer(
        [{"params": parameters.values(), "adapt": False}], lr=0.0, momentum=0.0
    )
    return WeightState(
        parameters.items(), lambda _: optimizer, dtype=HALF, rounding="stochastic", seed=0
    )


def flattened(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors.values()])


@every_optimizer
def test_rounding_to_nearest_gives_the_half_of_the_float32_update(section):
    """Bitwise, for one update from the same state; slots that need float32 (the square of 2e-4 is
    4e-8, and float16 has nothing between 0 and 6e-8) are not rounded. Norms are those from before
    the rounding, against float64: the update's, a difference of float32 weights, errs by 2**-24 of
    a weight."""
    results = []
    norms = []
    for dtype in (HALF, SINGLE):
        parameters = states.module_parameters()
        state = weight_state(parameters, section, dtype, "nearest")
        norms.append(take_step(state, parameters, 5, divisor=4.0)[1])
        results.append(state.state_dict())
        assert results[-1].keys() == {"weights", *states.slots_of(section)}
        for key, tensors in results[-1].items():
            assert {tensor.dtype for tensor in tensors.values()} == {
                SINGLE if key in states.IN_FLOAT32 else dtype
            }
    for key, tensors in results[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, results[1][key][name].to(tensor.dtype)), (key, name)
    before = flattened(states.module_parameters()).double()
    gradient = flattened(random_values(6)).double() + 0.4 * before
    update = flattened(results[1]["weights"]).double() - before
    for found in norms:
        assert found.gradient.item() == pytest.approx(gradient.norm().item() / 4, rel=1e-6)
        assert found.weight.item() == pytest.approx(before.norm().item(), rel=1e-6)
        assert found.update.item() == pytest.approx(update.norm().item(), rel=1e-5)
        assert found.trust.keys() == (
            {*SHAPES} - {*states.SKIPPED} if section["name"] == "lars" else set()
        )


@some_pairs
def test_a_run_goes_on_bitwise_from_every_step_at_which_it_was_saved(
    section, dtype, rounding, compute
):
    """Step 2 is skipped, so a count of the updates made would differ from the number of the
    step."""
    steps = 5

    def go_on(state, parameters, step):
        finite, _ = take_step(state, parameters, step, torch.nan if step == 2 else 1.0)
        assert finite.item() is (step != 2)

    parameters = states.module_parameters(compute)
    state = weight_state(parameters, section, dtype, rounding)
    files = []
    for step in range(steps):
        files.append(state.state_dict())
        go_on(state, parameters, step)
    for first, file in enumerate(files):
        resumed_parameters = {
            name: nn.Parameter(torch.zeros_like(w)) for name, w in parameters.items()
        }
        resumed = weight_state(resumed_parameters, section, dtype, rounding)
        resumed.load_state_dict(file)
        for step in range(first, steps):
            go_on(resumed, resumed_parameters, step)
        assert_bitwise_equal(resumed.state_dict(), state.state_dict())
        assert torch.equal(flattened(resumed_parameters), flattened(parameters))


@some_pairs
def test_a_gradient_that_is_not_finite_changes_nothing(section, dtype, rounding, compute):
    """Bitwise, one element of one parameter; and the next step is as if there had been none before
    it."""
    parameters = states.module_parameters(compute)
    undisturbed = states.module_parameters(compute)
    state, other = (
        weight_state(named, section, dtype, rounding) for named in (parameters, undisturbed)
    )
    take_step(state, parameters, 3)
    before = state.state_dict()
    working = flattened(parameters)
    for bad in (torch.inf, -torch.inf, torch.nan):
        gradients = random_values(2)
        gradients["head.bias"][-1] = bad
        finite, norms = take_step(state, parameters, 4, gradients=gradients)
        assert finite.item() is False and not norms.update.isfinite()
        assert_bitwise_equal(state.state_dict(), before)
        assert torch.equal(flattened(parameters), working)
    take_step(state, parameters, 5)
    for step in (3, 5):
        take_step(other, undisturbed, step)
    assert_bitwise_equal(state.state_dict(), other.state_dict())


def test_an_overflow_of_the_sum_counts_as_not_finite():
    """Each float32 gradient is finite, twice it is not."""
    parameters = states.module_parameters()
    huge = {name: torch.full(shape, 3e38) for name, shape in SHAPES.items()}
    finite, _ = take_step(weight_state(parameters), parameters, 0, gradients=huge, micro_batches=2)
    assert finite.item() is False


@pytest.mark.parametrize(
    ("section", "compute"),
    [
        # LARS and LAMB, with and without OptimizerUpdate, in all dtypes; each other optimizer in
        # one.
        pytest.param(
            section,
            compute,
            id=f"{name} {compute}",
            marks=() if name in ("lars", "lamb") or number == place % 3 else pytest.mark.slow,
        )
        for place, (name, section) in enumerate(SECTIONS.items())
        for number, compute in enumerate(COMPUTE)
    ],
)
def test_nothing_waits_for_the_device(section, compute, monkeypatch):
    """On tensors without values, as those that a device has not computed yet, reading one raises.

    Without Triton, whose kernels need values.
    """
    monkeypatch.setitem(sys.modules, "optim.kernels.lars", None)
    for dtype in (HALF, SINGLE):
        with FakeTensorMode():
            parameters = {
                name: nn.Parameter(torch.zeros(shape, dtype=compute, device="cuda"))
                for name, shape in SHAPES.items()
            }
            state = weight_state(parameters, section, dtype)
            state.gradients.zero()
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            state.gradients.accumulate()
            finite, _ = state.update(0, 1.0, torch.ones((), device="cuda"), measure=True)
            with pytest.raises(Exception, match="_local_scalar_dense"):
                bool(finite)


def test_updates_too_small_for_nearest_rounding_add_up():
    """256 updates of a 64th of the spacing move a weight by 4 spacings.

    Each rounding adds a variance of about 1/64, in all 4 or less; the mean over 1,024 weights then
    has a standard deviation of 2/32, tolerated 5 times.
    """
    spacing = 2.0**-10
    parameters = {"bias": nn.Parameter(torch.full((1024,), 1.5))}
    state = plain(parameters)
    gradients = {"bias": torch.full((1024,), spacing / 64)}
    for step in range(256):
        take_step(state, parameters, step, gradients=gradients, lr=1.0)
    moved = (1.5 - state.state_dict()["weights"]["bias"].double().mean().item()) / spacing
    assert moved == pytest.approx(4, abs=5 * 2 / 32)


def test_weights_and_momentum_have_bits_of_their_own():
    """Weight and momentum become -x and x, with x halfway between two float16 values: by the same
    bits never of the same magnitude, by independent ones half the time; tolerated is 5 times the
    standard deviation 0.5 / 64."""
    parameters = {"bias": nn.Parameter(torch.zeros(4096))}
    state = plain(parameters)
    take_step(state, parameters, 0, gradients={"bias": torch.full((4096,), 1 + 2.0**-11)}, lr=1.0)
    weights, momenta = (tensors["bias"] for tensors in state.state_dict().values())
    assert (weights == -momenta).double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 64)


@pytest.mark.parametrize("names", [["head.weight"], [*SHAPES][::-1]], ids=str)
def test_the_presence_and_order_of_others_changes_nothing(names):
    """So a model cut into stages takes the steps of a whole one: bitwise, the random bits
    included."""
    results = []
    for chosen in (tuple(SHAPES), names):
        parameters = states.module_parameters(names=chosen)
        state = weight_state(parameters)
        for step in range(3):
            take_step(state, parameters, step, gradients=random_values(1 + step), lr=0.1)
        results.append({key: tensors["head.weight"] for key, tensors in state.state_dict().items()})
    assert_bitwise_equal(*results)


@every_compute
def test_gradients_add_up_and_are_divided_in_float32(compute):
    """48 times 1 + 2**-7, which all dtypes hold.

    From 32 on float16 goes in steps of 2**-5, bfloat16 in wider ones; in float32 the sum is exact,
    and so is the norm of 4 of it. The next step's quotient 2**-26 is zero in float16; the norm of
    four of them is 2**-25.
    """
    parameters = {"a": nn.Parameter(torch.ones(4, dtype=compute))}
    state = weight_state(parameters)
    each = 1 + 2.0**-7
    _, norms = take_step(
        state,
        parameters,
        0,
        gradients={"a": torch.full((4,), each)},
        divisor=16.0,
        micro_batches=48,
    )
    assert norms.gradient.item() == 2 * 48 * each / 16
    _, norms = take_step(
        state, parameters, 1, gradients={"a": torch.full((4,), 2.0**-16)}, divisor=2.0**10
    )
    assert norms.gradient.item() == 2.0**-25


@every_format
def test_the_working_copy_is_the_state_in_the_compute_dtype(dtype, rounding, compute):
    """From the start, after updates, after a step that is left out, and after loading; what was
    given out stays."""
    parameters = states.module_parameters(compute)
    # not in float16
    parameters["third"] = nn.Parameter(torch.tensor([1 / 3, 1e-4, -2.0], dtype=compute))
    started = {name: parameter.detach().to(dtype) for name, parameter in parameters.items()}
    state = weight_state(parameters, LARS, dtype, rounding)

    def refreshed():
        weights = state.state_dict()["weights"]
        for name, weight in weights.items():
            assert (parameters[name].dtype, weight.dtype) == (compute, dtype)
            assert torch.equal(parameters[name], weight.to(compute))
        return weights

    first = refreshed()
    values = [{**random_values(seed), "third": torch.full((3,), float(seed))} for seed in range(3)]
    take_step(state, parameters, 3, gradients=values[0], lr=0.1)
    assert not torch.equal(flattened(refreshed()), flattened(first))
    take_step(
        state,
        parameters,
        4,
        gradients={name: value * torch.inf for name, value in values[0].items()},
    )
    refreshed()
    state.load_state_dict({"weights": values[1], "momentum_buffer": values[2]})
    refreshed()
    assert_bitwise_equal(first, started)


def test_a_state_of_another_dtype_is_rounded_to_nearest():
    """What belongs to others in it is let be."""
    given = {
        "weights": random_values(3),
        "momentum_buffer": random_values(4),
        "loss_scale": {"scale": torch.ones(())},
    }
    half, single = (
        weight_state(states.module_parameters(), LARS, dtype) for dtype in (HALF, SINGLE)
    )
    half.load_state_dict(given)
    single.load_state_dict(half.state_dict())
    for key in ("weights", "momentum_buffer"):
        assert torch.equal(flattened(half.state_dict()[key]), flattened(given[key]).half())
        assert torch.equal(
            flattened(single.state_dict()[key]), flattened(given[key]).half().float()
        )


def without(tensors, name):
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"weights": {**random_values(3), "head.weight": torch.zeros(6, 10)}},
            r"head.weight is \[6, 10\], the model's",
        ),
        (
            {"momentum_buffer": {**random_values(3), "head.bias": torch.zeros(1)}},
            r"head.bias is \[1\], the model's is",
        ),
        ({"weights": without(random_values(3), "head.bias")}, "head.bias is missing"),
        (
            {"momentum_buffer": {**random_values(3), "tail.bias": torch.zeros(10)}},
            "tail.bias is unknown",
        ),
        ({"weights": None}, "weights is missing"),
        (
            {"momentum_buffer": None, "square_avg": random_values(7)},
            "momentum_buffer is missing; square_avg belongs to",
        ),
        (
            {"exp_avg": random_values(7), "exp_avg_sq": random_values(7)},
            "exp_avg_sq belongs to another optimizer than",
        ),
    ],
    ids=["turned", "shorter", "missing", "unknown", "no weights", "RMSprop's", "LAMB's"],
)
def test_a_state_that_does_not_fit_is_refused_whole(changed, message):
    """Named by its faults, and nothing of it is taken over."""
    parameters = states.module_parameters()
    state = weight_state(parameters)
    before = state.state_dict()
    damaged = {"weights": random_values(3), "momentum_buffer": random_values(4), **changed}
    with pytest.raises(ValueError, match=message):
        state.load_state_dict(
            {key: tensors for key, tensors in damaged.items() if tensors is not None}
        )
    assert_bitwise_equal(state.state_dict(), before)
    assert torch.equal(flattened(parameters), flattened(states.module_parameters()))


def test_rows_that_are_not_full_take_little_memory():
    """EfficientNet-B4 G16: fewer than one in 4,000 elements of a buffer is padding."""
    with without_memory():
        parameters = dict(build(Model(), 0).named_parameters())
    count = sum(parameter.numel() for parameter in parameters.values())
    assert count == 19_328_168
    state = weight_state(parameters, rounding="nearest")  # random bits would take half a second
    assert count < len(state.flat) < count * 1.00025
