"""A stage's blocks as a module that keeps its activations, or computes them again in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from typing import Callable, Container, Iterator, List, Sequence, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from engines.compilation import compiled
from models.normalization import BatchNormAct
from models.preprocess import Preprocess
from models.stages import BlockList
from models.stochastic import Draws
from parallel.work import Boundary


class Stage(nn.Module):
    """Consecutive blocks. Those in `recompute` keep their input only (GPipe's re-materialisation, 1811.06965).

    What is computed again is the same to the bit: random layers draw for the micro batch that they drew for, and
    running statistics do not move a second time. Compiled, it may be rounded differently: without and with a backward
    pass to come, a block is two programs.
    """

    def __init__(
        self,
        blocks: BlockList,
        draws: Draws,
        recompute: Container[str],
        memory_format: torch.memory_format = torch.contiguous_format,
    ):
        """Args: recompute: names of blocks; memory_format: of activations within the stage. Its output is contiguous,
        and so may its input be: in this form activations travel between stages."""
        super().__init__()
        self._draws, self._memory_format = draws, memory_format
        # A block without parameters, as the cast of the images, is computed again with the one behind it: its output
        # takes four times the memory of its input.
        self._segments: List[Tuple[nn.Module, bool]] = []
        waiting: list = []
        for name in blocks.names:
            waiting.append(blocks.block(name))
            if any(True for _ in waiting[-1].parameters()):
                self._segments.append((nn.Sequential(*waiting), name in recompute))
                waiting = []
        assert not waiting, "the last block has parameters"
        self._layers = nn.ModuleList(segment for segment, _ in self._segments)
        self._takes_images = isinstance(blocks.block(blocks.names[0]), Preprocess)
        self._compiled: Sequence[Callable] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._entered(x)
        for segment, run, recomputed in self._passes():
            x = self._recomputed(segment, run, x) if recomputed and torch.is_grad_enabled() else run(x)
        return x.contiguous()

    def compile(self, backend: str = "inductor") -> None:
        """From now on blocks are compiled, each when it is first computed. In training only: evaluation has batches of
        another size, and too few of them to make up for compiling once more."""
        self._compiled = compiled([segment for segment, _ in self._segments], backend)

    def interpret(self) -> None:
        """Takes `compile` back."""
        self._compiled = ()

    def dry_pass(self, x: torch.Tensor) -> None:
        """A training micro batch forward and backward, for what happens at the first one only, such as compiling.

        It leaves no trace in gradients, running statistics and draws.
        """
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        x = self._entered(x)
        if not self._takes_images:
            x = x.detach().requires_grad_()
        for segment, run, recomputed in self._passes():
            again = contextlib.nullcontext()
            if recomputed:
                with torch.no_grad():
                    run(x)
                again = _again(self._draws, self._draws.step, self._draws.micro_batch, segment)
            with again, torch.enable_grad():
                output = run(x)
            wanted = [tensor for tensor in (x, *segment.parameters()) if tensor.requires_grad]
            torch.autograd.grad(output, wanted, torch.zeros_like(output))  # no `.grad`, and no hook on it
            x = output.detach().requires_grad_()
        for buffer, value in before:
            buffer.copy_(value)

    def _passes(self) -> Iterator[Tuple[nn.Module, Callable, bool]]:
        """Each segment, what computes it, and whether it is to be computed again."""
        training = self._segments[0][0][-1].training
        runs = self._compiled if training and self._compiled else self._layers
        for (segment, recomputed), run in zip(self._segments, runs):
            yield segment, run, recomputed

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        """In the stage's memory format. Images get it together with their cast, in the first block."""
        return x if self._takes_images else x.contiguous(memory_format=self._memory_format)

    def _recomputed(self, segment: nn.Module, run: Callable, x: torch.Tensor) -> torch.Tensor:
        """Torch's reentrant form: the other one's hooks on each saved tensor cost a quarter of a step on a CPU.

        It gives its output a gradient only where an input has one, which images have not.
        """
        again = functools.partial(_again, self._draws, self._draws.step, self._draws.micro_batch, segment)

        def compute(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            with again() if torch.is_grad_enabled() else contextlib.nullcontext():
                return run(x)

        with_gradient = torch.empty(0, requires_grad=True)
        return checkpoint(compute, x, with_gradient, use_reentrant=True, preserve_rng_state=False)


@contextlib.contextmanager
def _again(draws: Draws, step: int, micro_batch: int, segment: nn.Module) -> Iterator[None]:
    norms = [module for module in segment.modules() if isinstance(module, BatchNormAct)]
    current = draws.step, draws.micro_batch
    draws.step, draws.micro_batch = step, micro_batch
    for norm in norms:
        norm.moves_statistics = False
    try:
        yield
    finally:
        draws.step, draws.micro_batch = current
        for norm in norms:
            norm.moves_statistics = True


def boundaries(parts: Sequence[Sequence[str]], model: BlockList, images: Boundary, dtype: torch.dtype) -> list:
    """Input of each part of the model, and output of the last: a Boundary each.

    Args:
        parts: names of the blocks of each.
        model: the whole model, on the meta device.
        images: of a micro batch.
        dtype: of activations.
    """
    found = [images]
    x = torch.empty(tuple(images.shape), dtype=images.dtype, device="meta")
    with torch.no_grad():
        for names in parts:
            x = model.part(names)(x)
            found.append(Boundary(tuple(x.shape), dtype))
    return found


def blocks_to_recompute(names: Sequence[str], recompute: object) -> frozenset:
    """The blocks that `parallel.recompute` means. Raises ValueError for one that is none."""
    if isinstance(recompute, bool):
        return frozenset(names) if recompute else frozenset()
    for name in recompute:
        if name not in names:
            raise ValueError(f"{name} is not a block; the blocks are {', '.join(names)}")
    return frozenset(recompute)
