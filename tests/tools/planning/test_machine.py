"""Descriptions of machines: those that come along, and faults of others; the plan's model beside
published figures."""

import json

import pytest

from common.errors import ConfigError
from recipe import loading
from tests.conftest import ROOT
from tools.planning import machine, published, scaling, summary

SERIES = [*published.PODS, *published.A100]


@pytest.mark.parametrize("name", machine.names())
def test_every_machine_that_comes_along_loads_and_survives_writing(name, tmp_path):
    found = machine.load(name)
    path = tmp_path / "copy.yaml"
    path.write_text(machine.dump(found), encoding="utf-8")
    assert machine.load(str(path)) == found
    assert machine.dump(found).count("value:") == machine.dump(found).count("source:") >= 8


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("source: 1,472 tiles", "sauce: 1,472 tiles", "memory.source: Field required"),
        ("value: 918528000", "value: much", "memory.value: Input should be a valid number"),
        ("device: ipu", "device: tpu", "device: Input should be 'cpu', 'cuda' or 'ipu'"),
        (
            "bandwidth: {value: 16.0e+9",
            "bandwidth: {value: 0",
            "links.0.bandwidth.value: Input should be greater than",
        ),
    ],
)
def test_a_file_that_is_no_machine_is_refused_in_one_line(before, after, fault, tmp_path):
    text = (machine.FOLDER / "bow_pod.yaml").read_text(encoding="utf-8")
    assert before in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        machine.load(str(path))
    assert str(caught.value).startswith(f"{path}: not a machine: {fault}") and "\n" not in str(
        caught.value
    )


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_larger_machines_are_predicted_as_the_page_says_within_a_tenth(series):
    found = published.compare(series)
    assert [each.replicas for each in found] == [
        size for size, _ in series.rates[1:] if size not in series.used
    ]
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    for each in found:
        assert abs(each.error) <= 0.10
        figures = f"{each.published:,.0f} | {each.predicted:,.0f} | {100 * each.error:+.1f} %"
        assert f"| {each.name} | {each.replicas} | {figures} |" in page


@pytest.mark.parametrize(
    "series", [published.PODS[0], published.A100[0]], ids=lambda series: series.name
)
def test_the_machines_rates_are_those_that_calibration_gives(series):
    """The files have five digits."""
    assert machine.load(series.machine).rate.value == pytest.approx(
        published.calibrated(series).rate.value, rel=1e-4
    )


def test_the_h200_makes_as_many_images_a_second_as_were_measured_on_one():
    """An update of one micro batch of the recipe, as the suite measured it."""
    place = ROOT / "docs" / "results" / "gpu" / "nvidia-h200.json"
    claims = json.loads(place.read_text(encoding="utf-8"))["claims"]
    (measured,) = (claim["value"] for claim in claims if claim["name"] == "b4_images_per_second")
    recipe = loading.load(
        ROOT / "configs" / "gpu.yaml",
        ["batch.micro=128", "batch.global=128", "parallel.replicas=1"],
    )
    planned = summary.make(recipe, machine.load("h200")).step.images_per_second
    assert planned == pytest.approx(measured, rel=1e-4)


def test_the_spread_of_gpus_is_that_of_the_pair_of_figures_which_its_source_names():
    """What eight GPUs lose beside eight times one is the expected slowest of eight, in units of the
    spread."""
    (series,) = (series for series in SERIES if series.used == (8,))
    ((_, single), (_, rate), *_), spread = (
        series.rates,
        machine.load(series.machine).straggling.value,
    )
    assert spread * scaling.slowest_of(8) == pytest.approx(8 * single / rate - 1, rel=2e-3)
