"""The engine for Graphcore's IPUs: the only file that imports PopTorch.

recipe/ipu/options.py maps a recipe to PopTorch's options. One program is compiled for training and
one for evaluation; they take turns on the IPUs. Weights and optimizer state are copied to the host
when they are saved, averaged or evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from data.augmentation import Colours
from data.base import Source
from data.batches import MicroBatch
from data.epochs import RunOrder
from data.workers import begin_work
from engines import cuts, state
from engines.averages import Averages
from engines.base import Counts, Diverged, Engine, StepResult, scored
from engines.devices import DTYPES
from engines.ipu_input import (
    EvaluationFeed,
    Loader,
    Positions,
    StepImages,
    TrainingFeed,
    padded,
)
from engines.ipu_instances import Instances
from engines.ipu_model import EvaluationModule, Marks, TrainingModule, device_model
from models import balance
from models.base import BlockList
from models.normalization import norm_parameters
from optim import factory
from optim.loss_scale import LossScale
from optim.weight_state import WeightState
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import training_image_size
from recipe.config import Recipe
from recipe.course import Update
from recipe.division import Batch
from recipe.ipu import optimizers, options, poprun
from recipe.ipu.optimizers import Name
from recipe.ipu.options import Chain, Setting
from recipe.ipu.rules import compute_dtype
from recipe.settled import image_size

# Matrix products on a Mk2 IPU, by Graphcore's data sheet; a Bow IPU is clocked 1.4 times as fast.
_PEAK_FLOPS = {torch.float16: 250e12, torch.float32: 62.5e12}
_COUNT_PREFIX = "Step___"  # the updates that a bias correction counts
_WORKERS_PORTION = 64  # images that a worker sends at once: each message costs some 0.2 ms
_IMAGES_ENTER = "every instance has all stages, so that images enter it"
_INSIDE = "model."  # prefix of the BlockList's parameters in engines.ipu_model's modules


def connect(recipe: Recipe, topology: Topology) -> Processes:
    """Join the other instances that poprun started, if any.

    Args:
        recipe: of the run.
        topology: this process's place in it.

    Raises:
        ConfigError: PopTorch cannot be imported, or poprun started something else than the recipe
            says.
    """
    _poptorch()
    if not _under_poprun():
        poprun.check_served(topology.served, recipe.parallel.stages, topology.replicas)
        return Processes(topology, IpuEngine.device)
    popdist = _needed("popdist", "install it from the Poplar SDK")
    # It carries small objects between the instances.
    _needed("horovod.torch", "install it by pip")
    popdist.init()
    replicas = popdist.getNumTotalReplicas()
    if replicas != topology.replicas:
        raise ConfigError(
            f"poprun started {replicas} replicas, but this command computes with one; start it without poprun"
        )
    instances = Instances(topology)
    launched = poprun.Launched(
        replicas,
        popdist.getNumLocalReplicas(),
        popdist.getNumIpusPerReplica(),
    )
    instances.from_main(lambda: poprun.check_launched(recipe, launched))
    return instances


class IpuEngine(Engine):
    """Computes the replicas that this instance serves, each in `parallel.stages` IPUs."""

    device = torch.device("cpu")  # of inputs and outputs

    def __init__(self, recipe: Recipe, batch: Batch, processes: Processes):
        """
        Args:
            recipe: of the run.
            batch: of a step.
            processes: the instances of the run; all of them call.
        """
        self._library = _poptorch()
        self.batch = batch
        self.processes = processes
        self.topology = processes.topology
        self._recipe = recipe
        # Of arithmetic and weights: recipe/ipu/rules.py requires one dtype for both.
        self._dtype = DTYPES[compute_dtype(recipe)]
        training = device_model(recipe.model, recipe.run.seed, self._dtype)
        evaluation = device_model(recipe.model, recipe.run.seed, self._dtype)
        self.shapes = state.shapes(evaluation)
        notes = self._cut(training, evaluation)
        self._create_host_state(evaluation)
        self._plan = optimizers.optimizer(recipe)
        self._create_options()
        self._create_training(training)
        self._create_inference(evaluation)
        # Where the newest values are.
        self._weights_are_on_device = False
        self._slots_are_on_device = False
        self._slots_to_send = False
        self._inference_is_stale = False
        self.notes = (*notes, *options.notes(recipe, batch.replicas, self.topology.served))

    # Parts of the engine ----------------------------------------------------------------------

    def _cut(self, *models: BlockList) -> List[str]:
        """Mark where stages begin in equal models. Returns lines for the user."""
        recipe = self._recipe
        blocks = cuts.Blocks(models[0], recipe.model, recipe.parallel, self.batch)
        parts, note = cuts.counted(blocks)
        names = models[0].names
        # Refused now, not after the minutes that a program takes to compile.
        balance.check_blocks("ipu.keep_activations", recipe.ipu.keep_activations, names)
        for number, part in enumerate(parts):
            for model in models:
                first = model.get_submodule(part[0])
                self._library.BeginBlock(first, user_id=f"stage {number}", ipu_id=number)
        return [note] if note else []

    def _create_host_state(self, model: BlockList) -> None:
        """Create the host's copy of weights, optimizer state and averages.

        They have the form that all engines save.
        """
        recipe = self._recipe
        norms = norm_parameters(model)
        self._host = WeightState(
            model.named_parameters(),
            lambda parameters: factory.create(recipe.optimizer, parameters, norms),
            dtype=self._dtype,
            rounding="nearest",  # the device rounds; here values are only stored
            seed=recipe.run.seed,
        )
        self._averages = Averages(recipe.average, self._host, buffers={})
        self._loss_scale = LossScale(recipe.precision.loss_scale, False, self.device)

    def _create_options(self) -> None:
        """Create PopTorch's options of the two programs."""
        settings: Dict[str, Callable[..., List[Setting]]] = {
            "training": options.training_settings,
            "evaluation": options.evaluation_settings,
        }
        recipe = self._recipe
        self._options = {}
        for program, settings_of in settings.items():
            listed = settings_of(recipe, self.batch, self.topology.served, _under_poprun())
            is_main = self.topology.is_main
            self._options[program] = _options(recipe.parallel.stages, listed, is_main)

    def _create_training(self, model: BlockList) -> None:
        """Create the executor of training. Nothing is compiled before the first images come."""
        recipe = self._recipe
        # PopTorch is not to reduce the loss again: the module gives a mean.
        marks = Marks(
            loss=functools.partial(self._library.identity_loss, reduction="none"),
            keep=self._library.recomputationCheckpoint,
        )
        if options.overlaps(recipe, self.batch):
            marks = self._overlapping(marks)
        module = TrainingModule(
            model,
            recipe.data.label_smoothing,
            recipe.model.classes,
            marks,
            frozenset(recipe.ipu.keep_activations),
        )
        self._module = module.train()
        self._create_optimizer(model)
        self._training = self._library.trainingModel(
            self._module,
            self._options["training"],
            self._optimizer,
        )

    def _create_inference(self, model: BlockList) -> None:
        """Create the executor of evaluation."""
        recipe = self._recipe
        marks = Marks()
        if options.evaluation_overlaps(recipe):
            marks = self._overlapping(marks)
        module = EvaluationModule(model, marks).eval()
        self._inference = self._library.inferenceModel(module, self._options["evaluation"])
        iterations = options.evaluation_iterations(recipe)
        self._rows = recipe.batch.evaluation * iterations * self.topology.served

    def _overlapping(self, marks: Marks) -> Marks:
        """Return marks by which transfers overlap computation."""
        mode = self._library.OverlapMode.OverlapAccumulationLoop
        return marks._replace(
            input=functools.partial(self._library.set_overlap_for_input, mode=mode),
            output=functools.partial(self._library.set_overlap_for_output, mode=mode),
        )

    def _create_optimizer(self, model: BlockList) -> None:
        plan = self._plan
        section = self._recipe.optimizer
        groups = self._parameter_groups(model)
        keywords = {name: _resolved(value) for name, value in plan.options.items()}
        # The rate must be given here: PopTorch compiles in what only groups have.
        self._optimizer = getattr(self._library.optim, plan.name)(groups, lr=1.0, **keywords)
        for name in plan.constant:
            self._optimizer.variable_attrs.markAsConstant(name)
        # PopTorch keeps SGD's momentum multiplied by the loss scale
        # (popart_compiler/source/CompilerImpl.cpp).
        self._slot_scale = 1.0
        if section.name == "sgd":
            self._slot_scale = self._recipe.precision.loss_scale

    def _parameter_groups(self, model: BlockList) -> List[Dict[str, Any]]:
        """Return the groups of the optimizer that have parameters, and note the rate of each."""
        section = self._recipe.optimizer
        parameters = dict(model.named_parameters())
        skipped = factory.skipped_names(section, parameters, norm_parameters(model))
        groups = []
        self._rate_scales = []
        for group in self._plan.groups:
            members = []
            for name, parameter in parameters.items():
                if (name in skipped) == group.skipped:
                    members.append(parameter)
            if members:
                groups.append({"params": members, **group.options})
                self._rate_scales.append(group.lr_scale)
        return groups

    # Training ---------------------------------------------------------------------------------

    def training_batches(self, source: Optional[Source], steps: range) -> TrainingFeed:
        """Read this instance's images of all `steps`: see `Engine`."""
        assert source is not None, _IMAGES_ENTER
        recipe = self._recipe
        positions = Positions(
            RunOrder(source, recipe.data, recipe.run.seed, self.batch.global_),
            steps,
            micro=self.batch.micro,
            # A compiled program takes images of one size, as recipe/ipu/rules.py demands.
            size=training_image_size(recipe, 0),
            colours=Colours(recipe.model.mean, recipe.model.std),
            instance=self._instance,
            instances=self.topology.world,
        )
        self._batches = TrainingFeed(positions, steps, self._create_loader)
        return self._batches

    def _create_loader(self, positions: Positions) -> Loader:
        """Create PopTorch's loader of the images at some `positions`. It begins to read at once."""
        data = self._recipe.data
        images = self.batch.global_ // self.topology.world  # of this instance in a step
        return self._library.DataLoader(
            self._options["training"],
            positions,
            batch_size=self.batch.micro,
            num_workers=data.workers,
            worker_init_fn=begin_work,
            auto_distributed_partitioning=False,  # `Positions` are this instance's already
            mode=self._library.DataLoaderMode.AsyncRebatched,
            rebatched_worker_size=min(_WORKERS_PORTION, images),
            async_options={
                "buffer_size": self._recipe.ipu.prefetch_depth,
                "load_indefinitely": False,
                "early_preload": True,
            },
        )

    @property
    def _instance(self) -> int:
        """Return the number of this process among the instances."""
        return self.topology.replica // self.topology.served

    def data_wait(self) -> float:
        return self._batches.waited

    def train_step(
        self,
        micro_batches: Iterator[Any],
        update: Update,
        lr: float,
        measure: bool = False,
    ) -> StepResult:
        """Make an `update` of one step: see `Engine`."""
        # A batch that grows needs several steps for an update, which recipe/ipu/rules.py refuses.
        assert update.steps == 1, update
        images = next(micro_batches)
        assert images.step == update.step, (images.step, update.step)
        losses, correct = self._train(images, lr)

        # Each process has the sums over its own replicas.
        sums = torch.stack([losses.double().sum(), correct.double().sum()])
        loss, hits = self.processes.sum(sums)
        # The IPUs have no step that could be left out: weights that got such a gradient are lost.
        if self._weights_are_on_device and not loss.isfinite():
            raise Diverged(f"the loss is {loss.item()}, and the IPUs have made an update of it")
        zero = torch.zeros((), dtype=torch.int64)
        return StepResult(
            loss=(loss / self.batch.micro_batches).float(),
            correct=hits.long(),
            images=self.batch.global_,
            skipped=zero,
            skipped_in_row=zero,
            loss_scale=self._loss_scale.scale,
            norms=None,
            unreadable=(),
        )

    def _train(self, images: StepImages, lr: float) -> Tuple[torch.Tensor, torch.Tensor]:
        """Make an update on the IPUs. Returns losses and hits of this instance's replicas."""
        # PopTorch reads a changed rate only as the optimizer is set again.
        for group, scale in zip(self._optimizer.param_groups, self._rate_scales):
            group["lr"] = lr * scale
        self._training.setOptimizer(self._optimizer)
        inputs = [images.images, images.labels]
        if images.mixing is not None:
            inputs.append(images.mixing)
        # The two programs take turns on the IPUs.
        _detach(self._inference)
        if not self._training.isCompiled():
            self._training.compile(*inputs)
        # Only a compiled program has a place for the optimizer's state.
        if self._slots_to_send:
            self._send_slots(images.step)
        results = self._training(*inputs)
        # With synthetic data nothing leaves the device, and the host keeps the first weights.
        trains = not self._recipe.ipu.synthetic_data
        self._weights_are_on_device = trains
        self._slots_are_on_device = trains
        return results

    def end_epoch(self) -> None:
        if self._averages.names():
            self._fetch_weights()
            self._averages.end_epoch()

    # Scores -----------------------------------------------------------------------------------

    def evaluation_batches(self, source: Optional[Source], images: int) -> EvaluationFeed:
        """Read this instance's share of the images of `source`: see `Engine`."""
        assert source is not None, _IMAGES_ENTER
        return EvaluationFeed(
            source,
            self._recipe.data,
            self._rows,
            size=image_size(self._recipe.model),
            instance=self._instance,
            instances=self.topology.world,
        )

    def averages(self) -> Tuple[str, ...]:
        return self._averages.filled()

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        """Evaluate with other `weights` within: see `Engine`."""
        self._fetch_weights()
        if weights == "trained":
            yield
            return
        # The device has to be sent the average, and afterwards the trained weights again.
        try:
            with self._averages.shown(weights, mean=_alike):
                self._inference_is_stale = True
                yield
        finally:
            self._inference_is_stale = True

    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        """Score a `batch`: see `Engine`."""
        assert batch is not None, _IMAGES_ENTER
        return scored(self.predict_step(batch), batch.labels[: batch.valid])

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        """Return the logits of a `batch`: see `Engine`."""
        self._fetch_weights()
        _detach(self._training)
        # A program that is not attached is sent the weights when it is.
        if self._inference_is_stale and _is_attached(self._inference):
            self._inference.copyWeightsToDevice()
        self._inference_is_stale = False
        logits = [self._inference(part).float() for part in padded(batch.images, self._rows)]
        return torch.cat(logits)[: batch.valid]

    def peak_flops(self) -> float:
        """Return published rates: nothing else can run on the IPUs beside the run's programs."""
        ipus = self.batch.replicas * self._recipe.parallel.stages
        return _PEAK_FLOPS[self._dtype] * ipus

    # State ------------------------------------------------------------------------------------

    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        """Replace the `weights`: see `Engine`."""
        state.check_shapes(weights, self.shapes)
        # Those that are not replaced keep the device's values.
        self._fetch_weights()
        self._host.replace(weights)
        self._send_weights()

    def state_dict(self) -> dict:
        self._fetch_weights()
        self._fetch_slots()
        if not self.topology.is_main:
            return {}
        return {
            **self._host.state_dict(),
            "loss_scale": self._loss_scale.state_dict(),
            "averages": self._averages.state_dict(self._averages.flat()),
            "buffers": {},
        }

    def load_state_dict(self, saved: dict) -> None:
        """Load the `saved` state of any engine."""
        state.check_parts(saved, ("loss_scale", "averages"), self._averages.names())
        self._host.load_state_dict(saved)
        self._averages.load_state_dict(saved["averages"])
        # Weights are sent now, slots once the program is compiled.
        self._slots_are_on_device = False
        self._slots_to_send = True
        self._send_weights()

    def close(self) -> None:
        for program in (self._training, self._inference):
            program.destroy()
        self.processes.part()

    def _fetch_weights(self) -> None:
        """Copy the device's weights to the host."""
        if not self._weights_are_on_device:
            return
        self._weights_are_on_device = False
        # PopTorch reads the device when the module's state_dict is called, and hands arguments to
        # torch by position.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Positional args are being deprecated")
            tensors = self._module.state_dict()
        self._host.replace({name[len(_INSIDE) :]: tensor for name, tensor in tensors.items()})
        # The loss would show it at the next step only.
        if not self._host.flat.float().sum().isfinite():
            raise Diverged("the weights are not finite any more")
        self._inference_is_stale = True

    def _send_weights(self) -> None:
        self._weights_are_on_device = False
        self._inference_is_stale = True
        # Evaluation's program is sent them when it is attached the next time.
        weights = self._host.state_dict()["weights"]
        self._training.load_state_dict({_INSIDE + name: weights[name] for name in weights})

    def _fetch_slots(self) -> None:
        """Copy the device's optimizer state to the host."""
        if not self._slots_are_on_device:
            return
        self._slots_are_on_device = False
        tensors = self._optimizer.state_dict()["ipu_state"]
        host = self._host.state_dict()
        # The device's factor is taken out: files hold momenta as all engines do.
        for slot in self._host.optimizer.slots:
            host[slot] = {}
            for name, key in self._slot_keys(slot):
                host[slot][name] = tensors[key] / self._slot_scale
        self._host.load_state_dict(host)

    def _send_slots(self, step: int) -> None:
        """Copy the loaded optimizer state into the program just compiled."""
        self._slots_to_send = False
        saved = self._optimizer.state_dict()
        tensors = dict(saved["ipu_state"])
        for key, value in tensors.items():
            # Bias corrections go on from this step; no other engine saves their counts.
            if key.startswith(_COUNT_PREFIX):
                tensors[key] = torch.full_like(value, step)
        host = self._host.state_dict()
        for slot in self._host.optimizer.slots:
            for name, key in self._slot_keys(slot):
                value = host[slot][name] * self._slot_scale
                tensors[key] = value.to(tensors[key].dtype).view_as(tensors[key])
        self._optimizer.load_state_dict({**saved, "ipu_state": tensors})
        self._training.setOptimizer(self._optimizer)

    def _slot_keys(self, slot: str) -> List[Tuple[str, str]]:
        """Return each parameter's name, and PopART's name of its tensor in a slot."""
        prefix = self._plan.slots[slot] + _INSIDE
        return [(name, prefix + name) for name in self.shapes]


def _poptorch() -> Any:
    """Import PopTorch. Raises ConfigError with its message if that fails."""
    try:
        import poptorch
    except (ImportError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"run.device ipu: PopTorch cannot be imported: {error or type(error).__name__}; Poplar SDK 3.4 needs "
            f"Python 3.8 and torch 2.0.1 (requirements-ipu.txt), here are Python {platform.python_version()} and torch "
            f"{torch.__version__}; source the SDK's enable.sh and install its wheel, or use run.device=cpu"
        ) from None
    return poptorch


def _needed(name: str, remedy: str) -> Any:
    """Import a module that joins the instances. Raises ConfigError."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"poprun needs {name.split('.')[0]}, which cannot be imported: {error}; {remedy} "
            "(requirements-ipu.txt says in which order), or start one process without poprun"
        ) from None


def _under_poprun() -> bool:
    return "POPDIST_NUM_TOTAL_REPLICAS" in os.environ


def _options(stages: int, settings: Sequence[Setting], is_main: bool) -> Any:
    """Return PopTorch's options with these settings, made in order.

    Some are for the first process of a run only.
    """
    if _under_poprun():
        import popdist.poptorch

        made = popdist.poptorch.Options(ipus_per_replica=stages)
    else:
        made = _poptorch().Options()
    for setting in settings:
        if is_main or not setting.main_only:
            path = setting.call.split(".")[1:]
            method = functools.reduce(getattr, path, made)
            method(*_resolved(list(setting.arguments)))
    return made


def _resolved(value: Any) -> Any:
    """Replace the names in `value` by the objects that they stand for."""
    if isinstance(value, Name):
        module, *path = value.path.split(".")
        return functools.reduce(getattr, path, importlib.import_module(module))
    if isinstance(value, Chain):
        result = _resolved(Name(value.start))()
        for method, arguments in value.calls:
            result = getattr(result, method)(*_resolved(list(arguments)))
        return result
    if isinstance(value, list):
        return [_resolved(element) for element in value]
    return value


def _detach(program: Any) -> None:
    """Detach a program from the IPUs; the other one attaches itself when it is called."""
    if _is_attached(program):
        program.detachFromDevice()


def _is_attached(program: Any) -> bool:
    return program.isCompiled() and program.isAttachedToDevice()


def _alike(flat: torch.Tensor) -> torch.Tensor:
    """Return a buffer as it is: on IPUs all replicas have the same weights."""
    return flat
