"""The PyTorch engine against itself: work divided otherwise, saved states.

Against timm it is in test_parity.py.
"""

import itertools
from unittest import mock

import pytest
import torch

from common.errors import ConfigError
from engines.base import one_step
from engines.torch_engine import TorchEngine
from models.kernels import patching
from optim import gradients
from optim.lars import update_class
from optim.lars_update import LarsUpdate
from tests.engines import worlds
from tests.engines.noise import as_micro_batches, micro_batches, noise_images
from tests.tensors import assert_bitwise_equal, flat

PLAIN = (
    "model.dropout=0",
    "model.drop_path=0",
    "precision.weights=float32",
    "data.label_smoothing=0.1",
)
SGD = (
    *PLAIN,
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "schedule.peak=0.1",
)
RANDOM_LAYERS = ("model.dropout=0.5", "model.drop_path=0.5")
AVERAGES = ("average.step_decay=0.6", "average.epoch_decay=0.9", "model.norm=batch")


def train(engine, steps, lr=1.0):
    """Steps on noise, other images in each; the results."""
    batch = engine.batch
    images = [micro_batches(step, micro=batch.micro, count=batch.global_) for step in steps]
    return [engine.train_step(each, one_step(step), lr) for step, each in zip(steps, images)]


@pytest.mark.parametrize("valid", [9, 0])
def test_an_image_left_out_does_not_change_the_weight_of_the_others(create, valid):
    """Each readable image of a step of 24 counts 1/24, and a micro batch without any adds nothing:
    SGD, which is linear, moves the weights as in a batch of the others at a lower rate. Products of
    up to 1e3 terms are rounded by 2**-24 each, through some 20 layers forward and backward: to 3e-4
    at most; a forgotten term shows at 1e-2."""
    images, labels = noise_images(24)
    first, second = as_micro_batches(images, labels, 12)
    unreadable = ("a.jpg: empty",)
    count = 12 + valid
    engine = create(*SGD)
    other = create(*SGD, f"batch.global={count}", f"batch.micro={count}")
    start = engine.state_dict()["weights"]
    result = engine.train_step(
        iter([first, second._replace(valid=valid, unreadable=unreadable)]), one_step(0), 1.0
    )
    expected = other.train_step(
        as_micro_batches(images[:count], labels[:count], count), one_step(0), count / 24
    )
    assert result.loss.item() == pytest.approx(expected.loss.item() * count / 24, rel=1e-5)
    assert (result.images, result.unreadable, result.skipped.item()) == (count, unreadable, 0)
    found, expected = (run.state_dict()["weights"] for run in (engine, other))
    for name, before in start.items():
        assert (found[name] - expected[name]).norm() < 3e-4 * (expected[name] - before).norm(), name


def test_a_power_of_two_as_loss_scale_changes_no_bit(create):
    """It only moves exponents, far from float32's limits: exact also with stochastic rounding and
    dropout."""
    found = []
    for scale in (2**-7, 2**16):
        engine = create(*RANDOM_LAYERS, f"precision.loss_scale={scale}")
        losses = [result.loss.item() for result in train(engine, range(3))]
        state = engine.state_dict()
        del state["loss_scale"]
        found.append((losses, state))
    assert found[0][0] == found[1][0]
    assert_bitwise_equal(found[0][1], found[1][1])


def test_a_step_pulls_exactly_its_micro_batches(create):
    engine = create("batch.micro=6")
    supply = itertools.chain(*(micro_batches(0, micro=6) for _ in range(3)))
    engine.train_step(supply, one_step(0), 1.0)
    assert len(list(supply)) == 2 * 4
    before = engine.state_dict()
    with pytest.raises(AssertionError, match="only 3 micro batches came"):
        engine.train_step(itertools.islice(micro_batches(0, micro=6), 3), one_step(0), 1.0)
    assert_bitwise_equal(engine.state_dict(), before)


def test_each_step_and_each_micro_batch_has_draws_of_its_own(create):
    """The same images from the same weights: the loss differs with the step's and the micro batch's
    number."""
    (only,) = micro_batches(0, count=12)
    losses = set()
    for step, number in ((0, 0), (0, 1), (1, 0), (0, 0)):
        engine = create(*RANDOM_LAYERS, "batch.global=12")
        losses.add(
            engine.train_step(iter([only._replace(number=number)]), one_step(step), 1.0).loss.item()
        )
    assert len(losses) == 3


OVERFLOW = ("precision.loss_scale=3e38", "precision.dynamic_loss_scale=true")
FEW = ("batch.global=4", "batch.micro=2")
STATES = (AVERAGES, ("precision.weights=float32",), ("precision.compute=bfloat16",), OVERFLOW)


@pytest.mark.parametrize("overrides", STATES)
def test_an_engine_goes_on_from_another_ones_state_bit_for_bit(create, overrides, tmp_path):
    """Also with weights of its own before, a working copy in another dtype than the state, and a
    first step that was skipped, which lowers the loss scale to the largest that a dynamic one may
    have."""
    first, second = (create(*RANDOM_LAYERS, *FEW, *overrides) for _ in range(2))
    train(first, range(2))
    first.end_epoch()
    train(second, range(1), lr=3.0)
    state = first.state_dict()
    torch.save(state, tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_bitwise_equal(second.state_dict(), state)
    for engine in (first, second):
        result = train(engine, range(2, 4))[-1]
        engine.end_epoch()
    expected = (1, 2.0**24) if overrides == OVERFLOW else (0, 128.0)
    assert (result.skipped.item(), result.loss_scale.item()) == expected
    later = first.state_dict()
    assert any(
        not torch.equal(one, other)
        for one, other in zip(flat(later).values(), flat(state).values())
    )
    assert_bitwise_equal(second.state_dict(), later)


@pytest.mark.parametrize("overrides", STATES)
def test_an_engine_goes_back_to_a_copy_of_its_live_state_and_another_one_goes_on_from_it(
    create, overrides
):
    first, second = (create(*RANDOM_LAYERS, *FEW, *overrides) for _ in range(2))
    train(first, range(2))
    first.end_epoch()
    copied = {name: tensor.clone() for name, tensor in first.live_state().items()}
    state = first.state_dict()
    train(first, [2])
    later = first.state_dict()
    assert any(
        not torch.equal(one, other)
        for one, other in zip(flat(later).values(), flat(state).values())
    )
    for engine in (first, second):
        engine.load_live_state(copied)
        assert_bitwise_equal(engine.state_dict(), state)
        train(engine, [2])
        assert_bitwise_equal(engine.state_dict(), later)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (
            lambda state: state["averages"].pop("epoch_average"),
            r"averages\.epoch_average is missing",
        ),
        (lambda state: state["buffers"].popitem(), "running_var is missing"),
        (
            lambda state: state["averages"]["step_average"]["weights"].popitem(),
            r"head\.classifier\.bias is missing",
        ),
        (lambda state: state.pop("loss_scale"), "^loss_scale is missing$"),
        (lambda state: state["weights"].update(other=torch.zeros(1)), "other is unknown"),
        (
            lambda state: state["weights"].update({"stem.conv_stem.weight": torch.zeros(1)}),
            r"stem\.conv_stem\.weight is \[",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(create, damage, fault):
    engine = create(*AVERAGES)
    state = create(*AVERAGES, "run.seed=1").state_dict()
    damage(state)
    with pytest.raises(ValueError, match=fault):
        engine.load_state_dict(state)


def test_a_step_with_gradients_that_are_not_finite_changes_nothing_and_is_counted(create):
    """An infinite loss scale overflows every gradient; the counts run on, weights, momentum and
    running statistics stay bit for bit, and averages take nothing in."""
    engine = create(*AVERAGES)
    engine._loss_scale.scale = torch.tensor(torch.inf)
    before = engine.state_dict()
    results = train(engine, range(2))
    after = engine.state_dict()
    assert (results[-1].skipped.item(), results[-1].skipped_in_row.item()) == (2, 2)
    assert after["averages"]["step_average"]["count"] == 0
    del before["loss_scale"], after["loss_scale"], before["averages"], after["averages"]
    assert_bitwise_equal(after, before)


def test_auto_takes_what_there_is_and_its_measured_peak_is_a_rate(create, monkeypatch):
    """A product of two 1024 x 1024 matrices is 2 x 1024**3 operations; the first one is not
    counted."""
    monkeypatch.setattr("engines.torch_engine.timed", lambda *_: [9.0, 7.0, 2.0, 3.0])
    engine = create("run.device=auto")
    assert isinstance(engine, TorchEngine)
    assert engine.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if torch.cuda.is_available() else 1024
    assert engine.peak_flops() == 2 * size**3 / 3.0
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_with_the_remedy(create):
    with pytest.raises(ConfigError, match=r"run.device cuda: .* use run.device=cpu or auto"):
        create("run.device=cuda")


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_gpus_that_only_look_like_cuda_are_refused_with_what_is_supported(
    create, device, monkeypatch
):
    """PyTorch for ROCm calls its devices cuda; no kernel of ours was ever tried there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(
        ConfigError,
        match=f"^run.device {device}: .* ROCm; supported are NVIDIA .* use run.device=cpu$",
    ):
        create(f"run.device={device}")
    assert update_class(torch.device("cuda")) is LarsUpdate and not patching.available()
    with pytest.raises(ImportError, match="for NVIDIA's GPUs, this PyTorch is for ROCm"):
        patching.patch(torch.nn.Sequential())
    create("run.device=cpu").close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="auto takes the CUDA device")
@pytest.mark.parametrize(
    ("backend", "name"),
    [(torch.backends.mps, "Apple's GPU (MPS)"), (torch.xpu, "Intel's GPU (XPU)")],
)
def test_a_gpu_that_auto_leaves_out_is_named_in_one_line(create, backend, name):
    with mock.patch.object(backend, "is_available", lambda: True):
        engine = create("run.device=auto")
        assert engine.device.type == "cpu"
        (line,) = [note for note in engine.notes if "run.device" in note]
        assert line.startswith(
            f"run.device auto: the CPU computes, {name} does not; supported are NVIDIA GPUs (cuda)"
        )
        engine.close()
        engine = create("run.device=cpu")
        assert not any("run.device" in note for note in engine.notes)
        engine.close()


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "muon"])
def test_no_gradient_is_counted_twice_where_autograd_leaves_new_tensors(monkeypatch, name):
    """As on GPUs, with float16 weights of a model that computes in float32: the module's own
    parameters are stepped."""
    keys = (
        f"optimizer.name={name}",
        "precision.compute=float32",
        "precision.weights=float16",
        "batch.global=4",
    )
    options = {"lr": 0.01, "steps": 2}
    expected = worlds.trains(worlds.single(), keys, options)
    monkeypatch.setattr(gradients, "_ONE_BY_ONE", ())
    results, digests, state = worlds.trains(worlds.single(), keys, options)
    assert_bitwise_equal(state[2], expected[2][2])
    assert (results, digests) == expected[:2]
