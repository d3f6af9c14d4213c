"""The engine beside plain steps: averages of weights, mixed images, running statistics, other
weights, scores."""

import numpy as np
import pytest
import torch
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

from data import mixing
from data.loader import EvaluationBatches
from data.sources import open_source
from engines.base import one_step
from models.efficientnet import build
from optim.averaging import WeightAverage
from tests.engines.noise import as_micro_batches, micro_batches, noise_images
from tests.tensors import assert_bitwise_equal
from training.scoring import evaluate

BOTH = ("average.step_decay=0.6", "average.epoch_decay=0.9")
BATCH_NORM = ("model.norm=batch",)
FLOAT32 = ("precision.weights=float32",)


def train(engine, steps, lr=1.0):
    for step in steps:
        engine.train_step(micro_batches(step), one_step(step), lr)


def test_averages_take_in_the_persistent_weights_after_each_update_and_epoch(create):
    """The reference averages what `state_dict` gives after every step, through the tested
    WeightAverage."""
    engine = create(*BOTH, *BATCH_NORM)
    assert engine.averages() == create().averages() == ()
    expected = {}
    for step in range(6):
        train(engine, [step])
        state = engine.state_dict()
        current = [*state["weights"].values(), *state["buffers"].values()]
        due = {"step_average": 0.6}
        if step % 3 == 2:
            engine.end_epoch()
            due["epoch_average"] = 0.9
        assert engine.averages() == ("step_average", "epoch_average")[: 1 + (step > 1)]
        for name, decay in due.items():
            expected.setdefault(name, WeightAverage(decay, current)).add(current)
    for name, average in expected.items():
        found = engine.state_dict()["averages"][name]
        assert found["count"] == average.count == {"step_average": 6, "epoch_average": 2}[name]
        for ours, reference in zip(
            {**found["weights"], **found["buffers"]}.values(), average.tensors
        ):
            assert torch.equal(ours, reference)
    assert engine.state_dict()["buffers"] and not create().state_dict()["buffers"]


def test_within_using_the_average_is_scored_and_afterwards_the_weights_again(create):
    """Predictions within are those of an engine that was given the average as its weights."""
    precision = ("precision.compute=bfloat16", *FLOAT32)
    engine = create(*BOTH, *BATCH_NORM, *precision)
    other = create(*BATCH_NORM, *precision)
    train(engine, range(2), lr=3.0)
    batch = next(micro_batches(99))
    before = engine.predict_step(batch)
    state = engine.state_dict()
    average = state["averages"]["step_average"]
    other.load_weights({**average["weights"], **average["buffers"]})
    with pytest.raises(KeyboardInterrupt), engine.using("step_average"):
        within = engine.predict_step(batch)
        assert engine.evaluate_step(batch).loss == other.evaluate_step(batch).loss
        raise KeyboardInterrupt
    assert torch.equal(within, other.predict_step(batch)) and not torch.equal(within, before)
    with engine.using("trained"):
        assert torch.equal(engine.predict_step(batch), before)
    assert torch.equal(engine.predict_step(batch), before)
    assert_bitwise_equal(engine.state_dict(), state)


def test_statistics_come_from_images_not_from_padding(create):
    """4 of 12 rows are images: the statistics are those of the four alone, repeated to fill the
    micro batch."""
    (batch,), found = micro_batches(0, micro=12, count=12, valid=4), []
    for filling in (torch.zeros(8, 3, 16, 16), batch.images[:4].repeat(2, 1, 1, 1)):
        engine = create(*BATCH_NORM, "batch.global=12")
        batch.images[4:] = filling
        engine.train_step(iter([batch]), one_step(0), 1.0)
        found.append(engine.state_dict()["buffers"])
    assert_bitwise_equal(*found)


def test_mixed_images_and_targets_give_the_loss_and_gradients_of_a_plain_loop(create, tiny):
    """The reference mixes by the tested functions of data.mixing and takes the cross entropy in
    float64 by hand.

    Tolerance of a gradient: float32 against float64 over some 20 layers, as in
    test_torch_engine.py.
    """
    plain = ("model.dropout=0", "model.drop_path=0", *FLOAT32)
    overrides = (
        *plain,
        "data.mixup=0.4",
        "data.cutmix=0.7",
        "data.label_smoothing=0.1",
        "batch.micro=3",
    )
    recipe = tiny(*overrides)
    engine = create(*overrides)
    model = build(recipe.model, recipe.run.seed).double()
    loss = 0.0
    boxes = 0
    hits = 0
    for batch in micro_batches(5, micro=3):
        plan = mixing.draw(
            recipe.data, recipe.run.seed, (5, batch.number), rows=3, valid=3, size=(16, 16)
        )
        boxes += plan.kept < 1
        targets = mixing.mix_targets(batch.labels, plan, 10).double() * 0.9 + 0.1 / 10
        logits = model(mixing.mix_images(batch.images, plan))
        hits += (logits.argmax(1) == batch.labels).sum()
        log_p = F.log_softmax(logits, dim=1)
        loss = loss - (targets * log_p).sum(1).mean() / 8
    assert 0 < boxes < 8, "some micro batches cut, some not"
    loss.backward()
    result = engine.train_step(micro_batches(5, micro=3), one_step(5), 1.0, measure=True)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5) and result.correct == hits
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert result.norms.gradient.item() == pytest.approx(gradients.norm().item(), rel=1e-4)


def test_an_update_without_a_gradient_yet_does_not_count_in_the_average(create):
    """While the first gradient is on its way the weights are those of the start."""
    engine = create("exchange.delay=1", "average.step_decay=0.9")
    counts = []
    for step in range(3):
        engine.train_step(micro_batches(step), one_step(step), 0.05)
        counts.append(int(engine.state_dict()["averages"]["step_average"]["count"]))
    assert counts == [0, 1, 2]


@pytest.mark.parametrize(
    "keys", [(), ("data.bce_threshold=0.2", "data.bce_reduction=sum")], ids=["mean", "sum"]
)
def test_binary_cross_entropies_of_mixed_images_give_the_loss_and_gradients_of_timms_loss(
    create, tiny, keys
):
    """timm's BinaryCrossEntropy in float64 on the images that are there; the rest of a micro batch
    has a loss of 0."""
    plain = ("model.dropout=0", "model.drop_path=0", *FLOAT32)
    overrides = (
        *plain,
        "data.mixup=0.4",
        "data.label_smoothing=0.1",
        "batch.micro=3",
        "data.loss=bce",
        *keys,
    )
    recipe = tiny(*overrides)
    engine = create(*overrides)
    theirs = BinaryCrossEntropy(
        target_threshold=recipe.data.bce_threshold, sum_classes="sum" in str(keys)
    )
    model = build(recipe.model, recipe.run.seed).double()
    loss = 0.0
    for batch in micro_batches(5, micro=3, valid=2):
        plan = mixing.draw(
            recipe.data, recipe.run.seed, (5, batch.number), rows=3, valid=2, size=(16, 16)
        )
        targets = mixing.mix_targets(batch.labels, plan, 10).double() * 0.9 + 0.1 / 10
        logits = model(mixing.mix_images(batch.images, plan))
        loss = loss + theirs(logits[:2], targets[:2]) * (2 / 3) / 8
    loss.backward()
    result = engine.train_step(micro_batches(5, micro=3, valid=2), one_step(5), 1.0, measure=True)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-5)
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert result.norms.gradient.item() == pytest.approx(gradients.norm().item(), rel=1e-4)


def test_loaded_weights_replace_those_of_their_names_only(create):
    engine = create(*BATCH_NORM, *FLOAT32)
    assert not any("preprocess" in name for name in engine.shapes), (
        "its constants belong to the recipe"
    )
    train(engine, range(2))
    before = engine.state_dict()
    name = "stem.conv_stem.weight"
    buffer = "stem.bn1.running_mean"
    given = {name: torch.randn(engine.shapes[name]), buffer: torch.randn(engine.shapes[buffer])}
    engine.load_weights(given)
    state = engine.state_dict()
    before["weights"][name], before["buffers"][buffer] = given.values()
    assert_bitwise_equal(state, before)
    with pytest.raises(ValueError, match="nobody is unknown"):
        engine.load_weights({"nobody": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"stem.conv_stem.weight is \[1\], the model's is \[8, 3, 3, 3\]"
    ):
        engine.load_weights({name: torch.zeros(1)})


def test_evaluation_counts_every_image_once_whatever_the_batch_size(tiny, create):
    """360 digits by 7 (the last batch has 3) and by 360, without dropout, against ranks computed by
    NumPy in float64.

    Ranks are exact as long as no label's logit comes closer to another than float32 errs, which is
    asserted; the mean loss agrees to 1e-6, twenty roundings of 2**-24.
    """
    overrides = ("model.dropout=0.5", "model.drop_path=0.5", *FLOAT32)
    engine = create(*overrides)
    recipe = tiny(*overrides)
    train(engine, range(2))
    source = open_source(recipe.data, 10, "validation")
    small, whole = (
        EvaluationBatches(source, data=recipe.data, image_size=16, batch=batch)
        for batch in (7, 360)
    )
    (images,) = whole
    model = build(recipe.model, 0)
    model.load_state_dict(engine.state_dict()["weights"])
    with torch.no_grad():
        logits = model.double().eval()(images.images).numpy()
    hit = logits[np.arange(360), images.labels.numpy()][:, None]
    assert np.sort(np.abs(logits - hit), axis=1)[:, 1].min() > 1e-5
    ranks = (logits > hit).sum(1)
    for batches in (small, whole):
        scores = evaluate(engine, batches)
        assert (scores.images, scores.top1, scores.top5) == (
            360,
            (ranks < 1).sum() / 360,
            (ranks < 5).sum() / 360,
        )
        assert scores.loss == pytest.approx(np.log(np.exp(logits - hit).sum(1)).mean(), rel=1e-6)
    assert 0 < (ranks < 1).sum() < (ranks < 5).sum() < 360


def test_top5_of_at_most_five_classes_is_every_image(create):
    batch = next(as_micro_batches(*noise_images(12, classes=2), 12))._replace(valid=10)
    counts = create("model.classes=2").evaluate_step(batch)
    assert counts.images == counts.top5 == 10 and 0 <= counts.top1 <= 10
