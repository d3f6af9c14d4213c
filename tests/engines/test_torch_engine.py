"""The PyTorch engine against a plain float64 loop, and against itself with the work divided differently."""

import itertools

import pytest
import torch

from engines.torch_engine import TorchEngine
from models.efficientnet import build
from recipe.errors import ConfigError
from tests.engines.noise import as_micro_batches, noise_images
from tests.tensors import assert_bitwise_equal, flat

PLAIN = ("model.dropout=0", "model.drop_path=0", "precision.weights=float32", "data.label_smoothing=0.1")
RANDOM_LAYERS = ("model.dropout=0.5", "model.drop_path=0.5")


def train(engine, steps, micro=12, lr=1.0, first=0):
    """A few steps on noise, other images in each; the results."""
    return [
        engine.train_step(as_micro_batches(*noise_images(24, seed=step), micro, step), step, lr)
        for step in range(first, first + steps)
    ]


def differ(one, other):
    return any(not torch.equal(a, b) for a, b in zip(flat(one).values(), flat(other).values()))


def relative_differences(actual, expected):
    """{name: |actual - expected| / |expected|} in float64, 0 where both are 0."""
    result = {}
    for name, tensor in flat(expected).items():
        difference = (flat(actual)[name].double() - tensor.double()).norm().item()
        result[name] = difference / tensor.double().norm().item() if difference else 0.0
    return result


class Reference:
    """The same training by hand: the whole global batch at once, autograd and LARS (1708.03888) in float64, with biases
    and scales of norms skipped: plain momentum at `skip_lr_scale` times the learning rate, without weight decay."""

    def __init__(self, recipe):
        self.recipe = recipe
        self.model = build(recipe.model, recipe.run.seed).double()
        self.initial = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.momentum = {name: torch.zeros_like(tensor) for name, tensor in self.initial.items()}

    def loss(self, images, labels, weight=None):
        """Mean of -(1 - s) log p(label) - s / classes sum over all classes of log p, by hand."""
        smoothing = self.recipe.data.label_smoothing
        log_p = torch.log_softmax(self.model(images), dim=1)
        hit = log_p[torch.arange(len(labels)), labels]
        losses = -(1 - smoothing) * hit - smoothing * log_p.mean(1)
        return (losses / len(labels) if weight is None else losses * weight).sum()

    def step(self, lr, loss):
        section = self.recipe.optimizer
        self.model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for name, w in self.model.named_parameters():
                g, m = w.grad, self.momentum[name]
                if w.ndim == 1:  # biases, and the scales of the norms
                    m.mul_(section.momentum).add_(lr * section.skip_lr_scale * g)
                else:
                    decay = section.weight_decay
                    trust = section.trust_coefficient * w.norm() / (g.norm() + decay * w.norm())
                    m.mul_(section.momentum).add_(lr * trust * (g + decay * w))
                w.sub_(m)
        return loss.item()

    def movement(self):
        return {name: w.detach() - self.initial[name] for name, w in self.model.named_parameters()}


@pytest.mark.parametrize("overrides", [("data.label_smoothing=0",), ("optimizer.weight_decay=0.01",)])
def test_several_steps_equal_a_float64_loop_over_the_whole_batch(tiny, engine, overrides):
    """Momenta and the way each weight has moved agree to 3e-4 of their norms; norms and trust ratios of the first step
    to 1e-4. A layer's products have up to K = 1e3 terms, rounded by 2**-24 each: sqrt(K) 2**-24 = 2e-6. Through some 20
    layers forward and backward, and over four steps, that grows to 3e-4; a forgotten term shows at 1e-2."""
    recipe = tiny(*PLAIN, *overrides)
    reference, engine = Reference(recipe), engine(*PLAIN, *overrides)
    for step, lr in enumerate((2.0, 0.5, 3.0, 1.0)):
        images, labels = noise_images(24, seed=step)
        result = engine.train_step(as_micro_batches(images, labels, 12, step), step, lr, measure=True)
        hits = (reference.model(images).argmax(1) == labels).sum()
        expected = reference.step(lr, reference.loss(images, labels))
        assert result.loss.item() == pytest.approx(expected, rel=1e-5)
        assert result.correct == hits
        if step == 0:
            assert_norms(result.norms, reference)
    state = engine.state_dict()
    moved = {name: state["weights"][name].double() - reference.initial[name] for name in reference.initial}
    assert max(relative_differences(moved, reference.movement()).values()) < 3e-4
    assert max(relative_differences(state["momentum_buffer"], reference.momentum).values()) < 3e-4


def assert_norms(norms, reference):
    """Those of the reference's first step."""
    gradients = {name: w.grad for name, w in reference.model.named_parameters()}
    total = {"gradient": gradients, "weight": reference.initial, "update": reference.movement()}
    for name, tensors in total.items():
        expected = torch.cat([tensor.flatten() for tensor in tensors.values()]).norm().item()
        assert getattr(norms, name).item() == pytest.approx(expected, rel=1e-4), name
    adapted, section = [name for name, w in reference.initial.items() if w.ndim > 1], reference.recipe.optimizer
    assert sorted(norms.trust) == sorted(adapted)
    for name in adapted:
        w, g = reference.initial[name].norm().item(), gradients[name].norm().item()
        trust = section.trust_coefficient * w / (g + section.weight_decay * w)
        assert norms.trust[name].item() == pytest.approx(trust, rel=1e-4), name


def test_how_a_batch_is_divided_changes_only_the_order_of_summation(engine):
    """24 images as 1 x 24 and as 24 x 1 micro batches: momenta agree to 5e-5 of each tensor's norm. An entry of a
    gradient sums up to 24 images x 256 pixels = 6e3 rounded products, sqrt(6e3) 2**-24 = 5e-6, in each of two orders,
    after some 20 layers whose kernels depend on the batch: sqrt(2 x 20) 5e-6 = 3e-5."""
    divided, whole = (engine(*PLAIN, f"batch.micro={size}") for size in (1, 24))
    images, labels = noise_images(24)
    losses = [
        run.train_step(as_micro_batches(images, labels, size), 0, 1.0).loss.item()
        for run, size in ((divided, 1), (whole, 24))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    differences = relative_differences(divided.state_dict()["momentum_buffer"], whole.state_dict()["momentum_buffer"])
    assert max(differences.values()) < 5e-5


def test_a_power_of_two_as_loss_scale_changes_no_bit(engine):
    """It only moves exponents, far from float32's limits: exact also with stochastic rounding and dropout."""
    scaled, usual = (engine(*RANDOM_LAYERS, f"precision.loss_scale={value}") for value in (2**-7, 2**16))
    losses = [[result.loss.item() for result in train(run, 3)] for run in (scaled, usual)]
    assert losses[0] == losses[1]
    scaled, usual = scaled.state_dict(), usual.state_dict()
    del scaled["loss_scale"], usual["loss_scale"]
    assert_bitwise_equal(scaled, usual)


@pytest.mark.parametrize("valid", [9, 0])
def test_an_image_left_out_does_not_change_the_weight_of_the_others(tiny, engine, valid):
    """Each readable image of a step of 24 counts 1/24, and a micro batch without any adds nothing. Tolerance as in the
    float64 loop."""
    recipe = tiny(*PLAIN)
    reference, run = Reference(recipe), engine(*PLAIN)
    images, labels = noise_images(24)
    first, second = as_micro_batches(images, labels, 12)
    unreadable, count = ("a.jpg: empty",), 12 + valid
    result = run.train_step(iter([first, second._replace(valid=valid, unreadable=unreadable)]), 0, 1.0)
    loss = reference.step(1.0, reference.loss(images[:count], labels[:count], weight=1 / 24))
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert (result.images, result.unreadable, result.skipped.item()) == (count, unreadable, 0)
    assert max(relative_differences(run.state_dict()["momentum_buffer"], reference.momentum).values()) < 3e-4


def test_a_step_pulls_exactly_its_micro_batches(engine):
    run = engine("batch.micro=6")
    supply = itertools.chain(*(as_micro_batches(*noise_images(24), 6) for _ in range(3)))
    run.train_step(supply, 0, 1.0)
    assert len(list(supply)) == 2 * 4
    before = run.state_dict()
    with pytest.raises(AssertionError, match="only 3 micro batches came"):
        run.train_step(itertools.islice(as_micro_batches(*noise_images(24), 6), 3), 0, 1.0)
    assert_bitwise_equal(run.state_dict(), before)


def test_each_step_and_each_micro_batch_has_draws_of_its_own(engine):
    """The same images from the same weights: the loss differs with the step's and the micro batch's number."""
    images, labels = noise_images(12)
    only = next(as_micro_batches(images, labels, 12))
    losses = {
        engine(*RANDOM_LAYERS, "batch.global=12")
        .train_step(iter([only._replace(number=number)]), step, 1.0)
        .loss.item()
        for step, number in ((0, 0), (0, 1), (1, 0), (0, 0))
    }
    assert len(losses) == 3


OVERFLOW = ("precision.loss_scale=3e38", "precision.dynamic_loss_scale=true")
AVERAGES = ("average.step_decay=0.6", "average.epoch_decay=0.9", "model.norm=batch")


@pytest.mark.parametrize(
    "overrides", [AVERAGES, ("precision.weights=float32",), ("precision.compute=bfloat16",), OVERFLOW]
)
def test_an_engine_goes_on_from_another_ones_state_bit_for_bit(engine, overrides, tmp_path):
    """Also with weights of its own before, a working copy in another dtype than the state, and a first step that was
    skipped, which lowers the loss scale to the largest that a dynamic one may have."""
    first, second = engine(*RANDOM_LAYERS, *overrides), engine(*RANDOM_LAYERS, *overrides)
    train(first, 2)
    first.end_epoch()
    train(second, 1, lr=3.0)
    state = first.state_dict()
    torch.save(state, tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_bitwise_equal(second.state_dict(), state)
    for run in (first, second):
        result = train(run, 2, first=2)[-1]
        run.end_epoch()
    expected = (1, 2.0**24) if overrides == OVERFLOW else (0, 128.0)
    assert (result.skipped.item(), result.loss_scale.item()) == expected
    assert differ(first.state_dict(), state)
    assert_bitwise_equal(second.state_dict(), first.state_dict())


def test_a_state_that_does_not_fit_is_refused_by_name_before_anything_is_taken_from_it(engine):
    with pytest.raises(ValueError, match=r"stem\.conv_stem\.weight is \["):
        engine().load_state_dict(engine("model.width=0.5").state_dict())
    with pytest.raises(ValueError, match=r"blocks\.1\.1.* is unknown"):
        engine().load_state_dict(engine("model.depth=1").state_dict())
    run, other = engine(), engine("run.seed=1")
    before = run.state_dict()
    state = {name: value for name, value in other.state_dict().items() if name != "loss_scale"}
    with pytest.raises(ValueError, match=r"^loss_scale is missing$"):
        run.load_state_dict(state)
    assert_bitwise_equal(run.state_dict(), before)


def test_a_step_with_gradients_that_are_not_finite_changes_nothing_and_is_counted(engine):
    """An infinite loss scale overflows every gradient; the counts run on, weights, momentum and running statistics stay
    bit for bit, and averages take nothing in."""
    run = engine(*AVERAGES)
    run._loss_scale.scale = torch.tensor(torch.inf)
    before = run.state_dict()
    results = train(run, 2)
    after = run.state_dict()
    assert (results[-1].skipped.item(), results[-1].skipped_in_row.item()) == (2, 2)
    assert after["averages"]["step_average"]["count"] == 0
    del before["loss_scale"], after["loss_scale"], before["averages"], after["averages"]
    assert_bitwise_equal(after, before)


def test_auto_takes_what_there_is_and_its_measured_peak_is_a_rate(engine):
    """A product of two 1024 x 1024 matrices is 2 x 1024**3 operations; no machine needs a minute for one."""
    run = engine("run.device=auto")
    assert isinstance(run, TorchEngine) and run.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert run.peak_flops() > 2 * 1024**3 / 60
    run.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_with_the_remedy(engine):
    with pytest.raises(ConfigError, match=r"run.device cuda: .* use run.device=cpu or auto"):
        engine("run.device=cuda")
