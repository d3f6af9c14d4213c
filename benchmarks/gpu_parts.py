"""The suite's short sections: the device's limits, an update of the weights, the selection of the largest."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Callable, Dict, Iterator, List

import torch
from torch import nn

from benchmarks.gpu_checks import update_by
from benchmarks.gpu_measure import Maker, Row, Session, Side, model_overrides, of_gpu_recipe, ready, reason
from models.efficientnet import build
from models.normalization import norm_parameters
from optim import factory
from optim.half_weights import WeightState
from optim.lars_update import LarsUpdate
from parallel.selection import largest

CEILINGS, OPTIMIZER, SELECTION = "ceilings", "optimizer", "selection"
COPY = "copy"
UPDATE, UPDATE_IN_GRAPH = "ours, Triton", "ours, Triton, CUDA graph"
# A parameter. Gradient and weight are read for the norms (4 + 2); no weight may change before all norms are known, so
# they are read again, with the momentum (4 + 2 + 2), and weight and momentum written (2 + 2).
_BYTES = 18
_LR, _DECAY, _MOMENTUM = 0.1, 2.5e-6, 0.885
_DENSITY = 0.001

Parameters = Dict[str, nn.Parameter]


def ceilings(session: Session) -> Iterator[Row]:
    """GB/s of a copy, and TFLOP/s of products of square matrices: [n, n] x [n, n]."""
    plan, device = session.plan, session.device
    note = f"{plan.copied / 2**30:.3g} GiB, read and written"
    copy = {COPY: functools.partial(_copy, plan.copied, device)}
    yield from session.compare(copy, lambda each: 2 * plan.copied / each / 1e9, "GB/s", calls=10, note=note)
    torch.backends.cuda.matmul.allow_tf32 = False
    products: Dict[str, Maker] = {
        f"matmul, {str(dtype).split('.')[1]}": functools.partial(_product, plan.matrix, dtype, device)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    note = f"{plan.matrix} x {plan.matrix}, float32 without TF32"
    yield from session.compare(products, lambda each: 2 * plan.matrix**3 / each / 1e12, "TFLOP/s", calls=5, note=note)


def _copy(size: int, device: torch.device, stack: contextlib.ExitStack) -> Side:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(size: int, dtype: torch.dtype, device: torch.device, stack: contextlib.ExitStack) -> Side:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


# Optimizer ------------------------------------------------------------------------------------------------------------


def optimizer(session: Session) -> Iterator[Row]:
    """Milliseconds of an update of the large model's parameters; limit: 18 bytes each at the speed of the copy."""
    plan = session.plan
    model = build(of_gpu_recipe(model_overrides(plan, plan.large, 1)).model, 0)
    parameters = dict(itertools.islice(model.named_parameters(), plan.tensors))
    norms = norm_parameters(model)
    count = sum(parameter.numel() for parameter in parameters.values())
    copied = session.found(CEILINGS, COPY)
    floor = 1e3 * _BYTES * count / (copied.value * 1e9) if copied and copied.value else None
    makers: Dict[str, Maker] = {
        UPDATE: functools.partial(_our_update, session, parameters, norms, True),
        "ours, eager": functools.partial(_our_update, session, parameters, norms, False),
        "torch SGD, fused, float32": functools.partial(_their_step, session, parameters, _fused_sgd),
        "timm Lars, float32": functools.partial(_their_step, session, parameters, _timm_lars),
        # At the end: a capture that fails may leave the stream unusable.
        UPDATE_IN_GRAPH: functools.partial(_our_update_in_graph, session, parameters, norms),
    }
    note = f"{count:,} parameters, {plan.queued} updates queued"
    yield from session.compare(makers, _ms, "ms", calls=plan.queued, limit=floor, note=note, warm_up=3)


def _ms(seconds: float) -> float:
    return 1e3 * seconds


def _our_update(
    session: Session, parameters: Parameters, norms: List[str], triton: bool, stack: contextlib.ExitStack
) -> Side:
    state = _weight_state(session, parameters, norms, triton)
    divisor = torch.tensor(128.0, device=session.device)
    return lambda: state.update(0, _LR, divisor, measure=False)


def _weight_state(session: Session, parameters: Parameters, norms: List[str], triton: bool) -> WeightState:
    """Weights and momentum in float16, as are the module's: 8 bytes a parameter with the gradient."""
    kind = LarsUpdate
    if triton:
        from optim.kernels.lars import TritonLarsUpdate as kind
    named = {
        name: nn.Parameter(parameter.detach().to(session.device, torch.float16, copy=True))
        for name, parameter in parameters.items()
    }
    section = of_gpu_recipe([]).optimizer
    with update_by(kind):
        state = WeightState(
            named.items(), lambda each: factory.create(section, each, norms),
            dtype=torch.float16, rounding="stochastic", seed=0,
        )  # fmt: skip
    for view in state.gradients.views:
        view.normal_(0.0, 0.128)
    return state


def _our_update_in_graph(
    session: Session, parameters: Parameters, norms: List[str], stack: contextlib.ExitStack
) -> Side:
    update = _our_update(session, parameters, norms, True, stack)
    if session.device.type != "cuda":
        raise RuntimeError("CUDA graphs need CUDA")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            update()
    except Exception as error:
        raise RuntimeError(f"it is not captured: {reason(error)}") from None
    return graph.replay


def _their_step(session: Session, parameters: Parameters, make: Callable, stack: contextlib.ExitStack) -> Side:
    own = [nn.Parameter(parameter.detach().to(session.device, copy=True)) for parameter in parameters.values()]
    for parameter in own:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return make(own).step


def _fused_sgd(own: List[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(own, lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY, fused=True)


def _timm_lars(own: List[nn.Parameter]) -> torch.optim.Optimizer:
    import timm.optim

    return timm.optim.Lars(own, lr=_LR, momentum=_MOMENTUM, weight_decay=_DECAY)


# Selection ------------------------------------------------------------------------------------------------------------


def selection(session: Session) -> Iterator[Row]:
    """Milliseconds to find the thousandth part of normal float32 values that is largest in magnitude."""
    plan = session.plan
    k = int(_DENSITY * plan.values)
    values = torch.randn(plan.values, device=session.device)
    sides = {
        "largest": ready(lambda: largest(values, k)),
        "torch.topk": ready(lambda: torch.topk(values.abs(), k)),
        "one pass": ready(lambda: values.sum()),
    }
    yield from session.compare(sides, _ms, "ms", calls=5, note=f"{k:,} of {plan.values:,}")
