"""Dropout and stochastic depth, whose draws are a function of (seed, step, micro batch, block name)."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from recipe.randomness import MASK32, bits32, key, mix32

_ON_DEVICE = ("cuda", "meta")  # types of devices that draw themselves; meta stands for a GPU, where one is not at hand
AHEAD = 8  # micro batches whose masks a device draws at once: about 30 kernels, however many masks they make
_ALIGNED = 16  # elements: compiled programs copy masks that begin elsewhere


class Draws:
    """The seed and the current micro batch, which the random layers of one model share; `layers` are these layers.

    On a host each mask is drawn when it is needed. A GPU draws, by the same integers, all masks of some micro batches
    when the first is needed; the host sends it their keys without waiting.
    """

    def __init__(self, seed: int):
        self.seed, self.step, self.micro_batch = seed, 0, 0
        self.layers: List[_Dropping] = []
        self._plan: Optional[_Plan] = None
        self._drawn: Tuple[tuple, torch.Tensor] = ((), torch.empty(0))  # for which micro batches; masks by the plan

    def mask(self, layer: _Dropping, rows: int, like: torch.Tensor) -> torch.Tensor:
        """The mask of a layer for the current micro batch of so many rows, in `like`'s dtype and device."""
        if like.device.type not in _ON_DEVICE:
            return self.keep_mask(layer.name, layer.rate, rows * layer.per_row, like)
        plan, kind = self._plan, (rows, like.dtype, like.device)
        if plan is None or plan.kind != kind or (layer.name, layer.rate) not in plan.starts:
            plan = self._plan = _Plan.of(kind, self.layers)
            self._drawn = ((), torch.empty(0))
        number, place = divmod(self.micro_batch, AHEAD)
        if self._drawn[0] != (self.step, number):
            names = [("model", self.seed, self.step, number * AHEAD + each) for each in range(AHEAD)]
            keys = [[key(*name, layer.name) for layer in self.layers] for name in names]
            self._drawn = (self.step, number), plan.draw(keys)
        start = plan.starts[layer.name, layer.rate]
        return self._drawn[1][place, start : start + rows * layer.per_row]

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        """`count` values, 0 with probability `rate` and else 1 / (1 - rate), in `like`'s dtype and device."""
        # Drawn on the host: a few numbers are cheaper there than ten kernel launches on a device.
        draw = key("model", self.seed, self.step, self.micro_batch, name)
        kept = bits32(draw, np.arange(count, dtype=np.uint64)) >= int(rate * 2**32)
        mask = torch.from_numpy(kept.astype(np.float32) / (1 - rate))
        return mask.to(like.device, like.dtype, non_blocking=True)


class _Plan(NamedTuple):
    """How the masks of all layers lie behind one another, on a device. Its tensors have a number for each element."""

    kind: tuple  # rows, dtype, device
    starts: Dict[Tuple[str, float], int]  # first element of a layer's mask, by name and rate
    layer: torch.Tensor  # int64
    counter: torch.Tensor  # int64, within the layer's mask
    threshold: torch.Tensor  # int64: bits from here on keep an activation
    scale: torch.Tensor  # of what is kept, in the masks' dtype

    @classmethod
    def of(cls, kind: Tuple[int, torch.dtype, torch.device], layers: Sequence[_Dropping]) -> _Plan:
        rows, dtype, device = kind
        starts, parts, start = {}, [], 0
        for number, layer in enumerate(layers):
            count = -(-rows * layer.per_row // _ALIGNED) * _ALIGNED
            same = (number, int(layer.rate * 2**32), np.float32(1) / np.float32(1 - layer.rate))
            parts.append([np.arange(count), *(np.full(count, value) for value in same)])
            starts[layer.name, layer.rate], start = start, start + count
        counter, layer, threshold, scale = (torch.from_numpy(np.concatenate(each)) for each in zip(*parts))
        return cls(kind, starts, *(each.to(device) for each in (layer, counter, threshold)), scale.to(device, dtype))

    def draw(self, keys: List[List[int]]) -> torch.Tensor:
        """The masks of some micro batches, [micro batches, elements], from the key of each layer."""
        halves = np.array(keys, np.uint64) >> np.array([[[0]], [[32]]], np.uint64) & np.uint64(MASK32)
        halves = torch.from_numpy(halves.astype(np.int64))
        halves = halves.pin_memory() if torch.cuda.is_available() else halves
        low, high = halves.to(self.layer.device, non_blocking=True).index_select(2, self.layer)
        bits = mix32((mix32(low ^ self.counter) + high) & MASK32)  # bits32, of a key for each element
        return torch.where(bits >= self.threshold, self.scale, 0.0)


class _Dropping(nn.Module):
    """A layer that drops a share `rate` in training, by `per_row` draws for each row; `name` is part of their key.

    `mask`, [N x per_row], is drawn ahead for the next pass: compiled code would take the numbers of step and micro
    batch for constants, and be compiled anew for each. None: the pass draws by itself.
    """

    def __init__(self, rate: float, name: str, draws: Draws, per_row: int = 1):
        super().__init__()
        self.rate, self.name, self.draws, self.per_row = rate, name, draws, per_row
        self.mask: Optional[torch.Tensor] = None
        draws.layers.append(self)

    def draw(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """The mask of a pass of so many rows, in `like`'s dtype and device."""
        return self.draws.mask(self, rows, like)

    def current(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """The mask for x, [N x per_row]; None where nothing is dropped."""
        if self.mask is not None:  # first: compiled, layers of all rates are then one program
            return self.mask
        return self.draw(len(x), x) if self.training and self.rate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.current(x)
        return x if mask is None else x * mask.view(len(x), self.per_row, *[1] * (x.dim() - 2))


class Dropout(_Dropping):
    """Zeroes single activations. Input and output: [N, per_row]. Source: Srivastava et al., JMLR 15 (2014)."""


class DropPath(_Dropping):
    """Zeroes a residual branch per image. Input and output: [N, C, H, W]. Source: Huang et al., 1603.09382."""


RANDOM_LAYERS = (Dropout, DropPath)
