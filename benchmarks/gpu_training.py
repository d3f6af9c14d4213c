"""The suite's sections on training: our engine beside timm's loop, on images that lie on the device.

Both get the same micro batch and make an update from each. Ours: the engine as a recipe makes it, weights and momentum
in float16 with stochastic rounding; it takes uint8 images and normalises them. timm's: the body of the loop in its
train.py around timm's model, with float32 weights, autocast (and its scaler in float16) and its Lars; its images are
normalised already. Both with cuDNN's search for the fastest kernels, both counted by the device's clock.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch import nn

from benchmarks.gpu_measure import Maker, Row, Session, Side, free, model_overrides, of_gpu_recipe
from data.batches import MicroBatch
from engines import factory
from engines.base import Engine
from recipe.batch import divide
from recipe.config import Recipe

FORMATS = ("contiguous", "channels_last")
KERNELS = ("triton", "group_norm", "group_conv", "torch")
OURS, TIMM = "ours", "timm"
_DEPTHWISE = ("model.group_size=1", "model.expansion=6", "model.norm=batch")
_WARM_UP = 3  # steps; in the first ones cuDNN searches, and Triton compiles
_LR = 0.01  # in so few steps nothing is learned: what counts is that nothing overflows


class Setting(NamedTuple):
    """The comparison of one section. dtype: of the arithmetic."""

    model: str  # "small" or "large", of the plan
    depthwise: bool
    dtype: str
    compiled: bool

    def name(self) -> str:
        """Name of its section."""
        model = {"small": "B0", "large": "B4"}[self.model] + ("-G1-BN" if self.depthwise else "-G16-GN")
        return f"training {model}, {self.dtype}" + (", compiled" if self.compiled else "")


SETTINGS = [
    Setting("large", False, "float16", False),
    Setting("large", False, "bfloat16", False),
    Setting("small", False, "float16", False),
    Setting("large", True, "float16", False),
    Setting("large", False, "float16", True),
]
CLAIMED = (SETTINGS[0].name(), SETTINGS[-1].name())


def training(session: Session, setting: Setting) -> Iterator[Row]:
    """Images a second of each side; the micro batch is halved until all have the memory for it."""
    name = getattr(session.plan, setting.model)
    micro = session.plan.micro[name]
    size = of_gpu_recipe(model_overrides(session.plan, name, micro)).model.image_size
    while True:
        sides, note = _sides(session, setting, micro), f"{size} px, micro batch {micro}"
        options = {"calls": session.plan.steps, "warm_up": _WARM_UP, "passed_on": (torch.OutOfMemoryError,)}
        try:
            rows = list(
                session.compare(sides, functools.partial(operator.truediv, micro), "images/s", note=note, **options)
            )
            break
        except torch.OutOfMemoryError:
            if micro == 1:
                raise
        free(session.device)  # not within the handler, whose error holds what did not fit
        micro //= 2
    yield from rows


def _sides(session: Session, setting: Setting, micro: int) -> Dict[str, Maker]:
    """The likely fastest first."""
    name = getattr(session.plan, setting.model)
    overrides = [*model_overrides(session.plan, name, micro), f"precision.compute={setting.dtype}"]
    overrides += _DEPTHWISE if setting.depthwise else ()

    def ours(memory_format: str, kernels: str) -> Maker:
        return functools.partial(
            _ours, of_gpu_recipe([*overrides, *_engine(memory_format, kernels, setting.compiled)]), setting.compiled
        )

    def timms(memory_format: str) -> Maker:
        return functools.partial(_timms, of_gpu_recipe(overrides), setting, session, memory_format)

    own = {
        f"{OURS}, {memory_format}, {kernels}": ours(memory_format, kernels)
        for kernels in (("torch",) if setting.depthwise or setting.compiled else KERNELS)
        for memory_format in FORMATS
    }
    others = {f"{TIMM}, {memory_format}": timms(memory_format) for memory_format in FORMATS}
    if setting.compiled:
        return _fastest_formats(session, setting, own, others)
    return dict(_pairs(own, others))


def _pairs(own: Dict[str, Maker], others: Dict[str, Maker]) -> List[Tuple[str, Maker]]:
    """One of ours and one of timm's by turns, so that of each there is one if time runs out."""
    pairs = itertools.zip_longest(own.items(), others.items())
    return [side for pair in pairs for side in pair if side is not None]


def _fastest_formats(
    session: Session, setting: Setting, own: Dict[str, Maker], others: Dict[str, Maker]
) -> Dict[str, Maker]:
    """Compiling takes long: of each side the layout that is fastest uncompiled, contiguous where that is not known."""
    eager = setting._replace(compiled=False).name()

    def first(sides: Dict[str, Maker]) -> Tuple[str, Maker]:
        known = {what: row.value for what in sides for row in [session.found(eager, what)] if row and row.value}
        what = max(known, key=lambda each: known[each]) if known else next(iter(sides))
        return what, sides[what]

    return dict([first(others), first(own)])


def _engine(memory_format: str, kernels: str, compiled: bool) -> List[str]:
    return [f"engine.memory_format={memory_format}", f"engine.kernels={kernels}", f"engine.compile={compiled}".lower()]


# Ours -----------------------------------------------------------------------------------------------------------------


def made(recipe: Recipe, stack: contextlib.ExitStack) -> Engine:
    """The engine of a recipe, closed with the stack."""
    engine = factory.create(recipe, divide(recipe, 1), steps_per_epoch=1)
    stack.callback(engine.close)
    return engine


def on_device(recipe: Recipe, device: torch.device) -> MicroBatch:
    """Random uint8 images as the loader gives them, on the device already."""
    micro, size = recipe.batch.micro, recipe.model.image_size
    images = torch.randint(0, 256, (micro, 3, size, size), dtype=torch.uint8, device=device)
    labels = torch.randint(0, recipe.model.classes, (micro,))
    if device.type == "cuda":
        labels = labels.pin_memory()
    return MicroBatch(images.contiguous(memory_format=torch.channels_last), labels, labels, micro, 0, 0, ())


def stepping(engine: Engine, batches: Iterator[MicroBatch]) -> Side:
    """A call is an update from the next micro batch."""
    numbers = itertools.count()
    return lambda: engine.train_step(batches, next(numbers), lr=_LR)


def _ours(recipe: Recipe, compiled: bool, stack: contextlib.ExitStack) -> Side:
    if compiled:
        stack.callback(torch._dynamo.reset)
    engine = made(recipe, stack)
    uncompiled = [note for note in engine.notes if "uncompiled" in note]
    if compiled and uncompiled:
        raise RuntimeError(uncompiled[0])
    return stepping(engine, itertools.repeat(on_device(recipe, engine.device)))


# timm's ---------------------------------------------------------------------------------------------------------------


def _timms(recipe: Recipe, setting: Setting, session: Session, memory_format: str, stack: contextlib.ExitStack) -> Side:
    """The body of the loop in timm's train.py: one update from the same images each time."""
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, NativeScaler

    device, dtype = session.device, getattr(torch, setting.dtype)
    torch.backends.cudnn.benchmark = True
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    model = _timm_model(recipe, setting.depthwise).to(device).to(memory_format=layout)
    optimizer = create_optimizer_v2(
        model, opt="lars", lr=_LR, momentum=0.885, weight_decay=2.5e-6, filter_bias_and_bn=True
    )
    loss_function = nn.CrossEntropyLoss(label_smoothing=0.1)
    scaler = NativeScaler(device=device.type) if dtype == torch.float16 else None
    losses = AverageMeter()
    batch = on_device(recipe, device)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (recipe.model.mean, recipe.model.std))
    images = ((batch.images / 255 - mean) / std).contiguous(memory_format=layout)
    labels = batch.labels.to(device)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if setting.compiled:
        stack.callback(torch._dynamo.reset)
        forward = torch.compile(model)

    def step() -> None:
        with torch.autocast(device.type, dtype):
            loss = loss_function(forward(images), labels)
        if scaler is not None:
            scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.update(loss.item(), len(images))

    return step


def _timm_model(recipe: Recipe, depthwise: bool) -> nn.Module:
    model = recipe.model
    if not depthwise:
        from benchmarks.timm_peer import create_g16

        return create_g16(model.classes, model.width, model.depth, model.dropout, model.drop_path)
    import timm

    return timm.create_model(
        f"tf_{model.name}", num_classes=model.classes, drop_rate=model.dropout, drop_path_rate=model.drop_path
    )
