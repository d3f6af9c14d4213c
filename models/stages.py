"""A model as a flat list of named blocks, which a pipeline can cut between any two, and what makes such models."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Iterable, Sequence, Tuple, Type

import torch
from torch import nn

from recipe.config import Model
from recipe.kinds import Registry


class BlockList(nn.Module):
    """Named blocks that run one after the other, e.g. `preprocess`, `stem`, `blocks.0.0`, ..., `head`.

    Each takes and returns one tensor. Dots in a name nest modules, so a parameter's name starts with its block's name
    and does not depend on which other blocks are present: a stage's state dict is a part of the whole model's.
    """

    def __init__(self, blocks: Iterable[Tuple[str, nn.Module]]):
        super().__init__()
        self.names = []
        for name, block in blocks:
            parent = self
            *path, last = name.split(".")
            for part in path:
                if part not in parent._modules:
                    parent.add_module(part, nn.Module())
                parent = parent._modules[part]
            parent.add_module(last, block)
            self.names.append(name)

    def block(self, name: str) -> nn.Module:
        """The block called `name`."""
        return self.get_submodule(name)

    def part(self, names: Sequence[str]) -> BlockList:
        """The blocks in `names` as a model of their own; modules are shared, not copied."""
        return BlockList((name, self.block(name)) for name in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


class Family:
    """A family of models, registered for its section class; `models.shapes.SHAPES` has its blocks as numbers.

    anchors: names of a parameter that every model of the family has, ours and those of other programs. By these the
    model is found in a file of another program, behind whatever prefix (`training.foreign`).
    """

    anchors: ClassVar[Tuple[str, ...]] = ()

    @staticmethod
    def build(section: Model, seed: int) -> BlockList:
        """Build a model in training mode, float32: images [N, 3, H, W] in, logits [N, classes] out.

        Images are uint8, or float32 from 0 to 255 if mixed. The first block is a `Preprocess` called `preprocess`.
        Initial weights depend on `seed` alone. `draws` of the list (`models.stochastic.Draws`) steers random layers.
        """
        raise NotImplementedError

    @staticmethod
    def timm_name(name: str) -> str:
        """Name of a parameter or buffer in timm's files, where timm has such a model."""
        return name

    @staticmethod
    def keys_of(shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, Any]:
        """Keys of the section that weights of these names and shapes show; none that they do not."""
        return {}


FAMILIES: Registry[Type[Family]] = Registry("a model family")
