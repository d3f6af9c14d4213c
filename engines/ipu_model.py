"""The model as an IPU runs it: with its loss, mixing of images, and random layers that draw by the hardware.

PopTorch's functions that mark losses and overlapped tensors are arguments, so the same modules run on a CPU.
"""

from __future__ import annotations

from typing import Callable, Container, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from data.mixing import Mixing
from models.families import build
from models.preprocess import Preprocess
from models.stages import BlockList
from models.stochastic import Draws
from recipe.config import Recipe

Mark = Callable[[torch.Tensor], torch.Tensor]


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class HardwareDraws(Draws):
    """Draws of the device's own generator: a compiled program gets no numbers from the host.

    They have the distribution of `Draws`, but other values; Options.randomSeed seeds them.
    """

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones(count, dtype=like.dtype, device=like.device), rate, training=True)


class Entry(nn.Module):
    """The first block: (image / 255 - mean) / std in float32, of images mixed on the device; returned in `dtype`.

    It replaces models.preprocess.Preprocess, whose constants are buffers. PopTorch moves buffers to the device one by
    one, and a module may not exchange them.
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

    def __init__(
        self,
        model: BlockList,
        smoothing: float,
        classes: int,
        mark_loss: Mark,
        kept: Container[str] = (),
        keep: Mark = _unmarked,
        mark_input: Mark = _unmarked,
        mark_output: Mark = _unmarked,
    ):
        """
        Args:
            model: of `device_model`.
            mark_loss: poptorch.identity_loss.
            kept, keep: blocks whose output is kept where activations are recomputed, and the function that marks it.
            mark_input, mark_output: mark a tensor whose transfer may overlap computation.
        """
        super().__init__()
        self.model = model
        self._smoothing, self._classes = smoothing, classes
        self._mark_loss, self._kept, self._keep = mark_loss, kept, keep
        self._mark_input, self._mark_output = mark_input, mark_output

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, mixing: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Args: images: uint8 [micro, 3, H, W]; labels: int32 [micro]; mixing: float32 [micro, 6]."""
        images, labels = self._mark_input(images), self._mark_input(labels)
        mixing = None if mixing is None else self._mark_input(mixing)
        first, *others = self.model.names
        x = self.model.get_submodule(first)(images, mixing)
        for name in others:
            x = self.model.get_submodule(name)(x)
            x = self._keep(x) if name in self._kept else x
        logits = x.float()
        targets = (labels[:, None] == torch.arange(self._classes, device=labels.device, dtype=labels.dtype)).float()
        if mixing is not None:
            targets = mix_targets(targets, mixing)
        targets = targets * (1 - self._smoothing) + self._smoothing / self._classes
        loss = self._mark_loss(-(targets * F.log_softmax(logits, dim=1)).sum(1).mean())
        correct = (logits.argmax(1).to(labels.dtype) == labels).float().sum()
        return self._mark_output(loss), self._mark_output(correct)


class EvaluationModule(nn.Module):
    """Images in, uint8 [rows, 3, H, W]; logits out, float32 [rows, classes]."""

    def __init__(self, model: BlockList, mark_input: Mark = _unmarked, mark_output: Mark = _unmarked):
        super().__init__()
        self.model = model
        self._mark_input, self._mark_output = mark_input, mark_output

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._mark_output(self.model(self._mark_input(images)).float())


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
    """A plan of mixing as a tensor for the device: float32 [rows, 6].

    A row: its own share in mixup; top, left, bottom and right edge of cutmix's box in pixels; and the share of the
    pixels outside the box. All but the first are the same in all rows.
    """
    top, left, box_height, box_width = plan.box
    edges = torch.tensor([top, left, top + box_height, left + box_width, plan.kept], dtype=torch.float32)
    return torch.cat([plan.share[:, None], edges.expand(rows, -1)], dim=1)


def mix_images(images: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Mix full micro batches as data.mixing.mix_images does, but find partners by rolling instead of by indices.

    Args: images: float32 [micro, 3, H, W]; mixing: of `mixing_rows`.
    """
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
