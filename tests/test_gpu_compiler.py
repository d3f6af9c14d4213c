"""Our Triton kernels compile for a GPU: the interpreter, in which the other tests run them, takes what it refuses."""

import pytest
import torch

from tests import gpu_compiler

_COMPILE = """
import torch
from models.kernels import group_conv, group_norm
from models.normalization import GroupNormAct
import optim.lars
from optim.kernels import lars
from tests.gpu_compiler import assembly
from tests.optim.test_lars_update import HALF, SINGLE, state_of

optim.lars.update_class = lambda device: lars.TritonLarsUpdate
BRAIN = torch.bfloat16
for trust, compute, dtype in (("gradient", HALF, HALF), ("momentum", BRAIN, HALF), ("momentum", SINGLE, SINGLE)):
    state, _ = state_of(trust, compute, dtype)
    state._update.asks = False
    made = assembly(lars, lambda: state.update(0, 0.5, torch.ones(()), True))
    print(sorted(made) == ["_add_squares", "_merge", "_none_wrong", "_step", "_trust_ratios"])
    print(*("atom" not in each for each in made.values()))

for form, kernel, stride in ((torch.contiguous_format, 3, 2), (torch.channels_last, 5, 1)):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels")
def test_kernels_compile_for_a_gpu(tmp_path):
    """Without atomics, which add in any order. Convolutions use tensor cores and, where channels lie together, load 16
    bytes at a time."""
    pytest.importorskip("triton")
    assert gpu_compiler.run(_COMPILE, tmp_path).split() == ["True"] * (6 * 3 + 6 * 2 + 3 * 2)
