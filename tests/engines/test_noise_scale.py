"""The gradient noise scale: against its definition, and the same however a step is divided."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

from engines.base import NoiseScale, one_step
from engines.noise_scale import Batches, Meter, estimate
from recipe.course import Update
from recipe.shares import by_speed
from tests.engines import worlds
from tests.engines.recording import on_cpus
from tests.engines.worlds import FLOAT32, case, engine_of, micro_batches, outcome

ONE = torch.tensor(1.0)


def measured(parameters, batches, micro, updates, scale=ONE, layers=False):
    """A meter that has seen updates of several micro batches.

    Args: batches: of an update, gradients of single images of each parameter, [images, ...].
    """
    large = len(next(iter(batches(0).values())))
    batches_of_step = Batches(micro, large, large // micro, share=range(large // micro), weight=1.0)
    meter = Meter(parameters, batches_of_step, layers=layers)
    for step in range(updates):
        for parameter in parameters.values():
            parameter.grad = None
        meter.start(step)
        if not meter.on:
            continue
        images = batches(step)
        count = len(next(iter(images.values())))
        for start in range(0, count, micro):
            means = {name: each[start : start + micro].mean(0) for name, each in images.items()}
            (
                sum((parameters[name] * mean).sum() for name, mean in means.items()) * scale
            ).backward()
        gradients = [parameter.grad for parameter in parameters.values()]
        meter.add(meter.squares(gradients, scale, scale * (count // micro)), torch.tensor(True))
    return meter


@pytest.mark.parametrize(("spread", "micro"), [(0.3, 1), (1.0, 4)])
def test_the_noise_scale_is_that_of_single_images_gradients(spread, micro):
    """Images' gradients have a mean and a covariance that are known; the first parameter's image
    noise is twice the second's. The estimate is within four standard errors, and a standard error
    is below a quarter."""
    generator = torch.Generator().manual_seed(3)
    parameters = {"a": nn.Parameter(torch.zeros(50, 4)), "b": nn.Parameter(torch.zeros(30))}
    mean = {
        name: torch.randn(each.shape, generator=generator) / 5 for name, each in parameters.items()
    }
    noise = {"a": 2 * spread, "b": spread}

    def batches(step):
        drawn = torch.Generator().manual_seed(step)
        return {
            name: each + noise[name] * torch.randn(32, *each.shape, generator=drawn)
            for name, each in mean.items()
        }

    found = measured(parameters, batches, micro, 400, layers=True).values()
    expected = {
        name: (noise[name] ** 2 * each.numel(), each.square().sum().item())
        for name, each in mean.items()
    }
    expected[""] = [sum(each) for each in zip(*expected.values())]
    assert found.keys() == expected.keys() and found[""].noise == pytest.approx(
        expected[""][0], rel=0.05
    )
    for name, each in found.items():
        assert (
            abs(each.images - expected[name][0] / expected[name][1])
            < (5 if name else 4) * each.error
        )
    assert 0 < found[""].error < 0.25 * found[""].images


@pytest.mark.parametrize("size", [1e-25, 3e19])
def test_the_size_of_gradients_whose_squares_float32_cannot_hold_does_not_matter(size):
    """The noise scale is a ratio; one infinity would stay in its averages for ever."""
    found = []
    for factor in (1.0, size):
        parameters = {"a": nn.Parameter(torch.zeros(50, 4))}

        def batches(step, factor=factor):
            drawn = torch.Generator().manual_seed(step)
            return {"a": factor * (1 + torch.randn(8, 50, 4, generator=drawn))}

        found.append(measured(parameters, batches, 4, 60).values()[""].images)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_what_the_averages_hold_after_two_measured_updates():
    """By hand, in float64: an update of two micro batches each; the second update counts 1, the
    first 0.96."""
    parameters = {"a": nn.Parameter(torch.zeros(3))}
    images = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = torch.tensor(1024.0)
    meter = measured(parameters, lambda step: {"a": images[step // 4].float()}, 2, 5, scale)
    squares = []
    for update in images:
        halves = update.view(2, 2, 3).mean(1)
        squares.append((halves.square().sum(1).mean(), update.mean(0).square().sum()))
    noise = [(small - large) / (1 / 2 - 1 / 4) for small, large in squares]
    signal = [(4 * large - 2 * small) / 2 for small, large in squares]
    expected = [1.96, 1.9216]
    for first, second in (noise, signal, [x**2 for x in noise], [x**2 for x in signal]):
        expected.append(0.96 * first + second)
    expected.append(0.96 * noise[0] * signal[0] + noise[1] * signal[1])
    torch.testing.assert_close(
        meter.moments[:, 0], torch.tensor(expected).double(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("fault", ["inf", "nan"])
def test_a_gradient_that_is_not_finite_counts_for_nothing(fault):
    """Though the update may be of an earlier, finite one, as with a delay."""
    parameters = {"a": nn.Parameter(torch.zeros(3))}
    images = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))

    def batches(step):
        return {"a": images[1] * float(fault) if step == 4 else images[0]}

    found = measured(parameters, batches, 2, 5, layers=True)
    assert torch.equal(found.moments, measured(parameters, batches, 2, 1, layers=True).moments)


def test_nothing_is_said_of_few_updates_or_where_noise_hides_the_gradient():
    """As if ten updates were measured: weights 1, S = 4, |G|^2 = 2, without spread."""
    assert estimate([10.0, 10.0, 40.0, 20.0, 160.0, 40.0, 80.0]) == (2.0, 0.0, 2.0, 4.0)
    assert estimate([9.0, 9.0, 36.0, 18.0, 144.0, 36.0, 72.0]) is None
    assert estimate([10.0, 10.0, 40.0, -20.0, 160.0, 40.0, -80.0]) is None
    assert estimate([0.0] * 7) is None


@pytest.mark.parametrize(
    ("images", "error", "text"),
    [(1310.4, 90.2, "1,310±90"), (2259.0, 5384.0, "unknown"), (600.0, 300.0, "unknown")],
)
def test_a_log_line_has_no_figure_that_may_be_zero(images, error, text):
    assert str(NoiseScale(images, error, 1.0, images)) == text


LAYERS = ("log.noise_scale=layers", "data.mixup=0", "batch.micro=3")


def metered(processes, overrides, steps=5):
    """A case: the averages after some steps, of the whole model and of each layer."""
    engine = engine_of(processes, (*LAYERS, *overrides), steps_per_epoch=4)
    for step in range(steps):
        engine.train_step(micro_batches(step, engine), one_step(step), 0.05)
    value, _ = engine.noise_scale()
    state = engine.state_dict()
    alike = "exchange.method=local" not in overrides
    own = worlds.digest(engine.weights.state_dict()) if alike else ()
    return value, own, (state.get("noise_scale"), engine._noise.meter.batches.large)


HALF = "exchange.method=half"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "run",
    [
        case(1, 2, metered, (*FLOAT32, worlds.TREE)),
        case(2, 2, metered, FLOAT32, slow=True),
        case(1, 2, metered, (*FLOAT32, HALF)),
    ],
)
def test_the_averages_are_those_of_one_process(run):
    """To the rounding of float32 norms, of weights that are apart by as much, and of what travels
    as float16."""
    found = outcome(run)[0]
    expected = metered(worlds.single(), FLOAT32)[2][0]
    torch.testing.assert_close(
        found[""], expected[""], rtol=2e-2 if HALF in run.arguments[0] else 1e-3, atol=0
    )
    assert found.keys() == expected.keys()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "run", [case(1, 3, metered, (worlds.TREE, "batch.micro=1", "data.cutmix=null"))]
)
def test_in_tree_order_they_have_the_bits_of_one_process(run):
    """Of 12 micro batches 8 are measured, each by the replica that has it; each number of the
    message is of one."""
    found = outcome(run)[0]
    expected = metered(worlds.single(), run.arguments[0])[2][0]
    assert torch.equal(found[""], expected[""]) and found[""][1] > 1


def test_the_micro_batches_of_a_step_that_are_measured_are_spread_over_it_and_over_the_replicas():
    """8 of 12, whoever has them; each once."""
    parameter = {"a": nn.Parameter(torch.zeros(1))}
    gradients = torch.arange(1.0, 13.0)
    found = []
    for share in by_speed(12, [1.0, 2.0, 1.0]):
        batches = Batches(1, 12, 12, share=share, weight=float(share.start == 0))
        meter = Meter(parameter, batches, layers=False)
        meter.start(0)
        for number in [*share, *share]:  # an update of two steps, of which the first counts
            (parameter["a"] * gradients[number]).backward()
        found.append(meter.squares([gradients.sum()[None]], ONE, torch.tensor(12.0)))
        del meter
        parameter["a"]._backward_hooks.clear()
    numbers = [number * 12 // 8 for number in range(8)]
    assert torch.stack(found).sum(0).tolist() == [
        *((number + 1.0) ** 2 for number in numbers),
        6.5**2,
    ]
    assert (torch.stack(found) != 0).sum(0).tolist() == [1] * 9


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [case(1, 2, metered, ("exchange.method=local",))])
def test_where_no_replica_gets_the_whole_sum_its_own_batch_is_the_large_one(run):
    state, large = outcome(run)
    assert state[""][0] > 1 and large == 12 // 2


@pytest.mark.parametrize("steps", [1, 2])
def test_without_an_exchange_the_large_batch_has_as_many_images_of_an_update_of_several_steps(
    steps,
):
    """One replica, so that its own batch is the whole one."""
    found = []
    for method in ("none", "dense"):
        engine = engine_of(
            worlds.single(), (*LAYERS, *FLOAT32, f"exchange.method={method}"), steps_per_epoch=4
        )
        batches = itertools.chain.from_iterable(
            micro_batches(step, engine) for step in range(steps)
        )
        engine.train_step(batches, Update(0, steps, 0), 0.05)
        found.append(engine.state_dict()["noise_scale"])
    for name, moments in found[1].items():
        assert torch.equal(found[0][name], moments)


@pytest.mark.parametrize("noise", [pytest.param("true", marks=pytest.mark.slow), "layers"])
def test_it_is_measured_where_passes_are_recorded(noise):
    """To the bit, with a first update that is measured as the passes are recorded."""
    found = []
    for recorded in (True, False):
        with on_cpus() if recorded else contextlib.nullcontext() as recorder:
            engine = engine_of(worlds.single(), (f"log.noise_scale={noise}",), steps_per_epoch=10)
            for step in range(5):
                engine.train_step(micro_batches(step, engine), one_step(step), 0.05)
        assert not recorded or recorder.replays > 40
        found.append(engine.state_dict()["noise_scale"])
    assert found[0].keys() == found[1].keys() and found[1][""].abs().min() > 0
    for name, moments in found[1].items():
        assert torch.equal(found[0][name], moments)


def test_an_update_that_is_left_out_does_not_count():
    """Of updates 0 and 4 the second is not finite."""
    engine = engine_of(worlds.single(), LAYERS, steps_per_epoch=4)
    for step, counts in ((0, True), (1, False), (4, False)):
        before = engine.state_dict()["noise_scale"]
        if step == 4:
            engine._loss_scale.scale.fill_(float("inf"))
        engine.train_step(micro_batches(step, engine), one_step(step), 0.05)
        after = engine.state_dict()["noise_scale"]
        assert [
            not torch.equal(before[name], after[name]) for name in ("", "head.classifier.bias")
        ] == [counts] * 2


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        (("model.norm=batch",), "batch normalisation"),
        (("batch.micro=12",), "one micro batch"),
        (("batch.micro=12", "log.noise_scale=auto"), None),
        (("log.noise_scale=false",), None),
    ],
)
def test_a_reason_is_noted_where_it_cannot_be_measured(overrides, note):
    engine = engine_of(worlds.single(), (*LAYERS, *overrides), steps_per_epoch=4)
    assert (
        any(note in each for each in engine.notes)
        if note
        else not any("noise" in each for each in engine.notes)
    )
    assert engine.noise_scale() == (None, {})
    assert "noise_scale" not in engine.state_dict()
