"""Whether kernels compute what they should on this GPU: fresh random inputs against float64, torch,
and a stable sort.

An error is that of the worst element of an output. The bound of the layers' kernels is twice the
error of torch's own in the same dtype, or the spacing of the dtype's numbers at the largest one,
whichever is more: which of two roundings is met by chance is no fault.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Type
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

CHECKS = "checks"
# Many rows of 64 elements, a part of one, exactly one.
_SHAPES = {
    "conv.weight": (40, 33, 3),
    "conv.bias": (7,),
    "head.weight": (70, 50),
    "norm.weight": (64,),
}
_STEPS = 3
# Options of LARS.
_FORMS: Dict[str, Dict[str, Any]] = {
    "gradient": {},
    "gradient, Nesterov": {"nesterov": True},
    "momentum": {"trust": "momentum"},
}
_Tensors = Dict[str, torch.Tensor]
_Parameters = Dict[str, nn.Parameter]


class Deviation(NamedTuple):
    """How far a kernel's outputs are from what they should be.

    error: of the worst output.
    bound: that it may reach.
    output: its name.
    """

    error: float
    bound: float
    output: str


class Inputs(NamedTuple):
    """Kind of the inputs that a layer is checked on.

    shape: [N, C, H, W].
    """

    shape: Sequence[int]
    device: torch.device
    dtype: torch.dtype
    memory_format: torch.memory_format


_Check = Callable[[], Deviation]
_Checks = Dict[str, _Check]  # by name


def checks(session: Session) -> Iterator[Row]:
    """Return a row for each check. The limit is its bound; the note has the seed.

    Args:
        session: of the section.
    """
    seed = torch.seed() % 2**31
    rows: Dict[str, Callable[[], Row]] = {}
    for what, check in _all_checks(session).items():
        rows[what] = functools.partial(_row, what, check, seed)
    return session.attempts(rows)


def passed(row: Row) -> bool:
    """Return whether the check of a `row` has an error within its bound."""
    if row.value is None or row.limit is None:
        return False
    return row.value <= row.limit


def _row(what: str, check: _Check, seed: int) -> Row:
    """Make a check, and return its row.

    Args:
        what: name of the check.
        check: is called.
        seed: of its inputs.
    """
    torch.manual_seed(seed)
    worst = check()
    # An error that is NaN is not within the bound.
    verdict = "passed" if worst.error <= worst.bound else "FAILED"
    note = f"{verdict}: {worst.output}, seed {seed}"
    return Row(CHECKS, what, (worst.error,), limit=worst.bound, note=note)


def _all_checks(session: Session) -> _Checks:
    """Return all checks, in the order in which they are made."""
    device = session.device
    values = session.plan.values
    named: _Checks = {}
    for half, layout in itertools.product(session.plan.halves, FORMATS):
        named.update(_layer_checks(session, half, layout))
    for form, options in _FORMS.items():
        named[f"LARS ({form}), float32 state"] = functools.partial(_lars, options, device)
    named["LARS, bits rounded to float16"] = functools.partial(_rounding, device)
    named["largest"] = functools.partial(_largest, values, device)
    return named


def _layer_checks(session: Session, half: str, layout: str) -> _Checks:
    """Return checks of the layers' kernels.

    Args:
        session: of the section.
        half: name of the dtype.
        layout: name of the memory format, in FORMATS.
    """
    plan = session.plan
    norm_inputs = Inputs(
        shape=plan.norm,
        device=session.device,
        dtype=getattr(torch, half),
        memory_format=FORMATS[layout],
    )
    conv_inputs = norm_inputs._replace(shape=plan.conv)

    named: _Checks = {}
    named[f"group norm, {half}, {layout}"] = functools.partial(_group_norm, norm_inputs)
    for kernel, stride in plan.convolutions:
        size = f"{kernel} x {kernel} / {stride}"
        check = functools.partial(_group_conv, conv_inputs, kernel, stride)
        named[f"group conv {size}, {half}, {layout}"] = check
        # Those in CUDA C++ take no other layout.
        if layout == "channels_last" and session.device.type == "cuda":
            check = functools.partial(_cuda_group_conv, conv_inputs, kernel, stride)
            named[f"group conv in CUDA C++ {size}, {half}"] = check
    return named


# Layers -------------------------------------------------------------------------------------------

# Kernels are imported within the checks: where one cannot be, its check alone has no result.


def _group_norm(inputs: Inputs) -> Deviation:
    """Check the group normalisation by Triton."""
    from models.kernels.group_norm import FusedGroupNormAct

    norm = GroupNormAct(inputs.shape[1], 4, 1e-3).to(inputs.device, inputs.dtype)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3)
        norm.bias.normal_(0.0, 0.3)
    return _compared(norm, FusedGroupNormAct.of(norm), inputs)


def _group_conv(inputs: Inputs, kernel: int, stride: int) -> Deviation:
    """Check a group convolution by Triton."""
    from models.kernels.group_conv import FusedGroupConv2d

    conv = _convolution(inputs, kernel, stride)
    return _compared(conv, FusedGroupConv2d.of(conv), inputs)


def _cuda_group_conv(inputs: Inputs, kernel: int, stride: int) -> Deviation:
    """Check a group convolution in CUDA C++.

    Args:
        inputs: channels-last, on a GPU, or on a CPU where tests simulate one.
        kernel: pixels a side.
        stride: in pixels.
    """
    from models.kernels.cuda import group_conv

    conv = _convolution(inputs, kernel, stride)
    # Where it cannot be compiled, that is the fault: Triton's in its place is not what is checked.
    x = torch.empty(tuple(inputs.shape), device=inputs.device, dtype=inputs.dtype)
    variant = group_conv.variant_of(x, conv.weight, stride)
    program = group_conv.program_of(variant, x.device)
    assert program, "it cannot be compiled"
    return _compared(conv, group_conv.CudaGroupConv2d.of(conv), inputs)


def _convolution(inputs: Inputs, kernel: int, stride: int) -> nn.Conv2d:
    """Return torch's convolution by groups of 16 channels, padded as the model's are.

    Args:
        inputs: of the convolution.
        kernel: pixels a side.
        stride: in pixels.
    """
    channels = inputs.shape[1]
    groups = channels // 16
    conv: nn.Conv2d
    if stride == 2:
        conv = Conv2dSame(
            channels,
            channels,
            kernel,
            stride=stride,
            groups=groups,
            bias=False,
        )
    else:
        conv = nn.Conv2d(
            channels,
            channels,
            kernel,
            stride=stride,
            padding=kernel // 2,
            groups=groups,
            bias=False,
        )
    return conv.to(inputs.device, inputs.dtype)


def _compared(layer: nn.Module, fused: nn.Module, inputs: Inputs) -> Deviation:
    """Compare a fused layer with torch's on some inputs: see `compared`."""
    return compared(
        layer,
        fused,
        inputs.shape,
        dtype=inputs.dtype,
        memory_format=inputs.memory_format,
    )


def compared(
    layer: nn.Module,
    fused: nn.Module,
    shape: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Deviation:
    """Compare a fused layer with torch's, both with torch's in float64.

    Args:
        layer: of torch, in `dtype` on a device.
        fused: has its parameters.
        shape: of the input, [N, C, H, W].
        dtype: of the input.
        memory_format: of the input.

    Returns:
        Error and bound of that output or gradient of `fused` that is nearest to its bound, or
        beyond it.
    """
    # Random inputs.
    device = next(layer.parameters()).device
    x = torch.randn(tuple(shape), device=device) + 0.5
    x = x.to(dtype).contiguous(memory_format=memory_format)
    dy = torch.randn_like(layer(x).detach()).contiguous(memory_format=memory_format)

    # What is right, and both layers' results in the dtype.
    exact = _results(copy.deepcopy(layer).double(), x.double(), dy.double())
    ours = _results(fused, x, dy)
    torchs = _results(layer, x, dy)

    # Each output and gradient, with a bound of its own.
    deviations: List[Deviation] = []
    for name, reference in exact.items():
        error = _largest_difference(ours[name].double(), reference)
        torchs_error = _largest_difference(torchs[name].double(), reference)
        spacing = torch.finfo(dtype).eps * reference.abs().max().item()
        bound = max(2 * torchs_error, spacing)
        deviations.append(Deviation(error, bound, name))
    return max(deviations, key=_rank)


def _rank(deviation: Deviation) -> Tuple[float, Deviation]:
    """Return the order of deviations: first by the error over its bound, where NaN is the worst."""
    if math.isnan(deviation.error):
        return math.inf, deviation
    return deviation.error / deviation.bound, deviation


def _largest_difference(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Return how far the worst element of a tensor is from that of another; NaN if one is NaN."""
    return (tensor - reference).abs().max().item()


def _results(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> _Tensors:
    """Return a layer's output and gradients by name.

    Args:
        layer: of torch, or fused.
        x: its input.
        dy: gradient of its output.
    """
    x = x.detach().requires_grad_()
    y = layer(x)
    variables = {"input": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(y, list(variables.values()), dy)
    results = {"output": y.detach()}
    for name, gradient in zip(variables, gradients):
        results[f"{name}'s gradient"] = gradient
    return results


# Optimizer ----------------------------------------------------------------------------------------


def _lars(form: Mapping[str, Any], device: torch.device) -> Deviation:
    """Check LARS on float32 state.

    The bound: each number of the state may be off by a few roundings of numbers as large as the
    largest weight.

    Args:
        form: options of LARS.
        device: on which the weights lie.
    """

    def create(named: _Parameters) -> LARS:
        """Return LARS in this form on the parameters `named`."""
        return LARS(
            list(named.values()),
            lr=0.0,
            momentum=0.9,
            weight_decay=1e-3,
            **form,
        )

    weights = {name: torch.randn(shape, device=device) for name, shape in _SHAPES.items()}
    gradients: List[_Tensors] = []
    for _ in range(_STEPS):
        by_name = {name: torch.randn_like(weight) * 8 for name, weight in weights.items()}
        gradients.append(by_name)
    torchs, tritons = _states(weights, gradients, create)
    errors = {}
    largest_weight = 1.0
    for name, tensor in torchs.items():
        errors[name] = _largest_difference(tritons[name], tensor)
        if "weights" in name:
            largest_weight = max(largest_weight, tensor.abs().max().item())
    worst = max(errors, key=errors.__getitem__)
    return Deviation(
        error=errors[worst],
        bound=8 * torch.finfo(torch.float32).eps * largest_weight,
        output=worst,
    )


def _rounding(device: torch.device) -> Deviation:
    """Check LARS on float16 state; the error is the number of elements that differ.

    Without momentum, decay and trust ratios, and from weights of 0, gradients times a power of two
    are what is rounded: nothing is computed before.

    Args:
        device: on which the weights lie.
    """

    def create(named: _Parameters) -> LARS:
        """Return LARS without trust ratios on the parameters `named`."""
        group = {"params": list(named.values()), "adapt": False}
        return LARS([group], lr=0.0, momentum=0.0)

    scales = 10.0 ** torch.linspace(-9, 6, 5000, device=device)
    values = torch.randn(5000, device=device) * scales
    weights = {"a": torch.zeros_like(values).half()}
    torchs, tritons = _states(weights, [{"a": values}], create)
    differing = 0
    for name, tensor in torchs.items():
        if "weights" in name:
            assert len(tensor.unique()) > 1000, "nothing was rounded"
        differing += int((tritons[name] != tensor).sum())
    return Deviation(float(differing), 0.0, "elements that differ")


def _states(
    weights: _Tensors,
    gradients: Sequence[_Tensors],
    create: Callable[[_Parameters], LARS],
) -> Tuple[_Tensors, _Tensors]:
    """Return the states to which torch's update and Triton's come, in the weights' dtype.

    Args:
        weights: from which both start, by name.
        gradients: of each step, by name.
        create: creates the optimizer of named parameters.
    """
    from optim.kernels.lars import TritonLarsUpdate

    torchs = _state(LarsUpdate, weights, gradients, create)
    tritons = _state(TritonLarsUpdate, weights, gradients, create)
    return torchs, tritons


def _state(
    update_class: Type[LarsUpdate],
    weights: _Tensors,
    gradients: Sequence[_Tensors],
    create: Callable[[_Parameters], LARS],
) -> _Tensors:
    """Return the state to which a class of updates comes: see `_states`."""
    parameters = {name: nn.Parameter(values.clone()) for name, values in weights.items()}
    # LARS asks for the class by the device, which decides nothing here.
    with mock.patch.object(lars, "update_class", return_value=update_class):
        state = WeightState(
            parameters.items(),
            create,
            dtype=next(iter(weights.values())).dtype,
            rounding="stochastic",
            seed=3,
        )
    divisor = torch.tensor(8.0, device=state.flat.device)
    for step, by_name in enumerate(gradients):
        for view, values in zip(state.gradients.views, by_name.values()):
            view.copy_(values)
        state.update(step, 0.5, divisor, measure=True)
    tensors = {}
    for key, named in state.state_dict().items():
        for name, tensor in named.items():
            tensors[f"{key} of {name}"] = tensor
    return tensors


# Selection ----------------------------------------------------------------------------------------


def _largest(count: int, device: torch.device) -> Deviation:
    """Check the selection among values of which many are equal.

    Args:
        count: of the values.
        device: on which they lie.
    """
    # Multiples of a 64th: few values, and all exact.
    values = (torch.randn(count, device=device) * 64).round() / 64
    k = count // 100
    in_order = values.abs().sort(descending=True, stable=True).indices
    expected = in_order[:k].sort().values
    differing = int((largest(values, k) != expected).sum())
    return Deviation(float(differing), 0.0, "indices that differ")
