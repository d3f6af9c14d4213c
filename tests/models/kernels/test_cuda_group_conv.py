"""Grouped convolution in CUDA C++ without a GPU: compiled by NVRTC, and run by a simulator of a
GPU's instructions.

The simulator compiles group_conv.cu as C++ (simulator/instructions.h), and our own launches start
its kernels on tensors of the CPU.
"""

import ctypes
import functools
import itertools
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import gpu_checks
from models.kernels import group_conv as triton_group_conv
from models.kernels import group_norm
from models.kernels.cuda import compiler, driver, group_conv
from models.kernels.cuda.group_conv import CudaGroupConv2d, Variant
from models.kernels.group_conv import FusedGroupConv2d, Launches
from tests.models.kernels.test_group_conv import convolution, exact, images, results

SIMULATOR = Path(__file__).parent / "simulator"
CPU = torch.device("cpu")
simulates = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

# Compiling ----------------------------------------------------------------------------------------

VARIANTS = list(itertools.product((3, 5), (1, 2), (4, 3, 2, 1), (torch.bfloat16, torch.float16)))
FAST = [(5, 1, 4, torch.bfloat16)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tool(name):
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def printed(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(bool(compiler.fault()), reason=f"no NVRTC: {compiler.fault()}")
@pytest.mark.parametrize(
    "capability", [pytest.param((8, 0), marks=pytest.mark.slow), (9, 0)], ids=str
)
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(*each), marks=() if each in FAST else pytest.mark.slow)
        for each in VARIANTS
    ],
    ids=str,
)
def test_all_variants_compile_without_spills_and_atomics(tmp_path, variant, capability):
    """With asynchronous copies and tensor cores.

    Registers leave a multiprocessor, which has 65,536, 512 threads; but those of the weights'
    gradient of 5 x 5, which has one block.
    """
    file = tmp_path / "kernels.cubin"
    file.write_bytes(compiler.binary(group_conv.SOURCE, variant.macros, capability))
    usage = printed(tool("cuobjdump"), "-res-usage", file)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    kernels = {name: int(registers) for name, registers, _, _ in found}
    assert sorted(kernels) == [
        "add_parts",
        "input_gradient",
        "output",
        "output_with_statistics",
        "weight_gradient",
    ]
    assert all((stack, local) == ("0", "0") for _, _, stack, local in found), usage
    blocks = 512 // (64 * variant.pack)
    for name, registers in kernels.items():
        alone = name == "weight_gradient" and variant.kernel == 5
        assert registers * 64 * variant.pack * (1 if alone else blocks) <= 65536, usage
    code = printed(tool("cuobjdump"), "-sass", file)
    assert "LDGSTS.E.BYPASS.128" in code and "HMMA.16816.F32" in code and "LDSM.16.M88.4" in code
    assert not re.search(r"\b(ATOM|ATOMG|ATOMS|RED)\b", code)


@pytest.mark.skipif(bool(compiler.fault()), reason=f"no NVRTC: {compiler.fault()}")
def test_a_binary_is_compiled_once_and_a_source_that_is_wrong_is_named(tmp_path):
    source = tmp_path / "some.cu"
    (tmp_path / "some.h").write_text("#define ANSWER 42\n")
    source.write_text(
        '#include "some.h"\nextern "C" __global__ void answer(int* to) { *to = ANSWER + MORE; }\n'
    )
    with mock.patch.object(compiler, "_compiled", side_effect=compiler._compiled) as compiled:
        first = compiler.binary(source, {"MORE": 1}, (9, 0))
        assert first[:4] == b"\x7fELF" and compiler.binary(source, {"MORE": 1}, (9, 0)) == first
        assert compiled.call_count == 1
        for changed in ({"MORE": 2}, (9, 0)), ({"MORE": 1}, (8, 0)):
            assert compiler.binary(source, *changed) != first
        (tmp_path / "some.h").write_text("#define ANSWER 43\n")
        assert compiler.binary(source, {"MORE": 1}, (9, 0)) != first and compiled.call_count == 4
    with pytest.raises(compiler.CompilerError, match=r"^some\.cu\(2\): error: .*MORE"):
        compiler.binary(source, {}, (9, 0))
    with pytest.raises(compiler.CompilerError, match=r"gpu-architecture"):
        compiler.binary(source, {"MORE": 1}, (1, 0))


def test_what_nvrtc_lacks_is_a_line(monkeypatch):
    compiler._version.cache_clear()
    compiler._nvrtc.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    assert "libnvrtc.so.1" in compiler.fault()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert compiler.fault() == "this PyTorch is not for CUDA"


# Launching ----------------------------------------------------------------------------------------


class _Calls:
    """CUDA's driver that notes calls; some fail."""

    def __init__(self, context=7, failing=()):
        self.calls = []
        self.context = context
        self.failing = failing

    def __getattr__(self, name):
        return functools.partial(self._call, name)

    def _call(self, name, *arguments):
        if name == "cuGetErrorString":
            arguments[1]._obj.value = b"out of luck"
            return 0
        self.calls.append((name, arguments))
        if name in ("cuCtxGetCurrent", "cuDevicePrimaryCtxRetain"):
            arguments[0]._obj.value = self.context if name == "cuCtxGetCurrent" else 8
        return int(name in self.failing)

    def named(self, name):
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def cuda(monkeypatch):
    """cuda(**options): a driver, and a program that it has loaded."""
    stream = mock.Mock(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "device", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def make(**options):
        calls = _Calls(**options)
        monkeypatch.setattr(driver, "_cuda", lambda: calls)
        return calls, driver.Program(b"code", torch.device("cuda", 1))

    return make


def test_a_launch_has_its_grid_its_stream_and_its_argument(cuda):
    """A kernel is asked for once, and told of more than 48 KiB of shared memory before it has them,
    also once."""
    calls, program = cuda()
    arguments = group_conv._Adding(parts=3, elements=4)
    for shared_bytes in (48 << 10, 60_000, 50_000, 70_000):
        program.launch("add_parts", 9, 256, shared_bytes, arguments)
    assert [name for (_, _, name) in calls.named("cuModuleGetFunction")] == [b"add_parts"]
    assert [most for _, _, most in calls.named("cuFuncSetAttribute")] == [60_000, 70_000]
    assert not calls.named("cuCtxSetCurrent")
    launched = calls.named("cuLaunchKernel")[-1]
    assert [value.value for value in launched[1:9]] == [9, 1, 1, 256, 1, 1, 70_000, 5]
    given = ctypes.cast(launched[9][0], ctypes.POINTER(group_conv._Adding)).contents
    assert (given.parts, given.elements, launched[10]) == (3, 4, None)


def test_a_thread_without_a_context_gets_the_one_of_torch(cuda):
    calls, _ = cuda(context=None)
    ((_, index),) = calls.named("cuDevicePrimaryCtxRetain")
    ((context,),) = calls.named("cuCtxSetCurrent")
    assert (index, context.value) == (1, 8)


@pytest.mark.parametrize(
    "failing", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernel"]
)
def test_what_the_driver_refuses_is_an_error_with_its_words(cuda, failing):
    with pytest.raises(driver.DriverError, match=r"^CUDA's driver: out of luck$"):
        cuda(failing=[failing])[1].launch("output", 1, 64, 50_000, group_conv._Adding())


# Simulating ---------------------------------------------------------------------------------------


class Simulated:
    """A variant's kernels, simulated.

    Attributes:
        descending: whether blocks, and threads of a block, run from the last to the first.
        conflicts: by kernel, how often rows waited for others in their banks; of its last launch.
        blocks: by kernel, of its last launch.
    """

    def __init__(self, library):
        self._simulate = library.simulate
        self._simulate.restype = ctypes.c_int64
        self.descending = False
        self.conflicts = {}
        self.blocks = {}

    def launch(self, kernel, blocks, threads, shared_bytes, arguments):
        assert shared_bytes <= 227 << 10, "what an H100 has for a block; an A100 has 163 KiB"
        address = ctypes.byref(arguments)
        conflicts = self._simulate(
            kernel.encode(), address, blocks, threads, shared_bytes, int(self.descending)
        )
        assert conflicts >= 0, (
            f"{kernel}: threads that wait for ever, part at a product, or write where they must not"
        )
        self.conflicts[kernel] = conflicts
        self.blocks[kernel] = blocks


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """programs(variant, device): the same object for the same variant."""

    @functools.lru_cache(maxsize=None)
    def make(variant, device):
        folder = tmp_path_factory.mktemp("simulated")
        for file in (group_conv.SOURCE, *SIMULATOR.iterdir()):
            shutil.copy(file, folder)
        macros = [f"-D{name}={value}" for name, value in variant.macros.items()]
        options = [
            "-std=c++17",
            "-Og",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            "-Wno-unknown-pragmas",
        ]
        # Else the loader gives all variants in a process the first one's constants, where they are
        # taken by reference.
        options.append("-fno-gnu-unique")
        file = folder / "simulated.so"
        done = subprocess.run(
            ["g++", *options, *macros, folder / "simulator.cpp", "-o", file],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return Simulated(ctypes.CDLL(str(file)))

    return make


@pytest.fixture
def simulated(monkeypatch, programs):
    """simulated(conv, x): the program that convolves x."""
    monkeypatch.setattr(group_conv, "program_of", programs)
    return lambda conv, x: programs(group_conv.variant_of(x, conv.weight, conv.stride[0]), CPU)


def check(conv, x):
    """Relative to each tensor's largest value: one rounding to half precision, of eps / 2.

    Sums of up to some thousand products are float32, whose roundings are 2^13 or 2^16 times as
    small.
    """
    upstream = images(conv(x).shape, "channels_last", x.dtype, seed=2)
    found = results(CudaGroupConv2d.of(conv), x, upstream)
    for name, actual, expected in zip(
        ("output", "input", "weight"), found, exact(conv, x, upstream)
    ):
        assert actual.dtype == x.dtype and actual.shape == expected.shape
        difference = (actual.double() - expected).abs().max() / expected.abs().max()
        assert difference <= 0.51 * torch.finfo(x.dtype).eps, (
            f"{name}: {difference / torch.finfo(x.dtype).eps:.3g} eps"
        )
    return found


FAST_SETTING = (3, 2, "same")  # kernel, stride and padding


@simulates
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [
        pytest.param(*each, marks=() if each == FAST_SETTING else pytest.mark.slow)
        for each in itertools.product((3, 5), (1, 2), ("same", "torch"))
    ],
)
def test_output_and_gradients_are_the_convolutions(simulated, monkeypatch, kernel, stride, padding):
    """One pixel; images that are smaller than the kernel, of which a tile has many; lines of one
    tile and a part of another; several strips and parts, the last of them smaller. Bits are the
    same in another order of threads and blocks."""
    conv = convolution(kernel, stride, padding, dtype=torch.bfloat16)
    monkeypatch.setattr(group_conv, "_STRIP_LINES", 4)
    for shape in (
        (3, 32, 1, 1),
        (20, 32, 1, kernel - 2),
        (2, 32, 11, 5),
        (1, 32, 5, 67),
        (3, 32, 9, 24),
    ):
        x = images(shape, "channels_last", torch.bfloat16)
        found = check(conv, x)
        program = simulated(conv, x)
        assert set(program.blocks) == {"output", "input_gradient", "weight_gradient", "add_parts"}
        with mock.patch.object(program, "descending", True):
            again = check(conv, x)
        assert all(torch.equal(one, other) for one, other in zip(found, again))
        program.blocks.clear()


@simulates
@pytest.mark.parametrize(
    ("channels", "kernel", "dtype"),
    [
        (80, 3, torch.float16),
        pytest.param(48, 3, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(64, 5, torch.float16, marks=pytest.mark.slow),
        pytest.param(128, 3, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_groups_do_not_mix(simulated, channels, kernel, dtype):
    """One, three or four groups a block; five blocks, one or two. Weights in either layout."""
    conv = convolution(kernel, 2, "same", channels, dtype=dtype)
    for form in (torch.contiguous_format, torch.channels_last):
        conv.weight.data = conv.weight.data.contiguous(memory_format=form)
        _, _, gradient = check(conv, images((1, channels, 6, 5), "channels_last", dtype))
        assert gradient.stride() == conv.weight.stride(), "autograd would copy it"


@simulates
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_the_weights_gradient_is_added_up_in_parts(simulated, monkeypatch, dtype):
    """One part, several works each, and more parts than a thread of add_parts adds: the exact sum
    rounded once, but for the few elements that float32's own rounding takes across a boundary."""
    conv = convolution(3, dtype=dtype)
    x = images((11, 32, 9, 17), "channels_last", dtype)
    monkeypatch.setattr(group_conv, "_STRIP_LINES", 2)
    upstream = images(x.shape, "channels_last", dtype, seed=2)
    expected = exact(conv, x, upstream)[2].to(dtype)
    for blocks, parts in ((1, 1), (8, 7), (512, 35)):
        monkeypatch.setattr(group_conv, "_SUMMING_BLOCKS", blocks)
        _, _, gradient = check(conv, x)
        assert simulated(conv, x).blocks["weight_gradient"] == parts
        assert (gradient == expected).double().mean() > 0.98


@simulates
@pytest.mark.parametrize(
    ("kernel", "stride", "dtype"),
    [
        (3, 2, torch.float16),
        pytest.param(3, 1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(5, 1, torch.float16, marks=pytest.mark.slow),
    ],
)
def test_statistics_are_those_of_the_output_as_it_is_stored(
    simulated, monkeypatch, kernel, stride, dtype
):
    """Merged by Triton's kernel, they are mean and variance of each image's groups; parts at the
    edges have fewer pixels. A mean of some standard deviations takes no digits. Sums of 800 float32
    terms: 64 eps."""
    monkeypatch.setattr(group_conv, "_STRIP_LINES", 4)
    fused = CudaGroupConv2d.of(convolution(kernel, stride, dtype=dtype))
    x = images((2, 32, 9, 37), "channels_last", dtype)
    with torch.no_grad():
        fused.weight.add_(0.5)
        x += 3
        y, partial = fused.with_statistics(x)
        assert torch.equal(y, fused(x))
        tiles = group_norm.Tiles(y, 2)
        mean, scale = group_norm.merge_statistics(partial, tiles, 1e-3, y.shape[2:], fused.parts(x))
    values = y.double().reshape(2, 2, -1)
    tolerance = 64 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(mean.double(), values.mean(2), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        scale.double(), (values.var(2, correction=0) + 1e-3).rsqrt(), rtol=tolerance, atol=0
    )


@simulates
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param((3, 1)),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((3, 2), (5, 1), (5, 2))),
    ],
)
def test_rows_of_matrices_do_not_wait_for_each_other(simulated, setting):
    """Where tiles do not go on in the next image: else segments of two images may share their
    banks."""
    conv = convolution(*setting, "same", dtype=torch.float16)
    x = images((1, 32, 2, 256 if conv.stride == (1, 1) else 255), "channels_last", torch.float16)
    program = simulated(conv, x)
    program.conflicts.clear()
    check(conv, x)
    kernels = ("output", "input_gradient", "weight_gradient", "add_parts")
    assert program.conflicts == dict.fromkeys(kernels, 0)


@simulates
def test_memory_that_begins_between_two_chunks_is_copied(simulated):
    conv = convolution(dtype=torch.float16)
    values = images((1, 32, 4, 6), "contiguous", torch.float16).flatten()
    x = torch.cat((values[:1], values))[1:].view(1, 4, 6, 32).permute(0, 3, 1, 2)
    assert x.data_ptr() % 16 == 2 and x.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert torch.equal(CudaGroupConv2d.of(conv)(x), CudaGroupConv2d.of(conv)(x.clone()))


# In the place of Triton's -------------------------------------------------------------------------


@simulates
@pytest.mark.parametrize(
    "setting", [pytest.param((5, 1, "torch"), marks=pytest.mark.slow), FAST_SETTING]
)
def test_triton_and_cuda_differ_in_one_rounding(simulated, setting):
    """Results have the same dtypes, shapes and layouts."""
    conv = convolution(*setting, dtype=torch.float16)
    x = images((1, 32, 5, 7), "channels_last", torch.float16)
    upstream = images(conv(x).shape, "channels_last", torch.float16, seed=2)
    tritons = results(FusedGroupConv2d.of(conv), x, upstream)
    for name, ours, others in zip(
        ("y", "dx", "dweight"), results(CudaGroupConv2d.of(conv), x, upstream), tritons
    ):
        assert (ours.dtype, ours.shape, ours.stride()) == (
            others.dtype,
            others.shape,
            others.stride(),
        ), name
        limit = torch.finfo(torch.float16).eps * others.abs().max()
        assert (ours - others).abs().max() <= limit, name


@simulates
def test_the_suite_checks_them_and_no_others(simulated):
    """Where they cannot be compiled Triton's are not checked in their place."""
    inputs = gpu_checks.Inputs((2, 32, 5, 6), CPU, torch.float16, torch.channels_last)
    error, bound, _ = gpu_checks._cuda_group_conv(inputs, 3, 1)
    assert error <= bound
    with mock.patch.object(group_conv, "program_of", lambda *_: None), pytest.raises(
        AssertionError, match="compiled"
    ):
        gpu_checks._cuda_group_conv(inputs, 3, 1)


@simulates
def test_a_compiler_sees_operators(simulated):
    """And tensors like their results without computing them: torch.library's own check."""
    conv = convolution(dtype=torch.float16)
    x = images((1, 32, 4, 6), "channels_last", torch.float16)
    weight = conv.weight.detach()
    operators = torch.ops.large_batch_efficientnet
    for statistics in (False, True):
        torch.library.opcheck(
            operators.group_conv_output, (x, weight, 1, False, statistics, "cuda")
        )
    _, packed, _ = triton_group_conv._output(
        x, weight, 1, pads_same=False, statistics=False, language="cuda"
    )
    torch.library.opcheck(
        operators.group_conv_gradients, (x, x, weight, packed, 1, False, [True, True], "cuda")
    )


@pytest.mark.parametrize(
    ("form", "dtype", "group"),
    [
        ("contiguous", torch.float16, 16),
        ("channels_last", torch.float32, 16),
        ("channels_last", torch.float16, 32),
    ],
)
def test_what_cuda_does_not_take_is_tritons(monkeypatch, form, dtype, group):
    monkeypatch.setattr(group_conv, "program_of", None)
    conv = convolution(channels=64, group=group, dtype=dtype)
    x = images((1, 64, 4, 5), form, dtype)
    assert type(group_conv._launches(x, conv.weight, 1, False)) is Launches
    assert torch.equal(CudaGroupConv2d.of(conv)(x), FusedGroupConv2d.of(conv)(x))


@pytest.mark.parametrize(
    "error",
    [OSError("libcuda.so.1: no such file"), compiler.CompilerError("a.cu(1): error: x\nmore")],
)
def test_where_a_variant_cannot_be_compiled_a_line_says_so_once_and_triton_computes(
    monkeypatch, capsys, error
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(compiler, "binary", mock.Mock(side_effect=error))
    group_conv.program_of.cache_clear()
    conv = convolution(dtype=torch.float16)
    x = images((1, 32, 4, 5), "channels_last", torch.float16)
    variant = group_conv.variant_of(x, conv.weight, 1)
    assert [group_conv.program_of(variant, torch.device("cuda", 0)) for _ in range(2)] == [
        None,
        None,
    ]
    monkeypatch.setattr(group_conv, "program_of", lambda *_: None)
    assert type(group_conv._launches(x, conv.weight, 1, False)) is Launches
    assert torch.equal(CudaGroupConv2d.of(conv)(x), FusedGroupConv2d.of(conv)(x))
    line = str(error).splitlines()[0]
    expected = (
        f"engine.kernels cuda: 3 x 3 / 1 convolutions are computed by Triton's kernels: {line}\n"
    )
    assert capsys.readouterr().err == expected
