"""engine.memory_format and engine.kernels auto: the fastest is taken, by all ranks, once; and what
a device refuses."""

import contextlib
import itertools
import os
import pathlib
import re
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from common.errors import ConfigError
from engines import devices, factory, tuning
from engines.tuning import Candidate
from models.efficientnet import build
from models.kernels import patching
from models.kernels.cuda import compiler
from models.native import library
from parallel.processes import Processes
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide
from tests.engines import threads

GPU = torch.device("cuda")
CPU = torch.device("cpu")
PLAIN = ("contiguous", "torch")
FASTEST = ("channels_last", "triton")
SECONDS = (0.09, 0.07, 0.08, 0.06, 0.1, 0.055, 0.09, 0.05)
KERNELS = ("torch", "group_norm", "group_conv", "triton")
TIMES = dict(zip(itertools.product(("contiguous", "channels_last"), KERNELS), SECONDS))


def pretend(times=TIMES, measured=None, triton=True):
    """As if the CPU had a choice, with or without Triton, and candidates took these times; a string
    is a fault."""

    def seconds(*arguments):
        candidate = arguments[-1]
        if measured is not None:
            measured.append(candidate)
        if isinstance(times[candidate], str):
            raise torch.cuda.OutOfMemoryError(times[candidate])
        return times[candidate]

    tuning._MEASURED = ("cpu", "cuda")
    tuning._seconds = seconds
    patching.available = lambda: triton


@pytest.fixture(scope="module")
def written():
    """The choices that were written and read again: each once, as it takes as long as all else."""
    return set()


@pytest.fixture
def resolved(tiny, monkeypatch, tmp_path, written):
    """resolved(*overrides, times=..., begun=...): what auto becomes, the lines reported, the
    candidates measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module, name in ((tuning, "_MEASURED"), (tuning, "_seconds"), (patching, "available")):
        monkeypatch.setattr(module, name, getattr(module, name))

    def resolve(*overrides, times=TIMES, begun=None, triton=True):
        lines = []
        measured = []
        pretend(times, measured, triton)
        recipe = tiny("run.device=cpu", *overrides)
        result = tuning.settle(
            recipe, divide(recipe), Processes(Topology(), CPU), lines.append, begun
        )
        choice = (result.engine.memory_format, result.engine.kernels)
        if choice not in written:
            assert loading.loads(loading.dump(result), "what was written") == result
            written.add(choice)
        return choice, lines, measured

    return resolve


def test_the_fastest_is_taken_and_all_are_reported(resolved):
    taken, lines, measured = resolved()
    assert taken == FASTEST and len(measured) == 8
    assert lines[0] == "engine auto: 12 x 16 x 16 in float32 on cpu, measured"
    assert (
        lines[6] == "  channels_last group_norm  55 ms"
        and lines[9] == "  taken: channels_last triton"
    )
    assert set(resolved("run.seed=1", "batch.micro=6", triton=False)[2]) == {
        PLAIN,
        ("channels_last", "torch"),
    }


@pytest.mark.parametrize(
    ("overrides", "taken", "count"),
    [
        (("engine.memory_format=contiguous",), ("contiguous", "triton"), 4),
        (("engine.kernels=torch",), PLAIN, 2),
        (
            ("engine.memory_format=channels_last", "engine.kernels=torch"),
            ("channels_last", "torch"),
            0,
        ),
        (("run.deterministic=true",), PLAIN, 0),
    ],
)
def test_a_choice_of_the_recipe_is_kept(resolved, overrides, taken, count):
    found, _, measured = resolved(*overrides)
    assert (found, len(measured)) == (taken, count)


def test_candidates_that_fail_are_left_out_with_the_reason_and_measured_again(resolved):
    taken, lines, _ = resolved(
        times={**TIMES, FASTEST: "CUDA out of memory.\nTried to", PLAIN: "no"}
    )
    assert taken == ("channels_last", "group_norm")
    assert "  channels_last triton      left out: CUDA out of memory." in lines
    assert resolved(times=dict.fromkeys(TIMES, "no"))[0] == PLAIN
    assert resolved()[0] == FASTEST


def test_cudnn_searches_by_time_unless_the_recipe_is_deterministic(monkeypatch):
    switches = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32"):
        monkeypatch.setattr(switches, name, getattr(switches, name))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        for wanted in (False, True):
            devices.set_switches(wanted)
            assert (switches.benchmark, switches.deterministic) == (not wanted, wanted)
            # Triton's kernels are IEEE's
            assert not switches.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
        # Inductor fixes its reductions by this switch
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("given", "started", "fault"),
    [
        (
            None,
            True,
            "CUDA has started without CUBLAS_WORKSPACE_CONFIG; set it to :4096:8 or :16:8 before",
        ),
        (":0:0", False, "CUBLAS_WORKSPACE_CONFIG is :0:0; set it to :4096:8 or :16:8, or unset it"),
        (":16:8", True, None),
        (None, False, None),
    ],
)
def test_deterministic_is_refused_where_cublas_would_not_be(given, started, fault, monkeypatch):
    for name in ("benchmark", "deterministic", "allow_tf32"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    try:
        with (
            pytest.raises(ConfigError, match=f"^run.deterministic: {fault}$")
            if fault
            else contextlib.nullcontext()
        ):
            devices.set_switches(True)
        expected = given if fault else given or ":4096:8"
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == expected
    finally:
        torch.use_deterministic_algorithms(False)
        devices.set_switches(False)


def test_ipus_leave_the_choice_open(tiny):
    """So a run that begins there has not chosen for a GPU on which it may go on."""
    recipe = tiny("run.device=ipu")
    batch = divide(tiny("run.device=cpu"))
    begun = tiny("engine.memory_format=channels_last", "engine.kernels=triton").engine
    assert tuning.settle(recipe, batch, Processes(Topology(), CPU), pytest.fail, begun) is recipe


NATIVE = ("channels_last", "native")
MISSING = "c++: not found"


@pytest.mark.parametrize(
    ("overrides", "begun", "fault", "taken", "line"),
    [
        ((), None, "", NATIVE, "channels_last native"),
        ((), None, MISSING, PLAIN, f"contiguous torch; not native: {MISSING}"),
        (("engine.kernels=torch",), None, "", PLAIN, "contiguous torch"),
        (("engine.memory_format=contiguous",), None, "", PLAIN, "contiguous torch"),
        (("engine.memory_format=channels_last",), None, "", NATIVE, "channels_last native"),
        ((), NATIVE, "", NATIVE, None),
        ((), PLAIN, "", PLAIN, "contiguous torch, as this run has had it"),
        # before there was a choice
        ((), ("auto", "auto"), "", PLAIN, "contiguous torch, as this run has had it"),
        (
            (),
            NATIVE,
            MISSING,
            PLAIN,
            f"contiguous torch; not native: {MISSING}; this run has had it, and goes on with other bits",
        ),
        ((), PLAIN, MISSING, PLAIN, None),
        ((), ("contiguous", "triton"), "", NATIVE, "channels_last native"),  # begun on a GPU
        (
            ("precision.compute=bfloat16",),
            None,
            "",
            PLAIN,
            "contiguous torch; not native: they are for float32",
        ),
    ],
)
def test_cpus_take_native_kernels_unless_the_run_began_without(
    tiny, monkeypatch, overrides, begun, fault, taken, line
):
    """Nothing is timed: bits depend on the choice."""
    monkeypatch.setattr(library, "fault", lambda: fault)
    recipe = tiny("run.device=cpu", *overrides)
    lines = []
    if begun:
        begun = tiny(f"engine.memory_format={begun[0]}", f"engine.kernels={begun[1]}").engine
    found = tuning.settle(
        recipe, divide(recipe), Processes(Topology(), CPU), lines.append, begun
    ).engine
    assert (found.memory_format, found.kernels) == taken
    assert lines == ([f"engine auto: {line}"] if line else [])


def test_all_processes_take_the_same_where_one_has_no_compiler(tiny, monkeypatch):
    monkeypatch.setattr(library, "fault", lambda: MISSING if threads.rank() == 1 else "")
    recipe = tiny("run.device=cpu", "batch.micro=6")

    def choose(processes):
        section = tuning.settle(recipe, divide(recipe, 2), processes, lambda line: None).engine
        return section.memory_format, section.kernels

    assert threads.run(2, 1, choose) == [PLAIN, PLAIN]


@pytest.mark.parametrize(
    ("layout", "kernels", "triton", "count"),
    [
        ("channels_last", "torch", True, 0),
        ("auto", "auto", True, 8),
        ("contiguous", "triton", False, 2),
    ],
)
def test_a_run_that_goes_on_keeps_its_choice_where_it_has_one(
    resolved, tiny, layout, kernels, triton, count
):
    """It measures if it began without a choice, or where there was Triton."""
    begun = tiny(f"engine.memory_format={layout}", f"engine.kernels={kernels}").engine
    taken, _, measured = resolved(begun=begun, triton=triton)
    assert len(measured) == count and (count or taken == (layout, kernels))


def test_a_machine_measures_once(resolved, tmp_path):
    first, _, _ = resolved()
    taken, lines, measured = resolved(
        "run.name=other", "batch.global=48", times=dict.fromkeys(TIMES, "not measured")
    )
    assert (taken, measured) == (first, [])
    (file,) = (tmp_path / "cache").rglob("*.json")
    assert lines[0].endswith(f", measured before ({file})")


READ = pathlib.Path.read_bytes
KEYS = "batch.micro=6 model.width=0.5 model.image_size=24 precision.compute=bfloat16 parallel.recompute=true"
KEYS += " engine.compile=true"


@pytest.mark.parametrize("override", KEYS.split())
def test_what_the_times_depend_on_is_measured_anew(resolved, override):
    resolved()
    assert len(resolved(override)[2]) == 8


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch, "__version__", "2.99.0"),
        (torch.backends.cudnn, "version", lambda: 99999),
        (
            metadata,
            "distributions",
            lambda name: [SimpleNamespace(version="9.9")] if name == "triton" else [],
        ),
        (
            pathlib.Path,
            "read_bytes",
            lambda file: b"changed" if "kernels" in file.parts else READ(file),
        ),
    ],
    ids=["torch", "cuDNN", "Triton", "our kernels"],
)
def test_times_of_other_programs_are_measured_anew(resolved, place, name, value, monkeypatch):
    assert len(resolved()[2]) == 8 and len(resolved()[2]) == 0
    monkeypatch.setattr(place, name, value)
    assert len(resolved()[2]) == 8


@pytest.mark.parametrize(
    "damage", ["", "[]", "{}", '"contiguous torch": NaN', '"contiguous torch": "fast"']
)
def test_a_damaged_file_is_measured_anew_and_mended(resolved, tmp_path, damage):
    resolved()
    (file,) = (tmp_path / "cache").rglob("*.json")
    whole = file.read_text()
    file.write_text(whole.replace('"contiguous torch": 0.09', damage) if ":" in damage else damage)
    assert len(resolved()[2]) == 8
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("overrides", "first", "shape"),
    [
        (
            ("parallel.recompute=true", "data.image_sizes=[[0, 24], [1, 16]]"),
            "preprocess",
            (12, 3, 24, 24),
        ),
        (("parallel.stages=2", "parallel.split=[blocks.1.0]"), "blocks.1.0", (12, 8, 8, 8)),
    ],
)
def test_the_largest_part_is_measured_with_the_largest_images(tiny, overrides, first, shape):
    recipe = tiny("run.device=cpu", *overrides)
    part = tuning._largest_part(recipe, divide(recipe), CPU)
    assert (part.blocks[0], part.blocks[-1], part.entering.shape) == (first, "head", shape)
    assert 0 < tuning._seconds(part, Candidate(*PLAIN)) < 10


@pytest.mark.parametrize(
    ("memory_format", "kernels", "layers"),
    [
        ("auto", "auto", ()),
        ("channels_last", "group_norm", ("group_norm",)),
        ("contiguous", "triton", ("squeeze", "group_norm", "block", "group_conv")),
        ("channels_last", "cuda", ("squeeze", "group_norm", "block", "cuda.group_conv")),
    ],
)
def test_models_on_gpus_get_the_layout_and_kernels_of_the_section(
    tiny, monkeypatch, memory_format, kernels, layers
):
    """The device is only a word here: nothing is computed."""
    recipe = tiny(f"engine.memory_format={memory_format}", f"engine.kernels={kernels}")
    patched = []
    monkeypatch.setattr(patching, "available", lambda: True)
    monkeypatch.setattr(patching, "patch", lambda *arguments: patched.append(arguments))
    expected = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    for device, layout in ((CPU, torch.contiguous_format), (GPU, expected)):
        model = build(recipe.model, 0)
        assert tuning.apply(model, recipe.engine, device) == layout
        assert model.block("preprocess").memory_format == layout
    assert patched == [(model, layers)]


@pytest.mark.parametrize(
    ("replaced", "layout"), [(["head"], torch.channels_last), ([], torch.contiguous_format)]
)
def test_models_on_cpus_are_channels_last_if_they_have_layers_of_ours(
    tiny, monkeypatch, replaced, layout
):
    """Torch's own may lose digits there."""
    monkeypatch.setattr(library, "fault", lambda: "")
    monkeypatch.setattr(tuning.native, "patch", lambda model: replaced)
    recipe = tiny("engine.memory_format=channels_last", "engine.kernels=native")
    assert tuning.apply(build(recipe.model, 0), recipe.engine, CPU) == layout


@pytest.mark.parametrize(
    ("override", "fault", "remedy"),
    [
        ("engine.kernels=triton", "Triton's kernels need a CUDA device", "engine.kernels=auto"),
        ("engine.kernels=native", MISSING, "engine.kernels=auto"),
        ("engine.memory_format=channels_last", MISSING, "engine.memory_format=auto"),
    ],
)
def test_cpus_refuse_to_train_so_but_score_what_was_trained_so(
    tiny, monkeypatch, override, fault, remedy
):
    monkeypatch.setattr(library, "fault", lambda: MISSING)
    recipe = tiny("run.device=cpu", override)
    (key, value) = override.split("=")
    with pytest.raises(
        ConfigError, match=f"^{re.escape(f'{key} {value}: {fault}; use {remedy}')}$"
    ):
        factory.create(recipe, divide(recipe), steps_per_epoch=2)
    factory.create(recipe, divide(recipe)).close()


@pytest.mark.parametrize("override", ["engine.kernels=torch", "engine.memory_format=contiguous"])
def test_nothing_is_compiled_where_torchs_functions_are_named(tiny, monkeypatch, override):
    """Not as the choice is made, and not as the engine is."""
    monkeypatch.setattr(library, "fault", lambda: pytest.fail("compiles"))
    recipe = tiny("run.device=cpu", override)
    found = tuning.settle(recipe, divide(recipe), Processes(Topology(), CPU), lambda line: None)
    assert (found.engine.memory_format, found.engine.kernels) == PLAIN
    factory.create(found, divide(found), steps_per_epoch=2).close()


def test_a_refusal_names_all_keys_that_stand_in_the_way(tiny, monkeypatch):
    monkeypatch.setattr(library, "fault", lambda: MISSING)
    section = tiny("engine.memory_format=channels_last", "engine.kernels=native").engine
    remedy = "use engine.memory_format=auto engine.kernels=auto"
    with pytest.raises(
        ConfigError, match=f"^{re.escape(f'engine.kernels native: {MISSING}; {remedy}')}$"
    ):
        tuning.check(section, CPU, torch.float32)


@pytest.mark.parametrize(
    ("layout", "kernels", "device", "fault"),
    [
        (
            "channels_last",
            "torch",
            CPU,
            "engine.memory_format channels_last: on a CPU torch's group normalisation",
        ),
        (
            "contiguous",
            "native",
            CPU,
            "engine.memory_format contiguous: native kernels are for channels_last",
        ),
        (
            "auto",
            "native",
            GPU,
            "engine.kernels native: they are for CPUs; use engine.kernels=auto",
        ),
        (
            "auto",
            "triton",
            GPU,
            "engine.kernels triton: Triton is not installed; use engine.kernels=auto",
        ),
        (
            "auto",
            "cuda",
            GPU,
            "engine.kernels cuda: Triton is not installed; use engine.kernels=auto",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused(
    tiny, monkeypatch, layout, kernels, device, fault
):
    monkeypatch.setattr(patching, "available", lambda: False)
    section = tiny(f"engine.memory_format={layout}", f"engine.kernels={kernels}").engine
    with pytest.raises(ConfigError, match=f"^{re.escape(fault)}"):
        tuning.check(section, device, torch.float32)


def test_kernels_in_cuda_are_refused_where_nothing_can_compile_them(tiny, monkeypatch):
    section = tiny("engine.kernels=cuda").engine
    monkeypatch.setattr(patching, "available", lambda: True)
    monkeypatch.setattr(compiler, "fault", lambda: MISSING)
    with pytest.raises(
        ConfigError, match=f"^engine.kernels cuda: {re.escape(MISSING)}; use engine.kernels=auto$"
    ):
        tuning.check(section, GPU, torch.float32)
    monkeypatch.setattr(compiler, "fault", lambda: "")
    tuning.check(section, GPU, torch.float32)


def test_the_slowest_rank_counts_and_all_measure_where_one_has_not(resolved, tiny, monkeypatch):
    """Each rank is slow at something else, and only the first has measured before."""
    pretend()
    known = [tuning.Outcome(0.01, "")] * len(TIMES)
    slow = (FASTEST, ("contiguous", "triton"))
    times = [{**dict.fromkeys(TIMES, 0.15), PLAIN: 0.09, each: 0.2} for each in slow]
    recipe = tiny("run.device=cpu", "batch.micro=6")
    monkeypatch.setattr(tuning, "_seconds", lambda *arguments: times[threads.rank()][arguments[-1]])
    monkeypatch.setattr(tuning, "_read", lambda key, candidates: None if threads.rank() else known)

    def choose(processes):
        lines = []
        section = tuning.settle(recipe, divide(recipe, 2), processes, lines.append).engine
        return (section.memory_format, section.kernels), lines

    found = threads.run(2, 1, choose)
    assert found[0] == found[1] and found[0][0] == PLAIN
    assert [line.split()[2] for line in found[0][1][1:9]] == [
        "90",
        "150",
        "150",
        "200",
        "150",
        "150",
        "150",
        "200",
    ]
