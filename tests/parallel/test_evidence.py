"""What `auto` knows of losses, against the table of the experiment."""

import csv

import pytest

from benchmarks import RESULTS
from benchmarks.evidence.exchange_learning import METHODS
from parallel.evidence import MEASURED, Evidence, of
from recipe import loading
from tests.conftest import QUICKSTART


def test_a_loss_within_its_error_is_no_figure_to_act_on():
    assert str(Evidence(1.81, 0.46)) == "loses 1.8 ± 0.5 points"
    assert str(Evidence(-0.07, 0.47)) == "loses nothing that could be measured (-0.1 ± 0.5 points)"


@pytest.mark.parametrize("evidence", [evidence for _, evidence in MEASURED], ids=str)
def test_losses_are_those_of_the_worse_setting_of_the_experiment(evidence):
    """To the rounding of two digits, half of 0.01 and what floating point adds."""
    rows = list(csv.DictReader((RESULTS / "exchange_learning.csv").read_text().splitlines()))
    found = []
    for (name, size), overrides in METHODS.items():
        recipe = loading.load(QUICKSTART, list(overrides))
        if of(recipe.exchange, recipe.optimizer) is evidence:
            found = [row for row in rows if (row["exchange"], row["size"]) == (name, size)]
            break
    assert {row["setting"] for row in found} == {"digits", "glyphs"} and {
        row["seeds"] for row in found
    } == {"5"}
    worst = max(found, key=lambda row: float(row["lost_mean"]))
    assert evidence.loss == pytest.approx(float(worst["lost_mean"]), abs=0.0051)
    assert evidence.error == pytest.approx(float(worst["lost_error"]), abs=0.0051)
