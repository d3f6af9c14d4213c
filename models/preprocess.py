"""From pixels to the network's input, on the device."""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch import nn


class Preprocess(nn.Module):
    """Compute (image / 255 - mean) / std in float32 and return it in `dtype`.

    Input: [N, 3, H, W], uint8, or float32 from 0 to 255 as mixed images are; output: `dtype` [N, 3,
    H, W] in `memory_format`.

    Args:
        mean, std: of RGB in [0, 1], three numbers each; they belong to the recipe, not to the state
            dict.
    """

    scale: torch.Tensor  # [3, 1, 1], float32
    shift: torch.Tensor  # [3, 1, 1], float32

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.dtype = torch.float32
        self.memory_format = torch.contiguous_format
        # (image / 255 - mean) / std as image * scale + shift: a multiplication and an addition.
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std)]
        self.register_buffer("scale", torch.tensor(scale).view(3, 1, 1), persistent=False)
        self.register_buffer("shift", torch.tensor(shift).view(3, 1, 1), persistent=False)

    def _apply(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        recurse: bool = True,
    ) -> Preprocess:
        """Move with the model to a device, but keep float32 constants: the cast comes later."""
        # torch gives the function only: an empty tensor shows which dtype it makes.
        example = torch.empty(0, dtype=self.dtype, device=self.scale.device)
        self.dtype = function(example).dtype
        scale = self.scale
        shift = self.shift
        super()._apply(function)
        self.scale = scale.to(self.scale.device)
        self.shift = shift.to(self.shift.device)
        return self

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the network's input for `images`, [N, 3, H, W]."""
        if images.device.type != "cpu":
            return self.in_one_pass(images)
        # Loaders leave channels last in memory, as decoders do: where planes are wanted, the same
        # pass makes them.
        images = images.to(torch.float32, memory_format=self.memory_format)
        return torch.addcmul(self.shift, images, self.scale).to(self.dtype)

    def in_one_pass(self, images: torch.Tensor) -> torch.Tensor:
        """Return the same for `images`, [N, 3, H, W], by one kernel.

        With `out` a GPU casts as it computes, and moves 3 bytes a pixel, not 19. No CPU does.
        """
        out = torch.empty_like(images, dtype=self.dtype, memory_format=self.memory_format)
        return torch.addcmul(self.shift, images, self.scale, out=out)
