"""A dry pass of the suite for one GPU: on the GPU where there is one, else on the CPU with Triton's
interpreter."""

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import (
    CACHE,
    RESULTS,
    claims,
    drawn_photographs,
    gpu_calls,
    gpu_checks,
    gpu_files,
    gpu_kernels,
    gpu_measure,
    gpu_memory,
    gpu_results,
    gpu_suite,
    gpu_training,
    gpu_trainings,
    packages,
    ranks,
)
from benchmarks.gpu_calls import Call, Section
from benchmarks.gpu_measure import DRY_PASS, Row, Session, latest, missing
from benchmarks.gpu_results import Measured
from common.errors import ConfigError
from models.normalization import GroupNormAct
from tests.conftest import ROOT

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = dataclasses.replace(DRY_PASS, device=DEVICE)
KEYS = ["section", "what", "value", "unit", "lowest", "highest", "limit", "note"]
SECTIONS = [section for call in gpu_calls.CALLS for section in call.sections]
# What a CPU has not: its rows say so.
ON_CUDA = ("ours, G16, triton", "ours, G16, group", "ours, G16, cuda")
ROWS = {
    "checks": 9, "compilation": 2, "B4, bfloat16": 3, "B4, other micro batches": 1, "kernels": 7, "update": 3,
    "JPEG to update": 3, "memory": 4, "B4, eager": 5, "B4, engine.compile": 4,
    "first step": 2, "B4, micro batch auto": 1, "evaluation and export": 4, "selection": 3, "accuracy beside a CPU": 2,
}  # fmt: skip
# The others of their kind run always; tests/models/kernels has the kernels of "kernels" and
# "checks".
SLOW = (
    "memory", "B4, bfloat16", "B4, eager", "JPEG to update", "kernels", "evaluation and export",
    "accuracy beside a CPU", "checks",
)  # fmt: skip


@pytest.fixture
def few_photographs(monkeypatch, tmp_path):
    """Six photographs, two of each class."""
    paths = [
        tmp_path / "files" / drawn_photographs.CLASSES[number % 3] / f"{number}.jpg"
        for number in range(6)
    ]
    monkeypatch.setattr(drawn_photographs, "FOLDER", tmp_path / "files")
    monkeypatch.setattr(drawn_photographs, "photographs", lambda: drawn_photographs.make(paths))


@pytest.fixture(autouse=True, scope="module")
def _garbage_of_others():
    """Each section collects garbage: what tests before have left, in 0.1 s each time, were it not
    frozen."""
    gc.collect()
    gc.freeze()


ONE_AT_A_TIME = threading.Lock()


def stream_here(seconds, function, *args):
    """ranks.stream without a process, which takes seconds to start."""
    with ONE_AT_A_TIME:
        try:
            yield from list(function(*args))
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.name in SLOW else [])
        for each in SECTIONS
    ],
)
def test_each_section_gives_all_its_rows(section, monkeypatch, few_photographs):
    # that takes minutes
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(ranks, "stream", stream_here)
    # commands take longer on a busy CPU than beside a GPU
    monkeypatch.setattr(gpu_trainings, "_LEAST_SECONDS", 300.0)
    rows = latest(gpu_calls.perform(section, PLAN))
    assert len(rows) == len({row.what for row in rows}) == ROWS[section.name]
    for row in rows:
        assert (
            list(row.columns()) == KEYS
            and row.section == section.name
            and gpu_measure.WARMING not in row.note
        )
        if section.name == "checks":
            assert gpu_checks.passed(row) and row.note.startswith("passed"), row
        elif DEVICE == "cuda" or row.repetitions:
            assert row.repetitions, row
        else:
            assert row.note.startswith("not measured: ") and row.what.startswith(ON_CUDA), row


def test_a_layer_that_is_a_little_wrong_does_not_pass():
    """A variance that is too large by a hundredth makes outputs too small by half a hundredth: five
    roundings."""
    norm, wrong = (GroupNormAct(16, 4, eps).half().to(DEVICE) for eps in (1e-3, 2e-2))
    error, bound, _ = gpu_checks.compared(
        norm, wrong, (2, 16, 9, 9), torch.float16, torch.channels_last
    )
    assert error > bound
    for value in (error, float("nan")):
        row = gpu_checks._row(
            "norm", lambda value=value: gpu_checks.Deviation(value, bound, "output"), 0
        )
        assert row.note.startswith("FAILED") and not gpu_checks.passed(row)
        assert json.dumps(row.columns(), allow_nan=False)


@pytest.mark.parametrize("kernel", ["squeeze", "group_norm", "group_conv"])
def test_layers_are_measured_as_they_are_in_the_model_and_nothing_sees_them(kernel):
    found = gpu_kernels.layers(session(layers=2), kernel)
    assert (
        len({layer.name for layer in found}) == len(found) == 2
        and found[0].values >= found[1].values
    )
    for layer in found:
        assert layer.name.startswith(kernel.replace("_", " ")) and layer.name.endswith(
            " x ".join(map(str, layer.shape))
        )
        assert layer.shape[0] == PLAN.micro and layer.values > 3 * layer.shape.numel()
        ours, torchs = (list(side.modules()) for side in (layer.ours, layer.torchs))
        assert not any(each._forward_hooks for each in [*ours, *torchs])
        assert list(map(type, ours)) != list(map(type, torchs))
        assert (type(layer.in_cuda).__name__ == "CudaGroupConv2d") == (kernel == "group_conv")


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
    """A warming call of 10 s, then turns of 10 s each until the time is over: at least 2, at most
    what is asked for."""
    warm, row = session(seconds, turns=9).compare(
        {"side": lambda stack: lambda: spend(10)}, abs, "s"
    )
    assert len(row.repetitions) == turns and (len(warm.repetitions), warm.note) == (
        1,
        gpu_measure.WARMING,
    )
    sides = dict.fromkeys(("side", "late"), lambda stack: lambda: spend(5))
    slow, late = latest(session(6).compare(sides, abs, "s"))
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
    assert (
        rows["later"].note == "not measured: too late"
        and rows["never"].note == "not measured: no module"
    )
    good = Row("part", "good", (1.0,))
    assert list(session().attempts({"bad": never, "good": lambda: good})) == [
        missing("part", "bad", "no module"),
        good,
    ]

    def lose(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_measure, "synchronize", lose)
    rows = session().attempts({"good": lambda: good, "bad": never, "next": never})
    assert next(rows) == good
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(rows)


@pytest.mark.parametrize("fits", [1, 3], ids=["no warming call", "no turn"])
def test_a_side_that_fails_is_closed_and_freed_before_the_next_is_called(fits):
    left = []
    seen = []
    closed = []

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
    rows = {row.what: row for row in session(turns=4).compare(sides, abs, "s", warm_up=2)}
    good = rows["good"]
    bad = rows["bad"]
    assert bad.note == "not measured: out of memory" and len(good.repetitions) == 4
    # Turns begin from either end: two warming calls, bad and good, good and bad.
    assert seen == ([False] * 6 if fits == 1 else [True] * 4 + [False] * 2)
    assert closed == ["bad", "good"]


@pytest.mark.parametrize(("limit", "largest"), [(0, 0), (5, 4), (100, 8)])
def test_the_largest_micro_batch_is_doubled(limit, largest, monkeypatch):
    def two_steps(session, micro, kernels, recompute):
        if micro > limit:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_memory, "_two_steps", two_steps)
    assert gpu_memory._largest_micro(session(), "largest", False).value == largest


# Sections in a process of their own.


def good(session):
    yield Row(session.section, "figure", (2.0, 1.0, 4.0), "ms")


def dying(session):
    yield Row(session.section, "first", (1.0,), "ms")
    os._exit(3)


def endless(session):
    time.sleep(60)
    yield


def cublas():
    yield os.environ.get("CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.slow
def test_no_section_costs_the_others_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_calls, "_GRACE", 1.0)
    # On a busy machine a process takes half a minute to start: only the endless one has little
    # time.
    sections = [
        Section(each.__name__, seconds, each)
        for each, seconds in ((dying, 200), (good, 200), (endless, 5))
    ]
    plan = dataclasses.replace(PLAN, total=600)
    rows, _ = gpu_calls.measured(plan, Call("first", "", tuple(sections)), tmp_path)
    expected = [
        ("dying", "first", 1.0), ("dying", "the rest", None), ("good", "figure", 2.0), ("endless", "the rest", None),
    ]  # fmt: skip
    assert [(row.section, row.what, row.value) for row in rows] == expected
    notes = {row.section: row.note for row in rows if row.value is None}
    assert notes["dying"] == "not measured: its process ended with exit code 3"
    assert notes["endless"].startswith("not measured: not done after")
    page, content = (next(tmp_path.glob(f"*.{kind}")).read_text() for kind in ("md", "json"))
    assert [row["what"] for row in json.loads(content)["rows"]] == [row.what for row in rows]
    assert "| figure | 2 | ms | 1 | 4 | - |  |" in page


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_of_benchmarks_have_the_variable_that_deterministic_runs_need(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert list(ranks.stream(240, cublas)) == [":16:8"]


def test_the_second_call_adds_to_what_the_first_wrote_row_by_row(tmp_path, monkeypatch):
    """Each row is on the disk before the next comes; a section that is measured again replaces its
    rows."""
    about = {**next(gpu_calls.machine("cpu")), "device": "GPU X"}
    given = {
        "b": [Row("b", "x", (1.0,), note=gpu_measure.WARMING), Row("b", "x", (2.0, 3.0))],
        "c": [Row("c", "y", (4.0,))],
    }
    seen = []

    def stream(seconds, function, *args):
        if function is gpu_calls.machine:
            return iter([about])
        return rows_of(args[0].name)

    def rows_of(section):
        for row in given[section]:
            yield row
            seen.append(
                [(each.what, each.repetitions) for each in gpu_results.read(tmp_path, "GPU X").rows]
            )

    monkeypatch.setattr(ranks, "stream", stream)
    gpu_results.write(Measured([Row("a", "w", (5.0, 6.0))], {"first": about}), tmp_path)
    sections = tuple(Section(name, 10, good) for name in "bc")
    found = gpu_calls.measured(PLAN, Call("second", "", sections), tmp_path)
    first = ("w", (5.0, 6.0))
    assert seen == [
        [first, ("x", (1.0,))], [first, ("x", (2.0, 3.0))], [first, ("x", (2.0, 3.0)), ("y", (4.0,))],
    ]  # fmt: skip
    assert list(found.calls) == ["first", "second"] and gpu_results.read(tmp_path, "GPU X") == found
    page = (tmp_path / "gpu-x.md").read_text()
    assert "First call on" in page and "Second call on" in page
    again = gpu_calls.measured(PLAN, Call("second", "", sections[:1]), tmp_path)
    assert again.rows[1:] == [Row("c", "y", (4.0,)), Row("b", "x", (2.0, 3.0))]
    assert gpu_calls.measured(PLAN, Call("first", "", sections[:1]), tmp_path).rows == [
        Row("b", "x", (2.0, 3.0))
    ]


# What is written.

(BF16,) = (each.name for each in gpu_training.CLAIMED)
PEER = "timm, efficientnet_b4, compiled"
OTHER = "timm, G16, compiled"
WRITTEN = [
    Row("checks", "norm", (0.5,), limit=1.0, note="passed: output"),
    Row(BF16, PEER, (1000.0, 1100.0), "images/s", note="micro batch 128"),
    Row(BF16, OTHER, (900.0, 900.0), "images/s", note="micro batch 128"),
    Row(BF16, "ours, G16, triton", (1600.0, 1800.0), "images/s", note="micro batch 128"),
    Row(BF16, "ours, G16, triton, compiled", (2000.0, 2200.0), "images/s", note="micro batch 128"),
    missing(BF16, "ours, G16, group_conv, compiled", "out of memory"),
    Row(BF16, "ours, G16, torch", (9999.0,), "images/s", note=gpu_measure.WARMING),
    Row(gpu_training.MICROS.name, "ours, G16, triton, 256 images", (2600.0, 2600.0), "images/s"),
    Row("B4, eager", "ours, efficientnet_b4, torch", (9999.0, 9999.0), "images/s"),
    Row("update", "ours, Triton", (0.14, 0.12), "ms", limit=0.1),
    Row("update", "timm Lars, float32", (0.4, 0.5), "ms", limit=0.1),
    Row("JPEG to update", "images on the device", (1000.0, 1000.0), "images/s"),
    Row("JPEG to update", "torch reader", (970.0, 950.0), "images/s"),
    Row("JPEG to update", "dali reader", (900.0, 900.0), "images/s"),
    Row("first step", "no program in the cache", (12.0,), "s"),
    Row("first step", "all programs in the cache", (2.0,), "s"),
    Row("accuracy beside a CPU", "the device's", (90.0, 92.0, 91.0), "%"),
    Row("accuracy beside a CPU", "the CPU's", (90.5, 89.5, 90.0), "%"),
]


def verdicts(rows):
    return {
        claim["name"]: (claim["value"], claim["holds"]) for claim in gpu_results.made_claims(rows)
    }


def test_the_command_prints_what_the_files_hold_which_are_named_after_the_device(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {
        **next(gpu_calls.machine("cpu")),
        "device": "NVIDIA H100 80GB HBM3",
        "memory_gib": 79.1,
    }
    measured = Measured(WRITTEN, {"first": about})
    files = gpu_results.write(measured, tmp_path / "gpu")
    assert [file.name for file in files] == [
        "nvidia-h100-80gb-hbm3.json",
        "nvidia-h100-80gb-hbm3.md",
    ]
    page = files[1].read_text()
    content = json.loads(files[0].read_text())
    assert verdicts(WRITTEN) == {
        "b4_speedup_over_timm_compiled": (pytest.approx(2.0), False),
        "b4_images_per_second": (2600, True),
        "failed_checks": (0, True),
        "update_over_byte_floor": (pytest.approx(1.3), True),
        "jpeg_to_update_over_step": (pytest.approx(0.96), True),
        "first_step_seconds": (12.0, True),
        # A point, beside 2.776 times the root of (1 + 0.25) / 3.
        "same_top1_as_cpu": (pytest.approx(1 / 1.7919, rel=1e-3), True),
    }
    for table in (part for part in page.split("\n\n") if part.startswith("|")):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "not measured: out of memory" in page and "79.1 GiB" in page
    assert "| b4_speedup_over_timm_compiled | 2 (2 to 2) | >= 2.5 | does not hold |" in page
    folders = []

    def measure(plan, call, folder):
        folders.append(folder)
        return measured

    monkeypatch.setattr(gpu_calls, "measured", measure)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--write"])
    gpu_suite.main()
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--json"])
    capsys.readouterr()
    gpu_suite.main()
    assert folders == [RESULTS / "gpu", CACHE / "gpu"]
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "takes about 10 minutes at most for checks of kernels; B4 G16 at 380 px beside timm"
    )
    printed = json.loads(captured.out.splitlines()[-1])
    assert printed == {key: content[key] for key in printed} | {
        "rows": [row.columns() for row in WRITTEN]
    }


def test_claims_do_not_hold_where_a_side_did_not_finish():
    """timm's own model must have taken turns, and the faster of timm's two counts; a failed check
    is one."""
    assert not gpu_results.made_claims([*WRITTEN, missing("checks", "conv", "no kernel")])[2][
        "holds"
    ]
    without = [row for row in WRITTEN if row.what != PEER]
    late = Row(BF16, PEER, (1000.0,), "images/s", note=gpu_measure.WARMING)
    for rows in (without, [*without, late], [*without, missing(BF16, PEER, "no time was left")]):
        speedup, rate = gpu_results.made_claims(rows)[:2]
        assert (speedup["value"], rate["value"]) == (None, 2600)
        assert not speedup["holds"] and not rate["holds"]
        assert speedup["reason"] == rate["reason"] == gpu_results.NO_PEER
    faster = [*WRITTEN, Row(BF16, OTHER, (2000.0, 2200.0), "images/s")]
    assert verdicts(faster)["b4_speedup_over_timm_compiled"] == (1.0, False)
    (speedup, rate) = gpu_results.made_claims([WRITTEN[1]])
    assert (speedup["reason"], rate["reason"]) == ("none of ours finished",) * 2
    assert "| - | >= 2.5 | does not hold: none of ours finished |" in claims.claims_table([speedup])


@pytest.mark.parametrize(
    "row",
    [
        missing("accuracy beside a CPU", "the CPU's", "not done after 9 s"),
        missing("JPEG to update", "images on the device", "out of memory"),
        missing("first step", "no program in the cache", "out of memory"),
    ],
)
def test_a_figure_that_is_missing_makes_no_claim_of_its_section(row):
    rows = [
        row if (each.section, each.what) == (row.section, row.what) else each for each in WRITTEN
    ]
    assert len(verdicts(rows)) == len(verdicts(WRITTEN)) - 1


def test_another_accuracy_than_the_cpus_does_not_hold_however_alike_the_seeds_are():
    row = Row("accuracy beside a CPU", "the device's", (88.0, 88.0, 88.0), "%")
    beside = row._replace(what="the CPU's", repetitions=(90.0, 90.0, 90.0))
    assert verdicts([row, beside])["same_top1_as_cpu"] == (pytest.approx(20.0), False)
    assert verdicts([row, row._replace(what="the CPU's")])["same_top1_as_cpu"] == (0.0, True)


def test_sections_are_listed_and_chosen_by_name_and_another_name_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--list"])
    gpu_suite.main()
    printed = capsys.readouterr().out
    for section in SECTIONS:
        assert section.name in printed
        assert gpu_calls.chosen([section.name]).sections == (section,)
    both = gpu_calls.chosen(["update", "checks"])
    assert [section.name for section in both.sections] == ["checks", "update"]
    with pytest.raises(ConfigError, match="--only speed: no section; the sections are checks, "):
        gpu_calls.chosen(["checks", "speed"])


def test_each_call_ends_in_less_than_ten_minutes():
    for call in gpu_calls.CALLS:
        assert sum(section.seconds for section in call.sections) <= gpu_measure.REAL.total < 600


def test_a_dry_run_needs_no_gpu_and_writes_nothing(monkeypatch, capsys):
    given = []

    def measure(plan, call, folder):
        given.append((plan, call.name, folder))
        return Measured(WRITTEN, {call.name: next(gpu_calls.machine("cpu"))})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_calls, "measured", measure)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--dry-run", "--only", "memory"])
    gpu_suite.main()
    ((plan, name, folder),) = given
    assert (plan, name) == (DRY_PASS, "only memory")
    assert RESULTS not in folder.parents and CACHE not in folder.parents and not folder.exists()


def test_a_command_that_fails_or_takes_too_long_costs_its_row_and_says_why(monkeypatch):
    monkeypatch.setattr(gpu_trainings, "SEEDS", (0,))  # each is a process or two
    wrong = dataclasses.replace(PLAN, trained=("run.epochs=none",))
    rows = list(gpu_trainings.same_accuracy(Session("part", wrong, 200.0)))
    assert [row.what for row in rows] == [gpu_trainings.DEVICES, gpu_trainings.CPU]
    assert all("exit code 2" in row.note and "run.epochs" in row.note for row in rows)
    monkeypatch.setattr(gpu_trainings, "_LEAST_SECONDS", 0.1)
    (late, _) = gpu_trainings.same_accuracy(Session("part", PLAN, 0.1))
    assert late.note.startswith("not measured: not done after 0 s")


@pytest.mark.parametrize("rocm", [False, True])
def test_without_a_gpu_of_nvidia_it_is_refused_and_no_claim_holds(rocm, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: rocm)
    monkeypatch.setattr(torch.version, "hip", "7.1" if rocm else None)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--second", "--json"])
    with pytest.raises(ConfigError, match="PyTorch finds no NVIDIA GPU here; run it where"):
        gpu_suite.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [claim["holds"] for claim in result["claims"]] == [False, False] and result["rows"] == []
    assert {claim["reason"] for claim in result["claims"]} == {"PyTorch finds no NVIDIA GPU here"}


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="a dry run on a GPU's machine launches its kernels"
)
def test_a_dry_run_as_users_start_it_checks_our_kernels_in_tritons_interpreter():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_suite",
        "--dry-run",
        "--only",
        "checks",
        "--json",
    ]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    (failed,) = [claim for claim in result["claims"] if claim["name"] == "failed_checks"]
    assert failed["value"] == 0
    assert "not measured" not in ended.stdout


# On a machine that has little beside torch.

HIDE = """
import sys
sys.modules.update(dict.fromkeys(sys.argv.pop(1).split()))  # importing one of these is an error
"""


def without(modules, program):
    command = [sys.executable, "-c", HIDE + program, modules]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_missing_packages_are_one_line_with_the_remedy():
    program = "import runpy; runpy.run_module('benchmarks.gpu_suite', run_name='__main__', alter_sys=True)"
    ended = without("pydantic pydantic_core yaml", program)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "benchmarks.gpu_suite: not installed: pydantic, pyyaml; bring wheels (docs/gpu.md), then: "
    )


@pytest.mark.slow
def test_the_suite_needs_no_more_packages_than_it_asks_for():
    """What timm and torchvision can do without, and what reads images and remote files."""
    absent = "simplejpeg skimage nvidia.dali safetensors huggingface_hub aiohttp fsspec tqdm rich matplotlib optuna"
    ended = without(
        absent, "from benchmarks import gpu_calls, gpu_suite, packages; packages.check('x')"
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("absent", "row", "why"),
    [
        ("simplejpeg", "torch reader", "not installed: simplejpeg"),
        ("nvidia.dali", "dali reader", "not installed: nvidia-dali-cuda130"),
        ("skimage", "all", "scikit-image, which has the photographs, is not installed"),
    ],
)
def test_readers_that_are_not_installed_cost_a_line(absent, row, why, monkeypatch, few_photographs):
    monkeypatch.setattr(
        packages, "missing", lambda names: [name for name in names if name == absent]
    )
    monkeypatch.setattr(
        gpu_files, "_row", lambda session, what, *rest, **named: Row(session.section, what, (1.0,))
    )
    rows = {each.what: each for each in gpu_files.files(session())}
    assert rows[row].note == f"not measured: {why}"
