"""The suite's sections on kernels: layers of the model and the optimizer's update, each beside a copy."""

import contextlib
import copy
import functools
import importlib
import itertools
import operator
from types import ModuleType
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from benchmarks import optimizer
from benchmarks.gpu_measure import Row, Session, Side, latest, missing, reason, recipe
from benchmarks.gpu_training import FORMATS
from models.efficientnet import build
from models.kernels import patching
from parallel.selection import largest as largest_values

KERNELS, SELECTION, UPDATE = "kernels", "selection", "update"
OUR_UPDATE = "ours, Triton"
# A parameter. Gradient and weight are read for the norms (4 + 2); no weight may change before all norms are known, so
# they are read again, with the momentum (4 + 2 + 2), and weight and momentum written (2 + 2).
_BYTES = 18


# Layers ---------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer of the model, and ours in its place, with the input that it gets there. values: of input and output.
    in_cuda: ours in CUDA C++, where there is one."""

    name: str
    torchs: nn.Module
    ours: nn.Module
    in_cuda: Optional[nn.Module]
    shape: torch.Size
    values: int


def kernels(session: Session) -> Iterator[Row]:
    """GB/s of layers, forward and backward, in float16: the bytes of input, output and their gradients, each moved once
    (the input twice, for the gradient of the weights), over the time. Limit: the rate of a copy of 1 GiB."""
    plan = session.plan
    copied = 2**30 if session.device.type == "cuda" else 2**20
    copying = {"copy": lambda stack: functools.partial(optimizer.copy_of(copied, plan.device), 0)}
    rate = functools.partial(operator.truediv, copied / 1e9)
    (row,) = latest(session.compare(copying, rate, "GB/s", calls=plan.queued, warm_up=2))
    yield row
    for kernel in patching.KERNELS:
        try:
            found = layers(session, kernel)
        except ImportError as error:  # no Triton
            yield missing(session.section, kernel, reason(error))
            continue
        for layer in found:
            yield from _rates(session, layer, row.value)


def layers(session: Session, kernel: str) -> List[Layer]:
    """The largest layers of the model that a kernel takes the place of, one of each shape; on the meta device."""
    module, plan = importlib.import_module(f"models.kernels.{kernel}"), session.plan
    section = recipe(plan, plan.micro).model
    with torch.device("meta"):
        model = build(section, 0)
    seen: Dict[str, Tuple[nn.Module, torch.Size, int]] = {}
    hooks = []

    def see(replaced: nn.Module, layer: nn.Module, given: tuple, output: torch.Tensor) -> None:
        x = given[0]
        of = f"{layer.kernel_size[0]} x {layer.kernel_size[0]} / {layer.stride[0]}, " if kernel == "group_conv" else ""
        name = f"{kernel.replace('_', ' ')}, {of}{' x '.join(map(str, x.shape))}"
        seen[name] = (replaced, x.shape, 3 * x.numel() + 2 * output.numel())

    for replaced in filter(module.replaces, list(model.modules())):
        normalised = getattr(replaced, module.NORMS[type(replaced)]) if kernel == "squeeze" else replaced
        hooks.append(normalised.register_forward_hook(functools.partial(see, replaced)))
    with torch.no_grad():
        model(torch.empty((plan.micro, 3, section.image_size, section.image_size), dtype=torch.uint8, device="meta"))
    for hook in hooks:  # else copies would have them
        hook.remove()
    largest = sorted(seen.items(), key=lambda each: each[1][2], reverse=True)[: plan.layers]
    return [
        Layer(name, *_pair(module, replaced), _in_cuda(kernel, replaced), shape, values)
        for name, (replaced, shape, values) in largest
    ]


def _pair(module: ModuleType, replaced: nn.Module) -> Sequence[nn.Module]:
    """torch's layer and ours; of a block its normalisation with squeeze and excitation."""
    plain, fused = copy.deepcopy(replaced), module.fuse(copy.deepcopy(replaced))
    if module.__name__.endswith("squeeze"):
        return [nn.Sequential(getattr(each, module.NORMS[type(each)]), each.se) for each in (plain, fused)]
    return [plain, fused]


def _in_cuda(kernel: str, replaced: nn.Module) -> Optional[nn.Module]:
    if kernel != "group_conv":
        return None
    return importlib.import_module("models.kernels.cuda.group_conv").fuse(copy.deepcopy(replaced))


def _rates(session: Session, layer: Layer, limit: float) -> Iterator[Row]:
    moved = 2 * layer.values
    sides = {f"{layer.name}, ours": layer.ours, f"{layer.name}, torch": layer.torchs}
    if layer.in_cuda is not None and session.device.type == "cuda":
        sides[f"{layer.name}, ours in CUDA C++"] = layer.in_cuda
    makers = {name: functools.partial(_passes, session, each, layer.shape) for name, each in sides.items()}
    rate = functools.partial(operator.truediv, moved / 1e9)
    note = f"{moved / 1e9:.3g} GB, {session.plan.queued} passes queued"
    return session.compare(makers, rate, "GB/s", calls=session.plan.queued, warm_up=2, limit=limit, note=note)


def _passes(session: Session, layer: nn.Module, shape: torch.Size, stack: contextlib.ExitStack) -> Side:
    """A forward and a backward pass; values do not matter."""
    layout, device = FORMATS[session.plan.layout], session.device
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    layer = layer.to_empty(device=device).half().train()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.1)
    x = torch.randn(shape, device=device, dtype=torch.float16).contiguous(memory_format=layout).requires_grad_()
    dy = torch.randn_like(layer(x))
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), wanted, dy)


# Selection ------------------------------------------------------------------------------------------------------------


def selection(session: Session) -> Iterator[Row]:
    """Milliseconds to find the largest thousandth of as many values as the model has, beside torch's topk, which gives
    any of several equal ones; limit: reading all values at the speed of the copy."""
    plan, device = session.plan, session.device
    values = torch.randn(plan.values, device=device)
    k = max(1, plan.values // 1000)
    compare: Callable[..., Iterator[Row]] = functools.partial(
        session.compare, figure=lambda seconds: 1e3 * seconds, unit="ms", calls=plan.queued, warm_up=2,
        note=f"{k:,} of {plan.values:,}, {plan.queued} queued",
    )  # fmt: skip
    what = "copy that moves as many bytes"
    (copied,) = latest(compare({what: lambda stack: _call(optimizer.copy_of(4 * values.numel(), plan.device))}))
    yield copied
    makers = {
        "largest": lambda stack: functools.partial(largest_values, values, k),
        "torch.topk": lambda stack: lambda: values.abs().topk(k, sorted=False),
    }
    yield from compare(makers, limit=copied.value)


# Update ---------------------------------------------------------------------------------------------------------------


def update(session: Session) -> Iterator[Row]:
    """Milliseconds of an update of the model's parameters; limit: 18 bytes each at the speed of the copy."""
    plan, device = session.plan, session.device
    named = itertools.islice(build(recipe(plan, 1).model, 0).named_parameters(), plan.tensors)
    parameters = {name: nn.Parameter(parameter.detach().to(device)) for name, parameter in named}
    moved = _BYTES * sum(parameter.numel() for parameter in parameters.values())
    compare: Callable[..., Iterator[Row]] = functools.partial(
        session.compare, figure=lambda seconds: 1e3 * seconds, unit="ms", calls=plan.queued, warm_up=3,
        note=f"{moved // _BYTES:,} parameters, {plan.queued} updates queued",
    )  # fmt: skip
    what = f"copy of {_BYTES} bytes a parameter"
    (copied,) = latest(compare({what: lambda stack: _call(optimizer.copy_of(moved, plan.device))}))
    yield copied
    makers = {
        OUR_UPDATE: lambda stack: _our_update(parameters),
        optimizer.TIMM: lambda stack: _call(optimizer.their_updates(parameters)[optimizer.TIMM]),
    }
    yield from compare(makers, limit=copied.value)


def _call(side: Callable[[int], object]) -> Side:
    return functools.partial(side, 0)


def _our_update(parameters: Mapping[str, nn.Parameter]) -> Side:
    return _call(optimizer.updating(optimizer.weight_state(parameters, torch.float16, torch.float16)))
