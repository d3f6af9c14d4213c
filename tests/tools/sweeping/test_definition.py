"""Sweep files and the recipes of trials: what cannot be trained is one line before anything is
trained."""

import pytest

from common.errors import ConfigError
from common.yaml_text import parse_yaml
from recipe.batch import peak_learning_rate
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT
from tools.sweeping import candidates
from tools.sweeping.candidates import as_text, grid, load_candidates, survey
from tools.sweeping.definition import Axis, read

FILE = """
recipe: quickstart.yaml
trials: 4
space:
  optimizer.momentum: {low: 0.8, high: 0.95}
"""
_SAME = "space: schedule.peak and schedule.peak_per_image say the same; keep one"


@pytest.fixture
def fault(tmp_path):
    """fault(before, after): the fault of the sweep file above, once `before` in it is `after`."""

    def make(before, after):
        assert before in FILE
        (tmp_path / "some.yaml").write_text(FILE.replace(before, after))
        with pytest.raises(ConfigError) as caught:
            read(tmp_path / "some.yaml")
        place = f"{tmp_path}/some.yaml: "
        assert str(caught.value).startswith(place)
        return str(caught.value)[len(place) :]

    return make


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("trials: 4", "trails: 4", "trails: unknown key; did you mean trials?"),
        ("low: 0.8", "lo: 0.8", "space: optimizer.momentum: lo: unknown key; did you mean low?"),
        ("low: 0.8", "low: 1", "space: optimizer.momentum: low 1 is above high 0.95"),
        (
            "low: 0.8, high: 0.95",
            "low: 0.8",
            "space: optimizer.momentum: give choices, or low and high",
        ),
        (
            "low: 0.8",
            "choices: [1], low: 0.8",
            "space: optimizer.momentum: choices and a range are both given",
        ),
        (
            "low: 0.8",
            "log: true, step: 0.1, low: 0.8",
            "space: optimizer.momentum: log and step are both given",
        ),
        (
            "low: 0.8",
            "log: true, low: 0",
            "space: optimizer.momentum: a logarithmic range must begin above 0",
        ),
        (
            "low: 0.8",
            "integer: true, low: 0.8",
            "space: optimizer.momentum: low, high and step of whole numbers must",
        ),
        (
            "low: 0.8",
            "step: 0.1, low: 0.8",
            "space: optimizer.momentum: from low 0.8 no whole number of steps of 0.1",
        ),
        (
            "low: 0.8, high: 0.95",
            "choices: [0.9, 0.9]",
            "space: optimizer.momentum: choices has a value twice",
        ),
        ("trials: 4", "trials: 0", "trials: must be greater than 0, found 0"),
        ("trials: 4", "seed: 1", "trials: is needed for the sampler tpe"),
        (
            "trials: 4",
            "sampler: grid",
            "space: a grid needs choices, steps or whole numbers, at most ",
        ),
        (
            "trials: 4",
            "trials: 4\nsampler: bayes",
            "sampler: must be 'tpe', 'random' or 'grid', found 'bayes'",
        ),
        (
            "trials: 4",
            "trials: 4\noverrides: [run.name=x]",
            "run.name is given to each trial by the sweep; remove it",
        ),
        (
            "trials: 4",
            "trials: 4\noverrides: [optimizer.momentum=0]",
            "optimizer.momentum is in the space and in",
        ),
        (
            "  optimizer.momentum",
            "  batch.globl",
            "space: batch.globl: unknown key; did you mean batch.global?",
        ),
        (
            "  optimizer.momentum",
            "  colour",
            "space: colour: unknown key; write section.key as in a recipe, e.g. o",
        ),
        (
            "low: 0.8, high: 0.95",
            "choices: [0.8, 0.9]",
            "trials: 4, but the space has 2 combinations; give at most 2",
        ),
        (
            "optimizer.momentum",
            "run.output",
            "run.output is given to each trial by the sweep; remove it",
        ),
        (
            "  opti",
            "  schedule.peak_per_image: {low: 1, high: 2}\n  schedule.peak: {low: 1, high: 2}\n  opti",
            _SAME,
        ),
        ("recipe: quickstart.yaml", "", "recipe: is needed"),
        (
            "recipe: quickstart.yaml",
            "run: {epochs: 1}",
            "not a sweep file, which has `recipe:` and `space:`; train a ",
        ),
    ],
)
def test_a_fault_is_one_line(fault, before, after, expected):
    line = fault(before, after)
    assert line.startswith(expected)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ({"low": 0.1, "high": 0.5, "step": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"low": 2, "high": 5, "integer": True}, [2, 3, 4, 5]),
        ({"low": 2, "high": 8, "step": 3, "integer": True}, [2, 5, 8]),
        ({"low": 2, "high": 2}, [2.0]),
        ({"low": 2, "high": 3}, None),
        ({"choices": [1, None, [2]]}, [1, None, [2]]),
    ],
)
def test_a_grid_has_all_values(axis, values):
    assert Axis(**axis).grid() == values


@pytest.fixture
def found(tmp_path):
    """found(space, more, recipe): the candidates of a sweep over a space given as YAML."""

    def make(space, more="", recipe=QUICKSTART):
        (tmp_path / "some.yaml").write_text(
            f"recipe: {recipe}\ntrials: 1\n{more}\nspace: {space}\n"
        )
        return load_candidates(read(tmp_path / "some.yaml"))

    return make


def peaks(found, key, values):
    return [
        peak_learning_rate(load(found.sweep.recipe, found.overrides({key: value})))
        for value in values
    ]


@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("sqrt", 0.5), ("none", 0)])
@pytest.mark.parametrize(
    "recipe", [QUICKSTART, ROOT / "configs" / "b4_g16.yaml"], ids=["peak", "peak_per_image"]
)
def test_the_peak_follows_the_batch_by_the_rule_from_where_the_recipe_has_it(
    found, rule, power, recipe
):
    """Wherever the recipe has its peak from: of one image, or as a number."""
    base = load(recipe)
    batches = [base.batch.global_ * factor for factor in (1, 2, 4)]
    some = found(f"{{batch.global: {{choices: {batches}}}}}", f"batch_rule: {rule}", recipe)
    expected = [peak_learning_rate(base) * factor**power for factor in (1, 2, 4)]
    # a product rounds a few times
    assert peaks(some, "batch.global", batches) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("rule", "expected"), [("linear", [2.0, 8.0]), ("sqrt", [2.0, 4.0]), ("none", [2.0, 2.0])]
)
def test_a_recipe_with_a_reference_batch_keeps_its_own_rate_by_every_rule(
    found, tmp_path, rule, expected
):
    recipe = tmp_path / "mine.yaml"
    keys = "peak: 0.5, batch_rule: linear, reference_batch: 16"
    recipe.write_text(f"extends: {QUICKSTART}\nbatch: {{global: 64}}\nschedule: {{{keys}}}\n")
    assert peak_learning_rate(load(recipe)) == 2.0
    some = found("{batch.global: {choices: [64, 256]}}", f"batch_rule: {rule}", recipe)
    assert peaks(some, "batch.global", [64, 256]) == expected


def test_a_swept_peak_is_that_of_the_recipes_batch_and_without_a_rule_the_recipes_own_holds(found):
    some = found(
        "{schedule.peak: {low: 1, high: 4}}", "batch_rule: sqrt\noverrides: [batch.global=128]"
    )
    assert peaks(some, "schedule.peak", [1.0, 3.0]) == [1.0, 3.0]
    recipe = ROOT / "configs" / "b4_g16.yaml"
    some = found("{batch.global: {choices: [768, 1536]}}", recipe=recipe)
    assert peaks(some, "batch.global", [1536]) == [1536 * load(recipe).schedule.peak_per_image]


@pytest.mark.parametrize(
    "value", [1, 0.1, 1e-7, 2.5e20, True, False, None, "1e5", "a: b # ü", "", [[0, 16], [2, 28]]]
)
def test_a_value_reads_back_from_an_override(value):
    """As YAML that parse_yaml reads; an empty text needs quotes to be one."""
    assert parse_yaml(as_text(value), "here") == value


def test_what_is_impossible_in_part_is_a_note(found, monkeypatch):
    some = found("{batch.global: {choices: [64, 96]}, optimizer.momentum: {low: 0.5, high: 1}}")
    assert survey(some) == [
        "2 of 4 combinations are impossible, e.g.: optimizer.momentum: must be less than 1, found 1.0"
    ]
    monkeypatch.setattr(candidates, "_MAX_CHECKED", 8)
    (note,) = survey(
        found("{data.mixup: {choices: [0.0, 0.1, -1]}, optimizer.eps: {choices: [0.1, 0.2, 0.3]}}")
    )
    assert " of 8 combinations checked are impossible, e.g.: data.mixup: must be" in note


def test_choices_that_go_with_nothing_are_refused_by_name(found):
    with pytest.raises(
        ConfigError,
        match=r"space: batch\.micro: 48 goes with nothing: batch\.global 64 is not a mult",
    ):
        survey(found("{batch.global: {choices: [64, 128]}, batch.micro: {choices: [32, 48]}}"))
    with pytest.raises(
        ConfigError, match="space: no combination can be trained; the first: optimizer: beta1"
    ):
        survey(found("{optimizer.beta1: {low: 0, high: 0.5}}"))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "sweeps").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_sweeps_of_the_repository_can_be_trained(path):
    """All their combinations, by the command in their first lines."""
    assert survey(load_candidates(read(path))) == []
    assert (
        f"python -m tools.sweep --config {path.relative_to(ROOT)}"
        in path.read_text().split("\n\n")[0]
    )


def test_an_average_that_the_recipe_does_not_keep_is_no_metric(found):
    space = "{optimizer.momentum: {low: 0, high: 0.5}}"
    metric = "metric: epoch_average.top1"
    with pytest.raises(
        ConfigError, match=r"metric: epoch_average\.top1, but .*; set average\.epoch_decay"
    ):
        found(space, metric)
    assert found(space, f"{metric}\noverrides: [average.epoch_decay=0.9]").base.average.epoch_decay


def test_a_grid_has_each_combination_once_in_the_order_of_its_seed(found):
    space = (
        "{batch.global: {choices: [32, 64]}, optimizer.momentum: {low: 0.1, high: 0.3, step: 0.1}}"
    )
    orders = [
        grid(found(space, f"sampler: grid\nseed: {seed}").sweep.definition) for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]
    expected = [(batch, momentum) for batch in (32, 64) for momentum in (0.1, 0.2, 0.3)]
    assert sorted(tuple(each.values()) for each in orders[0]) == expected
