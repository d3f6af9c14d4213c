"""The suite's sections on kernels: layers of the model and the optimizer's update, each beside a copy."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
from types import ModuleType
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional

import torch
from torch import nn

from benchmarks import optimizer
from benchmarks.gpu_measure import Maker, Plan, Row, Session, Side, latest, missing, reason, recipe
from benchmarks.gpu_training import FORMATS
from models.families import build
from models.kernels import patching
from parallel.selection import largest as largest_values

KERNELS = "kernels"
SELECTION = "selection"
UPDATE = "update"
OUR_UPDATE = "ours, Triton"
# Of each parameter. Gradient and weight are read for the norms (4 + 2); no weight may change before
# all norms are known, so they are read again, with the momentum (4 + 2 + 2), and weight and
# momentum written (2 + 2).
_BYTES = 18


# Layers -------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer of the model, and ours in its place, with the input that it gets there.

    torchs: of the model; of a block its normalisation with squeeze and excitation.
    ours: by Triton.
    in_cuda: ours in CUDA C++, where there is one.
    shape: of the input, [N, C, H, W].
    values: elements that a forward pass and a backward pass move.
    """

    name: str
    torchs: nn.Module
    ours: nn.Module
    in_cuda: Optional[nn.Module]
    shape: torch.Size
    values: int


class _Part(NamedTuple):
    """A part of the model that a kernel takes the place of, as a forward pass has shown it.

    shape, values: see Layer.
    """

    replaced: nn.Module
    shape: torch.Size
    values: int


def kernels(session: Session) -> Iterator[Row]:
    """Yield GB/s of layers, forward and backward, in float16.

    These are the bytes of input, output and their gradients, each moved once (the input twice, for
    the gradient of the weights), over the time. The limit is the rate of a copy of 1 GiB.

    Args:
        session: of the section.
    """
    plan = session.plan
    copied = 2**30 if session.device.type == "cuda" else 2**20
    copies = session.compare(
        {"copy": _copying(copied, plan)},
        _rate_of(copied),
        "GB/s",
        calls=plan.queued,
        warm_up=2,
    )
    (copy_row,) = latest(copies)
    yield copy_row
    for kernel in patching.KERNELS:
        try:
            measured_layers = layers(session, kernel)
        except ImportError as error:  # no Triton
            yield missing(session.section, kernel, reason(error))
            continue
        for layer in measured_layers:
            yield from _rates(session, layer, copy_row.value)


def layers(session: Session, kernel: str) -> List[Layer]:
    """Return the largest layers of the model that a kernel takes the place of.

    Args:
        session: of the section.
        kernel: in patching.KERNELS.

    Returns:
        One layer of each shape, on the meta device; none of a kernel that only takes layers that
        others have replaced.

    Raises:
        ImportError: Triton is missing or cannot be loaded.
    """
    module = importlib.import_module(f"models.kernels.{kernel}")
    parts = _parts(session.plan, module)
    by_size = sorted(parts.items(), key=lambda item: item[1].values, reverse=True)
    return [_layer(name, module, part) for name, part in by_size[: session.plan.layers]]


def _parts(plan: Plan, module: ModuleType) -> Dict[str, _Part]:
    """Return those parts of the model that a kernel takes the place of, by a name for each shape.

    Args:
        plan: which model, and of which size.
        module: the kernel's file.
    """
    section = recipe(plan, plan.micro).model
    size = section.image_size
    assert size is not None, "the model's name has a size"
    with torch.device("meta"):
        model = build(section, 0)
        images = torch.empty((plan.micro, 3, size, size), dtype=torch.uint8)
    parts: Dict[str, _Part] = {}

    def see(replaced: nn.Module, layer: nn.Module, given: tuple, output: torch.Tensor) -> None:
        """Note a layer that has computed `output` from what it was `given`."""
        x = given[0]
        values = 3 * x.numel() + 2 * output.numel()
        parts[_name(module, layer, x.shape)] = _Part(replaced, x.shape, values)

    # A forward pass shows what each layer gets.
    hooks = []
    for replaced in list(model.modules()):
        if module.replaces(replaced):
            first = _norm_of(module, replaced) if _is_squeeze(module) else replaced
            hooks.append(first.register_forward_hook(functools.partial(see, replaced)))
    with torch.no_grad():
        model(images)

    # Else copies would have them.
    for hook in hooks:
        hook.remove()
    return parts


def _is_squeeze(module: ModuleType) -> bool:
    """Return whether a kernel's file is that of squeeze and excitation, which takes whole blocks."""
    return module.__name__.endswith(".squeeze")


def _norm_of(module: ModuleType, block: nn.Module) -> nn.Module:
    """Return the normalisation of a block before its squeeze and excitation."""
    return block.get_submodule(module.NORMS[type(block)])


def _name(module: ModuleType, layer: nn.Module, shape: torch.Size) -> str:
    """Return the name of a layer for the table.

    Args:
        module: the kernel's file.
        layer: that it takes the place of.
        shape: of its input.
    """
    _, _, kernel = module.__name__.rpartition(".")
    size = ""
    if kernel == "group_conv":
        assert isinstance(layer, nn.Conv2d)
        side = layer.kernel_size[0]
        size = f"{side} x {side} / {layer.stride[0]}, "
    sides = " x ".join(str(length) for length in shape)
    return f"{kernel.replace('_', ' ')}, {size}{sides}"


def _layer(name: str, module: ModuleType, part: _Part) -> Layer:
    """Return a part of the model as torch's layer and as ours.

    Args:
        name: for the table.
        module: the kernel's file.
        part: of the model; it is copied.
    """
    torchs = copy.deepcopy(part.replaced)
    ours = module.fuse(copy.deepcopy(part.replaced))
    # Of a block only what the kernel replaces is measured.
    if _is_squeeze(module):
        torchs = _norm_and_gates(module, torchs)
        ours = _norm_and_gates(module, ours)
    in_cuda = None
    if module.__name__.endswith(".group_conv"):
        cuda = importlib.import_module("models.kernels.cuda.group_conv")
        in_cuda = cuda.fuse(copy.deepcopy(part.replaced))
    return Layer(
        name=name,
        torchs=torchs,
        ours=ours,
        in_cuda=in_cuda,
        shape=part.shape,
        values=part.values,
    )


def _norm_and_gates(module: ModuleType, block: nn.Module) -> nn.Module:
    """Return a block's normalisation with its squeeze and excitation."""
    return nn.Sequential(_norm_of(module, block), block.get_submodule("se"))


def _rates(session: Session, layer: Layer, limit: Optional[float]) -> Iterator[Row]:
    """Return GB/s of a layer, ours and torch's.

    Args:
        session: of the section.
        layer: is measured.
        limit: of the rows: GB/s of a copy, or None where it could not be measured.
    """
    sides = {"ours": layer.ours, "torch": layer.torchs}
    if layer.in_cuda is not None and session.device.type == "cuda":
        sides["ours in CUDA C++"] = layer.in_cuda
    makers: Dict[str, Maker] = {}
    for owner, module in sides.items():
        makers[f"{layer.name}, {owner}"] = functools.partial(_passes, session, module, layer.shape)
    moved = 2 * layer.values  # bytes
    return session.compare(
        makers,
        _rate_of(moved),
        "GB/s",
        calls=session.plan.queued,
        warm_up=2,
        limit=limit,
        note=f"{moved / 1e9:.3g} GB, {session.plan.queued} passes queued",
    )


def _rate_of(moved: int) -> Callable[[float], float]:
    """Return what makes GB/s of the seconds in which so many bytes are moved."""
    gigabytes = moved / 1e9
    return lambda seconds: gigabytes / seconds


def _passes(
    session: Session,
    layer: nn.Module,
    shape: torch.Size,
    stack: contextlib.ExitStack,
) -> Side:
    """Return a side that is a forward and a backward pass; values do not matter.

    Args:
        session: of the section.
        layer: on the meta device; is moved.
        shape: of the input, [N, C, H, W].
        stack: see Maker.
    """
    device = session.device
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
    layer = layer.to_empty(device=device).half().train()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 0.0, 0.1)

    x = torch.randn(shape, device=device, dtype=torch.float16)
    x = x.contiguous(memory_format=FORMATS[session.plan.layout]).requires_grad_()
    dy = torch.randn_like(layer(x))
    variables = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), variables, dy)


# Selection ----------------------------------------------------------------------------------------


def selection(session: Session) -> Iterator[Row]:
    """Yield milliseconds to find the largest thousandth of as many values as the model has.

    Beside it is torch's topk, which gives any of several equal ones. The limit is reading all
    values at the speed of the copy.

    Args:
        session: of the section.
    """
    plan = session.plan
    values = torch.randn(plan.values, device=session.device)
    k = max(1, plan.values // 1000)

    def topk() -> object:
        """Find them by torch."""
        return values.abs().topk(k, sorted=False)

    makers: Dict[str, Maker] = {
        "largest": lambda stack: functools.partial(largest_values, values, k),
        "torch.topk": lambda stack: topk,
    }
    yield from _beside_copy(
        session,
        makers,
        moved=4 * values.numel(),
        copy_name="copy that moves as many bytes",
        warm_up=2,
        note=f"{k:,} of {plan.values:,}, {plan.queued} queued",
    )


# Update -------------------------------------------------------------------------------------------


def update(session: Session) -> Iterator[Row]:
    """Yield milliseconds of an update of the model's parameters.

    The limit is 18 bytes each at the speed of the copy.

    Args:
        session: of the section.
    """
    plan = session.plan
    model = build(recipe(plan, 1).model, 0)
    parameters: Dict[str, nn.Parameter] = {}
    for name, parameter in itertools.islice(model.named_parameters(), plan.tensors):
        parameters[name] = nn.Parameter(parameter.detach().to(session.device))
    count = sum(parameter.numel() for parameter in parameters.values())

    def timms(stack: contextlib.ExitStack) -> Side:
        """Make timm's update, which leaves nothing in the `stack`."""
        return _call(optimizer.their_updates(parameters)[optimizer.TIMM])

    makers: Dict[str, Maker] = {
        OUR_UPDATE: lambda stack: _our_update(parameters),
        optimizer.TIMM: timms,
    }
    yield from _beside_copy(
        session,
        makers,
        moved=_BYTES * count,
        copy_name=f"copy of {_BYTES} bytes a parameter",
        warm_up=3,
        note=f"{count:,} parameters, {plan.queued} updates queued",
    )


def _our_update(parameters: Mapping[str, nn.Parameter]) -> Side:
    """Return our update of copies of the parameters, with float16 state."""
    state = optimizer.weight_state(parameters, torch.float16, torch.float16)
    return _call(optimizer.updating(state))


# Copies -------------------------------------------------------------------------------------------


def _beside_copy(
    session: Session,
    makers: Mapping[str, Maker],
    *,
    moved: int,
    copy_name: str,
    warm_up: int,
    note: str,
) -> Iterator[Row]:
    """Yield milliseconds of a copy, and then of sides, whose limit it is.

    Args:
        session: of the section.
        makers: of the sides.
        moved: bytes that the copy reads and writes.
        copy_name: of the copy's row.
        warm_up: calls before the turns.
        note: of all rows.
    """
    compare = functools.partial(
        session.compare,
        figure=_milliseconds,
        unit="ms",
        calls=session.plan.queued,
        warm_up=warm_up,
        note=note,
    )
    # Its row comes when all is known; those of the sides come as they are warm, too.
    (copy_row,) = latest(compare({copy_name: _copying(moved, session.plan)}))
    yield copy_row
    yield from compare(makers, limit=copy_row.value)


def _milliseconds(seconds: float) -> float:
    """Return `seconds` in milliseconds."""
    return 1e3 * seconds


def _copying(moved: int, plan: Plan) -> Maker:
    """Return the maker of a copy that reads and writes so many bytes."""
    return lambda stack: _call(optimizer.copy_of(moved, plan.device))


def _call(side: Callable[[int], object]) -> Side:
    """Return a call of a side that takes the number of the round."""
    return functools.partial(side, 0)
