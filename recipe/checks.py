"""All checks of a recipe that concern more than one section. Those of one section stand with its keys; what IPUs ask is
in ipu_rules.py."""

from __future__ import annotations

from recipe import ipu_rules
from recipe.config import Recipe
from recipe.division import Batch
from recipe.errors import ConfigError


def check(recipe: Recipe, batch: Batch) -> None:
    """Raises ConfigError for sections that do not go together, on the recipe's device."""
    _check_micro_batch(recipe)
    _check_exchange(recipe)
    _check_growing_batch(recipe, batch)
    if recipe.run.device == "ipu":
        ipu_rules.check(recipe, batch)
    else:
        _check_schedule(recipe, batch.accumulation)


def _check_micro_batch(recipe: Recipe) -> None:
    """Check that a micro batch is large enough for mixing and for batch normalisation."""
    data, micro = recipe.data, recipe.batch.micro
    if micro == 1 and recipe.model.batch_statistics:
        raise ConfigError("model.norm batch takes statistics over a micro batch, but batch.micro is 1; raise it")
    if micro == 1 and (data.mixup or data.cutmix is not None):
        key = "data.mixup" if data.mixup else "data.cutmix"
        off = "0" if data.mixup else "null"
        raise ConfigError(f"{key} mixes images of one micro batch, but batch.micro is 1; raise it, or {key}={off}")


def _check_growing_batch(recipe: Recipe, batch: Batch) -> None:
    """Check that nothing counts updates, or sums in an order that depends on how many micro batches an update has."""
    if recipe.batch.schedule is None:
        return
    exchange = recipe.exchange
    if exchange.method not in ("dense", "none", "auto") or exchange.in_tree or exchange.delay:
        raise ConfigError(
            f"batch.schedule goes with exchange.method dense in the order fast, without delay, but the recipe has "
            f"{exchange.describe(recipe.optimizer)}; use exchange.method=dense exchange.order=fast exchange.delay=0"
        )
    if recipe.model.batch_statistics:
        raise ConfigError(
            "batch.schedule and model.norm batch: running statistics depend on the order of micro batches; use "
            "model.norm=group"
        )
    if recipe.batch.schedule != "noise":
        return
    if not recipe.log.noise_scale:
        raise ConfigError("batch.schedule noise follows log.noise_scale, which is false; use log.noise_scale=auto")
    if batch.micro == batch.global_:
        raise ConfigError(
            f"batch.schedule noise follows the noise scale, which needs several micro batches in batch.global "
            f"{batch.global_}; lower batch.micro {batch.micro}"
        )


def _check_exchange(recipe: Recipe) -> None:
    """Check that the optimizer, the model and the loss scale go with the exchange."""
    exchange, optimizer = recipe.exchange, recipe.optimizer
    if exchange.compresses_update(optimizer) and not optimizer.replica_update:
        raise ConfigError(
            f"exchange.compress update goes with lars and with sgd without nesterov, but the optimizer is "
            f"{optimizer.form()}; use one of these, or exchange.compress=gradient"
        )
    if exchange.compresses_update(optimizer) and exchange.delay:
        raise ConfigError(
            "exchange.compress update makes updates from the weights of their step, which exchange.delay has changed "
            "by then; use exchange.compress=gradient or exchange.delay=0"
        )
    if exchange.method == "local" and recipe.model.batch_statistics:
        raise ConfigError(
            "exchange.method local and model.norm batch: running statistics would be each replica's own; use "
            "model.norm=group"
        )
    if exchange.delay and recipe.model.batch_statistics:
        raise ConfigError(
            "exchange.delay and model.norm batch: running statistics would be ahead of the weights; use "
            "model.norm=group or exchange.delay=0"
        )
    if exchange.delay and exchange.method != "local" and recipe.precision.dynamic_loss_scale:
        raise ConfigError(
            "exchange.delay and precision.dynamic_loss_scale: a gradient that overflows would lower the scale of steps "
            "that are computed already; use dynamic_loss_scale=false"
        )


def _check_schedule(recipe: Recipe, accumulation: int) -> None:
    """Check the number of micro batches against the schedules of torch.distributed.pipelining."""
    parallel = recipe.parallel
    if parallel.schedule == "sharded":
        raise ConfigError(
            f"parallel.schedule sharded is for IPUs, but run.device is {recipe.run.device}; use gpipe or 1f1b"
        )
    if parallel.schedule == "gpipe" or parallel.stages == 1:
        return
    if accumulation < parallel.stages:
        raise ConfigError(
            f"parallel.schedule {parallel.schedule} needs as many micro batches as stages, but accumulation is "
            f"{accumulation} and parallel.stages {parallel.stages}; lower batch.micro, or use gpipe"
        )
    rounds = accumulation // parallel.stages
    if parallel.schedule == "interleaved" and accumulation % rounds:
        raise ConfigError(
            f"parallel.schedule interleaved needs an accumulation that is a multiple of {rounds} (accumulation // "
            f"stages), not {accumulation}; use 1f1b, or a batch.micro or parallel.replicas that makes it a multiple "
            f"of {parallel.stages} stages"
        )


def bound_to_cut(recipe: Recipe, replicas: int) -> str:
    """Reason why another cut into stages would change what `replicas` replicas learn; empty if it changes no bit.

    An all-reduce adds in an order that depends on an element's place in the stage's buffer. This matters for three
    replicas or more. `half` and the tree add each element in the order of replicas, wherever it is.
    """
    exchange = recipe.exchange
    if exchange.sparse:
        return f"{exchange.method} selects within each stage"
    if replicas > 1 and exchange.method == "local":
        return "local takes means of parts of a stage"
    if replicas > 1 and exchange.sent_bits:
        return "exchange.bits rounds blocks of a stage"
    if replicas > 2 and exchange.method == "dense" and not exchange.in_tree:
        return f"exchange.order fast adds {replicas} replicas' gradients as they lie in a stage"
    if replicas > 2 and exchange.method != "none" and recipe.model.batch_statistics:
        return f"running statistics of {replicas} replicas are added as they lie in a stage"
    return ""
