"""The engine for CPU and CUDA: plain PyTorch, one process."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from typing import Dict, Iterator, List, Tuple

import torch
from torch.nn import functional as F

from data import mixing
from data.loader import MicroBatch
from engines.base import AVERAGES, Counts, Engine, StepResult
from models.efficientnet import build
from models.normalization import BatchNormAct, norm_parameters
from models.stages import BlockList, split_names
from optim import factory
from optim.averaging import WeightAverage
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
        self._classes, self._seed, self._data = recipe.model.classes, recipe.run.seed, recipe.data
        self._model = build(recipe.model, recipe.run.seed).to(self.device, self._compute)
        _check_cuts(recipe, self._model)
        norms = norm_parameters(self._model)
        self._buffers = _persistent_buffers(self._model)
        self._uses_batch_statistics = any(isinstance(module, BatchNormAct) for module in self._model.modules())
        self.weights = WeightState(
            self._model.named_parameters(),
            lambda parameters: factory.create(recipe.optimizer, parameters, norms),
            dtype=_DTYPES[recipe.precision.weights],
            rounding=recipe.precision.rounding,
            seed=recipe.run.seed,
        )
        self._loss_scale = LossScale(recipe.precision.loss_scale, recipe.precision.dynamic_loss_scale, self.device)
        decays = (recipe.average.step_decay, recipe.average.epoch_decay)
        self._averages = {
            name: WeightAverage(decay, self._averaged()) for name, decay in zip(AVERAGES, decays) if decay is not None
        }

    def train_step(
        self, micro_batches: Iterator[MicroBatch], step: int, lr: float, measure: bool = False
    ) -> StepResult:
        self._model.train()
        self.weights.zero_gradients()
        statistics_before = [buffer.clone() for buffer in self._buffers.values()]
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
        for buffer, before in zip(self._buffers.values(), statistics_before):
            buffer.copy_(torch.where(finite, buffer, before))
        if "step_average" in self._averages:
            self._averages["step_average"].add(self._averaged(), counts=finite)
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

    def end_epoch(self) -> None:
        if "epoch_average" in self._averages:
            self._averages["epoch_average"].add(self._averaged())

    def averages(self) -> Tuple[str, ...]:
        return tuple(name for name, average in self._averages.items() if average.count)

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        if weights == "trained":
            yield
            return
        average, trained = self._averages[weights].tensors, [buffer.clone() for buffer in self._buffers.values()]
        with self.weights.shown(average[0]):
            try:
                _copy_all(self._buffers.values(), average[1:])
                yield
            finally:
                _copy_all(self._buffers.values(), trained)

    def evaluate_step(self, batch: MicroBatch) -> Counts:
        logits = self.predict_step(batch)
        labels = batch.labels[: batch.valid].to(self.device, non_blocking=True)
        best = logits.topk(min(5, self._classes), dim=1).indices == labels[:, None]
        loss = F.cross_entropy(logits.double(), labels, reduction="sum")
        return Counts(batch.valid, loss, best[:, 0].sum(), best.any(1).sum())

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        self._model.eval()
        with torch.no_grad():
            return self._model(batch.images.to(self.device, non_blocking=True))[: batch.valid].float()

    def shapes(self) -> Dict[str, Tuple[int, ...]]:
        parameters = {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}
        return {**parameters, **{name: tuple(buffer.shape) for name, buffer in self._buffers.items()}}

    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        shapes = self.shapes()
        for name, tensor in weights.items():
            if name not in shapes:
                raise ValueError(f"{name} is unknown")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} is {list(tensor.shape)}, the model's is {list(shapes[name])}")
        self.weights.replace({name: tensor for name, tensor in weights.items() if name not in self._buffers})
        for name, buffer in self._buffers.items():
            if name in weights:
                buffer.copy_(weights[name])

    def state_dict(self) -> dict:
        averages = {
            name: {**self._by_name(average.tensors), "count": average.count.to("cpu", copy=True)}
            for name, average in self._averages.items()
        }
        state = {**self.weights.state_dict(), "loss_scale": self._loss_scale.state_dict(), "averages": averages}
        return {**state, "buffers": self._by_name(self._averaged())["buffers"]}

    def load_state_dict(self, state: dict) -> None:
        for part in ("loss_scale", "averages", "buffers"):
            if part not in state:
                raise ValueError(f"{part} is missing")
        for name in self._averages:
            if name not in state["averages"]:
                raise ValueError(f"averages.{name} is missing")
        self.weights.load_state_dict(state)
        self._loss_scale.load_state_dict(state["loss_scale"])
        _load_buffers(self._buffers, state["buffers"])
        for name, average in self._averages.items():
            saved = state["averages"][name]
            self.weights.load_flat(average.tensors[0], saved["weights"])
            _load_buffers(dict(zip(self._buffers, average.tensors[1:])), saved["buffers"])
            average.count = saved["count"].to(self.device, copy=True)

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
        rows, _, height, width = images.shape
        plan = mixing.draw(self._data, self._seed, step, batch.number, rows, batch.valid, height, width)
        targets = labels if plan is None else mixing.mix_targets(labels, plan, self._classes)
        if plan is not None:
            images = mixing.mix_images(images, plan)
        if self._uses_batch_statistics and 0 < batch.valid < rows:
            images = images[torch.arange(rows, device=self.device) % batch.valid]  # statistics of images, not padding
        self._model.draws.step, self._model.draws.micro_batch = step, batch.number
        logits = self._model(images)[: batch.valid].float()
        smoothing = self._data.label_smoothing
        losses = F.cross_entropy(logits, targets[: batch.valid], reduction="sum", label_smoothing=smoothing)
        loss = losses / rows
        (loss * self._loss_scale.scale).backward()
        self.weights.accumulate()
        return loss.detach(), (logits.detach().argmax(1) == labels[: batch.valid]).sum()

    def _to_device(self, batch: MicroBatch) -> tuple:
        return batch.images.to(self.device, non_blocking=True), batch.labels.to(self.device, non_blocking=True)

    def _averaged(self) -> list:
        """What averages are taken of: the persistent weights in one, then each buffer."""
        return [self.weights.flat, *self._buffers.values()]

    def _by_name(self, tensors: list) -> dict:
        buffers = {name: tensor.to("cpu", copy=True) for name, tensor in zip(self._buffers, tensors[1:])}
        return {"weights": self.weights.by_name(tensors[0]), "buffers": buffers}


def _persistent_buffers(model: BlockList) -> Dict[str, torch.Tensor]:
    """Running statistics; constants such as the mean of the pixels belong to the recipe."""
    persistent = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _load_buffers(buffers: Dict[str, torch.Tensor], saved: Dict[str, torch.Tensor]) -> None:
    if buffers.keys() != saved.keys():
        name = sorted(buffers.keys() ^ saved.keys())[0]
        raise ValueError(f"{name} is {'missing' if name in buffers else 'unknown'}")
    _copy_all(buffers.values(), saved.values())


def _copy_all(targets, sources) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


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
