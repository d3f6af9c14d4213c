"""torch.compile for a stage's blocks: before the first step, so that no step is slow, and never again."""

from __future__ import annotations

import time
import types
from typing import TYPE_CHECKING, Callable, Dict, List, Sequence, Tuple

import torch
from torch import nn

from models.stochastic import RANDOM_LAYERS
from parallel.work import Boundary
from recipe.errors import first_line

if TYPE_CHECKING:
    from engines.stage import Stage

# Programs that one block may have: for each size of images, with a backward pass to come and without.
_PROGRAMS = 64


def compile_stages(
    stages: Dict[int, Stage], entering: Sequence[Sequence[Boundary]], device: torch.device
) -> Tuple[str, ...]:
    """Compile stages by a dry pass over each input in `entering`, or at their first use if there is none.

    Where that fails they are computed uncompiled: a missing compiler is no reason not to train.

    Args:
        stages: those of this process, by number.
        entering: for each size of images, what enters each of the model's stages.

    Returns:
        Lines for the user.
    """
    started = time.perf_counter()
    for stage in stages.values():
        stage.compile()
    if not entering:
        return ()
    try:
        for inputs in entering:
            for number, stage in stages.items():
                stage.dry_pass(torch.zeros(tuple(inputs[number].shape), dtype=inputs[number].dtype, device=device))
    except Exception as error:  # a compiler may be missing, half installed or wrong: there is no list of its errors
        for stage in stages.values():
            stage.interpret()
        return (f"engine.compile: the model stays uncompiled: {first_line(error)}",)
    return (f"engine.compile: the model compiled in {time.perf_counter() - started:.0f} s",)


def compiled(segments: Sequence[nn.Sequential], backend: str) -> List[Callable[[torch.Tensor], torch.Tensor]]:
    """Functions that compute each segment, [N, ...] in and out, as the segment itself does.

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
