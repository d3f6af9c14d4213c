"""The model as an IPU runs it: with its loss, mixing of images, and hardware's random numbers.

PopTorch's functions are arguments, so the same modules run on a CPU.
"""

from __future__ import annotations

from typing import Callable, Container, NamedTuple, Optional, Protocol, Tuple, runtime_checkable

import torch
from torch import nn
from torch.nn import functional as F

from data.mixing import Mixing
from models.base import BlockList
from models.families import build
from models.preprocess import Preprocess
from models.stochastic import Draws
from recipe.network import Model


def _unmarked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Marks(NamedTuple):
    """PopTorch's functions that mark a tensor, and return it.

    loss: as what is differentiated.
    keep: as kept where activations are recomputed.
    input, output: as one whose transfer may overlap computation.
    """

    loss: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    keep: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    input: Callable[[torch.Tensor], torch.Tensor] = _unmarked
    output: Callable[[torch.Tensor], torch.Tensor] = _unmarked


@runtime_checkable
class _Drawing(Protocol):
    """A module that draws random numbers, of whatever class a family of models has for it."""

    draws: Draws


class HardwareDraws(Draws):
    """Draws of the device's own generator: a compiled program gets no numbers from the host.

    They are distributed as those of `Draws`, but have other values.
    """

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        """Draw a mask of `count` elements: see `Draws.keep_mask`."""
        ones = torch.ones(count, dtype=like.dtype, device=like.device)
        return F.dropout(ones, rate, training=True)


class Entry(nn.Module):
    """The first block: (image / 255 - mean) / std in float32, of images mixed on the device.

    It replaces models.preprocess.Preprocess, whose constants are buffers, which PopTorch moves one
    by one.
    """

    def __init__(self, preprocess: Preprocess, dtype: torch.dtype):
        """
        Args:
            preprocess: the block that is replaced.
            dtype: of the result.
        """
        super().__init__()
        # In a tuple, which .half() and .to() do not convert.
        self._constants = (preprocess.scale.float(), preprocess.shift.float())
        self._dtype = dtype

    def forward(self, images: torch.Tensor, mixing: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Normalise images.

        Args:
            images: uint8 [micro, 3, H, W].
            mixing: float32 [micro, 6], see `mixing_rows`; None where nothing is mixed.
        """
        x = images.float()
        if mixing is not None:
            x = mix_images(x, mixing)
        scale, shift = (constant.to(x.device) for constant in self._constants)
        return (x * scale + shift).to(self._dtype)


class TrainingModule(nn.Module):
    """A model with its loss, which is all that a program for training computes."""

    def __init__(
        self,
        model: BlockList,
        smoothing: float,
        classes: int,
        marks: Marks,
        kept: Container[str] = (),
    ):
        """
        Args:
            model: result of `device_model`.
            smoothing: of the labels.
            classes: how many there are.
            marks: for the inputs, outputs and activations.
            kept: blocks whose output is kept where activations are recomputed.
        """
        super().__init__()
        self.model = model
        self._smoothing = smoothing
        self._classes = classes
        self._marks = marks
        self._kept = kept

    def forward(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        mixing: Optional[torch.Tensor] = None,
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Compute a micro batch.

        Args:
            images: uint8 [micro, 3, H, W].
            labels: int32 [micro].
            mixing: float32 [micro, 6], see `mixing_rows`; None where nothing is mixed.

        Returns:
            Mean loss and top-1 hits, float32 [] each.
        """
        marks = self._marks
        images = marks.input(images)
        labels = marks.input(labels)
        if mixing is not None:
            mixing = marks.input(mixing)
        logits = self._logits(images, mixing)
        log_probabilities = F.log_softmax(logits, dim=1)
        loss = -(self._targets(labels, mixing) * log_probabilities).sum(1).mean()
        loss = marks.loss(loss)
        correct = (logits.argmax(1).to(labels.dtype) == labels).float().sum()
        return marks.output(loss), marks.output(correct)

    def _logits(self, images: torch.Tensor, mixing: Optional[torch.Tensor]) -> torch.Tensor:
        """Return the model's result, float32 [micro, classes]."""
        # Block by block: only the first takes the plan of mixing, and only some keep their output.
        first, *others = self.model.names
        x = self.model.get_submodule(first)(images, mixing)
        for name in others:
            x = self.model.get_submodule(name)(x)
            if name in self._kept:
                x = self._marks.keep(x)
        return x.float()

    def _targets(self, labels: torch.Tensor, mixing: Optional[torch.Tensor]) -> torch.Tensor:
        """Return the mixed and smoothed targets, float32 [micro, classes]."""
        classes = torch.arange(self._classes, device=labels.device, dtype=labels.dtype)
        targets = (labels[:, None] == classes).float()
        if mixing is not None:
            targets = mix_targets(targets, mixing)
        return targets * (1 - self._smoothing) + self._smoothing / self._classes


class EvaluationModule(nn.Module):
    """A model whose logits leave the device in float32."""

    def __init__(self, model: BlockList, marks: Marks):
        """
        Args:
            model: result of `device_model`.
            marks: for its input and output.
        """
        super().__init__()
        self.model = model
        self._marks = marks

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows, classes], of `images`, uint8 [rows, 3, H, W]."""
        logits = self.model(self._marks.input(images)).float()
        return self._marks.output(logits)


def device_model(section: Model, seed: int, dtype: torch.dtype) -> BlockList:
    """Build a model whose first block is an `Entry`.

    Args:
        section: of the recipe.
        seed: of the first weights.
        dtype: of weights and arithmetic.
    """
    model = build(section, seed)
    preprocess = model.block("preprocess")
    assert isinstance(preprocess, Preprocess), "so every family of models begins"
    model.preprocess = Entry(preprocess, dtype)
    # Whatever draws numbers shares one source, which is the device's own.
    draws = HardwareDraws(seed)
    for module in model.modules():
        if isinstance(module, _Drawing):
            module.draws = draws
    return model.to(dtype)


def mixing_rows(plan: Mixing) -> torch.Tensor:
    """Return a plan of mixing as the device reads it.

    Args:
        plan: of a micro batch.

    Returns:
        float32 [micro, 6]: the share that a row keeps in mixup; the top, left, bottom and right
        edge of cutmix's box in pixels; the share of pixels outside the box.
    """
    top, left, height, width = plan.box
    box = [top, left, top + height, left + width, plan.kept]
    columns = torch.tensor(box, dtype=torch.float32).expand(len(plan.share), -1)
    return torch.cat([plan.share[:, None], columns], dim=1)


def mix_images(images: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Mix images as data.mixing.mix_images does, with partners that are found by rolling.

    Args:
        images: float32 [micro, 3, H, W].
        mixing: see `mixing_rows`.
    """
    # The box is compared with every pixel: a compiled program cannot cut it out, as its size is a
    # value. An empty box has no pixel inside.
    mixed = _mixed_up(images, mixing)
    top, left, bottom, right = (mixing[:, column].view(-1, 1, 1, 1) for column in range(1, 5))
    height, width = images.shape[2:]
    y = torch.arange(height, device=images.device, dtype=torch.float32).view(1, 1, -1, 1)
    x = torch.arange(width, device=images.device, dtype=torch.float32).view(1, 1, 1, -1)
    inside = (y >= top) & (y < bottom) & (x >= left) & (x < right)
    return torch.where(inside, _donors(mixed), mixed)


def mix_targets(targets: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Mix targets as their images are mixed.

    Args:
        targets: float32 [micro, classes].
        mixing: see `mixing_rows`.
    """
    mixed = _mixed_up(targets, mixing)
    outside = mixing[:, 5:6]
    return mixed * outside + _donors(mixed) * (1 - outside)


def _mixed_up(rows: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Mix each row with the one before it."""
    ones = [1] * (rows.dim() - 1)
    share = mixing[:, 0].view(-1, *ones)
    return rows * share + torch.roll(rows, 1, 0) * (1 - share)


def _donors(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows in cutmix's box: those two before, or one before if there are only two."""
    return torch.roll(rows, 2 if len(rows) > 2 else 1, 0)
