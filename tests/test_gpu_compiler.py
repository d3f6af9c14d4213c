"""Our Triton kernels compile for a GPU: the interpreter of the other tests takes code that the compiler refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_ROOT = Path(__file__).resolve().parent.parent  # not from tests.conftest, which turns on the interpreter


def assembly(work) -> list:
    """Name and PTX of each kernel that `work()` starts."""
    from benchmarks.gpu_assembly import launches

    return [(launch.kernel.rpartition(".")[2], launch.compile().asm["ptx"]) for launch in launches(work)]


_COMPILE = """
import torch
from models.efficientnet import build
from models.kernels import group_conv, group_norm, squeeze
from models.normalization import GroupNormAct
import optim.lars
from optim.kernels import lars
from recipe.config import Model
from tests.optim.test_lars_update import state_of
from tests.test_gpu_compiler import assembly

optim.lars.update_class = lambda device: lars.TritonLarsUpdate
for form, compute, dtype in {updates}:
    state, _ = state_of(form, compute, dtype)
    state._update.asks = False
    made = dict(assembly(lambda: state.update(0, 0.5, torch.ones(()), True)))
    print(sorted(made) == ["_add_squares", "_merge", "_none_wrong", "_step", "_trust_ratios"])
    print(*("atom" not in each for each in made.values()))

for form, kernel, stride in {convolutions}:
    norm = group_norm.FusedGroupNormAct.of(GroupNormAct(64, 4, 1e-3)).half()
    block = squeeze.fuse(build(Model(name="efficientnet_b0"), seed=0).block("blocks.1.0")).half()
    x = torch.zeros(2, 64, 16, 16, dtype=torch.float16).contiguous(memory_format=form).requires_grad_()
    made = assembly(lambda: norm.added(x, x[:, 0, 0, 0].contiguous(), x).sum().backward())
    print(len(made) == 6, *("atom" not in each for _, each in made))
    made = assembly(lambda: block.bn2(x).sum().backward())
    print(len(made) == 9, *("atom" not in each for _, each in made))

    x = torch.zeros(2, 32, 8, 6, dtype=torch.float16).contiguous(memory_format=form)
    weight = torch.zeros(32, 16, kernel, kernel, dtype=torch.float16)
    launches = group_conv._Launches(x, weight, stride, True)
    dy = x[:, :, ::stride, ::stride].contiguous(memory_format=form)

    def work():
        packed = launches.packed(weight)
        launches.output(x, packed, launches.partial(x, form is torch.channels_last))
        launches.input_gradient(dy, packed)
        launches.weight_gradient(x, dy)

    for name, made in assembly(work):
        wide = "ld.global.v4.b32" in made
        products = name == "add_parts" or "mma" in made
        print(products and "atom" not in made and (wide or form is torch.contiguous_format))
"""
_REST = [("momentum", torch.bfloat16, torch.float16), ("momentum", torch.float32, torch.float32)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels")
@pytest.mark.parametrize(
    ("updates", "convolutions"),
    [
        ([(form, torch.float16, torch.float16) for form in ("gradient", "nesterov")], [(torch.channels_last, 3, 1)]),
        (_REST, [(torch.channels_last, 5, 1), (torch.contiguous_format, 3, 2)]),
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
    assert ended.stdout.split() == ["True"] * (6 * len(updates) + 21 * len(convolutions))
