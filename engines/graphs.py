"""CUDA graphs: passes of a micro batch through a stage that are recorded once.

From then on each is started as one launch. The host's work for a pass, hundreds of launches and
autograd's bookkeeping, is done when it is recorded. Outside are images, masks, loss and the sum of
gradients. The first micro batches are computed as ever: libraries search and compile in them. A
recording is used only if it gives what the stage gives.

Source: Gray, Getting Started with CUDA Graphs (NVIDIA, 2019); torch.cuda.make_graphed_callables,
which does not take activations that are computed again, nor several micro batches between their
passes.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from common.errors import first_line
from engines.listeners import StepListener
from engines.stage import Stage
from models.stochastic import dropping
from recipe.course import Update

Result = TypeVar("Result")

DEVICES = ("cuda",)  # types that record
_FEW = 4  # micro batches of a replica in a step
_WARM_UP = 3  # micro batches of a kind before the first recording
# Micro batches between their forward and backward pass that have a recording; others are computed
# without.
_RECORDINGS = 8
# Share of the largest number: kernels may be others, but rounding does not get near.
_TOLERANCE = 0.01

_Work = Callable[[], Sequence[torch.Tensor]]
# Records what a function launches. Returns its tensors, whose memory is always the same, and what
# starts it again.
Record = Callable[[_Work], Tuple[Sequence[torch.Tensor], Callable[[], None]]]


def recorder() -> Record:
    """Return a recorder for CUDA; what it records in turn shares memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: _Work) -> Tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Record the `work`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay

    return record


def recorded(
    stages: Mapping[int, Stage],
    mode: str,
    *,
    accumulation: int,
    device: torch.device,
    overlaps: bool,
) -> Mapping[int, nn.Module]:
    """Return what computes the training passes of some stages, recorded where that is possible.

    Args:
        stages: by number.
        mode: `engine.graphs`.
        accumulation: micro batches of a replica in a step.
        device: that computes.
        overlaps: whether hooks of the parameters begin the exchange in the last backward pass of a
            step, which recordings do not call. That is worth more where there are few others.

    Returns:
        `stages` itself, or a `Graphed` for each.
    """
    if device.type not in DEVICES or mode == "never":
        return stages
    if overlaps and accumulation < _FEW:
        return stages
    return {number: Graphed(stage, recorder) for number, stage in stages.items()}


class GraphListener(StepListener):
    """Listener that tells recordings of a step's begin, and collects what could not be recorded."""

    def __init__(self, passes: Mapping[int, nn.Module]):
        """Follow the result of `recorded`, here `passes`."""
        self._graphed = [stage for stage in passes.values() if isinstance(stage, Graphed)]

    def begin(self, update: Update) -> None:
        """Free all recordings before an `update`."""
        for graphed in self._graphed:
            graphed.begin()

    def take_lines(self) -> List[str]:
        """Return lines for the user that were not returned before."""
        lines = []
        for graphed in self._graphed:
            lines += graphed.lines
            graphed.lines.clear()
        return lines


class Graphed(nn.Module):
    """A stage whose passes in training are recorded.

    In evaluation, and where recording fails, it is the stage itself. Output and gradients of the
    parameters are those of the stage, in memory that a later micro batch takes. Hooks on gradients
    (`register_hook`) are called, those on what was accumulated are not.

    lines: for the user, about what could not be recorded; to be taken out.
    recordings: those that exist.
    """

    def __init__(self, stage: Stage, recorder: Callable[[], Record]):
        """
        Args:
            stage: whose passes are recorded.
            recorder: makes what records one micro batch.
        """
        super().__init__()
        self.stage = stage
        self.lines: List[str] = []
        self.recordings: List[_Recording] = []
        self._recorder = recorder
        self._free: List[_Recording] = []
        self._kind: Optional[Tuple[torch.Size, torch.dtype]] = None
        self._seen = 0  # micro batches of this kind
        self._records = True
        self._with_gradient = torch.empty(0, requires_grad=True)  # images have none

    def begin(self) -> None:
        """Begin a step: no micro batch is between its passes, also where one was broken off."""
        self._free = list(self.recordings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the stage on `x`, images or activations."""
        if not (self._records and torch.is_grad_enabled()):
            return self.stage(x)
        # Of any layout: the stage has its own.
        kind = (x.shape, x.dtype)
        # A recording is of one shape and dtype: images of another size begin anew.
        if kind != self._kind:
            self._kind = kind
            self._seen = 0
            self._forget()
        self._seen += 1
        recording = self._recording(x)
        if recording is None:
            return self.stage(x)
        return _Passes.apply(x, self._with_gradient, recording, self._free)

    def _recording(self, x: torch.Tensor) -> Optional[_Recording]:
        """Return a recording that no micro batch uses, or a new one; None where there is none."""
        if self._free:
            return self._free.pop()
        if self._seen <= _WARM_UP or len(self.recordings) == _RECORDINGS:
            return None
        try:
            recording = _Recording(self.stage, x, self._recorder())
        except Exception as error:
            # Memory, a kernel that may not be recorded: there is no list of what goes wrong.
            self._records = False
            self._forget()
            self.lines.append(f"engine.graphs: passes are not recorded: {first_line(error)}")
            return None
        self.recordings.append(recording)
        return recording

    def _forget(self) -> None:
        self.recordings = []
        self._free = []


class _Recording:
    """Forward and backward pass of a micro batch.

    Between them its activations lie in the recording's memory.
    """

    def __init__(self, stage: Stage, x: torch.Tensor, record: Record):
        """Record the passes of a stage, and compare them with the stage's own.

        Args:
            stage: whose passes are recorded.
            x: of the shape and dtype of what enters.
            record: see `Record`.
        """
        self._stage = stage
        self._within = _Within(stage)
        self._parameters = dict(stage.named_parameters())
        self._trained = {
            name: each for name, each in self._parameters.items() if each.requires_grad
        }
        # Layers that draw: their masks are inputs of a recording, as the images are. Those of
        # frozen modules do not: they are as in evaluation.
        self._layers = [layer for layer in dropping(stage) if layer.training]
        # Copies: a recording reads and writes the same memory whenever it is started.
        self._masks = [mask.clone() for mask in self._drawn(len(x))]
        self._x = x.detach().clone().requires_grad_(x.requires_grad)
        self._y: Any = None
        self._dy = torch.empty(0)

        # Each of these passes moves running statistics, which are put back below.
        before = [(buffer, buffer.clone()) for buffer in stage.buffers()]
        try:
            expected = self._passes()
            (self._output,), self._forward = record(self._compute)
            self._gradients, self._backward = record(self._differentiate)
            self._y = None
            self._check(expected)
        finally:
            # Autograd need not know: another micro batch may be between its passes.
            for buffer, value in before:
                buffer.data.copy_(value)

    def _check(self, expected: Sequence[torch.Tensor]) -> None:
        """Start the recordings, which must give what the stage gives, `expected`.

        Raises AssertionError: they do not.
        """
        self._forward()
        self._backward()
        results = zip(["output", *self._leaves], [self._output, *self._gradients], expected)
        for name, result, tensor in results:
            assert _alike(result, tensor), f"{name} is not what it is without"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output of `x`."""
        # Masks are drawn outside: a recording would repeat its first draws for ever.
        with torch.no_grad():
            self._x.copy_(x)
            if self._masks:
                torch._foreach_copy_(self._masks, self._drawn(len(x)))
        self._forward()
        return self._output

    def backward(self, dy: torch.Tensor) -> Optional[torch.Tensor]:
        """Add the gradients of the parameters to theirs.

        Args:
            dy: gradient of the output.

        Returns:
            The gradient of x, if it has one.
        """
        gradients = dict(zip(self._leaves, self._gradients))
        # A gradient that nobody has taken since the last time lies where the next one comes.
        for name, parameter in self._trained.items():
            if parameter.grad is not None and parameter.grad is gradients[name]:
                parameter.grad = parameter.grad.clone()
        self._dy.copy_(dy)
        self._backward()
        for name, parameter in self._trained.items():
            gradient = _hooked(parameter, gradients[name])
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
        # A copy: the recording is free from here on, and another micro batch may overwrite it.
        return gradients["x"].clone() if "x" in gradients else None

    def _drawn(self, rows: int) -> List[torch.Tensor]:
        """Draw the masks of the current micro batch."""
        like = next(iter(self._parameters.values()))
        return [layer.draw(rows, like) for layer in self._layers]

    def _passes(self) -> List[torch.Tensor]:
        """Return output and gradients without a recording, for an equal gradient everywhere."""
        (output,) = self._compute()
        self._dy = torch.full_like(output, 1 / len(output))
        return [tensor.clone() for tensor in (output, *self._differentiate())]

    def _compute(self) -> List[torch.Tensor]:
        """Make the forward pass."""
        # With leaves of its own: those of the stage have hooks, and were first met on another
        # stream.
        self._weights: Dict[str, torch.Tensor] = {}
        self._leaves: Dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            weight = parameter.detach().requires_grad_(parameter.requires_grad)
            self._weights[f"stage.{name}"] = weight
            if weight.requires_grad:
                self._leaves[name] = weight
        if self._x.requires_grad:
            self._x = self._x.detach().requires_grad_()
            self._leaves["x"] = self._x
        self._y = self._run(lambda: self._stage(self._x))
        return [self._y.detach()]

    def _differentiate(self) -> List[torch.Tensor]:
        """Make the backward pass."""
        self._run(lambda: self._y.backward(self._dy))
        gradients = []
        for name, leaf in self._leaves.items():
            assert leaf.grad is not None, f"the output does not depend on {name}"
            gradients.append(leaf.grad)
        return gradients

    def _run(self, work: Callable[[], Result]) -> Result:
        """Call `work` with the recording's leaves and masks.

        Passes that are computed again look for them in the stage.
        """
        for layer, mask in zip(self._layers, self._masks):
            layer.mask = mask
        try:
            return functional_call(self._within, self._weights, (work,))
        finally:
            for layer in self._layers:
                layer.mask = None


class _Within(nn.Module):
    """Calls a function, which `functional_call` does with other parameters."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def forward(self, work: Callable[[], Any]) -> Any:
        """Call `work`."""
        return work()


class _Passes(torch.autograd.Function):
    """The passes of a recording, which is free for another micro batch after the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        with_gradient: torch.Tensor,
        recording: _Recording,
        free: List[_Recording],
    ) -> torch.Tensor:
        """Compute the output of `x`."""
        ctx.recording = recording
        ctx.free = free
        # The output is no copy: this recording is not free before its backward pass.
        return recording.forward(x).detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Tuple[Optional[torch.Tensor], None, None, None]:
        """Return the gradient of x from `dy`, that of the output."""
        dx = ctx.recording.backward(dy)
        # To its own step's list: one that was broken off must not free what a later step uses.
        ctx.free.append(ctx.recording)
        return dx, None, None, None


def _hooked(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient as the hooks of its parameter leave it.

    A recording differentiates leaves of its own, so autograd does not call the hooks, by which the
    noise scale is measured. torch keeps them in this attribute (seen in 2.11 and 2.14); a torch
    without it would fail the test that compares measured noise.
    """
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        if changed is not None:
            gradient = changed
    return gradient


def _alike(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether tensors are equal within rounding, also in where NaN and infinity are."""
    result = result.float()
    expected = expected.float()
    # The largest finite number: with an infinite tolerance all would be alike.
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    tolerance = _TOLERANCE * largest
    return torch.allclose(result, expected, rtol=0.0, atol=tolerance, equal_nan=True)
