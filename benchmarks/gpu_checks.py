"""Whether kernels compute what they should on this GPU: fresh random inputs against float64, torch, and a stable sort.

An error is that of the worst element of an output. The bound of the layers' kernels is twice the error of torch's own
in the same dtype, or the spacing of the dtype's numbers at the largest one, whichever is more: which of two roundings
is met by chance is no fault.
"""

import copy
import functools
import itertools
from typing import Callable, Dict, Iterator, List, Sequence, Tuple
from unittest import mock

import torch
from timm.layers import Conv2dSame
from torch import nn

from benchmarks.gpu_measure import Row, Session
from benchmarks.gpu_training import FORMATS
from models.normalization import GroupNormAct
from optim import lars
from optim.lars import LARS
from optim.lars_update import LarsUpdate
from optim.weight_state import WeightState
from parallel.selection import largest

# Many rows of 64 elements, a part of one, exactly one.
_SHAPES = {"conv.weight": (40, 33, 3), "conv.bias": (7,), "head.weight": (70, 50), "norm.weight": (64,)}
_STEPS = 3
_FORMS = {"gradient": {}, "gradient, Nesterov": {"nesterov": True}, "momentum": {"trust": "momentum"}}  # of LARS
CHECKS = "checks"


Found = Tuple[float, float, str]  # the error, its bound, and which of several outputs it is of


def checks(session: Session) -> Iterator[Row]:
    """A row for each check; limit: the bound; note: what was worst, and the seed."""
    seed = torch.seed() % 2**31
    return session.attempts(
        {what: functools.partial(_row, what, check, seed) for what, check in _all_checks(session).items()}
    )


def _row(what: str, check: Callable[[], Found], seed: int) -> Row:
    torch.manual_seed(seed)
    error, bound, name = check()
    verdict = "passed" if error <= bound else "FAILED"  # also where the error is NaN
    return Row(CHECKS, what, (error,), limit=bound, note=f"{verdict}: {name}, seed {seed}")


def passed(row: Row) -> bool:
    """Whether a check has an error within its bound."""
    return row.value is not None and row.limit is not None and row.value <= row.limit


def _all_checks(session: Session) -> Dict[str, Callable[[], Found]]:
    plan, device = session.plan, session.device
    found: Dict[str, Callable[[], Found]] = {}
    for half, layout in itertools.product(plan.halves, FORMATS):
        place = (device, getattr(torch, half), FORMATS[layout])
        found[f"group norm, {half}, {layout}"] = functools.partial(_group_norm, plan.norm, *place)
        for kernel, stride in plan.convolutions:
            check = functools.partial(_group_conv, plan.conv, *place, kernel, stride)
            found[f"group conv {kernel} x {kernel} / {stride}, {half}, {layout}"] = check
            if layout == "channels_last" and device.type == "cuda":
                check = functools.partial(_cuda_group_conv, plan.conv, *place, kernel, stride)
                found[f"group conv in CUDA C++ {kernel} x {kernel} / {stride}, {half}"] = check
    for form, options in _FORMS.items():
        found[f"LARS ({form}), float32 state"] = functools.partial(_lars, options, device)
    found["LARS, bits rounded to float16"] = functools.partial(_rounding, device)
    found["largest"] = functools.partial(_largest, plan.values, device)
    return found


# Layers ---------------------------------------------------------------------------------------------------------------


def _group_norm(shape: Sequence[int], device: torch.device, dtype: torch.dtype, layout: torch.memory_format) -> Found:
    from models.kernels.group_norm import FusedGroupNormAct

    norm = GroupNormAct(shape[1], 4, 1e-3).to(device, dtype)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
        norm.bias.normal_(0.0, 0.3)
    return compared(norm, FusedGroupNormAct.of(norm), shape, dtype, layout)


def _group_conv(shape, device, dtype, layout, kernel: int, stride: int) -> Found:
    from models.kernels.group_conv import FusedGroupConv2d

    conv = _convolution(shape, device, dtype, kernel, stride)
    return compared(conv, FusedGroupConv2d.of(conv), shape, dtype, layout)


def _cuda_group_conv(shape, device, dtype, layout, kernel: int, stride: int) -> Found:
    """Not Triton's in its place: where it cannot be compiled, that is the fault."""
    from models.kernels.cuda import group_conv

    conv = _convolution(shape, device, dtype, kernel, stride)
    x = torch.empty(shape, device=device, dtype=dtype)
    assert group_conv.program_of(group_conv.variant_of(x, conv.weight, stride), x.device), "it cannot be compiled"
    return compared(conv, group_conv.CudaGroupConv2d.of(conv), shape, dtype, layout)


def _convolution(shape, device, dtype, kernel: int, stride: int) -> nn.Conv2d:
    kind = Conv2dSame if stride == 2 else functools.partial(nn.Conv2d, padding=kernel // 2)
    channels = shape[1]
    return kind(channels, channels, kernel, stride=stride, groups=channels // 16, bias=False).to(device, dtype)


def compared(
    layer: nn.Module, fused: nn.Module, shape, dtype: torch.dtype, memory_format: torch.memory_format
) -> Found:
    """Error and bound of that output or gradient of `fused` that is nearest to its bound, or beyond it.

    Args:
        layer: of torch, in `dtype` on a device, with the parameters that `fused` has.
        shape: of the input, [N, C, H, W].
    """
    device = next(layer.parameters()).device
    x = (torch.randn(shape, device=device) + 0.5).to(dtype).contiguous(memory_format=memory_format)
    dy = torch.randn_like(layer(x).detach()).contiguous(memory_format=memory_format)
    exact = _results(copy.deepcopy(layer).double(), x.double(), dy.double())
    found, torchs = (_results(each, x, dy) for each in (fused, layer))
    worst: List[Tuple[float, float, float, str]] = []
    for name, reference in exact.items():
        error, others = ((each[name].double() - reference).abs().max().item() for each in (found, torchs))
        bound = max(2 * others, torch.finfo(dtype).eps * reference.abs().max().item())
        worst.append((error / bound if error == error else float("inf"), error, bound, name))
    _, error, bound, name = max(worst)
    return error, bound, name


def _results(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    named = dict(layer.named_parameters())
    gradients = torch.autograd.grad(y, [x, *named.values()], dy)
    names = ["input's gradient", *(f"{name}'s gradient" for name in named)]
    return {"output": y.detach(), **dict(zip(names, gradients))}


# Optimizer ------------------------------------------------------------------------------------------------------------


def _lars(form: dict, device: torch.device) -> Found:
    """Each number of the state is a few roundings of numbers up to the largest weight away."""
    weights = {name: torch.randn(shape, device=device) for name, shape in _SHAPES.items()}
    gradients = [{name: torch.randn_like(each) * 8 for name, each in weights.items()} for _ in range(_STEPS)]
    theirs, ours = _states(weights, gradients, **form, momentum=0.9, weight_decay=1e-3)
    errors = {name: (ours[name] - each).abs().max().item() for name, each in theirs.items()}
    worst = max(errors, key=errors.__getitem__)
    largest_weight = max(1.0, *(each.abs().max().item() for name, each in theirs.items() if "weights" in name))
    return errors[worst], 8 * torch.finfo(torch.float32).eps * largest_weight, worst


def _rounding(device: torch.device) -> Found:
    """Elements of float16 state that differ. Without momentum, decay and trust ratios, and from weights of 0, gradients
    times a power of two are what is rounded: nothing is computed before."""
    values = torch.randn(5000, device=device) * 10.0 ** torch.linspace(-9, 6, 5000, device=device)
    theirs, ours = _states({"a": torch.zeros_like(values).half()}, [{"a": values}], adapt=False, momentum=0.0)
    assert all(len(each.unique()) > 1000 for name, each in theirs.items() if "weights" in name), "nothing was rounded"
    return float(sum(int((ours[name] != each).sum()) for name, each in theirs.items())), 0.0, "elements that differ"


def _states(
    weights: Dict[str, torch.Tensor], gradients, adapt: bool = True, **options
) -> List[Dict[str, torch.Tensor]]:
    """The state by torch's and by Triton's updates with these gradients, in the weights' dtype."""
    from optim.kernels.lars import TritonLarsUpdate

    states = []
    for kind in (LarsUpdate, TritonLarsUpdate):
        own = {name: nn.Parameter(values.clone()) for name, values in weights.items()}
        with mock.patch.object(lars, "update_class", lambda device, kind=kind: kind):  # whatever the device
            state = WeightState(
                own.items(),
                lambda named: LARS([{"params": list(named.values()), "adapt": adapt}], lr=0.0, **options),
                dtype=next(iter(weights.values())).dtype,
                rounding="stochastic",
                seed=3,
            )
        for step, given in enumerate(gradients):
            for view, values in zip(state.gradients.views, given.values()):
                view.copy_(values)
            state.update(step, 0.5, torch.tensor(8.0, device=state.flat.device), True)
        saved = state.state_dict()
        states.append({f"{key} of {name}": each for key, named in saved.items() for name, each in named.items()})
    return states


# Selection ------------------------------------------------------------------------------------------------------------


def _largest(count: int, device: torch.device) -> Found:
    """Selection among values of which many are equal."""
    values = (torch.randn(count, device=device) * 64).round() / 64
    k = count // 100
    expected = values.abs().sort(descending=True, stable=True).indices[:k].sort().values
    return float((largest(values, k) != expected).sum().item()), 0.0, "indices that differ"
