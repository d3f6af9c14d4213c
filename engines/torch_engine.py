"""The engine for CPU and CUDA: plain PyTorch, one process."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from typing import Iterator, List

import torch
from torch import nn
from torch.nn import functional as F

from data.loader import MicroBatch
from engines.base import Counts, Engine, StepResult
from models.efficientnet import build
from models.stages import BlockList, split_names
from optim import factory
from optim.half_weights import WeightState
from optim.loss_scale import LossScale
from parallel.topology import Topology
from recipe.batch import Batch
from recipe.config import Recipe
from recipe.errors import ConfigError

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class TorchEngine(Engine):
    """Computes all stages of one replica on one device, accumulating gradients in float32."""

    def __init__(self, recipe: Recipe, batch: Batch, topology: Topology):
        self.batch, self.topology = batch, topology
        self.device = _device(recipe)
        if self.device.type == "cuda":
            _set_determinism(recipe.run.deterministic)
        self._compute = _compute_dtype(recipe, self.device)
        self._classes = recipe.model.classes
        self._label_smoothing = recipe.data.label_smoothing
        self._model = build(recipe.model, recipe.run.seed).to(self.device, self._compute)
        _check_cuts(recipe, self._model)
        norms = _norm_parameters(self._model)
        self.weights = WeightState(
            self._model.named_parameters(),
            lambda parameters: factory.create(recipe.optimizer, parameters, norms),
            dtype=_DTYPES[recipe.precision.weights],
            rounding=recipe.precision.rounding,
            seed=recipe.run.seed,
        )
        self._loss_scale = LossScale(recipe.precision.loss_scale, recipe.precision.dynamic_loss_scale, self.device)

    def train_step(
        self, micro_batches: Iterator[MicroBatch], step: int, lr: float, measure: bool = False
    ) -> StepResult:
        self._model.train()
        self.weights.zero_gradients()
        loss = torch.zeros((), device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        images, pulled = 0, 0
        unreadable: List[str] = []
        for micro_batch in itertools.islice(micro_batches, self.batch.accumulation):
            micro_loss, micro_correct = self._forward_backward(micro_batch, step)
            loss += micro_loss
            correct += micro_correct
            images += micro_batch.valid
            pulled += 1
            unreadable.extend(micro_batch.unreadable)
        assert pulled == self.batch.accumulation, f"{pulled} of {self.batch.accumulation} micro batches came"
        divisor = self._loss_scale.scale * self.batch.accumulation
        finite, norms = self.weights.update(step, lr, divisor, measure)
        self._loss_scale.update(finite)
        return StepResult(
            loss / self.batch.accumulation,
            correct,
            images,
            self._loss_scale.skipped,
            self._loss_scale.skipped_in_row,
            self._loss_scale.scale,
            norms,
            tuple(unreadable),
        )

    def evaluate_step(self, batch: MicroBatch) -> Counts:
        self._model.eval()
        with torch.no_grad():
            images, labels = self._to_device(batch)
            logits = self._model(images)[: batch.valid].float()
            labels = labels[: batch.valid]
            best = logits.topk(min(5, self._classes), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        return Counts(batch.valid, loss, best[:, 0].sum(), best.any(1).sum())

    def state_dict(self) -> dict:
        return {**self.weights.state_dict(), "loss_scale": self._loss_scale.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        if "loss_scale" not in state:
            raise ValueError("loss_scale is missing")
        self.weights.load_state_dict(state)
        self._loss_scale.load_state_dict(state["loss_scale"])

    def peak_flops(self) -> float:
        size = 8192 if self.device.type == "cuda" else 1024
        left = torch.randn(size, size, device=self.device).to(self._compute)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            left @ left
            self.synchronize()
            times.append(time.perf_counter() - start)
        return 2 * size**3 / statistics.median(times[1:])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forward_backward(self, batch: MicroBatch, step: int) -> tuple:
        """Adds a micro batch's gradients to the accumulators; its mean loss and its hits, on the device.

        An image that was left out counts as an image with loss 0, so every other one keeps its weight.
        """
        images, labels = self._to_device(batch)
        self._model.draws.step, self._model.draws.micro_batch = step, batch.number
        logits = self._model(images)[: batch.valid].float()
        labels = labels[: batch.valid]
        losses = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=self._label_smoothing)
        loss = losses / len(images)
        (loss * self._loss_scale.scale).backward()
        self.weights.accumulate()
        return loss.detach(), (logits.detach().argmax(1) == labels).sum()

    def _to_device(self, batch: MicroBatch) -> tuple:
        return batch.images.to(self.device, non_blocking=True), batch.labels.to(self.device, non_blocking=True)


def _device(recipe: Recipe) -> torch.device:
    wanted = recipe.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device cuda: PyTorch finds no CUDA device here; use run.device=cpu or auto")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    if recipe.precision.compute == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    return _DTYPES[recipe.precision.compute]


def _set_determinism(wanted: bool) -> None:
    """Process-wide switches of torch. Shapes never change within a run, so cuDNN may search for kernels."""
    torch.backends.cudnn.benchmark = not wanted
    torch.backends.cudnn.deterministic = wanted
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _check_cuts(recipe: Recipe, model: BlockList) -> None:
    """One process computes all stages whatever the cuts, but a recipe that names wrong ones is wrong everywhere."""
    try:
        split_names(model.names, recipe.parallel.split)
    except ValueError as error:
        raise ConfigError(f"parallel.split: {error}") from None


def _norm_parameters(model: nn.Module) -> List[str]:
    return [
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.GroupNorm)
        for name, _ in module.named_parameters(recurse=False)
    ]
