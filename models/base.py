"""The interface of a model: a flat list of named blocks, what makes one, and a registry of that."""

from __future__ import annotations

from typing import Any, ClassVar, Dict, Iterable, List, Sequence, Tuple, Type

import torch
from torch import nn

from models.meta import without_memory
from models.stochastic import Draws
from recipe.kinds import Registry


class BlockList(nn.Module):
    """Named blocks that run one after the other: `preprocess`, `stem`, `blocks.0.0`, ..., `head`.

    Each takes and returns one tensor, so a pipeline can cut the model between any two. Dots in a
    name nest modules, so a parameter's name starts with its block's name and does not depend on
    which other blocks are present: a stage's state dict is a part of the whole model's.

    Args:
        blocks: (name, block), in running order.
    """

    draws: Draws

    def __init__(self, blocks: Iterable[Tuple[str, nn.Module]]):
        super().__init__()
        self.names: List[str] = []
        for name, block in blocks:
            *path, last = name.split(".")
            # An empty module for each component before the last; blocks may share it.
            parent: nn.Module = self
            for component in path:
                if component not in parent._modules:
                    parent.add_module(component, nn.Module())
                parent = parent.get_submodule(component)
            parent.add_module(last, block)
            self.names.append(name)

    def block(self, name: str) -> nn.Module:
        """Return the block called `name`."""
        return self.get_submodule(name)

    def part(self, names: Sequence[str]) -> BlockList:
        """Return the blocks in `names` as a model of their own; modules are shared, not copied."""
        return BlockList((name, self.block(name)) for name in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the last block makes of `x`, the first block's input."""
        # By name and not by `children`: modules nest, and a `patch` may replace a block.
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


class Family:
    """A family of models, registered for its section class.

    `models.shapes.SHAPES` has its blocks as numbers.

    anchors: names of a parameter that every model of the family has, ours and those of other
    programs. By these the model is found in a file of another program, behind whatever prefix
    (`training.foreign`).
    """

    anchors: ClassVar[Tuple[str, ...]] = ()

    @staticmethod
    def build(section: Any, seed: int) -> BlockList:
        """Build a model in training mode, float32.

        The first block is a `Preprocess` called `preprocess`. `draws` of the list
        (`models.stochastic.Draws`) steers random layers.

        Args:
            section: the recipe's keys of the model, of the family's own class.
            seed: all that initial weights depend on.

        Returns:
            A model that takes images [N, 3, H, W], uint8, or float32 from 0 to 255 if mixed, and
            returns logits [N, classes].
        """
        raise NotImplementedError

    @staticmethod
    def timm_name(name: str) -> str:
        """Return timm's `name` of a parameter or buffer, where timm has such a model."""
        return name

    @staticmethod
    def classifier(section: Any) -> str:
        """Return timm's name of the classifier's module: it has a row for each class.

        Args:
            section: the recipe's keys of the model.

        Returns:
            The name; "" where there is no such module.
        """
        return "classifier"

    @classmethod
    def depths(cls, section: Any) -> Dict[str, int]:
        """Return how deep each parameter of the model lies, for `optimizer.layer_decay`.

        Args:
            section: the recipe's keys of the model.

        Returns:
            By parameter, 0 for the first layer; here the number of its block.
        """
        # Without memory: only names are needed.
        with without_memory():
            model = cls.build(section, seed=0)
        depths: Dict[str, int] = {}
        depth = 0
        for block in model.names:
            names = [f"{block}.{name}" for name, _ in model.block(block).named_parameters()]
            depths.update(dict.fromkeys(names, depth))
            # The cast of the images is no layer.
            depth += bool(names)
        return depths

    @staticmethod
    def keys_of(shapes: Dict[str, Tuple[int, ...]]) -> Dict[str, Any]:
        """Return keys of the section that weights show; none that they do not.

        Args:
            shapes: name of a parameter or buffer -> its shape.
        """
        return {}


FAMILIES: Registry[Type[Family]] = Registry("a model family")
