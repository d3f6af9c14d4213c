"""The suite's sections on whole steps: our engine beside timm's loop, and the memory that it takes.

Both get the same micro batch, which lies on the device, and make an update from each. Ours: the engine as a recipe
makes it, weights and momentum in float16 with stochastic rounding; it takes uint8 images and normalises them. timm's:
the body of the loop in its train.py, with float32 weights, autocast (and its scaler in float16) and its Lars; its
images are normalised already. Both with cuDNN's search for the fastest kernels.
"""

import contextlib
import functools
import itertools
import operator
from typing import Dict, Iterator, NamedTuple

import torch

from benchmarks.gpu_measure import Maker, Row, Session, Side, free, recipe
from benchmarks.ranks import images_and_labels
from benchmarks.timm_peer import Loop
from data.batches import MicroBatch
from engines import factory
from engines.devices import synchronize
from recipe.batch import divide
from recipe.config import Recipe

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
KERNELS = ("triton", "torch")
OURS, TIMM, MEMORY = "ours", "timm", "memory"
_DEPTHWISE = ("model.group_size=1", "model.expansion=6", "model.norm=batch")
_PLAIN = ("precision.compute=float16", "engine.memory_format=contiguous")
_WARM_UP = 3  # steps; in the first ones cuDNN searches, and Triton compiles
_LR = 0.01  # in so few steps nothing is learned: what counts is that nothing overflows


class Setting(NamedTuple):
    """The comparison of one section. dtype: of the arithmetic."""

    depthwise: bool
    dtype: str
    compiled: bool

    def name(self) -> str:
        kind = "B4-G1-BN" if self.depthwise else "B4-G16-GN"
        return f"training {kind}, {self.dtype}" + (", compiled" if self.compiled else "")


SETTINGS = (
    Setting(False, "float16", False),
    Setting(False, "bfloat16", False),
    Setting(True, "float16", False),
    Setting(False, "float16", True),
)
CLAIMED = (SETTINGS[0].name(), SETTINGS[-1].name())


def training(session: Session, setting: Setting) -> Iterator[Row]:
    """Images a second of each side."""
    micro = session.plan.micro
    note = f"{recipe(session.plan, micro).model.image_size} px, micro batch {micro}"
    compare = functools.partial(session.compare, calls=session.plan.steps, warm_up=_WARM_UP, note=note)
    rows = compare(_sides(session, setting, micro), functools.partial(operator.truediv, micro), "images/s")
    if setting.compiled:  # only now: sides that take turns share what Dynamo keeps
        torch._dynamo.reset()
    return iter(rows)


def _sides(session: Session, setting: Setting, micro: int) -> Dict[str, Maker]:
    """One of ours and one of timm's by turns, of which there is one each if time runs out; compiling takes long."""
    overrides = [f"precision.compute={setting.dtype}", *(_DEPTHWISE if setting.depthwise else ())]
    compiling = f"engine.compile={setting.compiled}".lower()
    kinds = KERNELS[1:] if setting.depthwise or setting.compiled else KERNELS
    made: Dict[str, Maker] = {}
    for kernels, layout in itertools.product(kinds, FORMATS):
        engine = (f"engine.memory_format={layout}", f"engine.kernels={kernels}", compiling)
        plan = recipe(session.plan, micro, *overrides, *engine)
        made[f"{OURS}, {layout}, {kernels}"] = functools.partial(_ours, plan)
        made[f"{TIMM}, {layout}"] = functools.partial(_timms, plan, setting, session.device, layout)
    return made


def _on_device(plan: Recipe, device: torch.device) -> MicroBatch:
    images, labels = images_and_labels(plan, plan.batch.micro)
    if device.type == "cuda":
        labels = labels.pin_memory()
    images = images.to(device).contiguous(memory_format=torch.channels_last)
    return MicroBatch(images, labels, labels, plan.batch.micro, 0, 0, ())


def _ours(plan: Recipe, stack: contextlib.ExitStack) -> Side:
    """The engine of a recipe, closed with the stack; a call is an update from the same images."""
    engine = factory.create(plan, divide(plan, 1), steps_per_epoch=1)
    stack.callback(engine.close)
    uncompiled = [note for note in engine.notes if "uncompiled" in note]
    if plan.engine.compile and uncompiled:
        raise RuntimeError(uncompiled[0])
    batches, numbers = itertools.repeat(_on_device(plan, engine.device)), itertools.count()
    return lambda: engine.train_step(batches, next(numbers), lr=_LR)


def _timms(plan: Recipe, setting: Setting, device: torch.device, layout: str, stack: contextlib.ExitStack) -> Side:
    torch.backends.cudnn.benchmark = True
    memory_format = FORMATS[layout]
    loop = Loop(plan.model, _LR, device.type, getattr(torch, setting.dtype), memory_format, setting.compiled)
    batch = _on_device(plan, device)
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (plan.model.mean, plan.model.std))
    images = ((batch.images / 255 - mean) / std).contiguous(memory_format=memory_format)
    batches = [(images, batch.labels.to(device))]
    return lambda: loop.update(batches)


# Memory ---------------------------------------------------------------------------------------------------------------


def memory(session: Session) -> Iterator[Row]:
    """GB at most during a step, and the largest micro batch among doublings. Without cuDNN's search, which would take
    long for each size."""
    plan, measures = session.plan, {}
    for kernels, recompute in itertools.product(plan.kernels, (False, True)):
        what = f"peak, {kernels}, recompute {recompute}".lower()
        measures[what] = functools.partial(_peak, session, what, kernels, recompute)
    for recompute in (False, True):
        what = f"largest micro batch, {plan.kernels[0]}, recompute {recompute}".lower()
        measures[what] = functools.partial(_largest_micro, session, what, recompute)
    return session.attempts(measures)


def _peak(session: Session, what: str, kernels: str, recompute: bool) -> Row:
    device, micro = session.device, session.plan.micro
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    _two_steps(session, micro, kernels, recompute)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Row(session.section, what, (peak / 1e9,), "GB", note=f"micro batch {micro}, allocated by tensors")


def _largest_micro(session: Session, what: str, recompute: bool) -> Row:
    """The last size that fits, doubled from the plan's on."""
    micro, fitting, note = session.plan.micro, 0, "larger ones were not tried"
    while micro <= session.plan.most_images and not session.over():
        try:
            _two_steps(session, micro, session.plan.kernels[0], recompute)
        except torch.OutOfMemoryError:
            note = f"{micro} does not fit"
            break
        fitting, micro = micro, 2 * micro
    free(session.device)
    return Row(session.section, what, (fitting,), "images", note=note)


def _two_steps(session: Session, micro: int, kernels: str, recompute: bool) -> None:
    changes = (f"engine.kernels={kernels}", f"parallel.recompute={recompute}".lower())
    with contextlib.ExitStack() as stack:
        step = _ours(recipe(session.plan, micro, *_PLAIN, *changes), stack)
        torch.backends.cudnn.benchmark = False
        step()
        step()
        synchronize(session.device)
    free(session.device)
