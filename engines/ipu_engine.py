"""The engine for Graphcore's IPUs: the only file that imports PopTorch.

recipe/ipu/options.py maps a recipe to PopTorch's options. One program is compiled for training and one for evaluation;
they take turns on the IPUs. Weights and optimizer state are copied to the host when they are saved, averaged or
evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import warnings
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from common.errors import ConfigError
from data.base import Source
from data.batches import MicroBatch
from data.workers import begin_work
from engines import cuts, state
from engines.base import Counts, Diverged, Engine, StepResult, scored
from engines.devices import DTYPES
from engines.ipu_input import EvaluationFeed, Positions, StepImages, TrainingFeed, padded
from engines.ipu_instances import Instances
from engines.ipu_model import EvaluationModule, Marks, TrainingModule, device_model
from models.base import BlockList
from models.normalization import norm_parameters
from optim import factory
from optim.averaging import WeightAverage
from optim.loss_scale import LossScale
from optim.weight_state import WeightState
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.config import Recipe
from recipe.course import Update
from recipe.division import Batch
from recipe.ipu import optimizers, options, poprun
from recipe.ipu.optimizers import Name
from recipe.ipu.options import Chain, Setting
from recipe.ipu.rules import compute_dtype

# Matrix products on a Mk2 IPU, by Graphcore's data sheet; a Bow IPU is clocked 1.4 times as fast.
_PEAK_FLOPS = {torch.float16: 250e12, torch.float32: 62.5e12}
_COUNT_PREFIX = "Step___"  # the updates that a bias correction counts
_WORKERS_PORTION = 64  # images that a worker sends at once: each message costs some 0.2 ms
_INSIDE = "model."  # prefix of the BlockList's parameters in engines.ipu_model's modules


def connect(recipe: Recipe, topology: Topology) -> Processes:
    """Join the other instances that poprun started, if any.

    Raises ConfigError: PopTorch cannot be imported, or poprun started something else than the recipe says.
    """
    _poptorch()
    if not _under_poprun():
        poprun.check_served(topology.served, recipe.parallel.stages, topology.replicas)
        return Processes(topology, IpuEngine.device)
    popdist = _needed("popdist", "install it from the Poplar SDK")
    _needed("horovod.torch", "install it by pip")
    popdist.init()
    replicas, local = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()
    if replicas != topology.replicas:
        raise ConfigError(
            f"poprun started {replicas} replicas, but this command computes with one; start it without poprun"
        )
    instances = Instances(topology)
    launched = poprun.Launched(replicas, local, popdist.getNumIpusPerReplica())
    instances.from_main(lambda: poprun.check_launched(recipe, launched))
    return instances


class IpuEngine(Engine):
    """Computes the replicas that this instance serves, each in `parallel.stages` IPUs."""

    device = torch.device("cpu")  # of inputs and outputs

    def __init__(self, recipe: Recipe, batch: Batch, processes: Processes):
        poptorch = _poptorch()
        self.batch, self.topology, self.processes, self._recipe = batch, processes.topology, processes, recipe
        self._dtype = DTYPES[compute_dtype(recipe)]  # of arithmetic and weights: ipu/rules.py requires one for both
        training, evaluation = (device_model(recipe, self._dtype) for _ in range(2))
        self.shapes = state.shapes(evaluation)
        parts, note = cuts.counted(cuts.Blocks(evaluation, recipe.model, recipe.parallel, batch))
        for name in recipe.ipu.keep_activations:
            if name not in evaluation.names:
                blocks = ", ".join(evaluation.names)
                raise ConfigError(f"ipu.keep_activations: {name} is not a block; the blocks are {blocks}")
        for number, (first, *_) in enumerate(parts):
            for model in (training, evaluation):
                poptorch.BeginBlock(model.get_submodule(first), user_id=f"stage {number}", ipu_id=number)
        # The host's copy of the weights and the optimizer's state, in the form that all engines save.
        self._host = WeightState(
            evaluation.named_parameters(),
            lambda parameters: factory.create(recipe.optimizer, parameters, norm_parameters(evaluation)),
            dtype=self._dtype,
            rounding="nearest",  # the device rounds; here values are only stored
            seed=recipe.run.seed,
        )
        decay = recipe.average.epoch_decay
        self._averages = {} if decay is None else {"epoch_average": WeightAverage(decay, [self._host.flat])}
        self._loss_scale = LossScale(recipe.precision.loss_scale, False, self.device)
        self._plan = optimizers.optimizer(recipe)
        self._create_programs(training, evaluation)
        self._weights_are_on_device = self._slots_are_on_device = self._slots_to_send = False
        self._inference_is_stale = False
        self.notes = (*((note,) if note else ()), *options.notes(recipe, batch.replicas, self.topology.served))

    def _create_programs(self, training: BlockList, evaluation: BlockList) -> None:
        """Create the two executors. Nothing is compiled before the first images come."""
        poptorch, recipe, served = _poptorch(), self._recipe, self.topology.served
        self._options = {
            name: _options(recipe, settings(recipe, self.batch, served, _under_poprun()), self.topology.is_main)
            for name, settings in (("training", options.training_settings), ("evaluation", options.evaluation_settings))
        }
        mode = poptorch.OverlapMode.OverlapAccumulationLoop
        overlapped = {
            "input": functools.partial(poptorch.set_overlap_for_input, mode=mode),
            "output": functools.partial(poptorch.set_overlap_for_output, mode=mode),
        }
        marks = Marks(
            functools.partial(poptorch.identity_loss, reduction="none"),
            poptorch.recomputationCheckpoint,
            **(overlapped if options.overlaps(recipe, self.batch) else {}),
        )
        kept = frozenset(recipe.ipu.keep_activations)
        self._module = TrainingModule(training, recipe.data.label_smoothing, recipe.model.classes, marks, kept).train()
        self._create_optimizer(training)
        self._training = poptorch.trainingModel(self._module, self._options["training"], self._optimizer)
        marks = Marks(**(overlapped if options.evaluation_overlaps(recipe) else {}))
        scoring = EvaluationModule(evaluation, marks).eval()
        self._inference = poptorch.inferenceModel(scoring, self._options["evaluation"])
        self._rows = recipe.batch.evaluation * options.evaluation_iterations(recipe) * served

    def _create_optimizer(self, model: BlockList) -> None:
        plan, parameters = self._plan, dict(model.named_parameters())
        skipped = factory.skipped_names(self._recipe.optimizer, parameters, norm_parameters(model))
        groups, self._rate_scales = [], []
        for group in plan.groups:
            members = [parameter for name, parameter in parameters.items() if (name in skipped) == group.skipped]
            if members:
                groups.append({"params": members, **group.options})
                self._rate_scales.append(group.lr_scale)
        keywords = {name: _resolved(value) for name, value in plan.options.items()}
        # The rate must be given here: PopTorch compiles in what only groups have.
        self._optimizer = getattr(_poptorch().optim, plan.name)(groups, lr=1.0, **keywords)
        for name in plan.constant:
            self._optimizer.variable_attrs.markAsConstant(name)
        # PopTorch keeps SGD's momentum multiplied by the loss scale (popart_compiler/source/CompilerImpl.cpp).
        self._slot_scale = self._recipe.precision.loss_scale if self._recipe.optimizer.name == "sgd" else 1.0

    def training_batches(self, source: Optional[Source], steps: range) -> Iterator[StepImages]:
        poptorch, place, recipe = _poptorch(), self.topology, self._recipe
        positions = Positions(source, recipe, self.batch, steps, place.replica // place.served, place.world)
        loader = functools.partial(
            poptorch.DataLoader,
            self._options["training"],
            batch_size=self.batch.micro,
            num_workers=recipe.data.workers,
            worker_init_fn=begin_work,
            auto_distributed_partitioning=False,  # `Positions` are this instance's already
            mode=poptorch.DataLoaderMode.AsyncRebatched,
            rebatched_worker_size=min(_WORKERS_PORTION, self.batch.global_ // place.world),
            async_options={"buffer_size": recipe.ipu.prefetch_depth, "load_indefinitely": False, "early_preload": True},
        )
        self._batches = TrainingFeed(positions, steps, loader)
        return self._batches

    def data_wait(self) -> float:
        return self._batches.waited

    def evaluation_batches(self, source: Optional[Source], images: int) -> EvaluationFeed:
        place = self.topology
        return EvaluationFeed(source, self._recipe, self._rows, place.replica // place.served, place.world)

    def train_step(self, micro_batches: Iterator[Any], update: Update, lr: float, measure: bool = False) -> StepResult:
        assert update.steps == 1, update
        step = update.step
        images = next(micro_batches)
        assert images.step == step, (images.step, step)
        for group, scale in zip(self._optimizer.param_groups, self._rate_scales):
            group["lr"] = lr * scale
        self._training.setOptimizer(self._optimizer)
        arguments = [tensor for tensor in images[:3] if tensor is not None]
        _detach(self._inference)
        if not self._training.isCompiled():
            self._training.compile(*arguments)
        if self._slots_to_send:
            self._send_slots(step)
        losses, correct = self._training(*arguments)
        # With synthetic data nothing leaves the device, and the host keeps the first weights.
        self._weights_are_on_device = self._slots_are_on_device = not self._recipe.ipu.synthetic_data
        sums = self.processes.sum(torch.stack([losses.double().sum(), correct.double().sum()]))
        if self._weights_are_on_device and not sums[0].isfinite():
            raise Diverged(f"the loss is {sums[0].item()}, and the IPUs have made an update of it")
        zero = torch.zeros((), dtype=torch.int64)
        loss, images = (sums[0] / self.batch.micro_batches).float(), self.batch.global_
        return StepResult(loss, sums[1].long(), images, zero, zero, self._loss_scale.scale, None, ())

    def end_epoch(self) -> None:
        if "epoch_average" in self._averages:
            self._fetch_weights()
            self._averages["epoch_average"].add([self._host.flat])

    def averages(self) -> Tuple[str, ...]:
        return tuple(name for name, average in self._averages.items() if average.count)

    @contextlib.contextmanager
    def using(self, weights: str) -> Iterator[None]:
        self._fetch_weights()
        if weights == "trained":
            yield
            return
        with self._host.shown(self._averages[weights].tensors[0]):
            self._inference_is_stale = True
            yield
        self._inference_is_stale = True

    def evaluate_step(self, batch: Optional[MicroBatch]) -> Counts:
        return scored(self.predict_step(batch), batch.labels[: batch.valid])

    def predict_step(self, batch: MicroBatch) -> torch.Tensor:
        self._fetch_weights()
        _detach(self._training)
        if self._inference_is_stale and self._inference.isCompiled() and self._inference.isAttachedToDevice():
            self._inference.copyWeightsToDevice()  # else they are sent when it is attached
        self._inference_is_stale = False
        return torch.cat([self._inference(part).float() for part in padded(batch.images, self._rows)])[: batch.valid]

    def load_weights(self, weights: Dict[str, torch.Tensor]) -> None:
        state.check_shapes(weights, self.shapes)
        self._fetch_weights()
        self._host.replace(weights)
        self._send_weights()

    def state_dict(self) -> dict:
        self._fetch_weights()
        self._fetch_slots()
        if not self.topology.is_main:
            return {}
        averages = {
            name: {"weights": self._host.by_name(average.tensors[0]), "buffers": {}, "count": average.count.clone()}
            for name, average in self._averages.items()
        }
        own = {"loss_scale": self._loss_scale.state_dict(), "averages": averages, "buffers": {}}
        return {**self._host.state_dict(), **own}

    def load_state_dict(self, saved: dict) -> None:
        state.check_parts(saved, ("loss_scale", "averages"), self._averages)
        self._host.load_state_dict(saved)
        for name, average in self._averages.items():
            self._host.load_flat(average.tensors[0], saved["averages"][name]["weights"])
            average.count = saved["averages"][name]["count"].clone()
        self._slots_are_on_device, self._slots_to_send = False, True
        self._send_weights()

    def peak_flops(self) -> float:
        """Published, not measured: nothing else can run on the IPUs beside the run's programs."""
        return _PEAK_FLOPS[self._dtype] * self.batch.replicas * self._recipe.parallel.stages

    def close(self) -> None:
        for program in (self._training, self._inference):
            program.destroy()
        self.processes.part()

    def _fetch_weights(self) -> None:
        """Copy the device's weights to the host; PopTorch reads them when the module's state_dict is called."""
        if self._weights_are_on_device:
            self._weights_are_on_device = False
            with warnings.catch_warnings():  # PopTorch hands arguments to torch by position
                warnings.filterwarnings("ignore", "Positional args are being deprecated")
                found = self._module.state_dict()
            self._host.replace({name[len(_INSIDE) :]: tensor for name, tensor in found.items()})
            if not self._host.flat.float().sum().isfinite():  # the loss would show it at the next step only
                raise Diverged("the weights are not finite any more")
            self._inference_is_stale = True

    def _send_weights(self) -> None:
        self._weights_are_on_device, self._inference_is_stale = False, True
        weights = self._host.state_dict()["weights"]
        self._training.load_state_dict({_INSIDE + name: tensor for name, tensor in weights.items()})

    def _fetch_slots(self) -> None:
        if self._slots_are_on_device:
            self._slots_are_on_device = False
            found = self._optimizer.state_dict()["ipu_state"]
            state = self._host.state_dict()
            for slot in self._host.optimizer.slots:
                state[slot] = {name: found[key] / self._slot_scale for name, key in self._slot_keys(slot)}
            self._host.load_state_dict(state)

    def _send_slots(self, step: int) -> None:
        """Copy the loaded optimizer state into the program just compiled; before, PopART has no place for it."""
        self._slots_to_send = False
        saved, own = self._optimizer.state_dict(), self._host.state_dict()
        found = {
            key: torch.full_like(value, step) if key.startswith(_COUNT_PREFIX) else value
            for key, value in saved["ipu_state"].items()
        }
        for slot in self._host.optimizer.slots:
            for name, key in self._slot_keys(slot):
                found[key] = (own[slot][name] * self._slot_scale).to(found[key].dtype).view_as(found[key])
        self._optimizer.load_state_dict({**saved, "ipu_state": found})
        self._training.setOptimizer(self._optimizer)

    def _slot_keys(self, slot: str) -> List[Tuple[str, str]]:
        """(parameter's name, PopART's name of its state tensor) of a slot."""
        return [(name, f"{self._plan.slots[slot]}{_INSIDE}{name}") for name in self.shapes]


def _poptorch() -> Any:
    """The module poptorch. Raises ConfigError with PopTorch's message if it cannot be imported."""
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


def _options(recipe: Recipe, settings: Sequence[Setting], is_main: bool) -> Any:
    """PopTorch's options with these settings, made in order. Args: is_main: in the first process of a run."""
    if _under_poprun():
        import popdist.poptorch

        made = popdist.poptorch.Options(ipus_per_replica=recipe.parallel.stages)
    else:
        made = _poptorch().Options()
    for setting in settings:
        if is_main or not setting.main_only:
            method = functools.reduce(getattr, setting.call.split(".")[1:], made)
            method(*_resolved(list(setting.arguments)))
    return made


def _resolved(value: Any) -> Any:
    """Replace the names in `value` by the objects that they stand for."""
    if isinstance(value, Name):
        module, *path = value.path.split(".")
        return functools.reduce(getattr, path, importlib.import_module(module))
    if isinstance(value, Chain):
        found = _resolved(Name(value.start))()
        for method, arguments in value.calls:
            found = getattr(found, method)(*_resolved(list(arguments)))
        return found
    return [_resolved(each) for each in value] if isinstance(value, list) else value


def _detach(program: Any) -> None:
    """Detach a program from the IPUs; the other one attaches itself when it is called."""
    if program.isCompiled() and program.isAttachedToDevice():
        program.detachFromDevice()
