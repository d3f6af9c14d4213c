"""A stage's blocks as a module: activations kept or computed again in the backward pass; blocks compiled if asked."""

from __future__ import annotations

import contextlib
import time
import types
from typing import Callable, Container, Dict, Iterator, Sequence, Tuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import ConfigError, first_line
from models.base import BlockList
from models.normalization import BatchNormAct
from models.preprocess import Preprocess
from models.stochastic import RANDOM_LAYERS, Draws
from parallel.work import Boundary

# Programs that one block may have: for each size of images, with a backward pass to come and without.
_PROGRAMS = 64


class Stage(nn.Module):
    """Consecutive blocks. Those in `recompute` keep their input only (GPipe's re-materialisation, 1811.06965).

    What is computed again has the same bits; not compiled, as with and without a backward pass a block is two programs.
    """

    def __init__(
        self,
        blocks: BlockList,
        draws: Draws,
        recompute: Container[str],
        memory_format: torch.memory_format = torch.contiguous_format,
    ):
        """Args: recompute: names of blocks. memory_format: of activations, within the stage and between stages: what it
        takes and returns, images and logits excepted, is as `sent` leaves it."""
        super().__init__()
        self._draws, self._memory_format = draws, memory_format
        # A block without parameters, as the cast of the images, is computed again with the one behind it: its output
        # takes four times the memory of its input.
        self._segments, self._recomputed, waiting = nn.ModuleList(), [], []
        for name in blocks.names:
            waiting.append(blocks.block(name))
            if any(True for _ in waiting[-1].parameters()):
                self._segments.append(nn.Sequential(*waiting))
                self._recomputed.append(name in recompute)
                waiting = []
        assert not waiting, "the last block has parameters"
        self._takes_images = isinstance(blocks.block(blocks.names[0]), Preprocess)
        self._compiled: Sequence[Callable] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self._entered(x)
        for segment, run, recomputed in self._passes():
            x = self._checkpointed(segment, run, x) if recomputed and torch.is_grad_enabled() else run(x)
        return sent(x, self._memory_format)

    def compile(self, mode: str = "default", backend: str = "inductor") -> None:
        """Compile each block when it is first computed, in training and in evaluation. Blocks that look alike share
        their program. Args: mode: of torch.compile."""
        torch._dynamo.config.recompile_limit = _PROGRAMS
        programs: Dict[str, Callable] = {}
        for segment in self._segments:
            programs.setdefault(repr(segment[-1]), _program(f"block_{len(programs)}", mode, backend))
        self._compiled = [_CompiledSegment(segment, programs[repr(segment[-1])]) for segment in self._segments]

    def dry_pass(self, x: torch.Tensor) -> None:
        """Compute a training micro batch forward and backward, for what happens only once, such as compiling.

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
                again = self._again(segment, (self._draws.step, self._draws.micro_batch))
            with again, torch.enable_grad():
                output = run(x)
            wanted = [tensor for tensor in (x, *segment.parameters()) if tensor.requires_grad]
            torch.autograd.grad(output, wanted, torch.zeros_like(output))  # no `.grad`, and no hook on it
            x = output.detach().requires_grad_()
        for buffer, value in before:
            buffer.copy_(value)

    def dry_evaluation(self, x: torch.Tensor) -> None:
        """Score a micro batch, for what happens only once."""
        blocks = [(segment, segment[-1].training) for segment in self._segments]
        for segment, _ in blocks:
            segment.eval()
        with torch.no_grad():
            self(x)
        for segment, training in blocks:
            segment.train(training)

    def _passes(self) -> Iterator[Tuple[nn.Module, Callable, bool]]:
        """Each segment, what computes it, and whether it is to be computed again."""
        return zip(self._segments, self._compiled or self._segments, self._recomputed)

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        """In the stage's memory format. Images get it together with their cast, in the first block."""
        if self._takes_images or self._memory_format == torch.contiguous_format:
            return x
        return x.permute(0, 3, 1, 2)

    def _checkpointed(self, segment: nn.Module, run: Callable, x: torch.Tensor) -> torch.Tensor:
        """Torch's reentrant form: the other one's hooks on each saved tensor cost a quarter of a step on a CPU.

        It gives its output a gradient only where an input has one, which images have not.
        """
        then = self._draws.step, self._draws.micro_batch

        def compute(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            with self._again(segment, then) if torch.is_grad_enabled() else contextlib.nullcontext():
                return run(x)

        with_gradient = torch.empty(0, requires_grad=True)
        return checkpoint(compute, x, with_gradient, use_reentrant=True, preserve_rng_state=False)

    @contextlib.contextmanager
    def _again(self, segment: nn.Module, then: Tuple[int, int]) -> Iterator[None]:
        """The segment draws for `then`, a step and micro batch, and its running statistics stand still."""
        draws, norms = self._draws, [module for module in segment.modules() if isinstance(module, BatchNormAct)]
        current = draws.step, draws.micro_batch
        draws.step, draws.micro_batch = then
        for norm in norms:
            norm.moves_statistics = False
        try:
            yield
        finally:
            draws.step, draws.micro_batch = current
            for norm in norms:
                norm.moves_statistics = True


def sent(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return activations, [N, C, H, W], as they travel between stages: contiguous, and [N, H, W, C] where stages
    compute channels-last, so that neither side copies them. Others, [N, classes], are contiguous."""
    if x.dim() == 4 and memory_format == torch.channels_last:
        x = x.permute(0, 2, 3, 1)
    return x.contiguous()


def boundaries(
    parts: Sequence[Sequence[str]],
    model: BlockList,
    images: Boundary,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> list:
    """Input of each part of the model, and output of the last: a Boundary each.

    Args:
        parts: names of the blocks of each.
        model: whole, on the meta device.
        dtype: of activations.
        memory_format: in which stages compute; with channels_last activations are [N, H, W, C].
    """
    found = [images]
    x = torch.empty(tuple(images.shape), dtype=images.dtype, device="meta")
    with torch.no_grad():
        for names in parts:
            x = model.part(names)(x)
            found.append(Boundary(tuple(sent(x, memory_format).shape), dtype))
    return found


def blocks_to_recompute(names: Sequence[str], recompute: object) -> frozenset:
    """The blocks that `parallel.recompute` means. Raises ConfigError for one that the model does not have."""
    if isinstance(recompute, bool):
        return frozenset(names if recompute else ())
    for name in recompute:
        if name not in names:
            raise ConfigError(f"parallel.recompute: {name} is not a block; the blocks are {', '.join(names)}")
    return frozenset(recompute)


def compile_stages(
    stages: Dict[int, Stage],
    entering: Sequence[Sequence[Boundary]],
    scored: Sequence[Boundary],
    device: torch.device,
    mode: str,
) -> Tuple[str, ...]:
    """Compile stages by a dry pass over each input in `entering`, or at their first use if there is none; return lines
    for the user. Where that fails they are computed uncompiled: a missing compiler is no reason not to train.

    Args: stages: those of this process, by number. entering: for each size of images, what enters each stage in
    training. scored: what enters each in evaluation. mode: of torch.compile.
    """
    started = time.perf_counter()
    for stage in stages.values():
        stage.compile(mode)

    def zeros(boundary: Boundary) -> torch.Tensor:
        return torch.zeros(tuple(boundary.shape), dtype=boundary.dtype, device=device)

    try:
        for number, stage in stages.items() if entering else ():
            for inputs in entering:
                stage.dry_pass(zeros(inputs[number]))
            stage.dry_evaluation(zeros(scored[number]))
    except Exception as error:  # a compiler may be missing, half installed or wrong: there is no list of its errors
        for stage in stages.values():
            stage._compiled = ()
        return (f"engine.compile: the model stays uncompiled: {first_line(error)}",)
    return (f"engine.compile: the model compiled in {time.perf_counter() - started:.0f} s",) if entering else ()


class _CompiledSegment:
    """Blocks without parameters, which cast images of changing strides, as they are; then the other one, compiled."""

    def __init__(self, segment: nn.Sequential, program: Callable):
        self._before, self._block, self._program = segment[:-1], segment[-1], program
        self._random = [layer for layer in self._block.modules() if isinstance(layer, RANDOM_LAYERS) and layer.rate]
        self._like = next(self._block.parameters())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._before(x)
        waiting = [layer for layer in self._random if layer.mask is None] if self._block.training else []
        for layer in waiting:
            layer.mask = layer.draw(len(x), self._like)
        try:
            return self._program(self._block, x)
        finally:
            for layer in waiting:
                layer.mask = None


def _program(name: str, mode: str, backend: str) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A compiled function with a code object of its own: torch keeps programs by it, and tries one after the other."""

    def compute(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return block(x)

    own = types.FunctionType(compute.__code__.replace(co_name=name), compute.__globals__, name)
    if backend != "inductor":
        return torch.compile(own, backend=backend, dynamic=False)
    return torch.compile(own, mode=mode, dynamic=False)
