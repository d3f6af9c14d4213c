"""CUDA graphs: the passes of a micro batch through a stage, recorded once, and each started as one launch from then on.

What the host does for a pass, hundreds of launches and autograd's bookkeeping, is done when it is recorded. Outside are
images, masks, loss and the sum of gradients. The first micro batches are computed as ever: libraries search and compile
in them. A recording is used only if it gives what the stage gives.

Source: Gray, Getting Started with CUDA Graphs (NVIDIA, 2019); torch.cuda.make_graphed_callables, which does not take
activations that are computed again, nor several micro batches between their passes.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call

from common.errors import first_line
from engines.listeners import StepListener
from engines.stage import Stage
from models.stochastic import RANDOM_LAYERS
from recipe.course import Update

DEVICES = ("cuda",)  # types that record
_FEW = 4  # micro batches of a replica in a step
_WARM_UP = 3  # micro batches of a kind before the first recording
_RECORDINGS = 8  # micro batches between their forward and backward pass that have one; others are computed without
_TOLERANCE = 0.01  # of the largest number: kernels may be others, but rounding does not get near

# Records what a function launches. Returns its tensors, whose memory is always the same, and what starts it again.
Record = Callable[[Callable[[], Sequence[torch.Tensor]]], Tuple[Sequence[torch.Tensor], Callable[[], None]]]


def recorder() -> Record:
    """For CUDA; what it records in turn shares memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Sequence[torch.Tensor]]) -> Tuple[Sequence[torch.Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            results = work()
        return results, graph.replay

    return record


def recorded(
    stages: Dict[int, Stage],
    mode: str,
    *,
    accumulation: int,
    device: torch.device,
    overlaps: bool,
) -> Dict[int, nn.Module]:
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
    if device.type not in DEVICES or mode == "never" or (overlaps and accumulation < _FEW):
        return stages
    return {number: Graphed(stage, recorder) for number, stage in stages.items()}


class GraphListener(StepListener):
    """Tells recordings that a step begins, and collects what could not be recorded."""

    def __init__(self, passes: Mapping[int, nn.Module]):
        """Follow the result of `recorded`, here `passes`."""
        self._graphed = [each for each in passes.values() if isinstance(each, Graphed)]

    def begin(self, update: Update) -> None:
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
    """A stage whose passes in training are recorded; in evaluation, and where recording fails, the stage itself.

    Output and gradients of the parameters are those of the stage, in memory that a later micro batch takes; no hook of
    the parameters is called. lines: for the user, about what could not be recorded; to be taken out.
    """

    def __init__(self, stage: Stage, recorder: Callable[[], Record]):
        super().__init__()
        self.stage, self.lines, self._recorder = stage, [], recorder
        self._kind: Any = None
        self._seen, self._on = 0, True
        self.recordings: List[_Recording] = []
        self._free: List[_Recording] = []
        self._with_gradient = torch.empty(0, requires_grad=True)  # images have none

    def begin(self) -> None:
        """Before the first micro batch of a step: none is between its passes, also where a step was broken off."""
        self._free = list(self.recordings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self._on and torch.is_grad_enabled()):
            return self.stage(x)
        kind = x.shape, x.dtype  # of any layout: the stage has its own
        if kind != self._kind:
            self._kind, self._seen, self.recordings, self._free = kind, 0, [], []
        self._seen += 1
        recording = self._recording(x)
        return self.stage(x) if recording is None else _Passes.apply(x, self._with_gradient, recording, self._free)

    def _recording(self, x: torch.Tensor) -> Optional[_Recording]:
        if self._free:
            return self._free.pop()
        if self._seen <= _WARM_UP or len(self.recordings) == _RECORDINGS:
            return None
        try:
            recording = _Recording(self.stage, x, self._recorder())
        except Exception as error:  # memory, a kernel that may not be recorded: there is no list of what goes wrong
            self._on, self.recordings, self._free = False, [], []
            self.lines.append(f"engine.graphs: passes are not recorded: {first_line(error)}")
            return None
        self.recordings.append(recording)
        return recording


class _Recording:
    """Forward and backward pass of a micro batch; between them its activations lie in the recording's memory."""

    def __init__(self, stage: Stage, x: torch.Tensor, record: Record):
        self._stage, self._within = stage, _Within(stage)
        self._parameters = dict(stage.named_parameters())
        self._layers = [layer for layer in stage.modules() if isinstance(layer, RANDOM_LAYERS) and layer.rate]
        self._masks = [mask.clone() for mask in self._drawn(len(x))]
        self._x = x.detach().clone().requires_grad_(x.requires_grad)
        self._dy = torch.empty(0)
        before = [(buffer, buffer.clone()) for buffer in stage.buffers()]
        expected = self._passes()
        (self._output,), self._forward = record(self._compute)
        self._gradients, self._backward = record(self._differentiate)
        self._y = None
        self._forward()
        self._backward()
        for name, one, other in zip(["output", *self._leaves], [self._output, *self._gradients], expected):
            assert _alike(one, other), f"{name} is not what it is without"
        for buffer, value in before:
            buffer.data.copy_(value)  # of which autograd need not know: another micro batch may be between its passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self._x.copy_(x)
            if self._masks:
                torch._foreach_copy_(self._masks, self._drawn(len(x)))
        self._forward()
        return self._output

    def backward(self, dy: torch.Tensor) -> Optional[torch.Tensor]:
        """x's gradient, if it has one. Those of the parameters are left in them."""
        found = dict(zip(self._leaves, self._gradients))
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad is found[name]:  # nobody has taken it since the last time
                parameter.grad = parameter.grad.clone()
        self._dy.copy_(dy)
        self._backward()
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                parameter.grad = found[name]
            else:
                parameter.grad.add_(found[name])
        return found["x"].clone() if "x" in found else None

    def _drawn(self, rows: int) -> List[torch.Tensor]:
        like = next(iter(self._parameters.values()))
        return [layer.draw(rows, like) for layer in self._layers]

    def _passes(self) -> List[torch.Tensor]:
        """The output and gradients of an output that grows everywhere alike, without a recording."""
        (output,) = self._compute()
        self._dy = torch.full_like(output, 1 / len(output))
        return [each.clone() for each in (output, *self._differentiate())]

    def _compute(self) -> List[torch.Tensor]:
        # Leaves of its own: those of the stage have hooks, and were first met on another stream.
        weights = {name: each.detach().requires_grad_(each.requires_grad) for name, each in self._parameters.items()}
        self._leaves: Dict[str, torch.Tensor] = {name: each for name, each in weights.items() if each.requires_grad}
        if self._x.requires_grad:
            self._x = self._x.detach().requires_grad_()
            self._leaves["x"] = self._x
        self._weights = {f"stage.{name}": each for name, each in weights.items()}
        self._y = self._run(lambda: self._stage(self._x))
        return [self._y.detach()]

    def _differentiate(self) -> List[torch.Tensor]:
        self._run(lambda: self._y.backward(self._dy))
        return [leaf.grad for leaf in self._leaves.values()]

    def _run(self, work: Callable[[], Any]) -> Any:
        """With the recording's leaves and masks: passes that are computed again look for them in the stage."""
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
        return work()


class _Passes(torch.autograd.Function):
    """The passes of a recording, which is free for another micro batch after the backward pass."""

    @staticmethod
    def forward(ctx, x, with_gradient, recording: _Recording, free: List[_Recording]):
        ctx.recording, ctx.free = recording, free
        return recording.forward(x).detach()

    @staticmethod
    def backward(ctx, dy):
        dx = ctx.recording.backward(dy)
        ctx.free.append(ctx.recording)
        return dx, None, None, None


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Up to rounding; what is not finite is so in both."""
    found, expected = found.float(), expected.float()
    largest = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * largest, equal_nan=True)
