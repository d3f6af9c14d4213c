"""A dry pass of the suite for one GPU: on the GPU where there is one, else on the CPU with Triton's interpreter."""

import dataclasses
import itertools
import json
import os
import sys
import time
import weakref

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_checks, gpu_measure, gpu_suite, gpu_training
from benchmarks.gpu_measure import DRY_PASS, Row, Session, missing
from benchmarks.gpu_suite import Section
from models.normalization import GroupNormAct
from recipe.errors import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = dataclasses.replace(DRY_PASS, device=DEVICE)
KEYS = ["section", "what", "value", "unit", "lowest", "highest", "limit", "note"]
# What a CPU has not: its rows say so.
ON_CUDA = ("triton", "channels_last")
# The first takes long; the others are like the rest in all but the model or the dtype.
SLOW = ("memory", "training B4-G1-BN, float16", "training B4-G16-GN, bfloat16")
ROWS = {
    "checks": 8, "update": 3, "memory": 4, "training B4-G1-BN, float16": 4, "training B4-G16-GN, float16, compiled": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else [])
        for each in gpu_suite.SECTIONS
    ],
)
def test_each_section_gives_all_its_rows(section, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # that takes minutes
    rows = list(gpu_suite.perform(section, PLAN))
    assert len(rows) == len({row.what for row in rows}) == ROWS.get(section.name, 6)
    for row in rows:
        assert list(row.columns()) == KEYS and row.section == section.name
        if section.name == "checks":
            assert gpu_checks.passed(row) and row.note.startswith("passed"), row
        elif DEVICE == "cuda" or row.repetitions:
            assert row.repetitions, row
        else:
            assert row.note.startswith("not measured: ") and any(what in row.what for what in ON_CUDA), row


def test_a_layer_that_is_a_little_wrong_does_not_pass():
    """A variance that is too large by a hundredth makes outputs too small by half a hundredth: five roundings."""
    norm, wrong = (GroupNormAct(16, 4, eps).half().to(DEVICE) for eps in (1e-3, 2e-2))
    error, bound, _ = gpu_checks.compared(norm, wrong, (2, 16, 9, 9), torch.float16, torch.channels_last)
    assert error > bound
    for value in (error, float("nan")):
        row = gpu_checks._row("norm", lambda value=value: (value, bound, "output"), 0)
        assert row.note.startswith("FAILED") and not gpu_checks.passed(row)
        assert json.dumps(row.columns(), allow_nan=False)


# Time and faults within a section.


@pytest.fixture
def spend(monkeypatch):
    """spend(seconds): the time of sessions, which passes only so."""
    now = [0.0]
    monkeypatch.setattr(gpu_measure.time, "monotonic", lambda: now[0])

    def spent(seconds):
        now[0] += seconds

    return spent


def session(seconds=60.0, **changes):
    return Session("part", dataclasses.replace(PLAN, **changes), seconds)


@pytest.mark.parametrize(("seconds", "turns"), [(1, 2), (45, 4), (1000, 9)])
def test_the_time_ends_the_turns(seconds, turns, spend):
    """A warming call of 10 s, then turns of 10 s each until the time is over: at least 2, at most what is asked for."""
    (row,) = session(seconds, turns=9).compare({"side": lambda stack: lambda: spend(10)}, abs, "s")
    assert len(row.repetitions) == turns
    slow, late = session(7).compare(dict.fromkeys(("side", "late"), lambda stack: lambda: spend(5)), abs, "s")
    assert slow.repetitions and late.note == "not measured: no time was left"


def test_a_fault_costs_one_row_and_one_that_the_device_does_not_survive_the_section(monkeypatch):
    calls = itertools.count()

    def later():
        if next(calls) == 2:
            raise ValueError("too late\nsecond line")

    def never(*stack):
        raise ImportError("no module")

    sides = {"good": lambda stack: int, "later": lambda stack: later, "never": never}
    rows = {row.what: row for row in session(turns=3).compare(sides, abs, "s")}
    assert len(rows["good"].repetitions) == 3
    assert rows["later"].note == "not measured: too late" and rows["never"].note == "not measured: no module"
    good = Row("part", "good", (1.0,))
    assert list(session().attempts({"bad": never, "good": lambda: good})) == [missing("part", "bad", "no module"), good]

    def lose(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_measure, "synchronize", lose)
    rows = session().attempts({"good": lambda: good, "bad": never, "next": never})
    assert next(rows) == good
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(rows)


@pytest.mark.parametrize("fits", [1, 3], ids=["no warming call", "no turn"])
def test_a_side_that_fails_is_closed_and_freed_before_the_next_is_called(fits):
    left, seen, closed = [], [], []

    class Failing:
        calls = 0

        def step(self):
            self.calls += 1
            if self.calls > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")

    def failing(stack):
        side = Failing()
        stack.callback(closed.append, "bad")
        left.append(weakref.ref(side))
        return side.step

    def other(stack):
        stack.callback(closed.append, "good")
        return lambda: seen.append(left[0]() is not None)

    sides = {"bad": failing, "good": other}
    good, bad = session(turns=4).compare(sides, abs, "s", warm_up=2)
    assert bad.note == "not measured: out of memory" and len(good.repetitions) == 4
    # Turns begin from either end: two warming calls, bad and good, good and bad.
    assert seen == ([False] * 6 if fits == 1 else [True] * 4 + [False] * 2)
    assert closed == ["bad", "good"]


@pytest.mark.parametrize(("limit", "largest"), [(0, 0), (5, 4), (100, 8)])
def test_the_largest_micro_batch_is_doubled(limit, largest, monkeypatch):
    def two_steps(session, micro, kernels, recompute):
        if micro > limit:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_training, "_two_steps", two_steps)
    assert gpu_training._largest_micro(session(), "largest", False).value == largest


# Sections in a process of their own.


def good(session):
    yield Row(session.section, "figure", (2.0, 1.0, 4.0), "ms")


def dying(session):
    yield Row(session.section, "first", (1.0,), "ms")
    os._exit(3)


def endless(session):
    time.sleep(60)
    yield


@pytest.mark.slow
def test_no_section_costs_the_others_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "_GRACE", 1.0)
    # On a busy machine a process takes half a minute to start: only the endless one has little time.
    sections = [Section(each.__name__, seconds, each) for each, seconds in ((dying, 200), (good, 200), (endless, 5))]
    rows, _ = gpu_suite.measured(dataclasses.replace(PLAN, total=600), sections, tmp_path)
    assert [(row.section, row.what, row.value) for row in rows] == [
        ("dying", "first", 1.0), ("dying", "the rest", None), ("good", "figure", 2.0), ("endless", "the rest", None),
    ]  # fmt: skip
    notes = {row.section: row.note for row in rows if row.value is None}
    assert notes["dying"] == "not measured: its process ended with exit code 3"
    assert notes["endless"].startswith("not measured: not done after")
    page, content = (next(tmp_path.glob(f"*.{kind}")).read_text() for kind in ("md", "json"))
    assert [row["what"] for row in json.loads(content)["rows"]] == [row.what for row in rows]
    assert "| figure | 2 | ms | 1 | 4 | - |  |" in page


# What is written.

TRAINING = gpu_training.CLAIMED
WRITTEN = [
    Row("checks", "norm", (0.5,), limit=1.0, note="passed: output"),
    Row(TRAINING[0], "ours, contiguous, torch", (300.0, 300.0), "images/s", note="micro batch 64"),
    Row(TRAINING[0], "ours, contiguous, triton", (800.0, 900.0), "images/s", note="micro batch 64"),
    Row(TRAINING[0], "timm, contiguous", (400.0, 420.0), "images/s", note="micro batch 64"),
    Row(TRAINING[1], "timm, contiguous", (500.0, 600.0), "images/s", note="micro batch 64"),
    missing(TRAINING[1], "ours, contiguous, torch", "out of memory"),
    Row("training B4-G1-BN, float16", "ours, contiguous, torch", (9999.0,), "images/s"),
    Row("update", "ours, Triton", (0.14, 0.12), "ms", limit=0.1),
    Row("update", "timm Lars, float32", (0.4, 0.5), "ms", limit=0.1),
]


def test_the_command_prints_what_the_files_hold_which_are_named_after_the_device(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--json"])
    about = {**next(gpu_suite.machine("cpu")), "device": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1}
    files = gpu_suite.write(WRITTEN, about, tmp_path / "gpu")
    assert [file.name for file in files] == ["nvidia-h100-80gb-hbm3.json", "nvidia-h100-80gb-hbm3.md"]
    page, made = files[1].read_text(), json.loads(files[0].read_text())["claims"]
    assert {claim["name"]: (claim["value"], claim["holds"]) for claim in made} == {
        "failed_checks": (0, True),
        "g16_speedup_over_timm": (pytest.approx(1.55), True),
        "update_over_byte_floor": (pytest.approx(1.3), True),
    }
    assert not gpu_suite.made_claims([*WRITTEN, missing("checks", "conv", "no kernel")])[0]["holds"]
    for table in (part for part in page.split("\n\n") if part.startswith("|")):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "not measured: out of memory" in page and "79.1 GiB" in page
    assert "| g16_speedup_over_timm | 1.55 (1.5 to 1.6) | >= 1.5 | holds |" in page
    monkeypatch.setattr(gpu_suite, "measured", lambda *arguments: (WRITTEN, about))
    gpu_suite.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(files[0].read_text())


def test_without_cuda_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    with pytest.raises(ConfigError, match="PyTorch finds no CUDA device here; run it where"):
        gpu_suite.main()
