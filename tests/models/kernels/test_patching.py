"""Fused layers in the place of others: which, and that nobody who holds their parameters or names
can tell."""

import pytest
import torch

from models.kernels.patching import patch
from models.normalization import norm_parameters

pytest.importorskip("triton")

from tests.models.kernels.test_squeeze import model_of


def kinds(model, *types):
    return [name for name, module in model.named_modules() if type(module).__name__ in types]


def test_layers_are_replaced_by_name_of_kernel_and_their_names_returned():
    """The parameters are the same objects under the same names."""
    model = model_of()
    before = dict(model.named_parameters())
    state = list(model.state_dict())
    owned = norm_parameters(model)
    norms = kinds(model, "GroupNormAct")
    grouped = [name for name, module in model.named_modules() if getattr(module, "groups", 1) > 1]
    assert patch(model, ["group_norm"]) == norms == kinds(model, "FusedGroupNormAct")
    assert patch(model, ["group_conv"]) == kinds(model, "FusedGroupConv2d")
    # One has 8 channels, in a single group of 8.
    assert set(kinds(model, "FusedGroupConv2d")) == set(grouped) - {"blocks.0.0.conv_dw"} != set()
    assert patch(model, ["block"]) == [name for name in model.names if name.startswith("blocks.")]
    assert patch(model) == patch(model_of(norm="batch", group_size=1, padding="same")) == []
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(
        after[name] is parameter for name, parameter in before.items()
    )
    assert (list(model.state_dict()), norm_parameters(model)) == (state, owned)


def test_a_patched_model_computes_the_same():
    """Output and gradients beside float64's. The first blocks have each kind of layer.

    Some ten layers, whose sums of up to a few hundred terms are rounded in another order: 100 eps
    of the largest.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model_of().to(device)
    patch(model)
    exact = model_of().to(device).double()
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8, device=device)
    first = exact.names[:4]
    assert kinds(model.part(first), "FusedGroupNormAct") and kinds(
        model.part(first), "FusedGroupConv2d"
    )
    results = []
    for each in (model, exact):
        part = each.part(first)
        with torch.backends.cudnn.flags(allow_tf32=False):
            output = part(images)
            slopes = torch.linspace(
                -1, 1, output.numel(), dtype=output.dtype, device=device
            ).view_as(output)
            (output * slopes).sum().backward()
        results.append(
            {"output": output, **{name: weight.grad for name, weight in part.named_parameters()}}
        )
    computed, expected = results
    assert list(computed) == list(expected)
    for name, values in expected.items():
        largest = values.abs().max().item()
        tolerance = 100 * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(
            computed[name].double(), values, rtol=0, atol=tolerance, msg=name
        )
