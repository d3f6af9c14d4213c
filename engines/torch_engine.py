"""The engine for CPU and CUDA: plain PyTorch, in a single process or one of several."""

from __future__ import annotations

import functools
import statistics
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from data import loader
from data.augmentation import Colours
from data.base import Source
from data.batches import MicroBatch
from engines import agreement, ahead, feed, graphs, losses, model_part, noise_scale, state, tuning
from engines.agreement import Agreement
from engines.averages import Averages
from engines.base import Counts, Engine, EvaluatedBatches, NoiseScale, StepResult, scored
from engines.devices import compute_dtype, device_of, set_switches, timed, unused
from engines.exchange import GradientExchange, UpdateSections, create_weights
from engines.listeners import Listeners, StepListener
from engines.measured_shares import MeasuredShares
from engines.passes import Passes, Rows
from engines.stage import compile_stages, dry_passes
from engines.statistics import RunningStatistics
from engines.timeline import Recorder
from engines.training_work import TrainingWork
from models.families import depths
from optim import factory
from optim.base import HasSlots
from optim.loss_scale import LossScale
from optim.norms import Norms, Stages
from parallel import exchange
from parallel.processes import Processes
from parallel.work import Boundary
from recipe.batch import training_image_size, training_image_sizes
from recipe.checks import bound_to_cut
from recipe.config import Recipe
from recipe.course import Update
from recipe.division import Batch
from recipe.optimization import Optimizer
from recipe.settled import image_size
from recipe.shares import subtrees


class TorchEngine(Engine):
    """Computes one stage of one replica, or all stages, on one device.

    Gradients are accumulated in float32. The constructor joins the parts that a recipe asks for;
    everything after it works with these.
    """

    def __init__(
        self,
        recipe: Recipe,
        batch: Batch,
        processes: Processes,
        steps_per_epoch: Optional[int] = None,
        *,
        class_weights: Optional[Sequence[float]] = None,
    ):
        """
        Args:
            recipe: of the run.
            batch: of a step.
            processes: of the run; all of them call.
            steps_per_epoch: for what changes with the epoch; None for an engine that does not
                train.
            class_weights: factors on the loss by class; None: 1.
        """
        self.batch = batch
        self.processes = processes
        self.topology = processes.topology
        self.device = device_of(recipe.run.device, self.topology)
        self._recipe = recipe
        self._trains = steps_per_epoch is not None
        self._steps_per_epoch = steps_per_epoch or 1
        self._class_weights: Optional[torch.Tensor] = None
        if class_weights is not None:
            self._class_weights = torch.tensor(class_weights, device=self.device)
        self._batches: Optional[feed.Batches] = None
        # Before anything computes: cuBLAS reads its variable once, as CUDA starts.
        if self.device.type == "cuda":
            set_switches(recipe.run.deterministic)
        self._compute = compute_dtype(recipe.precision.compute, self.device)
        if self._trains:
            tuning.check(recipe.engine, self.device, self._compute)
        self._build()
        self._follow_steps()
        self._prepare_passes()
        self._compile()

    # Parts of the engine ----------------------------------------------------------------------

    def _build(self) -> None:
        """Create the model's part, its weights, and their exchange."""
        recipe = self._recipe
        placement = model_part.Placement(
            device=self.device,
            dtype=self._compute,
            engine=recipe.engine,
            parallel=recipe.parallel,
            bound=bound_to_cut(recipe, self.topology.replicas),
        )
        self._part = model_part.create(
            recipe.model,
            recipe.run.seed,
            placement,
            batch=self.batch,
            processes=self.processes,
        )
        self._model = self._part.model
        self._buffers = self._part.buffers
        self._frozen = self._part.frozen
        self.shapes = self._part.shapes
        self.cut = self._part.cut
        # Only layer decay asks how deep parameters lie.
        self._depths: Dict[str, int] = {}
        if recipe.optimizer.layer_decay is not None:
            self._depths = depths(recipe.model)
        self.notes = (*unused(recipe.run.device), *self._part.notes)
        self._create_weights()
        # In this order: averages are laid out as the weights, and the exchange may move both.
        self._averages = Averages(recipe.average, self.weights, self._buffers)
        steps_per_epoch = self._steps_per_epoch if self._trains else None
        self._exchange = self.exchange_of(recipe, steps_per_epoch)

    def _create_weights(self) -> None:
        """Create the weights that persist, and the factor on the loss of their gradients."""
        recipe = self._recipe
        # On a CPU only our C++ layers are channels-last (engines/tuning.py), and then the update is
        # in C++, too.
        update_in_cpp = recipe.engine.compile or self._part.memory_format == torch.channels_last
        self.weights = create_weights(
            _update_sections(recipe),
            self._part.parameters,
            norms=self._part.norms,
            hidden=self._part.hidden,
            depths=self._depths,
            seed=recipe.run.seed,
            stages=Stages(self._part.whole_names, self.processes.sum_over_stages),
            tree=(self._leaves(), self._part.together) if recipe.exchange.in_tree else None,
        )
        if update_in_cpp and self._trains and self.device.type == "cpu":
            note = self.weights.compile_update()
            # Who did not ask for it by name is told nothing.
            if recipe.engine.compile:
                self.notes += (note,)
        precision = recipe.precision
        dynamic = precision.dynamic_loss_scale
        self._loss_scale = LossScale(precision.loss_scale, dynamic, self.device)

    def _create_optimizer(self, section: Optimizer) -> HasSlots:
        """Create the optimizer of this process's parameters that a `section` describes."""
        parameters = dict(self._part.parameters)
        return factory.create(section, parameters, self._part.norms, depths=self._depths)

    def exchange_of(self, recipe: Recipe, steps_per_epoch: Optional[int]) -> GradientExchange:
        """Return the exchange of `recipe` for this engine's weights.

        Args:
            recipe: may be another one than the engine's.
            steps_per_epoch: as for GradientExchange.
        """
        return GradientExchange(
            self.weights,
            self._part.parameters,
            _update_sections(recipe),
            create_optimizer=functools.partial(self._create_optimizer, recipe.optimizer),
            batch=self.batch,
            processes=self.processes,
            steps_per_epoch=steps_per_epoch,
            averages=self._averages.flat(),
        )

    def _follow_steps(self) -> None:
        """Create what follows the steps. Statistics come before averages, which contain them."""
        recipe = self._recipe
        method = exchange.of(recipe.exchange)
        self.recorder = Recorder(self.processes, self.device, recipe.log.trace)
        self._statistics = RunningStatistics(
            self._buffers,
            self.batch,
            self.processes,
            # A family of models without this key has no running statistics.
            momentum=getattr(recipe.model, "norm_momentum", 0.0),
            combined=method.sums,
        )
        self._noise = self._noise_listener(summed=method.complete)
        listeners: List[StepListener] = [
            self.recorder,
            self._statistics,
            self._noise,
            self._averages,
        ]
        self._shares: Optional[MeasuredShares] = None
        if recipe.parallel.shares == "measured" and self.topology.replicas > 1:
            self._shares = MeasuredShares(self.processes, self.device, recipe.parallel.least)
            listeners.append(self._shares)
        self._record_or_overlap()
        listeners.append(self._graphs)
        self._listeners = Listeners(listeners)

    def _record_or_overlap(self) -> None:
        """Decide whether passes are recorded or the exchange overlaps the last one.

        Sets `_training_stages`, `_arm`, `_graphs`.
        """
        # Recordings call no post-accumulate hook, by which an exchange begins within the last
        # backward pass.
        can_overlap = self._exchange.arm is not None and len(self._part.parts) == 1
        self._training_stages = graphs.recorded(
            self._part.parts,
            self._recipe.engine.graphs,
            accumulation=self.batch.accumulation,
            device=self.device,
            overlaps=can_overlap,
        )
        overlaps = can_overlap and self._training_stages is self._part.parts
        self._arm = self._exchange.arm if overlaps else None
        self._graphs = graphs.GraphListener(self._training_stages)

    def _noise_listener(self, *, summed: bool) -> noise_scale.NoiseListener:
        """Return what measures the noise scale, or, where the recipe or a fact forbids it, nothing.

        Args:
            summed: whether each replica gets the sum of all gradients.
        """
        wanted = self._recipe.log.noise_scale
        batches = noise_scale.compared(self.batch, self.topology.replica, summed=summed)
        obstacle = noise_scale.obstacle(batches, self._recipe.model.batch_statistics)
        # `auto` measures where that is possible: only who asked by name is told of an obstacle.
        if obstacle and self._trains and wanted not in ("auto", False):
            self.notes += (f"log.noise_scale: not measured, as {obstacle}",)
        measures = self._trains and wanted and not obstacle
        # Without parameters a meter measures nothing, and has nothing to be saved.
        parameters = self._part.parameters if measures else {}
        meter = noise_scale.Meter(parameters, batches, layers=wanted == "layers")
        gradients = self.weights.gradients
        return noise_scale.NoiseListener(meter, gradients, self._loss_scale, summed=summed)

    def _prepare_passes(self) -> None:
        """Create what computes micro batches, and what feeds them."""
        recipe = self._recipe
        self._settings = image_settings(recipe)
        self._feed = feed.Feed(self._settings, self.processes, self.device)
        self._work = TrainingWork(
            self._feed,
            self._model.draws,
            self.weights.gradients,
            loss_scale=self._loss_scale,
            summed_loss=functools.partial(
                losses.summed,
                recipe.data,
                class_weights=self._class_weights,
            ),
            listeners=self._listeners,
            check=self.processes.check,
            arm=self._arm,
        )
        # Training may go by recordings of the stages, scores go by the stages themselves.
        self._passes = Passes(
            self._part,
            recipe.model,
            recipe.parallel,
            self.processes,
            training=self._training_stages,
            device=self.device,
            dtype=self._compute,
            rows=Rows(self.batch.micro, recipe.batch.evaluation),
        )

    def _compile(self) -> None:
        """Compile what the first step and the first evaluation would compile, by dry passes."""
        engine = self._recipe.engine
        if self.device.type != "cuda":
            return
        # Before stages are compiled, as these contain our kernels as operators.
        if tuning.takes_triton(engine):
            self.notes += ahead.prepared(self._dry_passes)
        if engine.compile:
            self.notes += compile_stages(
                self._part.parts,
                self._entering(),
                self._scored(),
                self.device,
                engine.compile_mode,
            )

    def _dry_passes(self) -> None:
        """Launch all kernels that training and evaluation launch; no trace is left."""
        # The update comes first: its norms are added up over stages, and a stage that has no memory
        # for a pass must not leave the others waiting.
        if self._trains:
            # An update whose gradients are not finite changes nothing.
            not_finite = torch.zeros((), dtype=torch.bool, device=self.device)
            self.weights.prepare(torch.ones((), device=self.device))
            self.weights.apply(0, 0.0, not_finite, measure=True)
        dry_passes(self._part.parts, self._entering(), self._scored(), self.device)

    def _entering(self) -> List[List[Boundary]]:
        """Return what enters each stage in training, for each size of images."""
        if not self._trains:
            return []
        images = self._feed.image_dtype
        sizes = sorted(training_image_sizes(self._recipe))
        return [self._passes.boundaries(self.batch.micro, size, images) for size in sizes]

    def _scored(self) -> List[Boundary]:
        """Return what enters each stage in evaluation."""
        rows = self._recipe.batch.evaluation
        return self._passes.boundaries(rows, image_size(self._recipe.model), torch.uint8)

    # Training ---------------------------------------------------------------------------------

    def train_step(
        self,
        micro_batches: Iterator[Any],
        update: Update,
        lr: float,
        measure: bool = False,
    ) -> StepResult:
        self._listeners.begin(update)
        self._compute_gradients(micro_batches, update)
        divisor = self._exchange_gradients(update, lr)
        with self._listeners.span("update"):
            agreed = self._agree(divisor)
            norms = self._apply(update, lr, agreed.finite, divisor=divisor, measure=measure)
        # Means of weights, where replicas make updates alone; averages take these means.
        with self._listeners.span("exchange"):
            self._exchange.after_update(update.step)
        # While a late gradient is on its way the weights are as they were.
        is_applied = torch.zeros_like(agreed.finite) if divisor is None else agreed.finite
        self._listeners.applied(update, is_applied)
        # Last: what divides this update's gradients is the scale by which its loss was multiplied.
        self._loss_scale.update(agreed.finite)
        return self._account(update, agreed, norms)

    def _compute_gradients(self, micro_batches: Iterator[MicroBatch], update: Update) -> None:
        """Compute this replica's micro batches, forward and backward, into the gradients."""
        share = self.batch.shares[self.topology.replica]
        size = self._settings.size_of_epoch(update.step // self._steps_per_epoch)
        count = update.steps * len(share)
        self._model.train()
        # `train` reaches all modules: frozen ones go back, as their statistics must not move.
        for module in self._frozen.modules.values():
            module.eval()
        with self._listeners.span("compute"):
            self._feed.start(
                micro_batches,
                steps=range(update.step, update.end),
                share=share,
                rows=self.batch.micro,
                size=size,
            )
            self._work.start(self.batch.micro)
            self._passes.training(size, count, self._feed.image_dtype).train(self._work)
            self._feed.finish()
        # The gradient is a sum of the micro batches' means, each times the loss scale.
        self._listeners.computed(self._loss_scale.scale * count)

    def _exchange_gradients(self, update: Update, lr: float) -> Optional[torch.Tensor]:
        """Put the gradients of all replicas in the place of this one's.

        Returns:
            What makes means of them, float32 []; None where a late one is still on its way.
        """
        scale = self._loss_scale.scale * update.steps
        with self._listeners.span("exchange"):
            divisor = self._exchange(update.step, scale, lr)
        self._listeners.exchanged(divisor)
        return divisor

    def _agree(self, divisor: Optional[torch.Tensor]) -> Agreement:
        """Let all processes know whether all gradients are finite, and what was learned, at once."""
        # While a late gradient is on its way nothing is applied that could be at fault.
        finite = torch.ones((), dtype=torch.bool, device=self.device)
        if divisor is not None:
            finite = self.weights.prepare(divisor)
        numbers = {
            "not finite": (~finite).double(),
            "loss": self._work.total,
            "correct": self._work.correct.double(),
            **self._listeners.contribution(),
        }
        sums = agreement.add_up(self.processes.sum, numbers)
        finite = sums["not finite"] == 0
        self._listeners.agreed(sums, finite)
        return Agreement(finite, loss=sums["loss"], correct=sums["correct"].long())

    def _apply(
        self,
        update: Update,
        lr: float,
        finite: torch.Tensor,
        *,
        divisor: Optional[torch.Tensor],
        measure: bool,
    ) -> Optional[Norms]:
        """Make the update, unless its gradient is still on its way."""
        if divisor is None:
            return None
        rate = self._exchange.rate(lr)
        norms = self.weights.apply(update.index, rate, finite, measure)
        return None if norms is None else self._exchange.norms(norms)

    def _account(self, update: Update, agreed: Agreement, norms: Optional[Norms]) -> StepResult:
        """Say what an update has seen and done."""
        images, unreadable = self._images_seen(update.steps)
        micro_batches = self.batch.micro_batches * update.steps
        return StepResult(
            loss=(agreed.loss / micro_batches).float(),
            correct=agreed.correct,
            images=images,
            skipped=self._loss_scale.skipped,
            skipped_in_row=self._loss_scale.skipped_in_row,
            loss_scale=self._loss_scale.scale,
            norms=norms,
            unreadable=tuple(unreadable),
        )

    def _images_seen(self, steps: int) -> Tuple[int, List[str]]:
        """Return the images of an update over all replicas, and what could not be read.

        Only where unreadable images are skipped does this need a message.
        """
        if self.topology.world == 1:
            return self._feed.images_seen, self._feed.unreadable
        # Where none may be left out, one that cannot be read has ended the run: all were seen.
        if self._settings.data.bad_images != "skip":
            return steps * self.batch.global_, []
        by_rank = self.processes.gather((self._feed.images_seen, self._feed.unreadable))
        images = sum(count for count, _ in by_rank)
        return images, [message for _, messages in by_rank for message in messages]

    def _leaves(self) -> List[int]:
        """Return the micro batches of each of the largest subtrees in this replica's share."""
        share = self.batch.shares[self.topology.replica]
        return [len(leaves) for leaves in subtrees(share, self.batch.micro_batches)]

    # Between updates --------------------------------------------------------------------------

    def balance(self, step: int) -> List[str]:
        lines = self._graphs.take_lines()
        if self._shares is not None:
            shares, reasons = self._shares.follow(self.batch.shares)
            lines += reasons
            if shares is not None:
                self.set_shares(step, shares)
        return lines

    def set_shares(self, step: int, shares: List[range]) -> None:
        """Let replicas compute other `shares` of a step's micro batches, from a step on.

        Every rank calls, between two steps.
        """
        # Whatever depends on shares follows: a part left out would count other micro batches.
        self.batch = self.batch.with_shares(shares)
        share = shares[self.topology.replica]
        self.weights.gradients.set_leaves(self._leaves())
        self._exchange.set_shares(self.batch)
        self._statistics.batch = self.batch
        self._noise.meter.batches.share = share
        self._passes.forget()
        if self._shares is not None:
            self._shares.skip_next()
        # Where images do not enter there is nothing to be read otherwise.
        if isinstance(self._batches, loader.TrainingBatches):
            self._batches.set_share(step, share)

    def noise_scale(self) -> Tuple[Optional[NoiseScale], Dict[str, NoiseScale]]:
        by_name = self._noise.meter.values()
        if self._recipe.log.noise_scale == "layers" and self.topology.stages > 1:
            # The whole model's norms are summed over stages, each parameter's are its stage's
            # alone.
            by_stage = self.processes.gather(by_name)[: self.topology.stages]
            by_name = {name: scale for values in by_stage for name, scale in values.items()}
        whole = by_name.pop("", None)
        return whole, by_name

    def not_finite(self) -> List[str]:
        method = exchange.of(self._recipe.exchange)
        if method.sparse or self._recipe.exchange.sent_bits:
            return []  # its result has one element that is not finite, wherever the others' were
        return self.weights.not_finite()

    def end_epoch(self) -> None:
        self._averages.end_epoch()

    # Images and scores ------------------------------------------------------------------------

    def training_batches(self, source: Optional[Source], steps: range) -> feed.Batches:
        self._batches = feed.training_batches(
            source,
            self._settings,
            batch=self.batch,
            replica=self.topology.replica,
            steps=steps,
            device=self.device,
        )
        return self._batches

    def data_wait(self) -> float:
        assert self._batches is not None, "asked for in training alone"
        return self._batches.waited()

    def evaluation_batches(self, source: Optional[Source], images: int) -> EvaluatedBatches:
        place = self.topology
        rows = self._recipe.batch.evaluation
        if source is None:
            share = loader.evaluation_share(images, rows, place.replica, place.replicas)
            # All stages make as many calls, with images or without.
            return feed.Nothing([None] * len(share))
        return loader.EvaluationBatches(
            source,
            data=self._recipe.data,
            image_size=image_size(self._recipe.model),
            batch=rows,
            device=self.device,
            replica=place.replica,
            replicas=place.replicas,
        )

    def averages(self) -> Tuple[str, ...]:
        return self._averages.filled()

    def using(self, weights: str) -> ContextManager[None]:
        return self._averages.shown(weights, self._exchange.mean)

    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        logits = self._predict(batch)
        if logits is None:
            zero = torch.zeros((), dtype=torch.int64, device=self.device)
            return Counts(0, zero.double(), zero, zero)
        labels = self._feed.evaluation_labels(len(logits))
        return scored(logits[: len(labels)].float(), labels)

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        logits = self._predict(batch)
        assert logits is not None, "a process that computes all stages has logits"
        return logits[: batch.valid].float()

    def _predict(self, batch: Optional[MicroBatch]) -> Optional[torch.Tensor]:
        """Return the logits of all rows, with padding, on the last stage; None elsewhere."""
        self._model.eval()
        if not self.topology.is_first:
            return self._passes.predict(None)
        assert batch is not None, "images enter here"
        return self._passes.predict(self._feed.evaluation_images(batch))

    # State ------------------------------------------------------------------------------------

    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        state.check_shapes(weights, self.shapes)
        parameters = {}
        self._frozen.load(weights)
        for name, tensor in weights.items():
            if name in self._buffers:
                self._buffers[name].copy_(tensor)
            elif name not in self._frozen.names:
                parameters[name] = tensor
        self.weights.replace(parameters)
        # An exchange that moves weights may have kept a copy of those before.
        self._exchange.weights_replaced()

    def state_dict(self) -> dict:
        # Means over replicas, which all have to compute; the first one then has the whole state.
        trained = self._exchange.mean(self.weights.flat)
        averages = self._averages.means(self._exchange.mean)
        part: Dict[str, Any] = {}
        if self.topology.replica == 0:
            part = {
                **self.weights.state_dict(trained),
                "loss_scale": self._loss_scale.state_dict(),
                "averages": self._averages.state_dict(averages),
                **self._exchange.state_dict(),
                "buffers": state.on_cpu(self._buffers),
            }
            self._frozen.add_to(part)
            noise = self._noise.meter.state_dict()
            if noise:
                part["noise_scale"] = noise
        # The ranks of replica 0, which has all that is saved.
        stages = range(self.topology.stages)
        return state.merged(self.processes.gather_to_main(part, stages))

    def load_state_dict(self, saved: dict) -> None:
        parts = ("weights", "loss_scale", "averages", "buffers")
        state.check_parts(saved, parts, self._averages.names())
        # Each stage loads its part.
        others = self.shapes.keys() - self._part.parameters.keys() - self._buffers.keys()
        # Frozen tensors leave the state here: the weights refuse names that are not theirs.
        self._frozen.load_from(saved)
        saved = state.without(saved, others | self._frozen.names)
        self.weights.load_state_dict(saved)
        self._loss_scale.load_state_dict(saved["loss_scale"])
        self._exchange.load_state_dict(saved)
        state.load_buffers(self._buffers, saved["buffers"])
        self._noise.meter.load_state_dict(saved.get("noise_scale", {}))
        self._averages.load_state_dict(saved["averages"])

    def live_state(self) -> Dict[str, torch.Tensor]:
        return {
            **self.weights.own_state(),
            **self._buffers,
            **self._frozen.live_state(),
            **self._loss_scale.state(),
            **self._averages.live_state(),
            "noise_scale": self._noise.meter.moments,
        }

    def load_live_state(self, saved: Dict[str, torch.Tensor]) -> None:
        # Then it has a tensor for each value: before, one may have stood for several.
        self._loss_scale.load_state_dict(saved)
        for name, tensor in self.live_state().items():
            tensor.copy_(saved[name])
        self.weights.refresh()
        self._frozen.refresh()

    def replica_states(self) -> Iterator[dict]:
        return self._exchange.replica_states()

    def load_replica_states(self, count: int, read: Callable[[int], dict]) -> None:
        self._exchange.load_replica_states(count, read)

    def peak_flops(self) -> float:
        # Large enough that starting the product costs nothing beside it.
        size = 8192 if self.device.type == "cuda" else 1024
        left = torch.randn(size, size, device=self.device).to(self._compute)
        self.processes.wait_for_all()  # ranks that share a machine share what it can
        # The median of three products, after one that starts what is new.
        seconds = statistics.median(timed(lambda: left @ left, self.device, 4)[1:])
        rate = torch.tensor(2 * size**3 / seconds, dtype=torch.float64, device=self.device)
        return self.processes.sum(rate).item()

    def close(self) -> None:
        # Threads of an exchange end first: they would wait for processes that have parted.
        self._exchange.close()
        self.processes.part()
        torch.cuda.empty_cache()


def _update_sections(recipe: Recipe) -> UpdateSections:
    return UpdateSections(recipe.optimizer, recipe.exchange, recipe.precision)


def image_settings(recipe: Recipe) -> feed.ImageSettings:
    """Return how a `recipe` reads, mixes and labels its images."""
    return feed.ImageSettings(
        data=recipe.data,
        classes=recipe.model.classes,
        seed=recipe.run.seed,
        colours=Colours(recipe.model.mean, recipe.model.std),
        batch_statistics=recipe.model.batch_statistics,
        size_of_epoch=functools.partial(training_image_size, recipe),
    )
