"""The engine for CPU and CUDA: plain PyTorch, in a single process or one of several."""

from __future__ import annotations

import contextlib
import statistics
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from data import loader
from data.base import Source
from data.batches import MicroBatch
from engines import cuts, feed, graphs, noise_scale, state, tuning
from engines.base import AVERAGES, Counts, Engine, NoiseScale, StepResult, scored
from engines.devices import Stopwatch, compute_dtype, device_of, set_switches, timed, unused
from engines.exchange import GradientExchange, create_weights
from engines.stage import Stage, blocks_to_recompute, boundaries, compile_stages
from engines.timeline import Recorder
from models.families import build
from models.normalization import norm_parameters
from optim.averaging import WeightAverage
from optim.factory import hidden_layers
from optim.loss_scale import LossScale
from parallel import exchange
from parallel.processes import Processes
from parallel.speeds import Speeds
from parallel.work import Boundary, SingleProcess
from recipe.batch import training_image_size, training_image_sizes
from recipe.config import Recipe
from recipe.course import Update
from recipe.division import Batch
from recipe.shares import subtrees


class TorchEngine(Engine):
    """Computes one stage of one replica, or all stages, on one device, accumulating gradients in float32."""

    def __init__(self, recipe: Recipe, batch: Batch, processes: Processes, steps_per_epoch: Optional[int] = None):
        """Args: steps_per_epoch: for what changes with the epoch; None for an engine that does not train."""
        self.batch, self.topology, self.processes = batch, processes.topology, processes
        self._recipe, self._trains, self._steps_per_epoch = recipe, steps_per_epoch is not None, steps_per_epoch or 1
        self.device = device_of(recipe, self.topology)
        if self.device.type == "cuda":
            set_switches(recipe.run.deterministic)
        self._compute = compute_dtype(recipe, self.device)
        if self._trains:
            tuning.check(recipe.engine, self.device, self._compute)
        self._build()
        decays = zip(AVERAGES, (recipe.average.step_decay, recipe.average.epoch_decay))
        self._averages = {name: WeightAverage(decay, self._averaged()) for name, decay in decays if decay is not None}
        self._method = exchange.of(recipe.exchange)
        measured = self._parameters if self._trains else {}
        self._meter, note = noise_scale.create(recipe, batch, self._method, measured, self.topology.replica)
        self.notes += (note,) if note and self._trains else ()
        self._exchange = self.exchange_of(recipe, steps_per_epoch)
        self.recorder = Recorder(processes, self.device)
        arm = self._exchange.arm if len(self._stages) == 1 else None
        self._passes = graphs.recorded(self._stages, recipe, batch, self.device, overlaps=arm is not None)
        self._work = feed.TrainingStep(
            *(recipe, processes, self.device, self._model.draws),
            *(self.weights.gradients, self._loss_scale, self.recorder),
            arm if self._passes is self._stages else None,
        )
        self._schedules, self._steps_made, self._batches = {}, 0, None
        self._stopwatch, self._settled = Stopwatch(self.device), False
        follows = recipe.parallel.shares == "measured" and self.topology.replicas > 1
        self._speeds = Speeds(recipe.parallel.least) if follows else None
        if recipe.engine.compile and self.device.type == "cuda":
            sizes = sorted(training_image_sizes(recipe)) if self._trains else ()
            entering = [self._boundaries(batch.micro, size, self._work.image_dtype) for size in sizes]
            scored = self._boundaries(recipe.batch.evaluation, recipe.model.image_size, torch.uint8)
            mode = recipe.engine.compile_mode
            self.notes += compile_stages(self._stages, entering, scored, self.device, mode)

    def _build(self) -> None:
        """The model, this process's part of it, and its weights."""
        recipe = self._recipe
        whole = build(recipe.model, recipe.run.seed).to(self.device, self._compute)
        self._memory_format = tuning.apply(whole, recipe.engine, self.device)
        self._norms = norm_parameters(whole)
        self.shapes = state.shapes(whole)
        recomputed = blocks_to_recompute(whole.names, recipe.parallel.recompute)
        self._parts, note = cuts.parts(whole, recipe, self.batch, self.processes, self.device)
        self.cut = [names[0] for names in self._parts[1:]]
        self.notes = unused(recipe) + ((note,) if note else ())
        if self.batch.stages > 1 and self.topology.stages == 1:
            self.notes += (f"one process computes all {self.batch.stages} stages itself, on one device",)
        own = cuts.own_parts(self._parts, self.topology)
        self._stages = {
            number: Stage(whole.part(names), whole.draws, recomputed, self._memory_format)
            for number, names in own.items()
        }
        self._model = whole.part([name for names in own.values() for name in names])
        self._model.draws = whole.draws
        self._buffers, self._parameters = state.persistent_buffers(self._model), dict(self._model.named_parameters())
        together = [[name for name, _ in whole.part(names).named_parameters()] for names in own.values()]
        # Where the model is computed by functions in C++, so is the update.
        compiled = recipe.engine.compile or self._memory_format == torch.channels_last
        self.weights = create_weights(
            recipe,
            self._parameters,
            self._norms,
            hidden=hidden_layers(whole),
            model=[name for name, _ in whole.named_parameters()],
            tree=(self._leaves(), together) if recipe.exchange.in_tree else None,
            sum_over_stages=self.processes.sum_over_stages,
            compile=compiled and self._trains,
        )
        self.notes += self.weights.notes if recipe.engine.compile else ()
        self._loss_scale = LossScale(recipe.precision.loss_scale, recipe.precision.dynamic_loss_scale, self.device)

    def _leaves(self) -> List[int]:
        """Micro batches of each of the largest subtrees in this replica's share."""
        return [len(each) for each in subtrees(self.batch.shares[self.topology.replica], self.batch.micro_batches)]

    def exchange_of(self, recipe: Recipe, steps_per_epoch: Optional[int]) -> GradientExchange:
        """The exchange of `recipe` for this engine's weights. Args: steps_per_epoch: as of GradientExchange."""
        averages = {name: average.tensors[0] for name, average in self._averages.items()}
        of_weights = self.weights, self._parameters, self._norms
        return GradientExchange(*of_weights, recipe, self.batch, self.processes, steps_per_epoch, averages)

    def training_batches(self, source: Optional[Source], steps: range) -> Iterator[MicroBatch]:
        self._batches = feed.training_batches(source, self._recipe, self.batch, self.topology, steps, self.device)
        return self._batches

    def data_wait(self) -> float:
        return self._batches.waited()

    def evaluation_batches(self, source: Optional[Source], images: int) -> Any:
        recipe, place = self._recipe, self.topology
        rows, replica = recipe.batch.evaluation, {"replica": place.replica, "replicas": place.replicas}
        if source is None:
            return feed.Nothing([None] * len(loader.evaluation_share(images, rows, **replica)))
        size, device = recipe.model.image_size, self.device
        return loader.EvaluationBatches(source, data=recipe.data, image_size=size, batch=rows, device=device, **replica)

    def train_step(
        self, micro_batches: Iterator[Any], step: int, lr: float, measure: bool = False, update: Optional[Update] = None
    ) -> StepResult:
        steps, number = (update.steps, update.number) if update else (1, step)
        self.recorder.begin(step, 0 < self._steps_made <= self._recipe.log.trace)  # from the session's second step on
        self._model.train()
        statistics_before = [buffer.clone() for buffer in self._buffers.values()]
        self._meter.start(number, self.batch.shares[self.topology.replica], steps)
        # The first step with these shares also starts what is new.
        measured = self._speeds is not None and self._settled
        with self._stopwatch.running() if measured else contextlib.nullcontext():
            self._compute_gradients(micro_batches, range(step, step + steps))
        self._settled = True
        squares = self._squares(self._loss_scale.scale * self.batch.accumulation, summed=False)
        with self.recorder.span("exchange"):
            divisor = self._exchange(step, self._loss_scale.scale * steps, lr)
        squares += self._squares(divisor, summed=True)
        if self._buffers and self._method.sums:
            how = self._recipe.model.norm_momentum, self.batch.shares, self.processes
            state.combine_statistics(self._buffers, statistics_before, *how)
        with self.recorder.span("update"):
            finite, norms = torch.ones((), dtype=torch.bool, device=self.device), None
            if divisor is not None:  # else the first gradient is still on its way
                finite = self.weights.prepare(divisor)
            own = [(~finite).double(), self._work.total, self._work.correct.double(), *squares]
            unfinished, loss, correct, *squares = self.processes.sum(torch.stack(own))  # one message
            finite = unfinished == 0
            if squares:
                self._meter.add(torch.stack(squares), finite)
            if divisor is not None:
                norms = self.weights.apply(number, self._exchange.rate(lr), finite, measure)
                norms = None if norms is None else self._exchange.norms(norms)
        with self.recorder.span("exchange"):
            self._exchange.after_update(step)
        for buffer, before in zip(self._buffers.values(), statistics_before):
            buffer.copy_(torch.where(finite, buffer, before))
        if "step_average" in self._averages:
            self._averages["step_average"].add(self._averaged(), counts=finite.long() * steps)
        scale = self._loss_scale
        scale.update(finite)
        self._steps_made += 1
        images, unreadable = self._seen(steps)
        loss = (loss / (self.batch.micro_batches * steps)).float()
        counts = scale.skipped, scale.skipped_in_row, scale.scale
        return StepResult(loss, correct.long(), images, *counts, norms, tuple(unreadable))

    def _graphed(self) -> List[graphs.Graphed]:
        return [] if self._passes is self._stages else list(self._passes.values())

    def balance(self, step: int) -> List[str]:
        reported = [graphed.lines.pop() for graphed in self._graphed() if graphed.lines]
        if self._speeds is None:
            return reported
        (seconds, steps), share = self._stopwatch.read(), self.batch.shares[self.topology.replica]
        ranks = self.processes.gather(seconds / (steps * len(share)) if steps else 0.0)
        stages = self.topology.stages
        replicas = [max(ranks[first : first + stages]) for first in range(0, len(ranks), stages)]
        if not all(replicas):
            return reported  # no step was measured
        shares, lines = self._speeds.follow(self.batch.shares, replicas)
        if shares is not None:
            self.divide(step, shares)
        return [*reported, *lines]

    def divide(self, step: int, shares: List[range]) -> None:
        """From a step on replicas compute these shares of its micro batches. Every rank calls, between two steps."""
        self.batch, self._settled = self.batch.divided(shares), False
        self.weights.gradients.divide(self._leaves())
        self._exchange.divide(self.batch)
        self._schedules = {key: each for key, each in self._schedules.items() if key[0] is None}
        if self._batches is not None and self.topology.is_first:
            self._batches.divide(step, shares[self.topology.replica])

    def _squares(self, divisor: Optional[torch.Tensor], summed: bool) -> List[torch.Tensor]:
        """This process's share of the noise scale's squared norms; none where they are not to be measured here.

        Args: divisor: of the gradient that is there, None if none is. summed: whether the exchange is done.
        """
        if not self._meter.on or divisor is None or summed != self._method.complete:
            return []
        return list(self._meter.squares(self.weights.gradients.views, self._loss_scale.scale, divisor))

    def noise_scale(self) -> Tuple[Optional[NoiseScale], Dict[str, NoiseScale]]:
        parts = [self._meter.values()]
        if self._recipe.log.noise_scale == "layers" and self.topology.stages > 1:
            parts = self.processes.gather(parts[0])[: self.topology.stages]
        found = {name: each for part in parts for name, each in part.items()}
        return found.pop("", None), found

    def _compute_gradients(self, micro_batches: Iterator[MicroBatch], steps: range) -> None:
        """All micro batches of this replica in some steps, forward and backward."""
        share = self.batch.shares[self.topology.replica]
        size = training_image_size(self._recipe, steps.start // self._steps_per_epoch)
        self._work.start(micro_batches, steps, share, self.batch.micro, size)
        for graphed in self._graphed():
            graphed.begin()
        self._schedule(size, len(steps) * len(share)).train(self._work)
        self._work.finish()

    def _schedule(self, size: Optional[int], count: int = 1) -> Any:
        """What computes `count` training micro batches of this size, or, if None, evaluation batches, in a pipeline."""
        if size is not None and self.topology.stages == 1:
            return SingleProcess(self._passes[0], count)
        if (size, count) not in self._schedules:
            from parallel.pipeline import Pipeline

            recipe, named = self._recipe, {"group": self.processes.stage_group, "device": self.device}
            passes = self._stages if size is None else self._passes
            if size is None:
                entering = self._boundaries(recipe.batch.evaluation, recipe.model.image_size, torch.uint8)
            else:
                entering = self._boundaries(self.batch.micro, size, self._work.image_dtype)
                named.update(schedule=recipe.parallel.schedule, micro_batches=count)
            self._schedules[size, count] = Pipeline(passes, entering, **named)
        return self._schedules[size, count]

    def _boundaries(self, rows: int, size: int, dtype: torch.dtype) -> list:
        with torch.device("meta"):
            model = build(self._recipe.model, self._recipe.run.seed)
        images = Boundary((rows, 3, size, size), dtype)
        return boundaries(self._parts, model, images, self._compute, self._memory_format)

    def _seen(self, steps: int) -> Tuple[int, List[str]]:
        """Images of an update over all replicas, and what could not be read. Only `skip` needs a message."""
        if self.topology.world == 1:
            return self._work.images_seen, self._work.unreadable
        if self._recipe.data.bad_images != "skip":
            return steps * self.batch.global_, []
        counts, messages = zip(*self.processes.gather((self._work.images_seen, self._work.unreadable)))
        return sum(counts), [message for part in messages for message in part]

    def not_finite(self) -> List[str]:
        if self._method.sparse or self._recipe.exchange.sent_bits:
            return []  # its result has one element that is not finite, wherever the others' were
        return self.weights.not_finite()

    def end_epoch(self) -> None:
        if "epoch_average" in self._averages:
            self._averages["epoch_average"].add(self._averaged())

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        flat, *averaged = self._mean_of(self._averaged() if weights == "trained" else self._averages[weights].tensors)
        if flat is self.weights.flat:
            yield
            return
        buffers = list(self._buffers.values())
        trained = [buffer.clone() for buffer in buffers]
        with self.weights.shown(flat):
            try:
                _copy(averaged, buffers)
                yield
            finally:
                _copy(trained, buffers)

    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        logits = self._forward(batch)
        if logits is None:
            zero = torch.zeros((), dtype=torch.int64, device=self.device)
            return Counts(0, zero.double(), zero, zero)
        labels = self._work.evaluation_labels(len(logits))
        return scored(logits[: len(labels)].float(), labels)

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        assert self.topology.stages == 1, "logits lie on the last stage"
        return self._forward(batch)[: batch.valid].float()

    def _forward(self, batch: Optional[MicroBatch]) -> Optional[torch.Tensor]:
        """Logits of all rows, padding included, on the last stage; None elsewhere."""
        self._model.eval()
        images = self._work.evaluation_images(batch) if self.topology.is_first else None
        if self.topology.stages > 1:
            return self._schedule(None).predict(images)
        with torch.no_grad():
            return self._stages[0](images)

    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        state.check_shapes(weights, self.shapes)
        self.weights.replace({name: tensor for name, tensor in weights.items() if name not in self._buffers})
        for name, buffer in self._buffers.items():
            if name in weights:
                buffer.copy_(weights[name])

    def state_dict(self) -> dict:
        averaged = (each.tensors for each in self._averages.values())
        means = [self._mean_of(each) for each in (self._averaged(), *averaged)]
        own = self._state_of(means) if self.topology.replica == 0 else {}
        return state.merged(self.processes.gather_to_main(own, range(self.topology.stages)))

    def live_state(self) -> Dict[str, torch.Tensor]:
        found = {**self.weights.own_state(), **self._buffers, **self._loss_scale.state()}
        for name, average in self._averages.items():
            own = average.count, *average.tensors
            found.update({f"{name} {number}": tensor for number, tensor in enumerate(own)})
        return {**found, "noise_scale": self._meter.moments}

    def load_live_state(self, saved: Dict[str, torch.Tensor]) -> None:
        self._loss_scale.load_state_dict(saved)  # then it has a tensor for each value: one may stand for several before
        for name, tensor in self.live_state().items():
            tensor.copy_(saved[name])
        self.weights.refresh()

    def _state_of(self, tensors: List[list]) -> dict:
        """This process' part of the state. Args: tensors: of the weights, then of each average, as `_averaged`; their
        means over replicas."""
        (flat, *buffers), *averaged = tensors
        averages = {}
        for (own, *others), (name, average) in zip(averaged, self._averages.items()):
            parts = {"weights": self.weights.by_name(own), "buffers": self._buffers_by_name(others)}
            averages[name] = {**parts, "count": average.count.to("cpu", copy=True)}
        own = {**self.weights.state_dict(flat), "loss_scale": self._loss_scale.state_dict(), "averages": averages}
        own = {**own, **self._exchange.state_dict(), "buffers": self._buffers_by_name(buffers)}
        noise = self._meter.state_dict()
        return {**own, **({"noise_scale": noise} if noise else {})}

    def load_state_dict(self, saved: dict) -> None:
        state.check_parts(saved, ("loss_scale", "averages", "buffers"), self._averages)
        saved = state.without(saved, self.shapes.keys() - self._parameters.keys() - self._buffers.keys())
        self.weights.load_state_dict(saved)
        self._loss_scale.load_state_dict(saved["loss_scale"])
        self._exchange.load_state_dict(saved)
        state.load_buffers(self._buffers, saved["buffers"])
        self._meter.load_state_dict(saved.get("noise_scale", {}))
        for name, average in self._averages.items():
            part = saved["averages"][name]
            self.weights.load_flat(average.tensors[0], part["weights"])
            state.load_buffers(dict(zip(self._buffers, average.tensors[1:])), part["buffers"])
            average.count = part["count"].to(self.device, copy=True)

    def replica_states(self) -> Iterator[dict]:
        return self._exchange.replica_states()

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        self._exchange.load_replica_states(count, read)

    def peak_flops(self) -> float:
        """Of a large matrix product: the median of three, after a first."""
        size = 8192 if self.device.type == "cuda" else 1024
        left = torch.randn(size, size, device=self.device).to(self._compute)
        self.processes.wait_for_all()  # ranks that share a machine share what it can
        seconds = statistics.median(timed(lambda: left @ left, self.device, 4)[1:])
        return self.processes.sum(torch.tensor(2 * size**3 / seconds, dtype=torch.float64, device=self.device)).item()

    def close(self) -> None:
        self._exchange.close()
        self.processes.part()
        torch.cuda.empty_cache()

    def _mean_of(self, tensors: Sequence[torch.Tensor]) -> list:
        """The same with the mean over replicas of the weights, where these differ. Every rank calls."""
        flat, *others = tensors
        return [self._exchange.mean(flat), *others]

    def _averaged(self) -> list:
        """The tensors of an average: the persistent weights in one, then each buffer."""
        return [self.weights.flat, *self._buffers.values()]

    def _buffers_by_name(self, buffers: Sequence[torch.Tensor]) -> dict:
        return {name: buffer.to("cpu", copy=True) for name, buffer in zip(self._buffers, buffers)}


def _copy(tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    for tensor, buffer in zip(tensors, buffers):
        buffer.copy_(tensor)
