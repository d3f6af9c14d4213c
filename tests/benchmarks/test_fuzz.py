"""Damaged input in small, and that the harness notices what neither takes nor refuses it."""

import itertools
import os
import pickle
import random
import signal
import time

import pytest
import yaml

from benchmarks.fuzz import trial
from benchmarks.fuzz.mutations import mutated
from benchmarks.fuzz.targets import TARGETS, Target
from common.errors import UserError

pytestmark = pytest.mark.multiprocess


# Studies load Optuna in each process, which takes its time.
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "studies" else []) for name in TARGETS],
)
def test_damaged_input_is_taken_or_refused(name):
    # these are slow
    inputs = {"run folders": 20, "studies": 20, ".pt2": 20, ".onnx": 30}.get(name, 50)
    row, faults = trial.run(name, seed=5, inputs=inputs)
    assert faults == [] and row["taken"] + row["refused"] == inputs


@pytest.mark.parametrize("name", TARGETS)
def test_whole_input_is_taken(name, tmp_path):
    seeds = TARGETS[name].seeds(tmp_path)
    for seed in seeds:
        TARGETS[name].read(seed, tmp_path)


def test_damage_is_a_function_of_seed_and_number():
    seeds = [bytes(range(256)), b"other"]
    assert trial.made("a", 1, 7, seeds) == trial.made("a", 1, 7, seeds)
    assert (
        len({trial.made("a", seed, number, seeds) for seed in range(3) for number in range(20)})
        > 55
    )
    damaged = [mutated(seeds, random.Random(number)) for number in range(200)]
    assert sum(each in seeds for each in damaged) < 10


def misbehave(data, folder):
    """By its number, which the harness has noted before: takes, refuses, fails otherwise, dies, or
    hangs."""
    misbehave.number += 1
    if misbehave.number == 3:
        raise UserError("refused")
    if misbehave.number == 5:
        raise KeyError("nobody expected this")
    if misbehave.number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if misbehave.number == 9:
        time.sleep(60)


def test_other_errors_crashes_and_hangs_are_found_and_what_follows_is_tried(monkeypatch):
    """The child that follows a crash counts from 1 again: 3 and 5 come twice."""
    misbehave.number = 0
    monkeypatch.setattr(trial, "_HANGS", 2.5)
    monkeypatch.setitem(trial.TARGETS, "bad", Target(lambda folder: [b"seed"], misbehave))
    row, faults = trial.run("bad", seed=0, inputs=14)
    assert [(fault.number, fault.kind) for fault in faults] == [
        (4, "KeyError"),
        (7, "crash"),
        (12, "KeyError"),
    ]
    assert (row["taken"], row["refused"], row["crashed_hung_or_other"]) == (9, 2, 3)
    misbehave.number = 8
    _, faults = trial.run("bad", seed=0, inputs=2)
    assert [(fault.number, fault.kind) for fault in faults] == [(0, "hang"), (1, "hang")]


RUNNERS = (
    pickle.loads,
    lambda data: eval(data.decode("latin-1")),
    lambda data: yaml.load(data, yaml.UnsafeLoader),
)


@pytest.mark.parametrize("run", RUNNERS, ids=["pickle", "eval", "yaml"])
def test_code_that_an_input_brings_along_is_seen_to_run(monkeypatch, run):
    """By its canary, whatever the reader does with the rest.

    With this seed all three run one of few inputs.
    """
    monkeypatch.setitem(
        trial.TARGETS,
        "runs",
        Target(lambda folder: [b""], lambda data, folder: run(data), (Exception,)),
    )
    _, faults = trial.run("runs", seed=7, inputs=60)
    assert {fault.kind for fault in faults} == {trial.EXECUTED}


@pytest.mark.parametrize(
    ("reading", "growth"), [(range(3000), 32 * 1000), (range(1200), 0), (range(2990, 3000), 0)]
)
def test_a_steady_leak_is_memory_growth_and_warm_up_is_not(reading, growth, monkeypatch):
    """32 kB a piece: small ones would fit into holes of the heap that is inherited from the tests
    before."""
    held = []
    numbers = itertools.count()

    def read(data, folder):
        if next(numbers) in reading:
            held.append(b"1" * 32768)

    monkeypatch.setitem(trial.TARGETS, "leaks", Target(lambda folder: [b"seed"], read))
    assert trial.run("leaks", seed=0, inputs=3000)[0]["growth_kb_per_1000"] == pytest.approx(
        growth, rel=0.15, abs=50
    )
