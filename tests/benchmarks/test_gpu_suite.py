"""A dry pass of the suite for one GPU: on the GPU where there is one, else on the CPU with Triton's interpreter."""

import dataclasses
import itertools
import json
import os
import sys
import time

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_checks, gpu_process, gpu_report, gpu_runs, gpu_suite, gpu_training
from benchmarks.gpu_measure import DRY_PASS, Clock, DeviceLost, Row, Session
from benchmarks.gpu_process import Section
from models.normalization import GroupNormAct
from training.command import finish, one_line

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = dataclasses.replace(DRY_PASS, device=DEVICE)
KEYS = ["section", "what", "value", "unit", "lowest", "highest", "limit", "note"]
# What a CPU has not: its rows say so.
ON_CUDA = ("triton", "group_norm", "group_conv", "channels_last", "CUDA graph")


def performed(section, before=(), plan=PLAN):
    """Its rows, and whether the device goes on."""
    sent = []
    alive = gpu_process.perform(section, plan, before, lambda kind, content: sent.append((kind, content)))
    return [content for kind, content in sent if kind == "row"], alive


# Some are like others in all but the model.
ALIKE = ("training B4-G1-BN, float16", "training B0-G16-GN, float16", "training B4-G16-GN, bfloat16")


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in ALIKE else [])
        for each in gpu_suite.SECTIONS
    ],
)
def test_each_section_gives_all_its_rows(section, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # that takes minutes
    copied = Row("ceilings", "copy", (1.0,), "GB/s")
    rows, alive = performed(section, [copied] if section.name != "ceilings" else [])
    assert alive
    assert len(rows) == len({row.what for row in rows}) == EXPECTED.get(section.name, 10)
    for row in rows:
        assert list(row.columns()) == KEYS and row.section == section.name
        if section.name == "checks":
            assert row.value <= row.limit and row.note.startswith("passed"), row
        elif DEVICE == "cuda" or row.repetitions:
            assert row.repetitions, row
        else:
            assert row.note.startswith("not measured: ") and any(what in row.what for what in ON_CUDA), row


EXPECTED = {
    "checks": 8, "ceilings": 4, "optimizer": 5, "selection": 3, "feed": 4, "determinism": 2, "memory": 4,
    "training B4-G1-BN, float16": 4, "training B4-G16-GN, float16, compiled": 2,
}  # fmt: skip


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, None], ids=str)
def test_a_layer_that_is_a_little_wrong_or_not_finite_does_not_pass(memory_format):
    """A variance that is too large by a hundredth makes outputs too small by half a hundredth: five roundings."""
    error, bound = float("nan"), 1.0
    if memory_format is not None:
        norm, wrong = (GroupNormAct(16, 4, eps).half().to(DEVICE) for eps in (1e-3, 2e-2))
        error, bound, _ = gpu_checks.compared(norm, wrong, (2, 16, 9, 9), torch.float16, memory_format)
        assert error > bound
    row = gpu_checks._row(session(), "norm", lambda: (error, bound, "output"), 0)
    assert row.note.startswith("FAILED") and not gpu_report._passed(row)
    assert json.dumps(row.columns(), allow_nan=False)


# Time.


class Hands:
    """A clock whose time passes when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


def session(clock=None, before=(), told=None):
    return Session("part", PLAN, clock or Clock(60), before, (lambda what: None) if told is None else told.append)


@pytest.mark.parametrize(("seconds", "turns"), [(1, 2), (45, 4), (1000, 9)])
def test_the_clock_ends_the_turns(seconds, turns):
    """A warming call of 10 s, then turns of 10 s each until the time is over: at least 2, at most what is asked for."""
    hands = Hands()

    def side():
        hands.now += 10

    times, faults = session(Clock(seconds, hands)).take_turns({"side": lambda stack: side}, turns=9)
    assert not faults and len(times["side"]) == turns


def test_sides_for_which_no_time_is_left_say_so():
    hands = Hands()

    def slow():
        hands.now += 80

    times, faults = session(Clock(100, hands)).take_turns({"slow": lambda stack: slow, "late": lambda stack: slow})
    assert times.keys() == {"slow"} and "no time was left" in str(faults["late"])


# Faults.


def test_a_side_that_fails_leaves_the_others_and_one_that_has_a_row_is_left_out():
    calls = itertools.count()

    def later():
        if next(calls) == 2:
            raise ValueError("too late\nsecond line")

    def never(stack):
        raise ImportError("no module")

    before = [Row("part", "done", (1.0,)), Row("other part", "good", (1.0,))]
    sides = {"good": lambda stack: int, "later": lambda stack: later, "never": never, "done": lambda stack: int}
    rows = {row.what: row for row in session(before=before).compare(sides, abs, "s", turns=3)}
    assert rows.keys() == {"good", "later", "never"} and len(rows["good"].repetitions) == 3
    assert rows["later"].note == "not measured: too late" and rows["never"].note == "not measured: no module"


def test_an_error_that_the_device_survives_costs_one_row_and_one_that_it_does_not_ends_the_process(monkeypatch):
    def fail():
        raise ValueError("wrong\nsecond line")

    assert session().attempt("one", fail) == Row("part", "one", (), note="not measured: wrong")
    monkeypatch.setattr("benchmarks.gpu_measure.is_lost", lambda device: True)
    with pytest.raises(DeviceLost, match="one: wrong"):
        session().attempt("one", fail)
    with pytest.raises(DeviceLost, match="side: wrong"):
        session().take_turns({"side": lambda stack: fail})


def test_micro_batches_are_halved_until_both_sides_fit(monkeypatch):
    def sides(session, setting, micro):
        def step():
            if micro > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return {"ours": lambda stack: int, "timm": lambda stack: step}

    monkeypatch.setattr(gpu_training, "_sides", sides)
    rows = list(gpu_training.training(session(), gpu_training.SETTINGS[0]))
    assert [row.what for row in rows] == ["ours", "timm"]
    assert all(row.note == "32 px, micro batch 1" for row in rows)


@pytest.mark.parametrize("limit", [0, 1, 3, 64, 100, 317, 2000])
def test_the_largest_micro_batch_is_found_to_a_sixteenth(limit):
    tried = []

    def fits(number):
        tried.append(number)
        return number <= limit

    fitting, beyond = gpu_runs.largest_fitting(fits, 64, 1024, lambda: False)
    assert len(tried) <= 9
    if limit > 1024:
        assert (fitting, beyond) == (1024, None)
    else:
        assert fitting <= limit and beyond - fitting <= max(fitting // 16, 1) and beyond > limit


def test_no_time_ends_the_search_with_what_is_known():
    looks = itertools.count()
    over = lambda: next(looks) >= 3  # noqa: E731
    assert gpu_runs.largest_fitting(lambda number: number <= 150, 64, 1024, over) == (128, 256)


# Sections in a process of their own.


def good(session):
    yield session.row("figure", [2.0, 1.0, 4.0], "ms")


def raising(session):
    yield session.row("first", [1.0], "ms")
    session.tell("second")
    raise ValueError("it does not work")


def dying(session):
    for what in ("first", "second", "third"):
        if not session.is_done(what):
            session.tell(what)
            if what == "second":
                os._exit(3)
            yield session.row(what, [1.0], "ms")


def endless(session):
    session.tell("loop")
    time.sleep(60)
    yield


@pytest.mark.slow
def test_no_section_costs_the_others_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_suite, "_GRACE", 1.0)
    sections = [
        Section(each.__name__, 0.5 if each is endless else 30, each) for each in (raising, dying, good, endless)
    ]
    rows, _ = gpu_suite.measured(PLAN, sections, tmp_path)
    assert [(row.section, row.what, row.value) for row in rows[: -len(gpu_report.PUBLISHED_ROWS)]] == [
        ("raising", "first", 1.0),
        ("raising", "second", None),
        ("dying", "first", 1.0),
        ("dying", "second", None),
        ("dying", "third", 1.0),
        ("good", "figure", 2.0),
        ("endless", "loop", None),
    ]
    notes = {row.section: row.note for row in rows if row.value is None}
    assert notes["raising"] == "not measured: it does not work"
    assert notes["dying"] == "not measured: its process ended with exit code 3"
    assert notes["endless"].startswith("not measured: not done after")
    page, content = (next(tmp_path.glob(f"*.{kind}")).read_text() for kind in ("md", "json"))
    assert [row["what"] for row in json.loads(content)["rows"]] == [row.what for row in rows]
    assert "| figure | 2 | 1 to 4 |  |" in page and "not measured: it does not work" in page


def test_where_no_process_begins_again_the_other_sections_say_so(tmp_path, monkeypatch):
    class Broken:
        alive, machine = False, gpu_report.about(torch.device("cpu"))
        made = 0

        def __init__(self, plan):
            Broken.made += 1
            if Broken.made > 1:
                raise EOFError

        def end(self):
            pass

    monkeypatch.setattr(gpu_suite, "Process", Broken)
    rows, _ = gpu_suite.measured(PLAN, [Section("one", 9, good), Section("two", 9, good)], tmp_path)
    notes = {row.section: row.note for row in rows if row.section in ("one", "two")}
    assert notes == dict.fromkeys(("one", "two"), "not measured: no process begins: EOFError")
    assert len(list(tmp_path.iterdir())) == 2


# What is written.

TRAINING = gpu_training.CLAIMED
ROWS = [
    Row("checks", "norm", (0.5,), limit=1.0, note="passed: output"),
    Row(TRAINING[0], "ours, contiguous, torch", (300.0, 300.0), "images/s", note="micro batch 64"),
    Row(TRAINING[0], "ours, contiguous, triton", (800.0, 900.0), "images/s", note="micro batch 64"),
    Row(TRAINING[0], "timm, contiguous", (400.0, 420.0), "images/s", note="micro batch 64"),
    Row(TRAINING[1], "timm, contiguous", (500.0, 600.0), "images/s", note="micro batch 64"),
    Row.missing(TRAINING[1], "ours, contiguous, torch", "out of memory"),
    Row("training B0-G16-GN, float16", "ours, contiguous, torch", (9999.0,), "images/s"),
    Row("optimizer", "ours, Triton", (0.4, 0.5), "ms", limit=0.1),
    Row("optimizer", "ours, Triton, CUDA graph", (0.14, 0.12), "ms", limit=0.1),
]


def test_claims_compare_the_best_of_both_sides():
    found = {claim["name"]: claim for claim in gpu_report.made_claims(ROWS)}
    assert found["g16_speedup_over_timm"]["spread"] == [900 / 600, 800 / 500]
    assert found["update_over_byte_floor"]["value"] == pytest.approx(1.3) and found["update_over_byte_floor"]["holds"]
    assert found["failed_checks"]["holds"]
    failed = [*ROWS, Row.missing("checks", "conv", "no kernel")]
    assert not gpu_report.made_claims(failed)[0]["holds"]
    assert gpu_report.made_claims([Row.missing(TRAINING[0], "ours, contiguous, torch", "broken")]) == []


def test_files_are_named_after_the_device_and_hold_what_is_printed(tmp_path):
    machine = {**gpu_report.about(torch.device("cpu")), "device": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1}
    files = gpu_report.write(ROWS, machine, tmp_path / "gpu")
    assert [file.name for file in files] == ["nvidia-h100-80gb-hbm3.json", "nvidia-h100-80gb-hbm3.md"]
    content = json.loads(files[0].read_text())
    assert content == json.loads(json.dumps(gpu_report.result(ROWS, machine)))
    assert content["quick"] is False
    assert {"date", "device", "memory_gib", "torch", "cuda", "cudnn", "triton", "revision"} <= content["machine"].keys()
    page = files[1].read_text()
    tables = [table for table in page.split("\n\n") if table.startswith("|")]
    assert len(tables) == len({row.section for row in ROWS}) + 1
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "| ours, contiguous, torch | - |" in page and "not measured: out of memory" in page
    assert "79.1 GiB" in page and "`g16_speedup_over_timm` | 1.55 times | 1.5 to 1.6 | >= 1.5 | holds |" in page


def test_without_cuda_it_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_suite"])
    with pytest.raises(SystemExit) as end:
        finish(one_line()(gpu_suite.main))
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "benchmarks.gpu_suite: PyTorch finds no CUDA device here; run it where there is one"
    ]


def test_the_command_prints_tables_and_json(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--json"])
    machine = gpu_report.about(torch.device("cpu"))
    monkeypatch.setattr(gpu_suite, "measured", lambda *arguments: (ROWS, machine))
    gpu_suite.main()
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == json.loads(json.dumps(gpu_report.result(ROWS, machine)))
    assert any(line.startswith("optimizer") and "CUDA graph" in line for line in lines)
    assert any(line.startswith("g16_speedup_over_timm: 1.55 times") for line in lines)
