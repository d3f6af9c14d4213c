"""The model as an IPU runs it: with its loss, mixing of images, and random layers that draw by the hardware.

PopTorch's functions are arguments, so the same modules run on a CPU.
"""

from __future__ import annotations

from typing import Callable, Container, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from data.mixing import Mixing
from models.base import BlockList
from models.families import build
from models.preprocess import Preprocess
from models.stochastic import Draws
from recipe.config import Recipe


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Marks(NamedTuple):
    """PopTorch's functions that mark a tensor: as the loss, as kept where activations are recomputed, or as an input or
    output whose transfer may overlap computation."""

    loss: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    keep: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    input: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    output: Callable[[torch.Tensor], torch.Tensor] = _unmarked


class HardwareDraws(Draws):
    """As `Draws`, but other values, of the device's own generator: a compiled program gets no numbers from the host."""

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones(count, dtype=like.dtype, device=like.device), rate, training=True)


class Entry(nn.Module):
    """The first block: (image / 255 - mean) / std in float32, of images mixed on the device; returned in `dtype`.

    It replaces models.preprocess.Preprocess, whose constants are buffers, which PopTorch moves one by one.
    """

    def __init__(self, preprocess: Preprocess, dtype: torch.dtype):
        super().__init__()
        # In a tuple, which .half() and .to() do not convert.
        self._constants = (preprocess.scale.float(), preprocess.shift.float())
        self._dtype = dtype

    def forward(self, images: torch.Tensor, mixing: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Args: images: uint8 [micro, 3, H, W]; mixing: float32 [micro, 6], None where nothing is mixed."""
        x = images.float()
        if mixing is not None:
            x = mix_images(x, mixing)
        scale, shift = (constant.to(x.device) for constant in self._constants)
        return (x * scale + shift).to(self._dtype)


class TrainingModule(nn.Module):
    """Images and labels of a micro batch in, its loss and top-1 hits out: float32 [] each."""

    def __init__(self, model: BlockList, smoothing: float, classes: int, marks: Marks, kept: Container[str] = ()):
        """Args: model: of `device_model`. kept: blocks whose output is kept where activations are recomputed."""
        super().__init__()
        self.model, self._marks, self._kept = model, marks, kept
        self._smoothing, self._classes = smoothing, classes

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, mixing: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Args: images: uint8 [micro, 3, H, W]; labels: int32 [micro]; mixing: float32 [micro, 6]."""
        marks = self._marks
        images, labels = marks.input(images), marks.input(labels)
        mixing = None if mixing is None else marks.input(mixing)
        first, *others = self.model.names
        x = self.model.get_submodule(first)(images, mixing)
        for name in others:
            x = self.model.get_submodule(name)(x)
            x = marks.keep(x) if name in self._kept else x
        logits = x.float()
        targets = (labels[:, None] == torch.arange(self._classes, device=labels.device, dtype=labels.dtype)).float()
        if mixing is not None:
            targets = mix_targets(targets, mixing)
        targets = targets * (1 - self._smoothing) + self._smoothing / self._classes
        loss = marks.loss(-(targets * F.log_softmax(logits, dim=1)).sum(1).mean())
        correct = (logits.argmax(1).to(labels.dtype) == labels).float().sum()
        return marks.output(loss), marks.output(correct)


class EvaluationModule(nn.Module):
    """Images in, uint8 [rows, 3, H, W]; logits out, float32 [rows, classes]."""

    def __init__(self, model: BlockList, marks: Marks):
        super().__init__()
        self.model, self._marks = model, marks

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._marks.output(self.model(self._marks.input(images)).float())


def device_model(recipe: Recipe, dtype: torch.dtype) -> BlockList:
    """Build the model of a recipe with weights and arithmetic in `dtype`, its first block an `Entry`."""
    model = build(recipe.model, recipe.run.seed)
    model.preprocess = Entry(model.preprocess, dtype)
    draws = HardwareDraws(recipe.run.seed)
    for module in model.modules():
        if hasattr(module, "draws"):
            module.draws = draws
    return model.to(dtype)


def mixing_rows(plan: Mixing, rows: int, height: int, width: int) -> torch.Tensor:
    """A plan of mixing for the device, float32 [rows, 6]: a row's own share in mixup; the top, left, bottom and right
    edge of cutmix's box in pixels; the share of pixels outside the box."""
    top, left, box_height, box_width = plan.box
    edges = torch.tensor([top, left, top + box_height, left + box_width, plan.kept], dtype=torch.float32)
    return torch.cat([plan.share[:, None], edges.expand(rows, -1)], dim=1)


def mix_images(images: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """data.mixing.mix_images of float32 [micro, 3, H, W] and `mixing_rows`; partners are found by rolling."""
    mixed = _mixed_up(images, mixing)
    top, left, bottom, right = (mixing[:, column].view(-1, 1, 1, 1) for column in range(1, 5))
    y = torch.arange(images.shape[2], device=images.device, dtype=torch.float32).view(1, 1, -1, 1)
    x = torch.arange(images.shape[3], device=images.device, dtype=torch.float32).view(1, 1, 1, -1)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    return torch.where(inside, _donors(mixed), mixed)


def mix_targets(targets: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Mix targets in the same way: float32 [micro, classes]."""
    mixed, outside = _mixed_up(targets, mixing), mixing[:, 5:6]
    return mixed * outside + _donors(mixed) * (1 - outside)


def _mixed_up(rows: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    share = mixing[:, 0].view(-1, *[1] * (rows.dim() - 1))
    return rows * share + torch.roll(rows, 1, 0) * (1 - share)


def _donors(rows: torch.Tensor) -> torch.Tensor:
    """The rows in cutmix's box: those two before, or one before if there are only two."""
    return torch.roll(rows, 2 if len(rows) > 2 else 1, 0)
