"""Descriptions of machines: those that come along, and what is wrong with others."""

import pytest

from recipe.errors import ConfigError
from tools.planning import machine


@pytest.mark.parametrize("name", machine.names())
def test_every_machine_that_comes_along_loads_and_survives_writing(name, tmp_path):
    found = machine.load(name)
    path = tmp_path / "copy.yaml"
    path.write_text(machine.dump(found), encoding="utf-8")
    assert machine.load(str(path)) == found


def test_there_are_machines_of_every_kind():
    assert {machine.load(name).device for name in machine.names()} == {"cpu", "cuda", "ipu"}


def test_every_figure_has_a_source():
    text = machine.dump(machine.load("bow_pod"))
    assert text.count("value:") == text.count("source:") >= 10


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("memory:", "memery:", "memory: Field required"),
        ("source: 1,472 tiles", "sauce: 1,472 tiles", "memory.source: Field required"),
        ("value: 918528000", "value: -1", "memory.value: Input should be greater than or equal to 0"),
        ("value: 918528000", "value: much", "memory.value: Input should be a valid number"),
        ("device: ipu", "device: tpu", "device: Input should be 'cpu', 'cuda' or 'ipu'"),
        ("value: 520", "value: 0", "decode: Value error, must be positive"),
        ("bandwidth: {value: 16.0e+9", "bandwidth: {value: 0", "links.0.bandwidth: Value error, must be positive"),
        ("- devices: 64\n  latency", "- latency", "links: Value error, must join more devices from one to the next"),
    ],
)
def test_what_is_no_machine_is_refused_in_one_line(before, after, fault, tmp_path):
    text = (machine.FOLDER / "bow_pod.yaml").read_text(encoding="utf-8")
    assert before in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(before, after, 1), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        machine.load(str(path))
    assert str(caught.value).startswith(f"{path}: not a machine: {fault}")
    assert "\n" not in str(caught.value)


def test_an_unknown_machine_names_those_there_are():
    with pytest.raises(ConfigError) as caught:
        machine.load("cray")
    assert str(caught.value) == (
        "cray: no machine; name a file that python -m tools.doctor has written, or one of " + ", ".join(machine.names())
    )
