"""A stage's blocks as a module.

Activations are kept for the backward pass or computed again in it; blocks are compiled on demand.
"""

from __future__ import annotations

import contextlib
import time
import types
from typing import (
    Callable,
    Container,
    ContextManager,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.errors import first_line
from models import balance
from models.base import BlockList
from models.meta import without_memory
from models.normalization import BatchNormAct
from models.preprocess import Preprocess
from models.stochastic import Draws, dropping
from parallel.work import Boundary

# Programs that one block may have: for each size of images, with a backward pass to come and
# without.
_PROGRAMS = 64

Recompute = Union[bool, List[str]]  # all blocks, none, or those of these names


class Stage(nn.Module):
    """Consecutive blocks of a model, some of which keep only their input for the backward pass.

    What is computed again has the same bits, unless it is compiled: with and without a backward
    pass a block is two programs.

    Source: GPipe's re-materialisation (Huang et al., 2019, arXiv:1811.06965).
    """

    def __init__(
        self,
        blocks: BlockList,
        draws: Draws,
        recompute: Container[str],
        memory_format: torch.memory_format = torch.contiguous_format,
    ):
        """
        Args:
            blocks: of the stage.
            draws: of their random layers.
            recompute: names of the blocks whose activations are computed again.
            memory_format: of activations within the stage. It takes and returns them as
                `as_sent_between_stages` leaves them, apart from images and logits.
        """
        super().__init__()
        self._draws = draws
        self._memory_format = memory_format
        self._sequences: List[nn.Sequential] = []
        self._recomputed: List[bool] = []
        # A block without parameters, such as the cast of the images, is computed again with the
        # one behind it: its output takes four times the memory of its input.
        waiting: List[nn.Module] = []
        for name in blocks.names:
            block = blocks.block(name)
            waiting.append(block)
            if any(True for _ in block.parameters()):
                self._sequences.append(nn.Sequential(*waiting))
                self._recomputed.append(name in recompute)
                waiting = []
        # Behind the last block with parameters, as the pooling before a classifier that opens the
        # next stage: nothing follows in whose memory they could be computed again.
        if waiting:
            self._sequences.append(nn.Sequential(*waiting))
            self._recomputed.append(False)
        # Modules of a plain list would not be found: neither their parameters nor their buffers.
        self._segments = nn.ModuleList(self._sequences)
        self._takes_images = isinstance(blocks.block(blocks.names[0]), Preprocess)
        self._compiled: Sequence[Callable] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the blocks on `x`, images or activations."""
        x = self._to_memory_format(x)
        for segment, compute, recomputed in self._passes():
            if recomputed and torch.is_grad_enabled() and _has_gradient(segment, x):
                x = self._checkpointed(segment, compute, x)
            else:
                x = compute(x)
        return as_sent_between_stages(x, self._memory_format)

    def compile(self, mode: str = "default", backend: str = "inductor") -> None:
        """Compile each block when it is first computed, in training and in evaluation.

        Blocks that look alike share their program.

        Args:
            mode: of torch.compile.
            backend: of torch.compile; only "inductor" has modes.
        """
        # Beyond its limit torch computes a block uncompiled, and says so only in a log.
        torch._dynamo.config.recompile_limit = _PROGRAMS
        programs: Dict[str, Callable] = {}
        compiled: List[Callable] = []
        for segment in self._sequences:
            # As with the casts of images: blocks without parameters are not worth a program.
            if not any(True for _ in segment.parameters()):
                compiled.append(segment)
                continue
            structure = repr(segment[-1])
            if structure not in programs:
                programs[structure] = _program(f"block_{len(programs)}", mode, backend)
            compiled.append(_CompiledSegment(segment, programs[structure]))
        self._compiled = compiled

    def uncompile(self) -> None:
        """Compute blocks as they are from here on."""
        self._compiled = ()

    def dry_pass(self, x: torch.Tensor) -> None:
        """Compute a training micro batch forward and backward, for what happens only once.

        That is compiling, for instance. No trace is left in gradients, running statistics and
        draws.

        Args:
            x: what enters the stage.
        """
        before = [(buffer, buffer.clone()) for buffer in self.buffers()]
        try:
            self._pass_by_segments(x)
        finally:
            # Also where a compiler fails: training goes on without it.
            for buffer, value in before:
                buffer.copy_(value)

    def _pass_by_segments(self, x: torch.Tensor) -> None:
        """Compute each segment forward and backward by itself: see `dry_pass`."""
        x = self._to_memory_format(x)
        # Activations have a gradient in training, and without one a block is another program.
        if not self._takes_images:
            x = x.detach().requires_grad_()
        # Each segment goes forward and backward by itself, so that little memory is needed.
        for segment, compute, recomputed in self._passes():
            # Training computes it twice, the first time without a gradient: these are two programs.
            again: ContextManager[None] = contextlib.nullcontext()
            if recomputed:
                with torch.no_grad():
                    compute(x)
                again = self._again(segment, self._position())
            with again, torch.enable_grad():
                output = compute(x)
            inputs = [x, *segment.parameters()]
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            # Blocks before the first that is trained have no backward pass.
            if not wanted:
                x = output
                continue
            # Unlike backward() this fills no `.grad`, and calls no hook on it.
            torch.autograd.grad(output, wanted, torch.zeros_like(output))
            # Cut off from this segment, whose activations are not needed any more.
            x = output.detach().requires_grad_()

    def dry_evaluation(self, x: torch.Tensor) -> None:
        """Score a micro batch, for what happens only once.

        Args:
            x: what enters the stage.
        """
        modes = [(segment, segment[-1].training) for segment in self._sequences]
        for segment, _ in modes:
            segment.eval()
        with torch.no_grad():
            self(x)
        for segment, training in modes:
            segment.train(training)

    def _passes(self) -> Iterator[Tuple[nn.Module, Callable, bool]]:
        """Iterate over each segment, what computes it, and whether it is to be computed again."""
        return zip(self._sequences, self._compiled or self._sequences, self._recomputed)

    def _to_memory_format(self, x: torch.Tensor) -> torch.Tensor:
        # Images get their layout together with their cast, in the first block.
        if self._takes_images or self._memory_format == torch.contiguous_format:
            return x
        return x.permute(0, 3, 1, 2)

    def _position(self) -> Tuple[int, int]:
        """Return the step and micro batch whose random numbers are drawn."""
        return self._draws.step, self._draws.micro_batch

    def _checkpointed(
        self,
        segment: nn.Module,
        compute: Callable,
        x: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a segment now, and again in the backward pass.

        This is torch's reentrant form: the other one's hooks on each saved tensor cost a quarter
        of a step on a CPU.
        """
        position = self._position()

        def run(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            """Compute the segment on `x`, a second time as it was the first time."""
            # Torch enables gradients only when it calls a second time.
            if not torch.is_grad_enabled():
                return compute(x)
            with self._again(segment, position):
                return compute(x)

        # The reentrant form gives its output a gradient only where an input has one, which images
        # have not.
        with_gradient = torch.empty(0, requires_grad=True)
        return checkpoint(run, x, with_gradient, use_reentrant=True, preserve_rng_state=False)

    @contextlib.contextmanager
    def _again(self, segment: nn.Module, position: Tuple[int, int]) -> Iterator[None]:
        """Draw the numbers of a step and micro batch, and do not update running statistics."""
        draws = self._draws
        norms = [module for module in segment.modules() if isinstance(module, BatchNormAct)]
        current = self._position()
        draws.step, draws.micro_batch = position
        for norm in norms:
            norm.moves_statistics = False
        try:
            yield
        finally:
            draws.step, draws.micro_batch = current
            for norm in norms:
                norm.moves_statistics = True


def _has_gradient(segment: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a segment has a backward pass, for its parameters or for its input `x`."""
    return x.requires_grad or any(parameter.requires_grad for parameter in segment.parameters())


def as_sent_between_stages(x: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return activations as they travel between stages, so that neither side copies them.

    Args:
        x: [N, C, H, W], or of another number of dimensions, such as logits, [N, classes].
        memory_format: in which stages compute.

    Returns:
        A contiguous tensor: [N, H, W, C] of images' activations where stages compute
        channels-last, else of the same shape.
    """
    if x.dim() == 4 and memory_format == torch.channels_last:
        x = x.permute(0, 2, 3, 1)
    return x.contiguous()


def boundaries(
    parts: Sequence[Sequence[str]],
    model: BlockList,
    images: Boundary,
    dtype: torch.dtype,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> List[Boundary]:
    """Return what enters each part of a model, and what leaves the last.

    Args:
        parts: names of the blocks of each.
        model: whole, on the meta device.
        images: what enters the first part.
        dtype: of activations.
        memory_format: in which stages compute; with channels_last activations are [N, H, W, C].
    """
    shapes = [images]
    with torch.no_grad(), without_memory():
        x = torch.empty(tuple(images.shape), dtype=images.dtype)
        for names in parts:
            x = model.part(names)(x)
            shapes.append(Boundary(tuple(as_sent_between_stages(x, memory_format).shape), dtype))
    return shapes


def blocks_to_recompute(names: Sequence[str], recompute: Recompute) -> FrozenSet[str]:
    """Return the names of the blocks that a recipe computes again in the backward pass.

    Args:
        names: of all blocks of the model.
        recompute: `parallel.recompute`.

    Raises:
        ConfigError: a name that the model does not have.
    """
    if isinstance(recompute, bool):
        return frozenset(names if recompute else ())
    balance.check_blocks("parallel.recompute", recompute, names)
    return frozenset(recompute)


def compile_stages(
    stages: Dict[int, Stage],
    entering: Sequence[Sequence[Boundary]],
    scored: Sequence[Boundary],
    device: torch.device,
    mode: str,
) -> Tuple[str, ...]:
    """Compile stages by dry passes, or at their first use if there is nothing to pass.

    Where that fails they are computed uncompiled: a missing compiler is no reason not to train.

    Args:
        stages: those of this process, by number.
        entering: what enters each stage in training, for each size of images.
        scored: what enters each stage in evaluation.
        device: that computes.
        mode: of torch.compile.

    Returns:
        Lines for the user.
    """
    started = time.perf_counter()
    for stage in stages.values():
        stage.compile(mode)
    # An engine that does not train compiles as it scores.
    if not entering:
        return ()
    try:
        dry_passes(stages, entering, scored, device)
    except Exception as error:
        # A compiler may be missing, half installed or wrong: there is no list of its errors.
        for stage in stages.values():
            stage.uncompile()
        return (f"engine.compile: the model stays uncompiled: {first_line(error)}",)
    return (f"engine.compile: the model compiled in {time.perf_counter() - started:.0f} s",)


def dry_passes(
    stages: Dict[int, Stage],
    entering: Sequence[Sequence[Boundary]],
    scored: Sequence[Boundary],
    device: torch.device,
) -> None:
    """Compute what stages compute in a run, once for each shape, for what happens only once.

    Args:
        stages: see `compile_stages`.
        entering: see `compile_stages`; nothing where nothing is trained.
        scored: see `compile_stages`.
        device: that computes.
    """
    for number, stage in stages.items():
        for inputs in entering:
            stage.dry_pass(_zeros(inputs[number], device))
        stage.dry_evaluation(_zeros(scored[number], device))


def _zeros(boundary: Boundary, device: torch.device) -> torch.Tensor:
    return torch.zeros(tuple(boundary.shape), dtype=boundary.dtype, device=device)


class _CompiledSegment:
    """A segment whose last block is compiled.

    The blocks before it are not: they cast images, whose strides change.
    """

    def __init__(self, segment: nn.Sequential, program: Callable):
        self._before = segment[:-1]
        self._block = segment[-1]
        self._program = program
        self._like = next(self._block.parameters())
        self._random = dropping(self._block)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._before(x)
        # Masks are drawn outside of the program, unless somebody has set them already. Layers of
        # frozen modules have none, also where another part of the block is trained.
        waiting = []
        for layer in self._random:
            if layer.training and layer.mask is None:
                waiting.append(layer)
        for layer in waiting:
            layer.mask = layer.draw(len(x), self._like)
        try:
            return self._program(self._block, x)
        finally:
            for layer in waiting:
                layer.mask = None


def _program(
    name: str,
    mode: str,
    backend: str,
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return a compiled function that calls a block."""

    def compute(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call the `block`."""
        return block(x)

    # Torch keeps programs by code object, and tries one after the other: so each has its own.
    code = compute.__code__.replace(co_name=name)
    function = types.FunctionType(code, compute.__globals__, name)
    if backend != "inductor":
        return torch.compile(function, backend=backend, dynamic=False)
    return torch.compile(function, mode=mode, dynamic=False)
