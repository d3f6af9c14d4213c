"""Triton's programs ahead of the first step: all that training launches, in the cache where a
launch looks."""

import json
import os
import subprocess
import sys

import pytest

from engines import ahead
from tests.conftest import ROOT

pytest.importorskip("triton")

_TINY = (
    "model.name=efficientnet_b0",
    "model.width=0.25",
    "model.depth=0.1",
    "model.image_size=16",
    "model.classes=10",
    "batch.micro=2",
    "batch.global=4",
    "batch.evaluation=3",
    "precision.compute=float16",
)
_LAYOUTS = ("contiguous", "channels_last")


def launches(tmp_path, *words, interprets=False):
    """What tests/engines/launches.py prints."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if interprets else "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tests.engines.launches", *words]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def described(programs):
    """Programs as a set, without attributes that say nothing, which versions of a launch list or
    not."""
    found = set()
    for program in programs:
        fields = json.loads(json.loads(program)["description"])
        attributes = zip(fields["attrs_keys"], fields["attrs_vals"])
        fields["attributes"] = sorted(str(each) for each in attributes if each[1])
        for name in ("attrs_keys", "attrs_vals", "key"):
            del fields[name]
        found.add(json.dumps(fields, sort_keys=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [("b0", "channels_last"), *(("b4", layout) for layout in _LAYOUTS)],
)
def test_dry_passes_launch_all_that_a_step_and_an_evaluation_launch(tmp_path, model, layout):
    """At full size, on the meta device, where convolutions keep their layout as they do on a
    GPU."""
    batch = ("batch.micro=128", "batch.global=256", "batch.evaluation=96")
    words = (f"model.name=efficientnet_{model}", f"engine.memory_format={layout}", *batch)
    found = launches(tmp_path, "programs", *words)
    (dry, fault), (step, other) = found["dry"], found["step"]
    assert (fault, other) == ("", "") and len(step) > 100
    assert set(step) == set(dry)
    assert "prepared by _dry_passes" in found["notes"]


@pytest.mark.slow
def test_the_interpreter_launches_the_same_from_the_memory_of_a_cpu(tmp_path):
    """There kernels compute, weights change, and addresses are real ones."""
    words = (*_TINY, "engine.memory_format=contiguous")
    dry, _ = launches(tmp_path, "programs", *words)["dry"]
    found = launches(tmp_path, "interpreted", *words, interprets=True)
    step, fault = found["step"]
    assert fault == "" and found["changed"]
    assert len(step) > 100 and described(step) == described(dry)


@pytest.mark.slow
def test_a_launch_finds_in_the_cache_what_a_worker_has_compiled(tmp_path):
    """Triton says so itself, for compute capability 9.0: its listener tells hits from
    compilations."""
    found = launches(tmp_path, "hits", "3", *_TINY, "engine.memory_format=channels_last")
    assert found["faults"] == [""] * 3
    assert list(found["hits"].values()) == [True] * 3
    assert (found["unknown"], found["left"]) == (3, 0)


def test_a_program_that_cannot_be_compiled_is_left_to_its_launch_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    names = [f"models.kernels.group_conv_kernels.{name}" for name in ("output", "no_kernel")]
    descriptions = [json.dumps({"name": name}) for name in names]
    programs = [json.dumps({"target": target, "description": each}) for each in descriptions]
    faults = ahead.compiled([*programs, "no JSON"], 1)
    assert list(faults) == [*programs, "no JSON"]
    kinds = [fault.partition(":")[0] for fault in faults.values()]
    assert kinds == ["KeyError", "AttributeError", "JSONDecodeError"]


def test_a_worker_compiles_with_tuples_that_json_has_made_lists_of():
    """Attributes of arguments are lists in Triton, too, and stay so."""
    from engines.ahead_worker import with_tuples

    def compile_(key, constexprs, attrs, warmup):
        return key, constexprs, attrs, warmup

    attributes = {(0,): [["tt.divisibility", 16]]}
    constants = {(1,): [True, 8], (2,): 64, (3, 1): None}
    made = with_tuples(compile_)("key", constants, attributes, warmup=True)
    assert made == ("key", {(1,): (True, 8), (2,): 64, (3, 1): None}, attributes, True)


class _Known:
    """Stands for the file of digests."""

    def __init__(self):
        self.programs = []

    def add(self, programs):
        self.programs += programs


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        ({"a": "", "b": ""}, "Triton: 2 programs compiled in 0 s by 1 process"),
        (
            {"a": "", "b": "ValueError: no registers"},
            "Triton: 1 program compiled in 0 s by 1 process; 1 are left to their first launch: "
            "ValueError: no registers",
        ),
        (
            {},
            "Triton: 0 programs compiled in 0 s by 1 process; 2 are left to their first launch: no answer after 300 s",
        ),
    ],
)
def test_the_line_says_what_is_left_and_only_the_rest_is_known(monkeypatch, faults, expected):
    monkeypatch.setattr(ahead, "compiled", lambda programs, count: faults)
    known = _Known()
    assert ahead._compile(["a", "b"], known) == expected
    assert known.programs == [name for name, fault in faults.items() if not fault]


def test_a_process_that_dies_costs_its_program_and_one_that_does_not_start_none(monkeypatch):
    real = subprocess.Popen
    dies = [sys.executable, "-c", "input(); exit(3)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real(dies, **options))
    assert ahead.compiled(["a", "b"], 1) == {"a": "a compiling process ended with exit code 3"}

    def fail(command, **options):
        raise OSError("no processes left")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert ahead.compiled(["a", "b"], 2) == {}


def test_a_process_that_hangs_is_ended(monkeypatch):
    real = subprocess.Popen
    hangs = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: real(hangs, **options))
    monkeypatch.setattr(ahead, "_SECONDS", 0.5)
    assert ahead.compiled(["a"], 1) == {}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Lists of programs that were compiled; a launch needs 9 programs, of which the digest is their
    name."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "triton"))
    monkeypatch.setattr(ahead._Known, "_digest", lambda self, program: program)
    batches = []

    def compiled(programs, count):
        batches.append(programs)
        return dict.fromkeys(programs, "")

    monkeypatch.setattr(ahead, "compiled", compiled)
    return batches


def recorded(monkeypatch, programs, fault=""):
    monkeypatch.setattr(ahead, "recorded", lambda work: ahead.Recorded(programs, fault))


def test_the_second_time_nothing_is_compiled_unless_the_cache_is_lost(
    monkeypatch, tmp_path, started
):
    names = [str(number) for number in range(9)]
    recorded(monkeypatch, names)
    (line,) = ahead.prepared(lambda: None)
    assert line.startswith("Triton: 9 programs compiled in ") and started == [names]
    assert ahead.prepared(lambda: None) == () and len(started) == 1
    (file,) = (tmp_path / "triton").iterdir()
    file.unlink()
    assert len(ahead.prepared(lambda: None)) == 1 and len(started) == 2


def test_a_few_programs_are_left_to_their_launch_and_a_fault_of_a_dry_pass_is_a_line(
    monkeypatch, started
):
    recorded(monkeypatch, ["a", "b"], "out of memory")
    assert ahead.prepared(lambda: None) == (
        "Triton's programs were looked for, until: out of memory",
    )
    assert started == []


def test_a_fault_of_the_work_ends_the_recording_and_the_hook_is_given_back():
    import triton

    def fail():
        raise RuntimeError("out of memory\nmore")

    before = triton.knobs.runtime.jit_cache_hook
    assert ahead.recorded(fail) == ([], "out of memory")
    assert triton.knobs.runtime.jit_cache_hook is before
