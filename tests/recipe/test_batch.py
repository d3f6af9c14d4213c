"""The arithmetic of a run against the published tables, and against division done by hand."""

import pytest

from data.digits import DigitsSource
from recipe import batch
from recipe.batch import divide, in_steps, lengths, peak_learning_rate, training_image_size
from recipe.config import Data, Recipe
from recipe.division import Batch
from recipe.errors import ConfigError, DataError

IMAGENET = 1_281_167


def recipe(global_=6144, micro=3, stages=2, replicas=None, run=None, schedule=None, **sections):
    return Recipe.model_validate(
        {
            "run": run or {"epochs": 350},
            "batch": {"global": global_, "micro": micro},
            "parallel": {"stages": stages, "replicas": replicas},
            "schedule": {"peak_per_image": 0.00138107, **(schedule or {"warmup_epochs": 70})},
            **sections,
        }
    )


# Accumulation on PODs of 8, 32, 64 and 128 replicas of two devices, as published with the recipe (at 6144
# and 3 images: 256, 64, 32, 16) and as divided by hand for the smaller batches.
TABLE = {
    (768, 3): (32, 8, 4, 2),
    (1536, 3): (64, 16, 8, 4),
    (3072, 3): (128, 32, 16, 8),
    (6144, 3): (256, 64, 32, 16),
    (6144, 4): (192, 48, 24, 12),
}


@pytest.mark.parametrize(("size", "micro"), TABLE)
def test_accumulation_on_every_pod(size, micro):
    for replicas, accumulation in zip((8, 32, 64, 128), TABLE[size, micro]):
        assert divide(recipe(size, micro), replicas) == Batch(size, micro, accumulation, replicas, 2)
        assert divide(recipe(size, micro), replicas).micro_batches == size // micro
        assert divide(recipe(size, micro, replicas=replicas)) == Batch(size, micro, accumulation, replicas, 2)
        assert divide(recipe(size, micro, replicas=2 * replicas), replicas).replicas == replicas


def test_one_line_says_how_the_batch_is_made_up():
    assert divide(recipe(), 64).describe() == (
        "6144 = 3 micro x 32 accumulation x 64 replicas (2 stages each: 128 devices)"
    )
    assert divide(recipe(48, 48, stages=1)).describe() == "48 = 48 micro x 1 accumulation x 1 replica (1 device)"
    assert divide(recipe(96, 48, stages=1), 2).describe() == "96 = 48 micro x 1 accumulation x 2 replicas (2 devices)"


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_do():
    for size, replicas, words in (
        (6000, 64, "3 micro x 64 replicas = 192; nearest: 5952 or 6144"),
        (5, 2, "3 micro x 2 replicas = 6; nearest: 6"),
        (4, None, "3 micro x 1 replica = 3; nearest: 3 or 6"),
    ):
        with pytest.raises(ConfigError) as caught:
            divide(recipe(size), replicas)
        assert str(caught.value) == f"batch.global {size} is not a multiple of {words}"


def test_lengths_of_the_published_run():
    """208 x 6144 = 1,277,952 of 1,281,167 images; 350 epochs of 208 steps, of which 70 warm up."""
    found = lengths(recipe(), IMAGENET)
    assert (found.steps_per_epoch, found.dropped) == (208, 3215)
    assert (found.total, found.warmup) == (72_800, 14_560)
    assert found.describe() == (
        "72800 steps = 350 epochs x 208 steps, 14560 of warm-up; 3215 images left over in each epoch"
    )


@pytest.mark.parametrize(
    ("unit", "length", "steps"),
    [
        ("epochs", 1, 208), ("epochs", 0.5, 104), ("epochs", 1.0024, 208), ("epochs", 1.0025, 209),  # 208.50, 208.52
        ("epochs", 1e-9, 0), ("steps", 77, 77), ("images", 6144, 1), ("images", 6145, 2), ("images", IMAGENET, 209),
    ],
)  # fmt: skip
def test_a_run_and_its_warm_up_are_as_long_as_they_say_in_epochs_steps_or_images(unit, length, steps):
    """Epochs to the nearest step; images to the step that has seen them all; a run has at least one step."""
    assert lengths(recipe(run={unit: length}, schedule={"warmup_steps": 0}), IMAGENET).total == max(1, steps)
    assert lengths(recipe(schedule={f"warmup_{unit}": length}), IMAGENET).warmup == steps
    assert lengths(recipe(schedule={"power": 1}), IMAGENET).warmup == 0
    assert in_steps(None, None, None, 208, 6144) == in_steps(None, 0, None, 208, 6144) == 0


def test_a_warm_up_ends_and_gradients_are_applied_before_the_run_ends():
    late = {"exchange": {"delay": 3}, "schedule": {"warmup_steps": 1}}
    assert lengths(recipe(run={"steps": 4}, **late), IMAGENET).total == 4
    with pytest.raises(ConfigError, match=r"^exchange\.delay 3 is not shorter than the run of 3 steps: .*; lower it "):
        lengths(recipe(run={"steps": 3}, **late), IMAGENET)
    lengths(recipe(run={"steps": 11}, schedule={"warmup_steps": 10}), IMAGENET)
    with pytest.raises(ConfigError, match="the warm-up of 10 steps is not shorter than the run of 10; lower "):
        lengths(recipe(run={"steps": 10}, schedule={"warmup_steps": 10}), IMAGENET)


def test_an_epoch_holds_a_whole_batch():
    assert lengths(recipe(48, 48), 48).steps_per_epoch == 1
    assert lengths(recipe(48, 48), 95).dropped == 47
    for replicas, images, remedy in (
        (None, 47, "batch.global=45"),
        (5, 47, "batch.global=45"),
        (10, 47, "batch.global=30"),
        (None, 2, "batch.global=2 batch.micro=2"),
        (16, 47, "batch.global=32 batch.micro=2"),
    ):
        with pytest.raises(DataError) as caught:
            lengths(recipe(48, 3, replicas=replicas), images)
        assert str(caught.value) == (
            f"batch.global 48 is more than the {images} training images; give more images or {remedy}"
        )
        values = dict(part.split("=") for part in remedy.split())
        mended = recipe(int(values["batch.global"]), int(values.get("batch.micro", 3)), replicas=replicas)
        assert divide(mended).global_ <= images
        assert lengths(mended, images).steps_per_epoch == 1


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [("none", 6144, 0.1), ("linear", 6144, 0.8), ("linear", 384, 0.05), ("sqrt", 3072, 0.2), ("sqrt", 192, 0.05)],
)
def test_the_peak_follows_the_rule_of_the_batch(rule, size, expected):
    """A peak of 0.1 at 768."""
    reference = {} if rule == "none" else {"reference_batch": 768}
    schedule = {"peak": 0.1, "peak_per_image": None, "batch_rule": rule, **reference}
    assert peak_learning_rate(recipe(size, schedule=schedule)) == pytest.approx(expected, rel=1e-12)
    # Given by image: 2^-9.5, the published rule, which is 8.485 at 6144.
    assert peak_learning_rate(recipe(size)) == pytest.approx(2**-9.5 * size, rel=1e-5)


def test_images_that_need_no_folder_are_counted_by_the_recipe():
    digits = Data(source="digits", train_images=5, validation_images=5)
    for split in ("train", "validation"):
        assert digits.images(split) == len(DigitsSource(split))
    glyphs = Data(source="glyphs", train_images=123)
    assert (glyphs.images("train"), glyphs.images("validation")) == (123, 2000)
    folder = Data(validation_images=50_000)
    assert (folder.images("train"), folder.images("validation")) == (None, 50_000)


def test_the_training_size_changes_with_the_epoch():
    plain = recipe(model={"image_size": 380})
    assert {training_image_size(plain, epoch) for epoch in (0, 7, 349)} == {380}
    growing = recipe(model={"image_size": 380}, data={"image_sizes": [[0, 160], [3, 252], [5, 380]]})
    assert [training_image_size(growing, epoch) for epoch in range(7)] == [160, 160, 160, 252, 252, 380, 380]
    assert batch.training_image_sizes(growing) == {160, 252, 380} and batch.training_image_sizes(plain) == {380}


@pytest.mark.parametrize(("source", "fitting", "wrong"), [("digits", 10, 9), ("digits", 10, 11), ("glyphs", 2, 1001)])
def test_the_plan_refuses_classes_that_a_source_has_not(source, fitting, wrong):
    batch.describe(recipe(6, model={"classes": fitting}, data={"source": source}))
    with pytest.raises(ConfigError, match=rf"data\.source={source}: 10+ classes.*, but model.classes is {wrong}; set "):
        batch.describe(recipe(6, model={"classes": wrong}, data={"source": source}))


DIGITS = {"model": {"classes": 10}, "data": {"source": "digits"}}
MODEL = "model      efficientnet_b4, width 1.4, depth 1.8, groups of 16 channels, expansion 4, 380 px"


def test_the_plan_says_what_the_recipe_determines():
    assert batch.describe(recipe(replicas=64, data={"train_images": IMAGENET})).splitlines() == [
        "run        run -> runs/run",
        f"{MODEL}, 1000 classes",
        "batch      6144 = 3 micro x 32 accumulation x 64 replicas (2 stages each: 128 devices)",
        "parallel   gpipe over 2 stages, split auto",
        "precision  auto compute, float16 weights, stochastic rounding",
        "optimizer  lars, polynomial schedule, weight decay 2.5e-06, peak learning rate 8.48529",
        "data       folder",
        "images     not found here: data.root is not set; name the folder of the images: data.root=/path/to/images",
        f"length     1281167 training images; {lengths(recipe(), IMAGENET).describe()}",
    ]
    assert "known once data.root is read" in batch.describe(recipe())
    digits = recipe(48, 48, model={"classes": 10}, data={"source": "digits", "train_images": 99})
    assert "1437 training images; 10150 steps" in batch.describe(digits)  # 350 x 29


def test_the_plan_has_a_place_for_everything_that_may_be_chosen():
    parallel = {"stages": 2, "split": ["blocks.1.0"], "recompute": ["blocks.0.0", "blocks.1.0"], "replicas": 2}
    images = {"image_sizes": [[0, 16], [4, 24]], "mixup": 0.2, "cutmix": 0.85, "label_smoothing": 0.1}
    changed = {
        "model": DIGITS["model"],
        "exchange": {"method": "gtopk"},
        "data": {**DIGITS["data"], **images, "augment": "randaugment"},
        "average": {"step_decay": 0.9, "epoch_decay": 0.97},
    }
    made = recipe(96, run={"name": "a", "output": "/b", "epochs": 100}, parallel=parallel, **changed)
    assert batch.describe(made).splitlines() == [
        "run        a -> /b",
        f"{MODEL}, 10 classes",
        "batch      96 = 3 micro x 16 accumulation x 2 replicas (2 stages each: 4 devices)",
        "parallel   gpipe over 2 stages, split [blocks.1.0]; recomputing blocks.0.0, blocks.1.0; exchange gtopk (tree, "
        "float32), density 0.001 of the update, conserving, factor masking",
        "precision  auto compute, float16 weights, stochastic rounding",
        "optimizer  lars, polynomial schedule, weight decay 2.5e-06, peak learning rate 0.132583",
        "data       digits, training at 16 px from epoch 0, 24 px from epoch 4, randaugment, mixup 0.2, cutmix 0.85, "
        "label smoothing 0.1, average over updates 0.9, average over epochs 0.97",
        f"length     1437 training images; {lengths(made, 1437).describe()}",
    ]
    interleaved = {"stages": 4, "schedule": "interleaved", "virtual_stages": 2, "recompute": True}
    plan = batch.describe(recipe(96, parallel=interleaved, **DIGITS))
    assert "interleaved over 4 stages of 2 parts, split auto; recomputing all blocks\n" in plan
    assert "\nparallel" not in batch.describe(recipe(96, stages=1, **DIGITS))


LAUNCHED = {"POPDIST_NUM_TOTAL_REPLICAS": "8", "POPDIST_NUM_LOCAL_REPLICAS": "2", "POPDIST_NUM_IPUS_PER_REPLICA": "2"}


def test_a_pod_is_filled_with_replicas_unless_poprun_or_the_recipe_says_how_many(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    pod = {"ipu": {"pod": 16}, "optimizer": {"trust": "momentum"}, **DIGITS}
    on_ipus = recipe(96, run={"epochs": 100, "device": "ipu"}, **pod)
    whole = batch.whole_pod(on_ipus)
    assert whole.parallel.replicas == 8
    assert whole.model_copy(update={"parallel": on_ipus.parallel}) == on_ipus
    for other in (
        recipe(96, **pod),
        recipe(96, run={"epochs": 100, "device": "ipu"}, **DIGITS),
        recipe(96, replicas=2, run={"epochs": 100, "device": "ipu"}, **pod),
    ):
        assert batch.whole_pod(other) is other
    with pytest.raises(ConfigError, match=r"^ipu\.pod 16 is not a multiple of parallel\.stages 3; "):
        batch.whole_pod(recipe(96, stages=3, run={"epochs": 100, "device": "ipu"}, **pod))
    assert batch.planned(on_ipus).replicas == 1
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert batch.whole_pod(on_ipus) is on_ipus
    assert batch.planned(on_ipus).replicas == 8
    assert batch.planned(recipe(96, **pod)).replicas == 1
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "1")
    with pytest.raises(ConfigError):
        batch.planned(on_ipus)
