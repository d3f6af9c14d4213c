"""Dropout and stochastic depth: draws are a function of (seed, step, micro batch, block name)."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from recipe.randomness import MASK32, bits32, key, mix32

# Types of devices that draw themselves; meta stands for a GPU, where one is not at hand.
_ON_DEVICE = ("cuda", "meta")
# Micro batches whose masks a device draws at once: about 30 kernels, however many masks they make.
AHEAD = 8
_ALIGNED = 16  # elements: compiled programs copy masks that begin elsewhere


class Draws:
    """The seed and the current micro batch, which the random layers of one model share.

    `layers` are these layers.

    On a host each mask is drawn when it is needed. A GPU draws, by the same integers, all masks of
    some micro batches when the first is needed; the host sends it their keys without waiting.

    Args:
        seed: the run's.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self.step = 0
        self.micro_batch = 0
        self.layers: List[_Dropping] = []
        self._plan: Optional[_Plan] = None
        self._ahead = _Ahead()

    def mask(self, layer: _Dropping, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return the mask of `layer` for the current micro batch.

        Args:
            layer: one of `layers`.
            rows: of the micro batch.
            like: a tensor whose dtype and device the mask has.

        Returns:
            [rows x per_row of the layer]: see `keep_mask`.
        """
        if like.device.type not in _ON_DEVICE:
            return self.keep_mask(layer.name, layer.rate, rows * layer.per_row, like)

        plan = self._plan_for(layer, _Kind(rows, like.dtype, like.device))

        # The first mask that is asked for in AHEAD micro batches draws all masks of all of them.
        number, place = divmod(self.micro_batch, AHEAD)
        if (self._ahead.step, self._ahead.number) != (self.step, number):
            self._ahead = _Ahead(self.step, number, plan.draw(self._keys(number)))
        start = plan.starts[layer.name, layer.rate]
        return self._ahead.masks[place, start : start + rows * layer.per_row]

    def _plan_for(self, layer: _Dropping, kind: _Kind) -> _Plan:
        """Return the plan of all masks, made anew where it is not one of this layer and kind.

        That is a micro batch of another size, dtype or device, or a layer that is new.
        """
        plan = self._plan
        if plan is None or plan.kind != kind or (layer.name, layer.rate) not in plan.starts:
            plan = _Plan.of(kind, self.layers)
            self._plan = plan
            # Masks that were drawn by the plan before lie otherwise.
            self._ahead = _Ahead()
        return plan

    def _keys(self, number: int) -> List[List[int]]:
        """Return keys of draws, [AHEAD][layers], for the micro batches from AHEAD x `number` on."""
        micro_batches = range(number * AHEAD, (number + 1) * AHEAD)
        return [
            [key("model", self.seed, self.step, micro_batch, layer.name) for layer in self.layers]
            for micro_batch in micro_batches
        ]

    def keep_mask(self, name: str, rate: float, count: int, like: torch.Tensor) -> torch.Tensor:
        """Draw a mask on the host: a few numbers are cheaper there than ten kernel launches.

        Args:
            name: the block's.
            rate: the probability of 0, less than 1.
            count: elements of the mask.
            like: a tensor whose dtype and device the mask has.

        Returns:
            [count], 0 where an activation is dropped and else 1 / (1 - rate).
        """
        draw = key("model", self.seed, self.step, self.micro_batch, name)
        counter = np.arange(count, dtype=np.uint64)
        # Integers are compared, so that all devices decide alike.
        kept = bits32(draw, counter) >= int(rate * 2**32)
        mask = torch.from_numpy(kept.astype(np.float32) / (1 - rate))
        return mask.to(like.device, like.dtype, non_blocking=True)


class _Kind(NamedTuple):
    """The micro batches that a plan of masks is made for."""

    rows: int
    dtype: torch.dtype
    device: torch.device


class _Ahead(NamedTuple):
    """Masks that a device has drawn; by default none.

    step, number: they are those of the micro batches from AHEAD x number on.
    masks: [AHEAD, elements of the plan].
    """

    step: int = -1
    number: int = -1
    masks: torch.Tensor = torch.empty(0)


class _Plan(NamedTuple):
    """How the masks of all layers lie behind one another, on a device.

    Its tensors have a number for each element.
    """

    kind: _Kind
    starts: Dict[Tuple[str, float], int]  # first element of a layer's mask, by name and rate
    layer: torch.Tensor  # int64
    counter: torch.Tensor  # int64, within the layer's mask
    threshold: torch.Tensor  # int64: bits from here on keep an activation
    scale: torch.Tensor  # of what is kept, in the masks' dtype

    @classmethod
    def of(cls, kind: _Kind, layers: Sequence[_Dropping]) -> _Plan:
        """Plan the masks of `layers`, in their order, for micro batches of one `kind`."""
        # Where each layer's mask begins. Its length is rounded up.
        counts: List[int] = []
        starts: Dict[Tuple[str, float], int] = {}
        for layer in layers:
            starts[layer.name, layer.rate] = sum(counts)
            blocks = -(-kind.rows * layer.per_row // _ALIGNED)
            counts.append(blocks * _ALIGNED)

        # Numbers of each layer, as `Draws.keep_mask` has them.
        counters = [np.arange(count) for count in counts]
        thresholds = [int(layer.rate * 2**32) for layer in layers]
        scales = [np.float32(1) / np.float32(1 - layer.rate) for layer in layers]

        def of_elements(numbers: Sequence[float]) -> torch.Tensor:
            """Return the number of its layer for each element, from `numbers` of the layers."""
            return torch.from_numpy(np.repeat(numbers, counts)).to(kind.device)

        return cls(
            kind=kind,
            starts=starts,
            layer=of_elements(range(len(layers))),
            counter=torch.from_numpy(np.concatenate(counters)).to(kind.device),
            threshold=of_elements(thresholds),
            scale=of_elements(scales).to(kind.dtype),
        )

    def draw(self, keys: List[List[int]]) -> torch.Tensor:
        """Draw the masks of some micro batches.

        Args:
            keys: of 64 bits, [micro batches][layers].

        Returns:
            [micro batches, elements].
        """
        # Torch has no unsigned integers of 64 bits to compute with, so a key goes to the device as
        # two halves.
        wide = np.array(keys, np.uint64)
        low_bits = wide & np.uint64(MASK32)
        high_bits = wide >> np.uint64(32)
        # [2, micro batches, layers]
        halves = torch.from_numpy(np.stack([low_bits, high_bits]).astype(np.int64))
        if torch.cuda.is_available():
            halves = halves.pin_memory()  # else the copy would wait for the device
        halves = halves.to(self.layer.device, non_blocking=True)
        low, high = halves.index_select(2, self.layer)
        # bits32 of recipe/randomness.py, of a key for each element.
        bits = mix32((mix32(low ^ self.counter) + high) & MASK32)
        return torch.where(bits >= self.threshold, self.scale, 0.0)


class _Dropping(nn.Module):
    """A layer that drops a share `rate` in training, by `per_row` draws for each row.

    `name` is part of their key.

    `mask`, [N x per_row], is drawn ahead for the next pass: compiled code would take the numbers of
    step and micro batch for constants, and be compiled anew for each. None: the pass draws by
    itself.
    """

    def __init__(self, rate: float, name: str, draws: Draws, per_row: int = 1):
        super().__init__()
        self.rate = rate
        self.name = name
        self.draws = draws
        self.per_row = per_row
        self.mask: Optional[torch.Tensor] = None
        draws.layers.append(self)

    def draw(self, rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return the mask of a pass of so many `rows`, in the dtype and on the device of `like`."""
        return self.draws.mask(self, rows, like)

    def current(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Return the mask for `x`, [N x per_row]; None where nothing is dropped."""
        # The mask first, not training and rate: compiled, layers of all rates are then one program.
        if self.mask is not None:
            return self.mask
        return self.draw(len(x), x) if self.training and self.rate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times its mask."""
        mask = self.current(x)
        if mask is None:
            return x
        # [N, per_row] for a vector of each image, [N, 1, 1, 1] for an image.
        ones = [1] * (x.dim() - 2)
        return x * mask.view(len(x), self.per_row, *ones)


class Dropout(_Dropping):
    """Zeroes single activations.

    Input and output: [N, per_row]. Source: Srivastava et al., JMLR 15 (2014).
    """


class DropPath(_Dropping):
    """Zeroes a residual branch per image.

    Input and output: [N, C, H, W]. Source: Huang et al., 1603.09382.
    """


class DropPaths(nn.Module):
    """Stochastic depth that a block calls several times in a pass: each call has a layer, and so a
    key, of its own.

    The first call has the key of a layer that is called once.
    """

    def __init__(self, rate: float, name: str, draws: Draws, calls: int):
        """
        Args:
            rate: see `_Dropping`, as are `name` and `draws`.
            name: of the first call.
            draws: of the model.
            calls: in a pass.
        """
        super().__init__()
        names = [name, *(f"{name}.{number}" for number in range(1, calls))]
        self.paths = nn.ModuleList(DropPath(rate, each, draws) for each in names)
        self.begin()

    def begin(self) -> None:
        """Begin a pass: the next call is its first, however far the pass before has come."""
        self._call = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` times the mask of this call."""
        if not self.training:
            return x
        path = self.paths[self._call]
        self._call = (self._call + 1) % len(self.paths)
        return path(x)


RANDOM_LAYERS = (Dropout, DropPath)


def dropping(module: nn.Module) -> List[_Dropping]:
    """Return the random layers of a `module` that have a rate, in its order."""
    layers: List[_Dropping] = []
    for layer in module.modules():
        if isinstance(layer, RANDOM_LAYERS) and layer.rate:
            layers.append(layer)
    return layers
