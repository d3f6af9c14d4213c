"""The plan's model beside published figures: calibrated on the smallest machines, within a tenth on the larger ones."""

import pytest

from tests.conftest import ROOT
from tools.planning import machine, published, scaling


@pytest.mark.parametrize("series", [*published.PODS, *published.A100], ids=lambda series: series.name)
def test_larger_machines_are_predicted_within_a_tenth(series):
    found = published.compare(series)
    sizes = [replicas for replicas, _ in series.rates[1:] if replicas not in series.used]
    assert [comparison.replicas for comparison in found] == sizes
    assert all(abs(comparison.error) <= 0.10 for comparison in found)


@pytest.mark.parametrize("series", [published.PODS[0], published.A100[0]], ids=lambda series: series.name)
def test_the_machines_rates_are_what_calibration_gives(series):
    """The files have five digits."""
    known, calibrated = machine.load(series.machine), published._calibrated(series, *series.rates[0])
    assert known.rate.value == pytest.approx(calibrated.rate.value, rel=1e-4)


def test_the_spread_of_gpus_is_that_of_the_one_pair_of_figures_it_is_said_to_be_from():
    (series,) = (series for series in published.A100 if series.used)
    assert published.straggling(series, *series.used) == pytest.approx(
        machine.load(series.machine).straggling.value, rel=2e-3
    )


@pytest.mark.parametrize("fill", [1, 2])
def test_without_the_exchange_the_model_is_a_ratio_of_micro_batches(fill, monkeypatch):
    """Rates go as A / (A + fill) for each replica: from 256 micro batches on Pod16 to 16 on Pod256, 5 % too fast for
    2 K - 2 and 11 % for K - 1. Update and copies are below a thousandth."""
    monkeypatch.setattr(scaling, "_exchange", lambda *arguments: 0.0)
    monkeypatch.setattr(scaling, "_fill", lambda recipe, machine, stages: float(fill))
    (_, pod256) = published.compare(published.PODS[0])
    expected = 9000 * 16 * (16 / (16 + fill)) / (256 / (256 + fill))
    assert pod256.predicted == pytest.approx(expected, rel=1e-3)


def test_the_table_in_the_docs_is_this_one():
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for comparison in published.everything():
        figures = f"{comparison.published:,.0f} | {comparison.predicted:,.0f} | {100 * comparison.error:+.1f} %"
        assert f"| {comparison.name} | {comparison.replicas} | {figures} |" in text
