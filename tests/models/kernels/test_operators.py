"""Our kernels within compiled code: operators that say what they return, in a program without
breaks."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

pytest.importorskip("triton")

from engines.stage import Stage
from models.kernels import group_conv, group_norm, operators, squeeze
from models.kernels.patching import KERNELS, patch
from tests.engines.test_stage import FEW, assert_same, model_of
from tests.models.kernels.test_group_norm import FORMATS, drawn, layer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# As training on a GPU has it, and with --full the other.
every_layout = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(each, marks=() if each is torch.channels_last else pytest.mark.slow)
        for each in FORMATS
    ],
    ids=str,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def check(name, *arguments):
    """What the operator returns is new, and of the shapes, dtypes and strides that it says."""
    found = getattr(getattr(torch.ops, operators._NAMESPACE), name).default
    torch.library.opcheck(found, arguments, test_utils=("test_schema", "test_faketensor"))


@every_layout
@pytest.mark.parametrize("shift", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_normalisation_says_what_it_returns(layout, shift):
    norm = layer(8, shift=shift, dtype=torch.float16)
    x = drawn((2, 8, 3, 5), torch.float16, layout)
    weight = norm.weight.detach()
    bias = None if norm.bias is None else norm.bias.detach()
    kept = torch.ones(2, device=DEVICE)
    y, moments = group_norm._output(x, weight, bias, kept, x, 4, 1e-3, True)
    assert y.shape == x.shape
    check("group_norm_output", x, weight, bias, kept, x, 4, 1e-3, True)
    for wanted, copied in ((True, True), (True, False), (False, True)):
        check("group_norm_gradients", x, x, weight, bias, kept, moments, 4, True, wanted, copied)


@every_layout
def test_squeeze_and_excitation_says_what_it_returns(layout):
    block = model_of().block("blocks.1.0").to(DEVICE, torch.float16)
    x = drawn((2, block.bn2.num_channels, 3, 5), torch.float16, layout)
    reduce = block.se.conv_reduce
    expand = block.se.conv_expand
    parameters = [
        block.bn2.weight,
        block.bn2.bias,
        reduce.weight,
        reduce.bias,
        expand.weight,
        expand.bias,
    ]
    weight, bias, *layers = (parameter.detach() for parameter in parameters)
    arguments = (x, weight, bias, *layers, None, 1, 1, block.bn2.num_groups, 1e-3)
    _, *kept = squeeze._output(*arguments)
    check("squeeze_output", *arguments)
    check(
        "squeeze_gradients", x, x, weight, bias, layers[0], layers[2], *kept, block.bn2.num_groups
    )


@every_layout
@pytest.mark.parametrize("statistics", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "wanted",
    [
        (True, True),
        *(pytest.param(each, marks=pytest.mark.slow) for each in ((True, False), (False, True))),
    ],
)
def test_the_convolution_says_what_it_returns(layout, statistics, wanted):
    x = drawn((2, 32, 5, 6), torch.float16, layout)
    weight = drawn((32, 16, 3, 3), torch.float16, layout)
    y, packed, _ = group_conv._output(
        x, weight, 2, pads_same=True, statistics=statistics, language="triton"
    )
    check("group_conv_output", x, weight, 2, True, statistics, "triton")
    check("group_conv_gradients", y, x, weight, packed, 2, True, list(wanted), "triton")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [("group_norm",), KERNELS], ids=len)
def test_blocks_with_kernels_are_one_program_each(kernels):
    """Without breaks, with the bits of the blocks uncompiled, and not compiled again by a step."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = model_of()
        assert patch(model, kernels)
        stage = Stage(model.part(FEW).to(DEVICE), model.draws, ())
        if compiled:
            stage.compile(backend="aot_eager")
            stage.dry_pass(torch.zeros((2, 3, 16, 16), dtype=torch.uint8, device=DEVICE))
        results = []
        with torch._dynamo.config.patch(error_on_recompile=True):
            for model.draws.step in range(2):
                images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, device=DEVICE)
                images.copy_(torch.arange(images.numel()).view(images.shape) % 251)
                output = stage(images)
                output.square().sum().backward()
                results.append(output.detach())
        found.append([*results, *(parameter.grad for parameter in stage.parameters())])
    assert counters["stats"]["unique_graphs"] == len(FEW) - 1 and not counters["graph_break"]
    assert_same(*found)
