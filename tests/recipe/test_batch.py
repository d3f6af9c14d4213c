"""The arithmetic of a run against the published tables, and against division done by hand."""

from types import SimpleNamespace

import pytest

from common.errors import ConfigError, DataError
from common.text import count
from data.digits import DigitsSource
from recipe import batch
from recipe.batch import (
    Lengths,
    described_lengths,
    divide,
    in_steps,
    lengths,
    peak_learning_rate,
    rate_factor,
    training_image_size,
)
from recipe.config import Data, Recipe
from recipe.course import Course
from recipe.division import Batch
from recipe.ipu import plan as ipu_plan
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from training import opening

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


@pytest.mark.parametrize(
    ("global_", "micro", "stages", "replicas", "line"),
    [
        (
            6144,
            3,
            2,
            64,
            "6144 = 3 micro x 32 accumulation x 64 replicas (2 stages each: 128 devices)",
        ),
        (48, 48, 1, None, "48 = 48 micro x 1 accumulation x 1 replica (1 device)"),
        (96, 48, 1, 2, "96 = 48 micro x 1 accumulation x 2 replicas (2 devices)"),
        (
            6000,
            3,
            2,
            64,
            "batch.global 6000 is not a multiple of 3 micro x 64 replicas = 192; nearest: 5952 or 6144",
        ),
        (5, 3, 1, 2, "batch.global 5 is not a multiple of 3 micro x 2 replicas = 6; nearest: 6"),
        (
            4,
            3,
            1,
            None,
            "batch.global 4 is not a multiple of 3 micro x 1 replica = 3; nearest: 3 or 6",
        ),
    ],
)
def test_a_batch_is_one_line_and_one_that_does_not_divide_names_the_nearest(
    global_, micro, stages, replicas, line
):
    try:
        found = divide(recipe(global_, micro, stages), replicas).describe()
    except ConfigError as error:
        found = str(error)
    assert found == line
    assert (
        repr(divide(recipe(replicas=64), 8))
        == repr(divide(recipe(replicas=8)))
        == repr(Batch(6144, 3, 256, 8, 2))
    )


TREE = {"method": "dense", "order": "tree"}


@pytest.mark.parametrize(
    ("global_", "replicas", "overrides", "expected"),
    [
        (6144, 1, {}, 32),  # not 48
        (6144, 3, {}, 32),
        (768, 128, {}, 6),
        (37 * 4, 4, {}, 37),  # 1 is refused, as mixing needs two: the smallest above 32
        (37 * 4, 4, {"data": {"mixup": 0}}, 1),
        # of 10 micro batches each replica has one at least; of 10 images there are 6
        (60, 7, {"exchange": TREE}, 6),
        (64, 2, {"batch": {"schedule": "noise", "largest": 128}}, 32),
        # which needs several micro batches
        (
            32,
            1,
            {"batch": {"schedule": "noise", "largest": 64}},
            16,
        ),
    ],
)
def test_an_automatic_micro_batch_is_the_largest_up_to_32_that_the_recipe_allows(
    global_, replicas, overrides, expected
):
    sections = {"data": {"mixup": 0.2}, **overrides}
    sections["batch"] = {"global": global_, "micro": "auto", **sections.get("batch", {})}
    made = recipe(stages=1, **{"run": {"epochs": 350}, **sections})
    assert divide(made, replicas).micro == expected
    found = batch.candidates(made, replicas)
    assert found == sorted(found) and expected in found
    numbers = [
        number
        for number in range(1, global_ + 1)
        if accepted(batch.settled(made, number), replicas)
    ]
    assert found == numbers


def test_where_no_automatic_micro_batch_is_possible_the_fault_is_that_of_the_first():
    made = recipe(stages=1, run={"epochs": 350}, batch={"global": 100, "micro": "auto"})
    with pytest.raises(
        ConfigError, match="100 is not a multiple of 1 micro x 3 replicas = 3; nearest: 99 or 102"
    ):
        divide(made, 3)


def accepted(made, replicas):
    try:
        return bool(divide(made, replicas))
    except ConfigError:
        return False


def test_a_plan_says_that_a_gpu_takes_another_micro_batch():
    words = "; batch.micro auto: a GPU takes the largest that fits"
    for overrides, said in (
        (["batch.micro=auto"], True),
        (["batch.micro=auto", "run.device=cpu"], False),
        ([], False),
    ):
        made = load(QUICKSTART, overrides)
        line = f"batch      {divide(made).describe()}{words if said else ''}"
        assert line in batch.describe(made).splitlines()


@pytest.mark.parametrize(
    ("global_", "replicas", "line"),
    [
        (24, 5, "24 = 2 micro x 12 on 5 replicas, accumulation 1 to 3 (2 stages each: 10 devices)"),
        (24, 4, "24 = 2 micro x 3 accumulation x 4 replicas (2 stages each: 8 devices)"),
        (25, 5, "batch.global 25 is not a multiple of 2 micro; nearest: 24 or 26"),
        (
            8,
            5,
            "batch.global 8 is 4 micro batches of 2, too few for 5 replicas; lower batch.micro or start fewer",
        ),
        (
            2,
            5,
            "batch.global 2 is 1 micro batch of 2, too few for 5 replicas; lower batch.micro or start fewer",
        ),
    ],
)
def test_in_tree_order_any_number_of_replicas_shares_the_micro_batches(global_, replicas, line):
    try:
        found = divide(recipe(global_, 2, exchange=TREE), replicas).describe()
    except ConfigError as error:
        found = str(error)
    assert found == line


def test_uneven_shares_fill_a_pipeline_and_follow_one_another():
    """12 micro batches on 5 replicas of 2 stages: with 1f1b no replica has a single one."""
    pipeline = {"stages": 2, "schedule": "1f1b"}
    for keys, least in (({"stages": 2}, 1), (pipeline, 2)):
        made = Recipe.model_validate(
            {**recipe(24, 2, exchange=TREE).model_dump(by_alias=True), "parallel": keys}
        )
        found = divide(made, 5)
        assert [each.start for each in found.shares[1:]] == [
            each.stop for each in found.shares[:-1]
        ]
        assert (min(found.uneven), sum(found.uneven), found.accumulation) == (
            least,
            12,
            max(found.uneven),
        )
    again = found.with_shares([range(0, 4), range(4, 6), range(6, 12)])
    assert (again.uneven, again.accumulation, again.micro_batches) == ((4, 2, 6), 6, 12)
    assert found.with_shares([range(0, 6), range(6, 12)]).uneven == ()


def test_lengths_of_the_published_run():
    """208 x 6144 = 1,277,952 of 1,281,167 images; 350 epochs of 208 steps, of which 70 warm up."""
    assert lengths(recipe(), IMAGENET).describe() == (
        "72800 steps = 350 epochs x 208 steps, 14560 of warm-up; 3215 images left over in each epoch"
    )


@pytest.mark.parametrize(
    ("unit", "length", "steps"),
    [
        # 208.50, 208.52
        ("epochs", 1, 208), ("epochs", 0.5, 104), ("epochs", 1.0024, 208), ("epochs", 1.0025, 209),
        ("epochs", 1e-9, 0), ("steps", 77, 77), ("images", 6144, 1), ("images", 6145, 2), ("images", IMAGENET, 209),
    ],
)  # fmt: skip
def test_a_run_and_its_warm_up_are_as_long_as_they_say_in_epochs_steps_or_images(
    unit, length, steps
):
    """Epochs to the nearest step; images to the step that has seen them all; a run has at least one
    step."""
    assert lengths(recipe(run={unit: length}, schedule={"warmup_steps": 0}), IMAGENET).total == max(
        1, steps
    )
    assert lengths(recipe(schedule={f"warmup_{unit}": length}), IMAGENET).warmup == steps
    assert lengths(recipe(schedule={"power": 1}), IMAGENET).warmup == 0
    assert in_steps(None, None, None, 208, 6144) == in_steps(None, 0, None, 208, 6144) == 0


def test_a_warm_up_ends_and_gradients_are_applied_before_the_run_ends():
    late = {"exchange": {"delay": 3}, "schedule": {"warmup_steps": 1}}
    assert lengths(recipe(run={"steps": 4}, **late), IMAGENET).total == 4
    with pytest.raises(
        ConfigError,
        match=r"^exchange\.delay 3 is not shorter than the run of 3 steps: .*; lower it ",
    ):
        lengths(recipe(run={"steps": 3}, **late), IMAGENET)
    lengths(recipe(run={"steps": 11}, schedule={"warmup_steps": 10}), IMAGENET)
    fault = (
        "^the warm-up of 10 steps is not shorter than the run of 10; "
        "lower schedule.warmup_steps or raise run.steps$"
    )
    with pytest.raises(ConfigError, match=fault):
        lengths(recipe(run={"steps": 10}, schedule={"warmup_steps": 10}), IMAGENET)


@pytest.mark.parametrize("unit", ["epochs", "steps", "images"])
def test_a_plan_without_images_refuses_a_warm_up_as_long_as_the_run(unit):
    """In the same unit, that is; others compare once the images are counted."""
    for length, warmup in ((11, 10), (10, 0), (10, None)):
        made = recipe(run={unit: length}, schedule={f"warmup_{unit}": warmup})
        assert "length     known once data.root is read" in batch.describe(made)
    remedy = f"lower schedule.warmup_{unit} or raise run.{unit}"
    fault = f"^the warm-up of 10 {unit} is not shorter than the run of 10; {remedy}$"
    with pytest.raises(ConfigError, match=fault):
        batch.describe(recipe(run={unit: 10}, schedule={f"warmup_{unit}": 10}))
    other = "steps" if unit == "epochs" else "epochs"
    batch.describe(recipe(run={unit: 10}, schedule={f"warmup_{other}": 20}))


def test_classes_and_lengths_that_no_number_of_replicas_could_train_are_refused():
    batch.check_length(recipe(6, **DIGITS))
    batch.check_length(recipe())  # a folder, whose images are not counted
    with pytest.raises(ConfigError, match="10 classes"):
        batch.check_length(recipe(6, model={"classes": 9}, data={"source": "digits"}))
    with pytest.raises(
        DataError, match=r"^batch\.global 6144 is more than the 1437 training images"
    ):
        batch.check_length(recipe(**DIGITS))


@pytest.mark.parametrize(
    ("replicas", "images", "remedy"),
    [
        (None, 47, "batch.global=45"),
        (5, 47, "batch.global=45"),
        (10, 47, "batch.global=30"),
        (None, 2, "batch.global=2 batch.micro=2"),
        (16, 47, "batch.global=32 batch.micro=2"),
    ],
)
def test_an_epoch_holds_a_whole_batch(replicas, images, remedy):
    assert (
        lengths(recipe(48, 48), 48).steps_per_epoch == 1
        and lengths(recipe(48, 48), 95).dropped == 47
    )
    with pytest.raises(DataError) as caught:
        lengths(recipe(48, 3, replicas=replicas), images)
    fault = f"batch.global 48 is more than the {images} training images"
    assert str(caught.value) == f"{fault}; give more images or {remedy}"
    values = dict(part.split("=") for part in remedy.split())
    mended = recipe(
        int(values["batch.global"]), int(values.get("batch.micro", 3)), replicas=replicas
    )
    assert divide(mended).global_ <= images and lengths(mended, images).steps_per_epoch == 1


def test_too_few_images_for_a_batch_whose_micro_batch_is_chosen_ask_for_one_that_they_fill():
    with pytest.raises(
        DataError, match=r"47 training images; give more images or batch\.global=46$"
    ):
        lengths(recipe(48, "auto", replicas=2), 47)


def test_fewer_images_than_replicas_ask_for_fewer_replicas():
    with pytest.raises(
        DataError, match=r"5 training images; give more images or use at most 5 replicas$"
    ):
        lengths(recipe(48, 3, replicas=8), 5)


def test_a_rate_follows_a_batch_not_at_all_by_the_root_or_linearly():
    found = {
        rule: [rate_factor(rule, ratio) for ratio in (0.25, 1, 2.25)]
        for rule in ("none", "sqrt", "linear")
    }
    assert found == {"none": [1, 1, 1], "sqrt": [0.5, 1, 1.5], "linear": [0.25, 1, 2.25]}


@pytest.mark.parametrize(
    ("rule", "size", "expected"),
    [
        ("none", 6144, 0.1),
        ("linear", 6144, 0.8),
        ("linear", 384, 0.05),
        ("sqrt", 3072, 0.2),
        ("sqrt", 192, 0.05),
    ],
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
    growing = recipe(
        model={"image_size": 380}, data={"image_sizes": [[0, 160], [3, 252], [5, 380]]}
    )
    assert [training_image_size(growing, epoch) for epoch in range(7)] == [
        160,
        160,
        160,
        252,
        252,
        380,
        380,
    ]
    assert batch.training_image_sizes(growing) == {160, 252, 380} and batch.training_image_sizes(
        plain
    ) == {380}


@pytest.mark.parametrize(
    ("source", "fitting", "wrong"), [("digits", 10, 9), ("digits", 10, 11), ("glyphs", 2, 1001)]
)
def test_the_plan_refuses_classes_that_a_source_has_not(source, fitting, wrong):
    batch.describe(recipe(6, model={"classes": fitting}, data={"source": source}))
    with pytest.raises(
        ConfigError,
        match=rf"data\.source={source}: 10+ classes.*, but model.classes is {wrong}; set ",
    ):
        batch.describe(recipe(6, model={"classes": wrong}, data={"source": source}))


DIGITS = {"model": {"classes": 10}, "data": {"source": "digits"}}


def test_the_plan_says_what_follows_from_the_recipe_and_which_keys_are_not_at_their_defaults():
    """Of a section that comes in kinds also the kind."""
    data = {"train_images": IMAGENET, "image_sizes": [[0, 16], [4, 24]]}
    changed = {"exchange": {"method": "gtopk"}, "average": {"epoch_decay": 0.97}}
    made = recipe(
        replicas=64, data=data, run={"name": "a", "output": "/b", "epochs": 350}, **changed
    )
    assert batch.describe(made).splitlines() == [
        "run        a -> /b",
        "batch      6144 = 3 micro x 32 accumulation x 64 replicas (2 stages each: 128 devices)",
        "peak       learning rate 8.48529",
        f"length     1281167 training images; {lengths(recipe(), IMAGENET).describe()}",
        "images     not found here: data.root is not set; name the folder of the images: data.root=/path/to/images",
        "model      name efficientnet_b4",
        "parallel   stages 2, replicas 64",
        "exchange   method gtopk, compress update",
        "optimizer  name lars",
        "schedule   name polynomial, peak_per_image 0.00138107, warmup_epochs 70",
        f"data       source folder, image_sizes [[0, 16], [4, 24]], train_images {IMAGENET}",
        "average    epoch_decay 0.97",
    ]
    growing = batch.describe(load(QUICKSTART, ["batch.schedule=[[0,64],[700,128]]"]))
    assert "\nbatch      evaluation 120, schedule [[0, 64], [700, 128]]\n" in growing
    assert "known once data.root is read" in batch.describe(recipe())
    pod = load(ROOT / "configs" / "pod16.yaml", ["run.device=ipu"])
    assert batch.describe(pod).endswith("\n".join(["", *ipu_plan.lines(pod, batch.planned(pod))]))


LAUNCHED = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
}


def test_a_pod_is_filled_with_replicas_unless_poprun_or_the_recipe_says_how_many(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    run = {"epochs": 100, "device": "ipu"}
    pod = {"ipu": {"pod": 16}, "optimizer": {"trust": "momentum"}, **DIGITS}
    on_ipus = recipe(96, run=run, **pod)
    assert (
        repr(batch.whole_pod(on_ipus).parallel.replicas) == "8"
        and batch.planned(on_ipus).replicas == 1
    )
    for other in (
        recipe(96, **pod),
        recipe(96, run=run, **DIGITS),
        recipe(96, replicas=2, run=run, **pod),
    ):
        assert batch.whole_pod(other) is other
    with pytest.raises(
        ConfigError, match=r"^ipu\.pod 16 is not a multiple of parallel\.stages 3; "
    ):
        batch.whole_pod(recipe(96, stages=3, run=run, **pod))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert batch.whole_pod(on_ipus) is on_ipus
    assert (batch.planned(on_ipus).replicas, batch.planned(recipe(96, **pod)).replicas) == (8, 1)
    monkeypatch.setenv("POPDIST_NUM_IPUS_PER_REPLICA", "1")
    with pytest.raises(ConfigError):
        batch.planned(on_ipus)


GROWING = "batch.schedule=[[0,64],[700,128],[1600,256]]"


def test_updates_take_as_many_steps_as_the_schedule_says_but_end_with_epochs_changes_and_the_run():
    """Steps of 64 images: two at a time from step 11 (700 / 64 rounded up) on, four from 25 on;
    epochs of 8 steps."""
    found = list(Course(load(QUICKSTART, [GROWING]), 8, 39).updates())
    assert [update.steps for update in found] == [*[1] * 11, 2, 2, 1, *[2] * 4, 1, 4, 3, 4, 3]
    assert [update.index for update in found] == list(range(len(found)))
    assert [update.end for update in found[:-1]] == [update.step for update in found[1:]]
    assert found[-1].end == 39 and {8, 16, 24, 32} <= {update.end for update in found}
    assert [update.end for update in found if update.reaches(10)] == [10, 20, 32]


@pytest.mark.parametrize("start", [0, 5, 11, 13, 24, 29, 36, 39])
def test_a_resumed_run_has_the_rest_of_the_updates(start):
    course = Course(load(QUICKSTART, [GROWING]), 8, 39)
    assert list(course.updates(start)) == [
        update for update in course.updates() if update.step >= start
    ]
    plain = list(Course(load(QUICKSTART), 22, 50).updates(start))
    assert [(each.step, each.steps, each.index) for each in plain] == [
        (step, 1, step) for step in range(start, 50)
    ]


@pytest.mark.parametrize("start", range(40))
def test_a_run_whose_epochs_have_become_others_goes_on_from_its_own_step(start):
    """Also within what would be an update: the first one ends with the epoch, or what else ends it,
    of now."""
    course = Course(load(QUICKSTART, [GROWING]), 8, 39)
    updates = list(course.updates(start, made=100))
    assert [update.step for update in updates] == [start, *(update.end for update in updates[:-1])][
        : len(updates)
    ]
    assert [update.index for update in updates] == list(range(100, 100 + len(updates)))
    assert not updates or updates[-1].end == 39
    ends = {update.end for update in updates}
    assert {end for end in (8, 11, 16, 24, 25, 32) if end > start} <= ends
    # From each of them on: a session may begin anywhere.
    for number, update in enumerate(updates):
        assert list(course.updates(update.step, made=update.index)) == updates[number:]
    done = course.done(start)
    assert sum(update.steps for update in done) == start
    assert [update.index for update in course.updates(start)][:1] == [len(done)][: len(updates)]


NOISE = ("batch.schedule=noise", "batch.largest=300")


def test_the_batch_follows_the_noise_scale_at_the_ends_of_epochs_up_to_its_bound():
    """Epochs of 8 steps of 64 images: 64, then 128 and 256; 512 would be above the bound."""
    course = Course(load(QUICKSTART, NOISE), 8, 39)
    grown = []
    for update in course.updates():
        if course.may_grow(update.end):
            noise, error = {8: (128.0, 1.0), 16: (140.0, 11.0), 24: (900.0, 1.0)}[update.end]
            grown.append((update.end, course.grow(update.end, noise, error)))
    assert grown == [(8, None), (16, 128), (24, 256)]
    assert course.growth == [(16, 2), (24, 4)]
    by_pairs = Course(load(QUICKSTART, [GROWING]), 8, 39)
    assert not any(by_pairs.may_grow(step) for step in range(40)) and by_pairs.growth == []
    updates = list(Course(load(QUICKSTART, NOISE), 8, 39, course.growth).updates())
    assert [update.steps for update in updates] == [*[1] * 16, *[2] * 4, 4, 4, 4, 3]
    for start in (0, 15, 16, 20, 24, 28):
        resumed = Course(load(QUICKSTART, NOISE), 8, 39, [list(each) for each in course.growth])
        assert list(resumed.updates(start)) == [
            update for update in updates if update.step >= start
        ]


def test_a_plan_counts_the_updates_of_a_batch_that_grows():
    """From step 25 on, which has seen 2,000 images, an update takes two steps.

    Epochs of 22 steps: the second has three updates of one step, nine of two, and one that the end
    of the epoch cuts short.
    """
    overrides = ["batch.global=80", "batch.micro=16", "run.epochs=4", "schedule.warmup_epochs=1"]
    plain = load(QUICKSTART, overrides)
    grows = load(QUICKSTART, [*overrides, "batch.schedule=[[0,80],[2000,160]]"])
    length = lengths(grows, 1790)
    assert length.steps_per_epoch == 22
    assert described_lengths(plain, length) == length.describe()
    assert (
        described_lengths(grows, length)
        == f"{length.describe()}; {22 + 3 + 10 + 11 + 11} updates by batch.schedule"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 epoch"), (1.0, "1 epoch"), (2, "2 epochs"), (0, "0 epochs"), (0.5, "0.5 epochs")],
)
def test_one_of_a_thing_is_no_plural(number, text):
    assert count(number, "epoch") == text


def test_lines_of_one_epoch_and_of_groups_of_one_channel():
    assert (
        Lengths(1, 0, 1, 0).describe()
        == "1 step = 1 epoch x 1 step, 0 of warm-up; 0 images left over in each epoch"
    )
    assert (
        "groups of 1 channel, expansion"
        in load(QUICKSTART, ["model.group_size=1"]).model.describe()
    )


def test_a_model_whose_name_has_no_size_needs_one_in_the_recipe():
    """EfficientNets have one by their name; families that somebody adds need not."""
    recipe = load(QUICKSTART)
    model = recipe.model.model_copy(update={"image_size": None})
    with pytest.raises(ConfigError, match=r"model\.image_size is null, .* give the pixels a side"):
        divide(recipe.model_copy(update={"model": model}))


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_a_peak_of_lars_under_another_optimizer_is_said(optimizer):
    recipe = load(QUICKSTART, [f"optimizer.name={optimizer}", "schedule.peak=8.49"])
    lowest, highest = recipe.optimizer.usual_peaks
    fault = f"a peak rate of 8.49 is unusual for {optimizer} ({lowest:g} to {highest:g})"
    question = "was it meant for another optimizer?"
    assert (
        f"{'':<10} {fault}; {question} schedule.peak sets it" in batch.describe(recipe).splitlines()
    )
    for peak in (lowest, highest):
        assert (
            batch.unusual_peak(
                load(QUICKSTART, [f"optimizer.name={optimizer}", f"schedule.peak={peak}"])
            )
            == ""
        )


@pytest.mark.parametrize(
    ("steps", "decay", "is_said"), [(21, 0.9, True), (22, 0.9, False), (21, "null", False)]
)
def test_an_average_over_epochs_of_which_a_run_ends_none_is_said(steps, decay, is_said):
    """An epoch of the quickstart has 22 steps."""
    warmup = ("schedule.warmup_epochs=null", "schedule.warmup_steps=1")
    recipe = load(
        QUICKSTART,
        [f"average.epoch_decay={decay}", "run.epochs=null", f"run.steps={steps}", *warmup],
    )
    line = (
        f"average.epoch_decay: the run ends within its first epoch ({steps} steps of 22), so there will be no average "
        "over epochs; average.step_decay averages over updates"
    )
    assert (f"{'':<10} {line}" in batch.describe(recipe).splitlines()) == is_said
    images = SimpleNamespace(
        training_images=1437, validation_images=360, images_of_class=[1437], class_weights=[]
    )
    said = opening.lines(
        recipe, images, batch=batch.divide(recipe), lengths=lengths(recipe, 1437), device="cpu"
    )
    assert any(line in each for each in said) == is_said


@pytest.mark.parametrize(
    ("peak", "coefficient", "is_usual"),
    [
        (0.001, 0.001, False),
        (0.3, 0.001, True),
        (31, 0.001, True),
        (0.01, 0.01, True),
        (31, 0.01, False),
    ],
)
def test_a_peak_of_lars_is_usual_with_its_trust_coefficient(peak, coefficient, is_usual):
    overrides = [f"schedule.peak={peak}", f"optimizer.trust_coefficient={coefficient}"]
    assert (batch.unusual_peak(load(QUICKSTART, overrides)) == "") == is_usual


def test_all_recipes_of_the_repository_have_usual_peaks():
    recipes = [path for path in (ROOT / "configs").rglob("*.yaml") if "sweeps" not in path.parts]
    assert len(recipes) > 15
    for path in recipes:
        assert batch.unusual_peak(load(path)) == "", path
