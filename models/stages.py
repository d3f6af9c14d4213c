"""A model as a flat list of named blocks, which a pipeline can cut between any two; and what each costs."""

from __future__ import annotations

from typing import Dict, Iterable, Sequence, Tuple

import torch
from torch import nn


class BlockList(nn.Module):
    """Blocks that run one after the other, e.g. `preprocess`, `stem`, `blocks.0.0`, ..., `head`.

    Dots in a name nest modules, so a parameter's name starts with its block's name and does not depend
    on which other blocks are present: a stage's state dict is a part of the whole model's.
    """

    def __init__(self, blocks: Iterable[Tuple[str, nn.Module]]):
        """Args: blocks: (name, module) in running order; each module takes and returns one tensor."""
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
        """The block called `name`. Raises KeyError if there is none."""
        if name not in self.names:
            raise KeyError(name)
        return self.get_submodule(name)

    def part(self, names: Sequence[str]) -> BlockList:
        """The blocks in `names` as a model of their own; modules are shared, not copied."""
        return BlockList((name, self.block(name)) for name in names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = self.get_submodule(name)(x)
        return x


def split_names(names: Sequence[str], cuts: Sequence[str]) -> list:
    """`names` as consecutive lists, a new one opening at each name in `cuts`.

    Raises:
        ValueError: a cut that is no block, is the first block, or is out of order; the message lists the blocks.
    """
    positions = []
    for cut in cuts:
        if cut not in names:
            raise ValueError(f"{cut} is not a block; the blocks are {', '.join(names)}")
        positions.append(list(names).index(cut))
    edges = [0, *positions, len(names)]
    if any(end <= start for start, end in zip(edges, edges[1:])):
        raise ValueError(f"the cut points {', '.join(cuts)} leave a stage empty; order them as the blocks run")
    return [list(names[start:end]) for start, end in zip(edges, edges[1:])]


def multiply_adds(model: BlockList, image_size: int) -> Dict[str, int]:
    """Multiply-adds of one image's forward pass by block: convolutions and linear layers, the rest is small.

    Runs one image through the model in evaluation mode, on the meta device if the model lives there.
    """
    counts = dict.fromkeys(model.names, 0)
    handles = []

    def count(name: str):
        def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            if isinstance(module, nn.Conv2d):
                fan_in = module.weight[0].numel()
                counts[name] += output[0].numel() * fan_in
            else:
                counts[name] += output[0].numel() * module.in_features

        return hook

    for name in model.names:
        for module in model.block(name).modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                handles.append(module.register_forward_hook(count(name)))
    parameter = next(model.parameters())
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 3, image_size, image_size, dtype=torch.uint8, device=parameter.device))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return counts
