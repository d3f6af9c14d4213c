"""The model as an IPU runs it: with its loss, its mixing of images, and random layers that the hardware draws.

Nothing here imports PopTorch: what marks stages, losses and overlapped tensors is handed in as functions, so that the
same modules run on a CPU.
"""

from __future__ import annotations

from typing import Callable, Container, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from data.mixing import Mixing
from models.efficientnet import build
from models.preprocess import Preprocess
from models.stages import BlockList
from models.stochastic import Draws
from recipe.config import Recipe

Mark = Callable[[torch.Tensor], torch.Tensor]


class HardwareDraws(Draws):
    """Draws of the device's own generator: a compiled program cannot ask the host for numbers.

    Distributed as `Draws`, but not the same numbers; PopTorch seeds them by Options.randomSeed.
    """

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.ones(count, dtype=like.dtype, device=like.device), rate, training=True)


class Entry(nn.Module):
    """The first block: (image / 255 - mean) / std in float32, of images mixed on the device; returned in `dtype`.

    In the place of models.preprocess.Preprocess, whose constants are buffers: PopTorch moves buffers to the device
    one by one, and takes it amiss where a module puts others in their place.
    """

    def __init__(self, preprocess: Preprocess, dtype: torch.dtype):
        super().__init__()
        # In tuples, out of the reach of .half() and .to().
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
        keep: Optional[Mark] = None,
        overlap: Tuple[Optional[Mark], Optional[Mark]] = (None, None),
    ):
        """
        Args:
            model: as `device_model` makes it.
            mark_loss: poptorch.identity_loss.
            kept, keep: blocks whose output is kept where activations are recomputed, and what marks a tensor so.
            overlap: what marks an input and an output whose transfer may overlap computing.
        """
        super().__init__()
        self.model = model
        self._smoothing, self._classes = smoothing, classes
        self._mark_loss, self._kept, self._keep = mark_loss, kept, keep
        self._overlap_input, self._overlap_output = overlap

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, mixing: Optional[torch.Tensor] = None
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Args: images: uint8 [micro, 3, H, W]; labels: int32 [micro]; mixing: float32 [micro, 6]."""
        if self._overlap_input is not None:
            images, labels = self._overlap_input(images), self._overlap_input(labels)
            mixing = None if mixing is None else self._overlap_input(mixing)
        logits = self._logits(images, mixing).float()
        targets = (labels[:, None] == torch.arange(self._classes, device=labels.device, dtype=labels.dtype)).float()
        if mixing is not None:
            targets = mix_targets(targets, mixing)
        targets = targets * (1 - self._smoothing) + self._smoothing / self._classes
        loss = self._mark_loss(-(targets * F.log_softmax(logits, dim=1)).sum(1).mean())
        correct = (logits.argmax(1).to(labels.dtype) == labels).float().sum()
        if self._overlap_output is not None:
            loss, correct = self._overlap_output(loss), self._overlap_output(correct)
        return loss, correct

    def _logits(self, images: torch.Tensor, mixing: Optional[torch.Tensor]) -> torch.Tensor:
        first, *others = self.model.names
        x = self.model.get_submodule(first)(images, mixing)
        for name in others:
            x = self.model.get_submodule(name)(x)
            if name in self._kept:
                x = self._keep(x)
        return x


class EvaluationModule(nn.Module):
    """Images in, uint8 [rows, 3, H, W]; logits out, float32 [rows, classes]."""

    def __init__(self, model: BlockList, overlap: Tuple[Optional[Mark], Optional[Mark]] = (None, None)):
        super().__init__()
        self.model = model
        self._overlap_input, self._overlap_output = overlap

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._overlap_input is not None:
            images = self._overlap_input(images)
        logits = self.model(images).float()
        return logits if self._overlap_output is None else self._overlap_output(logits)


def device_model(recipe: Recipe, dtype: torch.dtype) -> BlockList:
    """The model of a recipe, weights and arithmetic in `dtype`, its first block an `Entry`."""
    model = build(recipe.model, recipe.run.seed)
    model.preprocess = Entry(model.preprocess, dtype)
    draws = HardwareDraws(recipe.run.seed)
    for module in model.modules():
        if hasattr(module, "draws"):
            module.draws = draws
    return model.to(dtype)


def mixing_rows(plan: Mixing, rows: int, height: int, width: int) -> torch.Tensor:
    """How a micro batch is mixed, as the device takes it: float32 [rows, 6].

    By row: its own share in mixup; top, left, bottom and right edge of the box that cutmix shows, in pixels; the share
    of the pixels outside of it. The box is the same in all rows.
    """
    top, left, box_height, box_width = plan.box
    edges = torch.tensor([top, left, top + box_height, left + box_width, plan.kept], dtype=torch.float32)
    return torch.cat([plan.share[:, None], edges.expand(rows, -1)], dim=1)


def mix_images(images: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """What data.mixing.mix_images does to full micro batches, without indices: partners are found by rolling.

    Args: images: float32 [micro, 3, H, W]; mixing: of `mixing_rows`.
    """
    mixed = _mixed_up(images, mixing)
    top, left, bottom, right = (mixing[:, column].view(-1, 1, 1, 1) for column in range(1, 5))
    y = torch.arange(images.shape[2], device=images.device, dtype=torch.float32).view(1, 1, -1, 1)
    x = torch.arange(images.shape[3], device=images.device, dtype=torch.float32).view(1, 1, 1, -1)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    return torch.where(inside, _donors(mixed), mixed)


def mix_targets(targets: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Likewise for float32 [micro, classes]."""
    mixed = _mixed_up(targets, mixing)
    kept = mixing[:, 5:6]
    return mixed * kept + _donors(mixed) * (1 - kept)


def _mixed_up(rows: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    share = mixing[:, 0].view(-1, *[1] * (rows.dim() - 1))
    return rows * share + torch.roll(rows, 1, 0) * (1 - share)


def _donors(rows: torch.Tensor) -> torch.Tensor:
    """The rows that cutmix shows in the box: two before, or one before where there are but two."""
    return torch.roll(rows, 2 if len(rows) > 2 else 1, 0)


def begin_stages(model: BlockList, parts: Sequence[Sequence[str]], begin: Callable[[nn.Module, int], object]) -> None:
    """Marks the first block of each part as the beginning of a stage. Args: begin: (module, number of the IPU)."""
    for number, names in enumerate(parts):
        begin(model.get_submodule(names[0]), number)
