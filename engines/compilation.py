"""torch.compile for a stage's blocks, so that no step compiles them again."""

from __future__ import annotations

import types
from typing import Callable, Dict, List, Sequence

import torch
from torch import nn

from models.stochastic import RANDOM_LAYERS

# Programs that one block may have: for each size of images, with a backward pass to come and without.
_PROGRAMS = 64


def compiled(segments: Sequence[nn.Sequential], backend: str) -> List[Callable[[torch.Tensor], torch.Tensor]]:
    """What computes each segment, [N, ...] in and out, as the segment itself does.

    Nothing is compiled before the first call. Blocks that look alike share their program.
    """
    torch._dynamo.config.recompile_limit = _PROGRAMS
    programs: Dict[str, Callable] = {}
    for segment in segments:
        programs.setdefault(repr(segment[-1]), _program(f"block_{len(programs)}", backend))
    return [_Segment(segment, programs[repr(segment[-1])]) for segment in segments]


class _Segment:
    """Blocks without parameters as they are, and then the one that has some, compiled.

    The former cast the images: there is little to gain, and the strides of images differ with where they come from.
    """

    def __init__(self, segment: nn.Sequential, program: Callable):
        self._before, self._block, self._program = segment[:-1], segment[-1], program
        self._random = [layer for layer in self._block.modules() if isinstance(layer, RANDOM_LAYERS) and layer.rate]
        self._like = next(self._block.parameters())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._before(x)
        for layer in self._random:
            layer.mask = layer.draw(len(x), self._like)
        try:
            return self._program(self._block, x)
        finally:
            for layer in self._random:
                layer.mask = None


def _program(name: str, backend: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A compiled function of its own code object. Torch keeps programs by it, and tries one after the other."""

    def compute(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    own = types.FunctionType(compute.__code__.replace(co_name=name), compute.__globals__, name)
    return torch.compile(own, backend=backend, dynamic=False)
