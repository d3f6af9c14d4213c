"""Some blocks are trained, the others keep every bit, and cost no backward pass before the first
that is trained."""

import pytest
import torch
from torch.nn import functional as F

from common.errors import ConfigError
from engines import factory
from engines.base import one_step
from recipe.batch import divide
from tests.engines.noise import micro_batches
from tests.tensors import assert_bitwise_equal

PLAIN = ("model.dropout=0", "model.drop_path=0", "precision.weights=float32")
SGD = (
    *PLAIN,
    "optimizer.name=sgd",
    "optimizer.momentum=0",
    "optimizer.weight_decay=0",
    "schedule.peak=0.1",
)
# Everything that moves a weight without a gradient, or rounds it.
ALL_THAT_MOVES = (
    (
        "optimizer.name=lars",
        "optimizer.weight_decay=0.1",
        "optimizer.trust_coefficient=0.1",
        "optimizer.skip=[]",
    ),
    (
        "optimizer.name=lars",
        "optimizer.trust=momentum",
        "optimizer.weight_decay=0.1",
        "schedule.peak=0.1",
    ),
    ("optimizer.name=sgd", "optimizer.weight_decay=0.1", "schedule.peak=0.1"),
    ("optimizer.name=rmsprop", "schedule.peak=0.1"),
    ("optimizer.name=lamb", "schedule.peak=0.1"),
    ("optimizer.name=adamw", "schedule.peak=0.1"),
    ("optimizer.name=muon", "schedule.peak=0.1"),
)


def train(engine, steps, lr=0.1):
    return [engine.train_step(micro_batches(step), one_step(step), lr) for step in steps]


def tensors(engine):
    state = engine.state_dict()
    return {**state["weights"], **state["buffers"]}


def is_of(name, blocks):
    return name.startswith(tuple(f"{block}." for block in blocks))


@pytest.mark.parametrize(
    ("optimizer", "half"),
    [
        # Fast in half precision and in single in turn; the first, whose step is our own, in both.
        pytest.param(
            keys,
            half,
            id=f"{' '.join(keys[:2])} {'half' if half else 'single'}",
            marks=() if place == 0 or half == bool(place % 2) else pytest.mark.slow,
        )
        for place, keys in enumerate(ALL_THAT_MOVES)
        for half in (True, False)
    ],
)
def test_what_is_not_trained_keeps_every_bit_and_the_rest_moves(create, optimizer, half):
    weights = "float16" if half else "float32"
    keys = (
        "model.norm=batch",
        "model.drop_path=0.5",
        "average.step_decay=0.5",
        f"precision.weights={weights}",
    )
    engine = create("model.train=[blocks.5, head]", *keys, *optimizer)
    start = tensors(engine)
    train(engine, range(3))
    end = tensors(engine)
    for name, before in start.items():
        trained = is_of(name, ("blocks.5", "head"))
        assert torch.equal(end[name], before) != trained, name
    average = engine.state_dict()["averages"]["step_average"]
    average = {**average["weights"], **average["buffers"]}
    assert average.keys() == start.keys()
    for name, before in start.items():
        if not is_of(name, ("blocks.5", "head")):
            assert torch.equal(average[name], before), name


def test_the_gradient_is_that_of_a_whole_training(create):
    """The first update from equal weights, without what blocks draw: the same operations in the
    same order."""
    part = create(*SGD, "model.train=[blocks.6, head]")
    whole = create(*SGD)
    train(part, range(1))
    train(whole, range(1))
    found = tensors(part)
    expected = tensors(whole)
    trained = [name for name in found if is_of(name, ("blocks.6", "head"))]
    assert trained
    assert_bitwise_equal(
        {name: found[name] for name in trained}, {name: expected[name] for name in trained}
    )


def test_a_block_in_the_middle_is_trained_through_those_behind_it(create):
    part = create(*SGD, "model.train=[stem]")
    whole = create(*SGD)
    train(part, range(1))
    train(whole, range(1))
    found = tensors(part)
    expected = tensors(whole)
    for name in found:
        assert torch.equal(found[name], expected[name]) == is_of(name, ["stem"]), name


@pytest.mark.parametrize("recompute", [True, False])
def test_nothing_before_the_first_trained_block_has_a_backward_pass(create, recompute):
    engine = create(
        *PLAIN, "model.train=classifier", f"parallel.recompute={str(recompute).lower()}"
    )
    seen = {}

    def note(name, output):
        seen.setdefault(name, []).append(output.requires_grad)

    for name in engine._model.names:
        engine._model.block(name).register_forward_hook(
            lambda _, __, output, name=name: note(name, output)
        )
    train(engine, range(1))
    # Two micro batches; what is computed again is so with gradients.
    assert seen.pop("head") == ([False, True] * 2 if recompute else [True] * 2)
    assert len(seen) > 5 and all(calls == [False] * 2 for calls in seen.values())


def test_a_classifier_alone_is_a_softmax_regression_on_features_as_in_evaluation(create):
    """Against torch's own SGD with momentum on features of the untrained model, running statistics
    included.

    Sums of some hundred products in another order: 1e-6, where weights have moved by more than a
    thousand times that.
    """
    keys = (
        "optimizer.name=sgd",
        "optimizer.momentum=0.9",
        "optimizer.weight_decay=0.01",
        "optimizer.skip=[]",
    )
    engine = create(
        *PLAIN, *keys, "model.norm=batch", "model.train=classifier", "schedule.peak=0.1"
    )
    model = engine._model
    classifier = torch.nn.Linear(*reversed(model.block("head").classifier.weight.shape))
    classifier.load_state_dict(model.block("head").classifier.state_dict())
    reference = torch.optim.SGD(classifier.parameters(), lr=1.0, momentum=0.9, weight_decay=0.01)
    start = classifier.weight.detach().clone()
    for step in range(3):
        reference.zero_grad()
        for batch in micro_batches(step):
            model.eval()
            with torch.no_grad():
                x = batch.images
                for name in model.names[:-1]:
                    x = model.block(name)(x)
                features = model.block("head").pooled(x).flatten(1)
            (F.cross_entropy(classifier(features.float()), batch.labels) / 2).backward()
        reference.step()
        train(engine, [step], lr=1.0)
    found = tensors(engine)["head.classifier.weight"]
    torch.testing.assert_close(found, classifier.weight.detach(), rtol=0, atol=1e-6)
    assert (found - start).abs().max() > 1e-3


def test_state_is_that_of_a_whole_model_and_is_loaded_exactly(create):
    keys = ("model.norm=batch", "average.step_decay=0.5", "model.train=[head]")
    engine = create(*keys)
    other = create(*keys, "run.seed=1")
    train(engine, range(2))
    saved = engine.state_dict()
    assert saved["weights"].keys() == create("model.norm=batch").state_dict()["weights"].keys()
    assert saved["momentum_buffer"].keys() == {
        name for name in saved["weights"] if is_of(name, ["head"])
    }
    other.load_state_dict(saved)
    assert_bitwise_equal(other.state_dict(), saved)
    train(engine, [2])
    # Another seed rounds otherwise, so only the fact that it trains on is compared.
    assert train(other, [2])[0].skipped.item() == 0
    del saved["weights"]["stem.conv_stem.weight"]
    with pytest.raises(ValueError, match=r"stem\.conv_stem\.weight is missing"):
        other.load_state_dict(saved)


def test_weights_of_float32_are_not_rounded_to_those_that_compute(create):
    """A working copy of half precision would lose bits of what a file has."""
    engine = create("precision.compute=bfloat16", "model.train=[head]")
    weights = {name: torch.randn_like(each) for name, each in tensors(create(*PLAIN)).items()}
    engine.load_weights(weights)
    found = tensors(engine)
    assert torch.equal(found["stem.conv_stem.weight"], weights["stem.conv_stem.weight"])
    working = engine._model.block("stem").conv_stem.weight
    assert torch.equal(working, weights["stem.conv_stem.weight"].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("train", "fault"),
    [
        (
            "[blocks.9]",
            "model.train: blocks.9 is not a block; the blocks are classifier, stem, blocks.0.0",
        ),
        ("[]", "empty"),
    ],
)
def test_blocks_that_are_not_there_are_refused(create, train, fault):
    with pytest.raises(ConfigError, match=fault):
        create(f"model.train={train}")


def test_what_cannot_train_a_part_refuses(tiny):
    for keys, fault in (
        (
            ["run.device=ipu", "optimizer.trust=momentum"],
            r"model\.train classifier on IPUs: a compiled program updates all weights; use",
        ),
        (["exchange.method=auto"], r"exchange\.method auto measures the exchange of all weights"),
    ):
        recipe = tiny("model.train=classifier", *keys)
        with pytest.raises(ConfigError, match=fault):
            divide(recipe)


def test_models_of_timm_train_their_classifier(tiny):
    recipe = tiny(
        "model.name=timm",
        "model.architecture=resnet18",
        "model.width=null",
        "model.depth=null",
        "model.image_size=32",
        "model.train=classifier",
        "data.source=glyphs",
        "model.classes=10",
    )
    engine = factory.create(recipe, divide(recipe))
    assert set(engine._part.parameters) == {
        name for name in engine.shapes if name.endswith(("fc.weight", "fc.bias"))
    }
