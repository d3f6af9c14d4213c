"""A trial's recipe is the sweep's recipe with its values, and what cannot be trained is found before training."""

import math

import pytest

from recipe.batch import peak_learning_rate
from recipe.errors import ConfigError
from recipe.loading import load, parse_yaml
from tests.conftest import QUICKSTART, ROOT
from tools.sweeping.candidates import as_text, candidates, grid, sections, survey
from tools.sweeping.definition import read


@pytest.fixture
def found(tmp_path):
    """found(space, more, recipe): the candidates of a sweep over a space given as YAML."""

    def make(space, more="", recipe=QUICKSTART):
        (tmp_path / "some.yaml").write_text(f"recipe: {recipe}\ntrials: 1\n{more}\nspace: {space}\n")
        return candidates(read(tmp_path / "some.yaml"))

    return make


def peaks(found, key, values):
    return [peak_learning_rate(load(found.sweep.recipe, found.overrides({key: value}))) for value in values]


@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("sqrt", 0.5), ("none", 0)])
@pytest.mark.parametrize("recipe", [QUICKSTART, ROOT / "configs" / "b4_g16.yaml"], ids=["peak", "peak_per_image"])
def test_the_peak_follows_the_batch_by_the_rule_from_where_the_recipe_has_it(found, rule, power, recipe):
    """Wherever the recipe has its peak from: of one image, or as a number."""
    base = load(recipe)
    batches = [base.batch.global_ * factor for factor in (1, 2, 4)]
    some = found(f"{{batch.global: {{choices: {batches}}}}}", f"batch_rule: {rule}", recipe)
    expected = [peak_learning_rate(base) * factor**power for factor in (1, 2, 4)]
    assert peaks(some, "batch.global", batches) == pytest.approx(expected, rel=1e-12)  # a product rounds a few times


def test_a_swept_peak_is_the_peak_at_the_recipes_batch(found):
    some = found("{schedule.peak: {low: 1, high: 4}}", "batch_rule: sqrt\noverrides: [batch.global=128]")
    assert peaks(some, "schedule.peak", [1.0, 3.0]) == [1.0, 3.0]


def test_without_a_rule_the_recipes_own_holds(found):
    recipe = ROOT / "configs" / "b4_g16.yaml"
    per_image = load(recipe).schedule.peak_per_image
    some = found("{batch.global: {choices: [768, 1536]}}", recipe=recipe)
    assert peaks(some, "batch.global", [768, 1536]) == [768 * per_image, 1536 * per_image]


@pytest.mark.parametrize("value", [1, 0.1, 1e-7, 2.5e20, True, False, None, "1e5", "a: b # ü", "", [[0, 16], [2, 28]]])
def test_a_value_reads_back_from_an_override(value):
    """As YAML that loading.parse_yaml reads; an empty text needs quotes to be one."""
    assert parse_yaml(as_text(value), "here") == value


def test_a_choice_that_goes_with_nothing_is_refused_by_name(found):
    with pytest.raises(ConfigError, match=r"space: batch\.micro: 48 goes with nothing: batch\.global 64 is not a mult"):
        survey(found("{batch.global: {choices: [64, 128]}, batch.micro: {choices: [32, 48]}}"))


def test_a_choice_that_goes_with_something_is_kept_and_told(found):
    notes = survey(found("{batch.global: {choices: [64, 96]}, batch.micro: {choices: [32, 48]}}"))
    assert len(notes) == 1
    assert notes[0].startswith(
        "1 of 4 combinations are impossible, e.g.: batch.global 64 is not a multiple of 48 micro"
    )


def test_the_end_of_a_range_that_no_recipe_takes_is_told(found):
    notes = survey(found("{optimizer.momentum: {low: 0.5, high: 1}}"))
    assert notes == [
        "optimizer.momentum at the end of its range, 1.0: optimizer.momentum: must be less than 1, found 1.0"
    ]


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (
            "{optimizer.momentun: {low: 0, high: 0.5}}",
            "space: optimizer.momentun: unknown key; did you mean optimizer.momentum?",
        ),
        ("{momentum: {low: 0, high: 0.5}}", "space: momentum: unknown key; did you mean optimizer.momentum?"),
        ("{colour: {low: 0, high: 0.5}}", "space: colour: unknown key; write section.key as in a recipe, e.g. optim"),
        ("{batch.globl: {choices: [64, 0]}}", "space: batch.globl: unknown key; did you mean batch.global?"),
        ("{optimizer.beta1: {low: 0, high: 0.5}}", "space: no combination can be trained; the first: optimizer: beta1"),
    ],
)
def test_a_key_that_the_recipe_has_not_is_refused(found, space, told):
    with pytest.raises(ConfigError) as caught:
        survey(found(space))
    assert told in str(caught.value)


def test_a_large_space_is_looked_at_in_part(found):
    choices = ", ".join(
        f"optimizer.{key}: {{choices: [0.1, 0.2, 0.3, 0.4]}}" for key in ("momentum", "eps", "clip_norm")
    )
    notes = survey(found(f"{{{choices}, data.mixup: {{choices: [0.0, 0.1, 0.2, 0.3, -1]}}}}"))
    assert len(notes) == 1 and " of 200 combinations looked at are impossible, e.g.: data.mixup: must be" in notes[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_of_the_sweeps_that_come_along_all_can_be_trained(path):
    assert survey(candidates(read(path))) == []


def test_an_average_that_the_recipe_does_not_keep_is_no_metric(found):
    space = "{optimizer.momentum: {low: 0, high: 0.5}}"
    with pytest.raises(ConfigError, match=r"metric: epoch_average\.top1, but the recipe keeps no such average; set av"):
        found(space, "metric: epoch_average.top1")
    assert found(space, "metric: epoch_average.top1\noverrides: [average.epoch_decay=0.9]").base.average.epoch_decay


def test_a_grid_has_each_combination_once_in_an_order_of_its_own(found):
    space = "{batch.global: {choices: [32, 64]}, optimizer.momentum: {low: 0.1, high: 0.3, step: 0.1}}"
    orders = [grid(found(space, f"sampler: grid\nseed: {seed}").sweep.definition) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    expected = {(batch, momentum) for batch in (32, 64) for momentum in (0.1, 0.2, 0.3)}
    assert {tuple(each.values()) for each in orders[0]} == expected
    assert len(orders[0]) == len(expected)


@pytest.mark.parametrize(
    "overrides",
    [
        ["schedule.peak_per_image=0.1", "schedule.peak=3"],
        ["schedule.peak=3", "schedule.peak_per_image=0.1"],
        ["run.steps=7", "optimizer.name=sgd", "optimizer.nesterov=true", "run.epochs=2", "schedule.warmup_steps=3"],
        ["optimizer.momentum=0.1", "optimizer.momentum=0.2", "schedule.name=cosine", "schedule.batch_rule=none"],
        ['data.root="a: b"', "run.images=null", "data.image_sizes=[[0, 16], [2, 28]]"],
    ],
)
def test_overrides_as_a_file_say_what_they_say_on_the_command_line(overrides, tmp_path):
    lines = [f"extends: {QUICKSTART}"]
    for section, keys in sections(overrides).items():
        lines += [f"{section}:", *(f"  {key}: {value}" for key, value in keys.items())]
    (tmp_path / "file.yaml").write_text("\n".join(lines))
    assert load(tmp_path / "file.yaml") == load(QUICKSTART, overrides)


def test_a_square_root_is_what_it_says():
    """That the rule of the recipe is meant, and not its name alone: 4 times the batch, twice the peak."""
    recipe = load(QUICKSTART, ["schedule.batch_rule=sqrt", "schedule.reference_batch=32", "batch.global=128"])
    assert math.isclose(peak_learning_rate(recipe), 2 * recipe.schedule.peak)
