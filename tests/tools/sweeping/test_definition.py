"""Sweep files, and the one-line errors about them."""

import pytest

from recipe.errors import ConfigError
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
        ("low: 0.8, high: 0.95", "low: 0.8", "space: optimizer.momentum: give choices, or low and high"),
        ("low: 0.8", "choices: [1], low: 0.8", "space: optimizer.momentum: choices and a range are both given"),
        ("low: 0.8", "log: true, step: 0.1, low: 0.8", "space: optimizer.momentum: log and step are both given"),
        ("low: 0.8", "log: true, low: 0", "space: optimizer.momentum: a logarithmic range must begin above 0"),
        ("low: 0.8", "integer: true, low: 0.8", "space: optimizer.momentum: low, high and step of whole numbers must"),
        ("low: 0.8", "step: 0.1, low: 0.8", "space: optimizer.momentum: from low 0.8 no whole number of steps of 0.1"),
        ("low: 0.8, high: 0.95", "choices: [0.9, 0.9]", "space: optimizer.momentum: choices has a value twice"),
        ("trials: 4", "trials: 0", "trials: must be greater than 0, found 0"),
        ("trials: 4", "seed: 1", "trials: is needed for the sampler tpe"),
        ("trials: 4", "sampler: grid", "space: a grid needs choices, steps or whole numbers, at most "),
        ("trials: 4", "trials: 4\nsampler: bayes", "sampler: must be 'tpe', 'random' or 'grid', found 'bayes'"),
        ("trials: 4", "trials: 4\noverrides: [run.name=x]", "run.name is given to each trial by the sweep; remove it"),
        ("trials: 4", "trials: 4\noverrides: [optimizer.momentum=0]", "optimizer.momentum is in the space and in"),
        ("  optimizer.momentum", "  batch.globl", "space: batch.globl: unknown key; did you mean batch.global?"),
        ("  optimizer.momentum", "  colour", "space: colour: unknown key; write section.key as in a recipe, e.g. o"),
        ("low: 0.8, high: 0.95", "choices: [0.8, 0.9]", "trials: 4, but the space has 2 combinations; give at most 2"),
        ("optimizer.momentum", "run.output", "run.output is given to each trial by the sweep; remove it"),
        ("  opti", "  schedule.peak_per_image: {low: 1, high: 2}\n  schedule.peak: {low: 1, high: 2}\n  opti", _SAME),
        ("recipe: quickstart.yaml", "", "recipe: is needed"),
        ("recipe: quickstart.yaml", "run: {epochs: 1}", "not a sweep file, which has `recipe:` and `space:`; train a "),
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
