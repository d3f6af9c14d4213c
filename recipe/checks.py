"""Checks of a recipe that concern more than one section. What IPUs refuse is in ipu/rules.py."""

from __future__ import annotations

from typing import Iterator

from common.errors import ConfigError
from common.text import count
from recipe.config import Recipe
from recipe.division import Batch
from recipe.ipu import rules as ipu_rules
from recipe.shares import subtrees


def check(recipe: Recipe, batch: Batch) -> None:
    """Check that sections go together, on the recipe's device.

    Args:
        recipe: with any sections, each of which is valid by itself.
        batch: how `batch.global` is divided.

    Raises:
        ConfigError: they do not; the first fault and its remedy.
    """
    # The first fault only: a later one may be there because of it.
    for fault in _faults(recipe, batch):
        raise ConfigError(fault)
    if recipe.run.device == "ipu":
        ipu_rules.check(recipe, batch)


def _faults(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Yield what is wrong, and the remedy, for each rule that the recipe breaks, in the order of
    this file.
    """
    # Only a family of models that somebody added has names without a size.
    if recipe.model.image_size is None:
        unset = f"model.image_size is null, but the name {recipe.model.name} has no size of its own"
        yield f"{unset}; give the pixels a side, e.g. model.image_size=224"
    if recipe.batch.micro is None:
        yield from _automatic_micro_batch(recipe)
    # Asked of the batch, as `auto` may have become 1.
    if batch.micro == 1:
        yield from _single_images(recipe)
    if recipe.model.train != "all" and recipe.exchange.method == "auto":
        measured = "measures the exchange of all weights, of which model.train trains a part"
        yield f"exchange.method auto {measured}; name a method, as exchange.method=dense"
    yield from _compressed_updates(recipe)
    yield from _late_gradients(recipe)
    if recipe.batch.schedule is not None:
        yield from _growing_batch(recipe, batch)
    yield from _sums_in_tree_order(recipe, batch)
    if recipe.parallel.shares == "measured":
        yield from _measured_shares(recipe)
    if recipe.log.memory and recipe.run.device == "cpu":
        yield "log.memory records the memory of CUDA devices, but run.device is cpu; use log.memory=false"
    if recipe.parallel.elastic:
        yield from _elastic(recipe, batch)
    # IPUs pipeline by rules of their own, which `check` asks after these.
    if recipe.run.device != "ipu":
        yield from _pipeline(recipe, batch)


def _automatic_micro_batch(recipe: Recipe) -> Iterator[str]:
    """Refuse `batch.micro: auto` where it changes what is learned, or is bound by more than memory."""
    if recipe.run.device == "ipu":
        yield "batch.micro auto on IPUs: programs are compiled for one size, and no other is tried; give a number"
    if recipe.model.batch_statistics:
        yield "batch.micro auto: model.norm batch has statistics over a micro batch, so its size matters; give a number"
    if recipe.parallel.stages > 1:
        idle = "the larger micro batches are, the longer stages of a pipeline stand still"
        yield f"batch.micro auto: {idle}; give a number, or parallel.stages=1"


def _single_images(recipe: Recipe) -> Iterator[str]:
    """Refuse micro batches of one image for what needs several."""
    alone = "mixes images of one micro batch, but batch.micro is 1; raise it, or"
    if recipe.model.batch_statistics:
        yield "model.norm batch takes statistics over a micro batch, but batch.micro is 1; raise it"
    if recipe.data.mixup:
        yield f"data.mixup {alone} data.mixup=0"
    if recipe.data.cutmix:
        yield f"data.cutmix {alone} data.cutmix=null"


def _compressed_updates(recipe: Recipe) -> Iterator[str]:
    """Refuse to select from an update that a replica cannot make alone."""
    exchange = recipe.exchange
    optimizer = recipe.optimizer
    if not exchange.compresses_update(optimizer):
        return
    if not optimizer.replica_update:
        goes = "exchange.compress update goes with lars and sgd"
        yield f"{goes}, not with {optimizer.name}; use exchange.compress=gradient"
    if exchange.delay:
        goes = "exchange.compress update needs the weights of its step, which exchange.delay has changed"
        yield f"{goes}; use exchange.compress=gradient or exchange.delay=0"


def _late_gradients(recipe: Recipe) -> Iterator[str]:
    """Refuse what a gradient or a mean of weights that is late, or each replica's own, would make
    wrong.
    """
    exchange = recipe.exchange
    if recipe.model.batch_statistics and exchange.is_local:
        drift = "each replica would have its own running statistics"
        yield f"exchange.method {exchange.method}: {drift}; use model.norm=group"
    if recipe.model.batch_statistics and exchange.delay:
        yield "exchange.delay: running statistics would be ahead; use model.norm=group or exchange.delay=0"
    # Local steps delay means of weights, in which no loss scale is left.
    if recipe.precision.dynamic_loss_scale and exchange.delay and not exchange.is_local:
        late = "exchange.delay: a late overflow would lower the scale of steps that are computed already"
        yield f"{late}; use precision.dynamic_loss_scale=false"


def _growing_batch(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Refuse a growing batch beside what counts updates, or adds in an order that depends on their
    micro batches.
    """
    exchange = recipe.exchange
    if not exchange.grows or exchange.in_tree or exchange.delay:
        goes = "batch.schedule goes with a dense exchange in fast order without a delay only"
        yield f"{goes}; use exchange.method=dense exchange.order=fast exchange.delay=0"
    if recipe.model.batch_statistics:
        yield "batch.schedule changes the order in which running statistics are summed; use model.norm=group"
    # An update may have any number of steps, as an epoch or a part of the schedule may end within
    # it: only multiples of the stages are then always such as `_pipeline` asks for.
    if recipe.parallel.schedule == "interleaved" and batch.accumulation % batch.stages:
        wanted = f"a multiple of {batch.stages} stages as accumulation, not {batch.accumulation}"
        yield f"batch.schedule with parallel.schedule interleaved needs {wanted}; use 1f1b, or change batch.micro"
    if recipe.batch.schedule != "noise":
        return
    if not recipe.log.noise_scale:
        yield "batch.schedule noise follows log.noise_scale, which is false; use log.noise_scale=auto"
    # Without a sum of all gradients a replica compares with its own share.
    images = batch.global_ if exchange.sums else batch.micro * batch.accumulation
    if batch.micro == images:
        place = f"batch.global {images}"
        if not exchange.sums:
            place = f"the {count(images, 'image')} of a replica"
        several = f"several micro batches in {place}"
        yield f"batch.schedule noise measures the noise scale by {several}; lower batch.micro {batch.micro}"


def _sums_in_tree_order(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Refuse a delay where a replica has several partial sums, of which a delayed exchange keeps
    one.
    """
    if not recipe.exchange.in_tree or not recipe.exchange.delay:
        return
    if any(len(subtrees(share, batch.micro_batches)) > 1 for share in batch.shares):
        late = "exchange.delay keeps one sum of a replica's gradients, but in tree order"
        yield f"{late} {count(batch.replicas, 'replica')} have several; use exchange.delay=0 or order=fast"


def _measured_shares(recipe: Recipe) -> Iterator[str]:
    """Refuse shares that follow measured times where they would change bits, or a schedule fixes
    them.
    """
    goes = "parallel.shares measured goes with exchange.order tree"
    if not recipe.exchange.in_tree:
        yield f"{goes}, in which shares change no bit; use exchange.order=tree or parallel.shares=even"
    if recipe.exchange.delay:
        yield f"{goes} without a delay; use exchange.delay=0 or parallel.shares=even"
    if recipe.model.batch_statistics:
        yield f"{goes}, but running statistics are summed by share; use model.norm=group or parallel.shares=even"
    if recipe.parallel.schedule == "interleaved":
        yield f"{goes} and any number of micro batches; use parallel.schedule=1f1b or parallel.shares=even"


def _elastic(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Refuse what needs each replica's own state, or adds in an order that depends on how many
    there are.
    """
    parallel = recipe.parallel
    if recipe.run.device == "ipu":
        yield "parallel.elastic is for CPUs and GPUs; use parallel.elastic=false"
    if not recipe.exchange.in_tree:
        yield "parallel.elastic goes with exchange.order tree, in which any replicas have the same bits; use it"
    if recipe.exchange.delay:
        yield "parallel.elastic: a gradient on its way would be lost with its replica; use exchange.delay=0"
    if recipe.model.batch_statistics:
        yield "parallel.elastic: running statistics are summed by replica; use model.norm=group"
    if parallel.schedule == "interleaved":
        yield "parallel.elastic changes the number of micro batches; use parallel.schedule=1f1b"
    # Not of the batch, for which one may only be assumed: training/run.py checks what was started.
    replicas = parallel.replicas
    if replicas is not None and parallel.minimum > replicas:
        yield f"parallel.minimum {parallel.minimum} is more than {count(replicas, 'replica')}; lower it"


def _pipeline(recipe: Recipe, batch: Batch) -> Iterator[str]:
    """Refuse numbers of micro batches that a schedule of torch.distributed.pipelining does not
    take.
    """
    name = recipe.parallel.schedule
    stages = batch.stages
    if name == "sharded":
        yield f"parallel.schedule sharded is for IPUs, but run.device is {recipe.run.device}; use gpipe or 1f1b"
    # Replicas may have different numbers of micro batches, and each has a pipeline.
    for accumulation in sorted({len(share) for share in batch.shares}):
        if stages > 1 and accumulation < recipe.parallel.least:
            few = f"accumulation is {accumulation} and parallel.stages {stages}"
            yield f"parallel.schedule {name} needs a micro batch a stage, but {few}; lower batch.micro, or use gpipe"
            continue
        # ScheduleInterleaved1F1B raises a ValueError for what its number of rounds does not divide.
        rounds = accumulation // stages
        if name == "interleaved" and accumulation % rounds:
            remedy = f"use 1f1b, or a batch.micro or parallel.replicas that makes it a multiple of {stages} stages"
            needed = f"needs a multiple of {rounds} micro batches, not {accumulation}"
            yield f"parallel.schedule interleaved {needed}; {remedy}"


def bound_to_cut(recipe: Recipe, replicas: int) -> str:
    """Return why another cut into stages would change what replicas learn; an empty text if it
    changes no bit.

    An all-reduce adds in an order that depends on an element's place in the stage's buffer. This
    matters for three replicas or more. `half` and the tree add each element in the order of
    replicas, wherever it is.

    Args:
        recipe: of the run.
        replicas: of the run.
    """
    exchange = recipe.exchange
    # Sparse methods, rounding and fragments look at several values of a stage at once, also where
    # there is one replica; sums of two numbers have only one order.
    if exchange.sparse:
        return f"{exchange.method} selects within each stage"
    if exchange.is_local:
        return f"{exchange.method} takes means of parts of a stage"
    if exchange.sent_bits:
        return "exchange.bits rounds blocks of a stage"
    if replicas > 2 and exchange.adds_by_place and not exchange.in_tree:
        rule = "exchange.order fast" if "order" in exchange.own_keys() else exchange.method
        return f"{rule} adds {replicas} replicas' gradients as they lie in a stage"
    if replicas > 2 and exchange.sums and recipe.model.batch_statistics:
        return f"running statistics of {replicas} replicas are added as they lie in a stage"
    return ""
