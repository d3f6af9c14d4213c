"""The measure of how much longer a step of LARS's gradient form is, against closed forms and LARS itself."""

import pytest
import torch

from benchmarks.evidence import runs
from benchmarks.evidence.experiment import changed
from benchmarks.evidence.lars_forms import LarsForms, record
from benchmarks.evidence.lars_ratio import Recorder, StepRatio
from optim.lars import LARS
from optim.weight_state import WeightState

MOMENTUM = 0.885


def after(gradients, rates):
    """(scheduled, steady) of the last step, for one tensor and no weight decay."""
    weight, ratio = torch.randn(len(gradients[0])), StepRatio(MOMENTUM, weight_decay=0.0)
    for gradient, lr in zip(gradients, rates):
        found = ratio.step([weight], [gradient], lr)
    return [each.item() for each in found]


def test_aligned_gradients_and_a_rising_rate_which_shortens_the_scheduled_step_only():
    """Aligned gradients, rate 1, 2, ... 400: the sum of mu^k (n - k) / n is (1 - mu / (n (1 - mu))) / (1 - mu)."""
    direction = torch.randn(100)
    scheduled, steady = after([direction] * 400, range(1, 401))
    assert scheduled == pytest.approx((1 - MOMENTUM / (400 * (1 - MOMENTUM))) / (1 - MOMENTUM), rel=1e-5)
    assert steady == pytest.approx(1 / (1 - MOMENTUM), rel=1e-5)


@pytest.mark.parametrize("trust", ["gradient", "momentum"])
def test_it_is_the_ratio_of_the_steps_that_lars_makes(trust):
    """Along a run of either form, the other form steps on the same gradients from the same weights."""
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in ((16, 8, 3, 3), (10, 40))]
    run = state_of(start, trust)
    other = lars(parameters(start), {"gradient": "momentum", "momentum": "gradient"}[trust])
    recorder, expected = Recorder(), []
    for step in range(12):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in start]
        before = [weight.detach().clone() for _, weight in run.places()][: len(start)]
        lengths = {other.trust: stepped(other, before, gradients, 0.5 * step)}
        for view, gradient in zip(run.gradients.views, gradients):
            view.copy_(8 * gradient)
        with recorder:
            run.update(step, 0.5 * step, torch.tensor(8.0), False)
        lengths[trust] = distances([weight for _, weight in run.places()], before)
        assert recorder.updates[-1] == pytest.approx(lengths[trust].norm().item())
        expected.append(lengths["gradient"] / lengths["momentum"])
    expected = torch.stack(expected[1:])
    summary = recorder.summary()
    assert summary["step"] == list(range(1, 12)), "at a rate of 0 nothing moves"
    # Steps are differences of float32 weights, of a thousandth of these at the lowest rate.
    assert [each[1] for each in summary["scheduled"]] == pytest.approx(expected.quantile(0.5, dim=1).tolist(), rel=1e-3)
    average = torch.tensor(summary["lr"]) @ expected / sum(summary["lr"])
    assert summary["scheduled_tensors"] == pytest.approx(average.tolist(), rel=1e-3)


def test_a_run_is_recorded(tmp_path, monkeypatch):
    """Five steps, the first at a rate of 0. The next has nothing in its momentum, and so is as long in both forms."""
    monkeypatch.setattr(runs, "RUNS", tmp_path)
    ((run,),) = [each.runs for each in LarsForms().quick()]
    length = ("run.epochs=1", "batch.global=256", "batch.micro=128", "schedule.warmup_epochs=0.2",
              "model.width=0.1", "model.image_size=16")  # fmt: skip
    run = run._replace(overrides=changed(run.overrides, length))
    assert record(run) is None
    assert runs.train_here(run) == 0
    found = record(run)
    assert found["step"] == [1, 2, 3, 4]
    assert found["scheduled"][0] == pytest.approx([1.0] * 3, rel=1e-3)
    assert all(length > 0 for length in found["update"])


def state_of(weights, trust):
    """As an engine has it. Besides the weights it has a parameter without trust ratio, which must be left out."""
    own = dict(zip("abc", parameters(weights)))
    options = {"dtype": torch.float32, "rounding": "nearest", "seed": 0}
    return WeightState(own.items(), lambda named: lars(list(named.values()), trust), **options)


def parameters(weights):
    return [torch.nn.Parameter(tensor.clone()) for tensor in [*weights, torch.ones(3)]]


def lars(own, trust):
    """The last parameter has no trust ratio."""
    groups = [{"params": own[:-1], "weight_decay": 0.01}, {"params": own[-1:], "adapt": False}]
    return LARS(groups, lr=0.0, momentum=MOMENTUM, trust=trust)


def stepped(optimizer, weights, gradients, lr):
    """Lengths of the step from `weights`, float32 [tensors]."""
    group = optimizer.param_groups[0]
    group["lr"] = lr
    for parameter, weight, gradient in zip(group["params"], weights, gradients):
        parameter.data, parameter.grad = weight.clone(), gradient
    optimizer.step()
    return distances(group["params"], weights)


def distances(new, old):
    return torch.stack([(after.detach() - before).norm() for after, before in zip(new, old)])
