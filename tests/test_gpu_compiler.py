"""Our Triton kernels compile for a GPU: the interpreter of the other tests takes code that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parent.parent
_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32", "bool": "i1"}


class _Recorder:
    """In the place of a kernel: records how it is started."""

    def __init__(self, name, started):
        self._name, self._started = name, started

    def __getitem__(self, grid):
        return lambda *values, **named: self._started.update({self._name: (values, named)})


def assembly(module, work) -> dict:
    """Name -> PTX for compute capability 9.0 of all kernels of a module that `work()` starts, which then do nothing."""
    import triton

    kernels, started = {name: each for name, each in vars(module).items() if isinstance(each, triton.JITFunction)}, {}
    try:
        vars(module).update({name: _Recorder(name, started) for name in kernels})
        work()
    finally:
        vars(module).update(kernels)
    return {name: _compiled(kernels[name], *arguments) for name, arguments in started.items()}


def _compiled(kernel, values, named) -> str:
    import triton
    from triton.backends.compiler import GPUTarget

    options = {key: named.pop(key) for key in ("num_warps", "num_stages") if key in named}
    values = {**dict(zip(kernel.arg_names, values)), **named}
    signature, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        key, value = parameter.name, values[parameter.name]
        whole = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None:
            signature[key], constants[(number,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[key] = f"*{_TYPES[str(value.dtype).split('.')[1]]}"
        else:
            signature[key] = "i32" if isinstance(value, int) else "fp32"
        if isinstance(value, torch.Tensor) or (whole and signature[key] == "i32"):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


_COMPILE = """
import torch
from models.kernels import group_conv, group_norm
from models.normalization import GroupNormAct
import optim.lars
from optim.kernels import lars
from tests.optim.test_lars_update import state_of
from tests.test_gpu_compiler import assembly

optim.lars.update_class = lambda device: lars.TritonLarsUpdate
for trust, compute, dtype in {updates}:
    state, _ = state_of(trust, compute, dtype)
    state._update.asks = False
    made = assembly(lars, lambda: state.update(0, 0.5, torch.ones(()), True))
    print(sorted(made) == ["_add_squares", "_merge", "_none_wrong", "_step", "_trust_ratios"])
    print(*("atom" not in each for each in made.values()))

for form, kernel, stride in {convolutions}:
    norm = group_norm.FusedGroupNormAct.of(GroupNormAct(64, 4, 1e-3)).half()
    x = torch.zeros(2, 64, 16, 16, dtype=torch.float16).contiguous(memory_format=form).requires_grad_()
    made = assembly(group_norm, lambda: norm(x).sum().backward())
    print(len(made) == 5, *("atom" not in each for each in made.values()))

    x = torch.zeros(2, 32, 8, 6, dtype=torch.float16).contiguous(memory_format=form)
    weight = torch.zeros(32, 16, kernel, kernel, dtype=torch.float16)
    launches = group_conv._Launches(x, weight, stride, True)
    dy = x[:, :, ::stride, ::stride].contiguous(memory_format=form)

    def work():
        launches.output(x, weight)
        launches.input_gradient(dy, weight)
        launches.weight_gradient(x, dy)

    for made in assembly(group_conv, work).values():
        wide = "ld.global.v4.b32" in made
        print("mma" in made and "atom" not in made and wide == (form is torch.channels_last))
"""
_REST = [("momentum", torch.bfloat16, torch.float16), ("momentum", torch.float32, torch.float32)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels")
@pytest.mark.parametrize(
    ("updates", "convolutions"),
    [
        ([("gradient", torch.float16, torch.float16)], [(torch.channels_last, 3, 1)]),
        pytest.param(_REST, [(torch.channels_last, 5, 1), (torch.contiguous_format, 3, 2)], marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_for_a_gpu(tmp_path, updates, convolutions):
    """Without atomics, which add in any order. Convolutions use tensor cores and wide loads of channels."""
    pytest.importorskip("triton")
    script = _COMPILE.format(updates=updates, convolutions=convolutions)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True"] * (6 * len(updates) + 9)
