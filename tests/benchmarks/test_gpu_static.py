"""Figures about GPU kernels that need no GPU: what is counted is what a hand counts."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from benchmarks import gpu_static
from benchmarks.gpu_assembly import PRODUCT, parsed
from models.efficientnet import build
from recipe.config import Model
from tests.conftest import ROOT

_USAGE = "Function _output:\n  REG:40 STACK:12 SHARED:1024 LOCAL:0"
# As nvdisasm prints: a loop of three instructions, two of them products, and padding.
_CODE = """
.text._output:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   MOV R2, R3 ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0040*/              @P0  BRA `(.L_x_0) ;
        /*0050*/              @P1  BRA `(.L_x_2) ;
        /*0060*/              @!P2 BRA `(.L_x_2) ;
.L_x_2:
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
        /*0090*/                   NOP;
"""


def test_loops_turn_as_often_as_their_products_are_needed():
    """Twenty products: ten turns of the loop; five instructions are outside."""
    found = parsed(_CODE, _USAGE)
    assert (found.registers, found.spilled) == (40, 3)
    assert found.executed(20 * PRODUCT) == found.turned(10) == 5 + 10 * 3
    with pytest.raises(AssertionError, match="not understood"):
        parsed(_CODE.replace("@P1  BRA `(.L_x_2)", "@P1  BRA `(.L_x_1)"), _USAGE).executed(20 * PRODUCT)


def passes(module):
    """Tensors like the input that a forward and a backward pass read and write; parameters are few."""
    x = torch.empty(2, 32, 64, 64, dtype=torch.float16, device="meta", requires_grad=True)
    traffic = gpu_static._Traffic()
    with traffic:
        y = module.half().to("meta")(x)
        y.backward(torch.empty_like(y))
    return traffic.bytes / x.nbytes


def test_passes_over_tensors_are_counted():
    """A convolution reads its input twice, the gradient twice, and writes two. Squeeze and excitation reads and writes
    13: mean 1, scaling 2, and backward 2 for what is scaled, 4 for the gates, 1 for the mean and 3 to add them up."""
    assert passes(nn.Conv2d(32, 32, 1, bias=False)) == pytest.approx(6, abs=0.05)
    assert passes(build(Model(name="efficientnet_b0"), seed=0).block("blocks.0.0").se) == pytest.approx(13, abs=0.05)


def test_an_expanded_tensor_is_as_large_as_its_memory():
    x = torch.empty(4, 1, dtype=torch.float16)
    assert gpu_static.moved([x.expand(4, 100), None, 3, torch.empty(5, dtype=torch.uint8)]) == 8 + 5


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles for a GPU that is not there")
def test_a_small_model_gives_all_rows_and_claims(tmp_path):
    """In a process without the interpreter. All kernels of the group convolution, none with spilled registers."""
    script = (
        "import sys; from benchmarks import gpu_static\n"
        "gpu_static._MODEL, gpu_static._IMAGES, gpu_static._SIZE = 'efficientnet_b0', 2, 64\n"
        "sys.argv = ['gpu_static', '--json', '--quick']; gpu_static.main()"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    claims = {each["name"]: each for each in result["claims"]}
    assert list(claims) == ["spilled_registers"] and claims["spilled_registers"]["value"] == 0
    moved = re.search(r"NHWC: operators read and write ([\d.]+) GB an image", ended.stdout)
    assert float(moved[1]) > 0
    for row in result["rows"]:
        # An element takes 16 multiply-adds at each point, and a tensor core's instruction is 2,048 of a warp.
        points = row["size"] ** 2 / (row["stride"] ** 2 if "input" in row["kernel"] else 1)
        assert row["per_pixel"] > points * 16 * 16 / PRODUCT and row["registers"] <= 255
    kernels = {row["kernel"] for row in result["rows"]}
    names = ("output", "input_gradient", "strided_input_gradient", "weight_gradient")
    assert kernels == {f"group_conv_kernels.{name}" for name in names}
