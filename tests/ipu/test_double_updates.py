"""The double's optimizers: arithmetic against formulas in float64, attributes, and state that leaves and comes back."""

import logging

import pytest
import torch

from tests.ipu.nets import Net, assert_close, batch, options, weights

pytestmark = [pytest.mark.ipu, pytest.mark.filterwarnings("ignore:Positional args are being deprecated")]

# float32 against float64 over a few updates.
CLOSE = {"rtol": 2e-5, "atol": 1e-6}


class Line(torch.nn.Module):
    """loss = sum(inputs @ weight): its gradient is the sum of the inputs, whatever the weight."""

    def __init__(self, mark, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(2)
        self.weight = torch.nn.Parameter(torch.randn(6).to(dtype))
        self.mark = mark

    def forward(self, inputs):
        return self.mark((inputs.to(self.weight.dtype) * self.weight).sum(), "none")


def gradients(count, scale=1.0):
    return scale * torch.randn(count, 1, 6, generator=torch.Generator().manual_seed(3))


def lamb(weight, gradient, state, step, lr, betas, eps, weight_decay, max_weight_norm, correct):
    """Algorithm 2 of 1904.00962 with PopART's rule for norms of 0, in float64."""
    state["m"] = betas[0] * state["m"] + (1 - betas[0]) * gradient
    state["v"] = betas[1] * state["v"] + (1 - betas[1]) * gradient**2
    mean = state["m"] / (1 - betas[0] ** step) if correct else state["m"]
    square = state["v"] / (1 - betas[1] ** step) if correct else state["v"]
    update = mean / (square.sqrt() + eps) + weight_decay * weight
    ratio = min(weight.norm(), max_weight_norm) / update.norm() if max_weight_norm and weight.norm() else 1.0
    return weight - lr * ratio * update


@pytest.mark.parametrize(
    ("group", "correct"),
    [
        ({}, True),
        ({}, False),
        ({"max_weight_norm": 0.0, "weight_decay": 0.0}, True),
        ({"max_weight_norm": 0.5}, True),
        ({"betas": (0.9, 1.0), "eps": 1.0, "weight_decay": 0.1}, False),
    ],
)
def test_lamb(double, group, correct):
    values = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.01, "max_weight_norm": 65500.0, **group}
    model = Line(double.identity_loss)
    expected = model.weight.detach().double()
    groups = [{"params": [model.weight], **values}]
    optimizer = double.optim.LAMB(groups, lr=0.1, bias_correction=correct, loss_scaling=64.0)
    executor = double.trainingModel(model, options(double), optimizer)
    state = {"m": torch.zeros(6).double(), "v": torch.zeros(6).double()}
    for step, gradient in enumerate(gradients(5), 1):
        values["lr"] = optimizer.param_groups[0]["lr"] = 0.1 / step
        executor.setOptimizer(optimizer)
        executor(gradient)
        expected = lamb(expected, gradient[0].double(), state, step, **values, correct=correct)
    torch.testing.assert_close(executor.state_dict()["weight"].double(), expected, **CLOSE)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("RMSprop", {"lr": 0.01}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
        ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ],
)
def test_optimizers_of_torch(double, name, values):
    model, reference = Line(double.identity_loss), Line(double.identity_loss)
    optimizer = getattr(double.optim, name)(model.parameters(), loss_scaling=8.0, **values)
    executor = double.trainingModel(model, options(double), optimizer)
    stepper = getattr(torch.optim, name)(reference.parameters(), **values)
    for gradient in gradients(5):
        executor(gradient)
        stepper.zero_grad()
        reference(gradient).backward()
        stepper.step()
    assert_close(weights(executor), weights(reference), **CLOSE)


def test_rmsprop_of_tensorflow(double):
    """Square average from ones, epsilon under the root, learning rate inside the momentum."""
    model = Line(double.identity_loss)
    weight = model.weight.detach().double()
    square, momentum = torch.ones(6).double(), torch.zeros(6).double()
    optimizer = double.optim.RMSprop(model.parameters(), lr=0.1, alpha=0.8, eps=1e-2, momentum=0.9, use_tf_variant=True)
    executor = double.trainingModel(model, options(double), optimizer)
    for gradient in gradients(4):
        executor(gradient)
        square = 0.8 * square + 0.2 * gradient[0].double() ** 2
        momentum = 0.9 * momentum + 0.1 * gradient[0].double() / (square + 1e-2).sqrt()
        weight = weight - momentum
    torch.testing.assert_close(executor.state_dict()["weight"].double(), weight, **CLOSE)


# Rounding to float16


def test_stochastic_rounding_is_right_on_average(double):
    """float16 has a spacing of 2^-10 above 1, and of 2^-24 where it is subnormal."""
    from poptorch import updates

    torch.manual_seed(0)
    for exact, low, high in ((1 + 2**-12, 1.0, 1 + 2**-10), (-5.25 * 2**-24, -6 * 2**-24, -5 * 2**-24)):
        rounded = updates.stochastic(torch.full((40000,), exact), torch.float16).double()
        assert set(rounded.tolist()) == {low, high}
        # Standard error of the mean of 40,000 draws, five times.
        assert abs(rounded.mean() - exact) < 5 * (high - low) * 0.25**0.5 / 200


def test_float16_keeps_what_it_can_hold(double):
    from poptorch import updates

    values = torch.randn(1000).half()
    assert torch.equal(updates.stochastic(values.float(), torch.float16), values)
    assert torch.equal(updates.stochastic(values.float() * 1.0001, torch.float32), values.float() * 1.0001)


@pytest.mark.parametrize("stochastic", [False, True])
def test_small_updates_of_float16_weights_survive_stochastic_rounding_only(double, stochastic):
    """A step of 2^-13 is an eighth of the spacing at 1: lost to the nearest, kept on average."""
    model = Line(double.identity_loss, torch.float16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    made = options(double)
    made.Precision.enableStochasticRounding(stochastic)
    executor = double.trainingModel(model, made, double.optim.SGD(model.parameters(), lr=2**-13))
    for _ in range(256):
        executor(-torch.ones(1, 6))
    moved = executor.state_dict()["weight"].float().mean() - 1
    assert moved == 0 if not stochastic else abs(moved - 256 * 2**-13) < 0.01


def test_accumulators_in_float16_hold_a_mean(double):
    """The sum of 4 gradients of 30000 is beyond float16; their running mean is not."""
    model = Line(double.identity_loss)
    optimizer = double.optim.SGD(model.parameters(), lr=1e-5, accum_type=torch.float16)
    executor = double.trainingModel(model, options(double, accumulation=4), optimizer)
    strategy = executor.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy == double.MeanReductionStrategy.Running
    before = model.weight.detach().clone()
    executor(torch.full((4, 6), 30000.0))
    torch.testing.assert_close(executor.state_dict()["weight"], before - 0.3, rtol=1e-3, atol=1e-4)


# Attributes


def grouped(double, **values):
    model = Line(double.identity_loss)
    optimizer = double.optim.LAMB([{"params": [model.weight], "lr": 0.1, "weight_decay": 0.1}], **values)
    executor = double.trainingModel(model, options(double), optimizer)
    executor(torch.ones(1, 6))
    return executor, optimizer


@pytest.mark.parametrize(
    ("values", "change", "error"),
    [
        ({"lr": 1.0}, {"lr": 0.2}, None),
        ({}, {"lr": 0.2}, "Problem with learning rates. Values are constant but do not match"),
        ({"lr": 1.0}, {"weight_decay": 0.2}, "weight decays"),
        ({"lr": 1.0, "weight_decay": 0.0}, {"weight_decay": 0.2}, None),
        ({"lr": 1.0}, {"lr": -0.1}, "Negative learning rate"),
    ],
)
def test_what_the_constructor_was_not_given_is_constant(double, values, change, error):
    executor, optimizer = grouped(double, **values)
    optimizer.param_groups[0].update(change)
    if error is None:
        executor.setOptimizer(optimizer)
        return
    with pytest.raises(double.Error, match=error):
        executor.setOptimizer(optimizer)


def test_a_constant_stays_one(double):
    executor, optimizer = grouped(double, lr=1.0)
    optimizer.variable_attrs.markAsConstant("lr")
    with pytest.raises(double.Error, match="Can not replace a constant value with a non constant value"):
        executor.setOptimizer(optimizer)
    with pytest.raises(AssertionError, match="Unknown attribute rate"):
        optimizer.variable_attrs.markAsVariable("rate")


def test_betas_are_a_tuple(double):
    with pytest.raises(AssertionError, match="Expected a pair for betas"):
        grouped(double, lr=1.0, betas=[0.9, 0.999])


@pytest.mark.parametrize("name", ["Adagrad", "Adadelta"])
def test_other_optimizers_are_refused(double, name):
    model = Net()
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        double.trainingModel(model, options(double), getattr(torch.optim, name)(model.parameters()))


def test_a_subclass_is_warned_of(double, caplog):
    class Lars(double.optim.SGD):
        pass

    model = Net()
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        double.trainingModel(model, options(double), Lars(model.parameters(), lr=0.1))
    assert "`Lars` subclassed from classes in poptorch.optim" in caplog.text


def test_a_new_attribute_is_warned_of(double, caplog):
    executor, optimizer = grouped(double, lr=1.0)
    optimizer.param_groups[0]["trust"] = 1.0
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        executor.setOptimizer(optimizer)
    assert "Ignoring unexpected group 0 attribute" in caplog.text
    assert "['trust']" in caplog.text


# State


def lamb_run(double, made=None):
    model = Net(double.identity_loss)
    optimizer = double.optim.LAMB(model.parameters(), lr=0.05, bias_correction=False)
    return double.trainingModel(model, made or options(double), optimizer), optimizer


@pytest.mark.parametrize("compiled_first", [False, True])
def test_state_leaves_and_comes_back_exactly(double, compiled_first):
    straight, _ = lamb_run(double)
    for seed in range(6):
        straight(*batch(4, seed))
    expected = weights(straight)
    straight.detachFromDevice()

    first, optimizer = lamb_run(double)
    for seed in range(3):
        first(*batch(4, seed))
    saved, state = weights(first), optimizer.state_dict()
    first.detachFromDevice()

    second, optimizer = lamb_run(double)
    if compiled_first:
        second.compile(*batch(4))
    second.load_state_dict(saved)
    optimizer.load_state_dict(state)
    second.setOptimizer(optimizer)
    for seed in range(3, 6):
        second(*batch(4, seed))
    assert_close(weights(second), expected, rtol=0, atol=0)


def test_state_is_not_read_while_an_update_of_the_optimizer_is_pending(double):
    """Here one that was refused: the learning rate is a constant."""
    executor, optimizer = lamb_run(double)
    optimizer.variable_attrs.markAsConstant("lr")
    executor.setOptimizer(optimizer)
    executor(*batch(4))
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(double.Error, match="Values are constant"):
        executor.setOptimizer(optimizer)
    with pytest.raises(AssertionError, match="Both host and ipu states cannot be dirty"):
        optimizer.state_dict()


def test_state_is_named_after_parameters(double):
    executor, optimizer = lamb_run(double)
    assert optimizer.state_dict()["ipu_state"] is None
    assert not optimizer.has_state()
    executor.compile(*batch(4))
    state = optimizer.state_dict()
    names = [name for name, _ in Net().named_parameters()]
    assert set(state["ipu_state"]) == {prefix + name for prefix in ("Accl1___", "Accl2___") for name in names}
    assert state["ipu_param"]["learningRate___specific___first.bias"] == torch.tensor(0.05)
    assert {"state", "param_groups"} < set(state)


def test_a_loaded_rate_changes_nothing(double):
    """ipu_param comes back when read; the rate is the optimizer's own."""
    executor, optimizer = lamb_run(double)
    before = weights(executor)
    executor.compile(*batch(4))
    state = optimizer.state_dict()
    state["ipu_param"] = {name: torch.zeros_like(value) for name, value in state["ipu_param"].items()}
    optimizer.load_state_dict(state)
    executor(*batch(4))
    assert optimizer.state_dict()["ipu_param"]["learningRate___specific___first.bias"] == 0
    assert not torch.equal(weights(executor)["first.weight"], before["first.weight"])


def test_state_without_streams_stays_on_the_device(double):
    """What is read is no state; what is written does not arrive."""
    made = options(double)
    made._Popart.set("disableOptimizerStateTensorStreams", True)
    with_streams, _ = lamb_run(double)
    for seed in range(3):
        with_streams(*batch(4, seed))
    expected = weights(with_streams)
    with_streams.detachFromDevice()
    executor, optimizer = lamb_run(double, made)
    executor(*batch(4, 0))
    state = optimizer.state_dict()
    assert all(tensor.isnan().all() for tensor in state["ipu_state"].values())
    optimizer.load_state_dict(state)
    for seed in range(1, 3):
        executor(*batch(4, seed))
    assert_close(weights(executor), expected, rtol=0, atol=0)


@pytest.mark.parametrize(("state", "error"), [({}, "it is empty"), ({"state": {}, "param_groups": []}, "Only IPU")])
def test_only_states_of_a_device_are_loaded(double, state, error):
    with pytest.raises(RuntimeError, match=error):
        lamb_run(double)[1].set_state_dict(state)


def test_synthetic_data_leaves_the_host_as_it_is(double):
    made = options(double).enableSyntheticData(True)
    executor, _ = lamb_run(double, made)
    before = weights(executor)
    executor(*batch(4))
    assert_close(weights(executor), before, rtol=0, atol=0)
