"""A trial's recipe is the sweep's recipe with its values, and what cannot be trained is found before training."""

import pytest

from recipe.batch import peak_learning_rate
from recipe.errors import ConfigError
from recipe.loading import load, parse_yaml
from tests.conftest import QUICKSTART, ROOT
from tools.sweeping import candidates
from tools.sweeping.candidates import as_text, grid, load_candidates, survey
from tools.sweeping.definition import read


@pytest.fixture
def found(tmp_path):
    """found(space, more, recipe): the candidates of a sweep over a space given as YAML."""

    def make(space, more="", recipe=QUICKSTART):
        (tmp_path / "some.yaml").write_text(f"recipe: {recipe}\ntrials: 1\n{more}\nspace: {space}\n")
        return load_candidates(read(tmp_path / "some.yaml"))

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
    some = found("{batch.global: {choices: [768, 1536]}}", recipe=recipe)
    assert peaks(some, "batch.global", [1536]) == [1536 * load(recipe).schedule.peak_per_image]


@pytest.mark.parametrize("value", [1, 0.1, 1e-7, 2.5e20, True, False, None, "1e5", "a: b # ü", "", [[0, 16], [2, 28]]])
def test_a_value_reads_back_from_an_override(value):
    """As YAML that loading.parse_yaml reads; an empty text needs quotes to be one."""
    assert parse_yaml(as_text(value), "here") == value


def test_what_is_impossible_in_part_is_a_note(found, monkeypatch):
    some = found("{batch.global: {choices: [64, 96]}, optimizer.momentum: {low: 0.5, high: 1}}")
    assert survey(some) == [
        "2 of 4 combinations are impossible, e.g.: optimizer.momentum: must be less than 1, found 1.0"
    ]
    monkeypatch.setattr(candidates, "_MAX_CHECKED", 8)
    (note,) = survey(found("{data.mixup: {choices: [0.0, 0.1, -1]}, optimizer.eps: {choices: [0.1, 0.2, 0.3]}}"))
    assert " of 8 combinations checked are impossible, e.g.: data.mixup: must be" in note


def test_choices_that_go_with_nothing_are_refused_by_name(found):
    with pytest.raises(ConfigError, match=r"space: batch\.micro: 48 goes with nothing: batch\.global 64 is not a mult"):
        survey(found("{batch.global: {choices: [64, 128]}, batch.micro: {choices: [32, 48]}}"))
    with pytest.raises(ConfigError, match="space: no combination can be trained; the first: optimizer: beta1"):
        survey(found("{optimizer.beta1: {low: 0, high: 0.5}}"))


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sweeps_of_the_repository_can_be_trained(path):
    """All their combinations, by the command in their first lines."""
    assert survey(load_candidates(read(path))) == []
    assert f"python -m tools.sweep --config {path.relative_to(ROOT)}" in path.read_text().split("\n\n")[0]


def test_an_average_that_the_recipe_does_not_keep_is_no_metric(found):
    space, metric = "{optimizer.momentum: {low: 0, high: 0.5}}", "metric: epoch_average.top1"
    with pytest.raises(ConfigError, match=r"metric: epoch_average\.top1, but .*; set average\.epoch_decay"):
        found(space, metric)
    assert found(space, f"{metric}\noverrides: [average.epoch_decay=0.9]").base.average.epoch_decay


def test_a_grid_has_each_combination_once_in_the_order_of_its_seed(found):
    space = "{batch.global: {choices: [32, 64]}, optimizer.momentum: {low: 0.1, high: 0.3, step: 0.1}}"
    orders = [grid(found(space, f"sampler: grid\nseed: {seed}").sweep.definition) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    expected = [(batch, momentum) for batch in (32, 64) for momentum in (0.1, 0.2, 0.3)]
    assert sorted(tuple(each.values()) for each in orders[0]) == expected
