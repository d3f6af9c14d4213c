"""What IPUs refuse: every rule has a recipe that trips it and a neighbour that passes, and says what to do."""

import contextlib

import pytest

from recipe import ipu
from recipe.batch import divide
from recipe.division import Batch
from recipe.errors import ConfigError
from recipe.ipu import Launched
from recipe.loading import load
from recipe.optimization import Optimizer
from tests.conftest import QUICKSTART

# Digits: 64 images an update in micro batches of 4, so an accumulation of 16.
BASE = ("run.device=ipu", "batch.micro=4")
TWO = ("parallel.stages=2",)
FULL = ("precision.compute=float32", "precision.weights=float32")


def recipe(*overrides):
    trust = () if any(text.startswith("optimizer.name") for text in overrides) else ("optimizer.trust=momentum",)
    return load(QUICKSTART, [*BASE, *trust, *overrides])


def check(*overrides):
    made = recipe(*overrides)
    batch, replicas = made.batch, made.parallel.replicas or 1
    accumulation = batch.global_ // (batch.micro * replicas)
    ipu.check(made, Batch(batch.global_, batch.micro, accumulation, replicas, made.parallel.stages))


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


# Overrides; a part of the reason; the remedy, which must be enough.
RULES = [
    (("optimizer.trust=gradient",), "PopTorch has no LARS", "optimizer.trust=momentum"),
    (("optimizer.eps=1e-6",), "LAMB, whose trust ratio has no epsilon", "optimizer.eps=0"),
    (("optimizer.name=sgd", "optimizer.nesterov=true"), "not divided by accumulation", "optimizer.nesterov=false"),
    (("optimizer.clip_norm=1",), "cannot clip", "optimizer.clip_norm=null"),
    (("average.step_decay=0.99",), "leave the device after every update", "average.step_decay=null"),
    (("exchange.method=gtopk",), "PopART exchanges gradients itself", "exchange.method=dense"),
    (("exchange.delay=1",), "from the gradients of its own step", "exchange.delay=0"),
    (("exchange.order=tree",), "in which order", "exchange.order=fast"),
    (("model.norm=batch",), "running statistics", "model.norm=group"),
    (("data.source=folder", "data.reader=dali"), "by worker processes", "data.reader=torch"),
    (("data.bad_images=skip",), "whole micro batches", "data.bad_images=error"),
    (("precision.compute=bfloat16",), "float16 and float32 only", "precision.compute=float16"),
    (("precision.compute=float32",), "in the format that it computes in", "precision.compute=float16"),
    (("precision.weights=float32",), "in the format that it computes in", "precision.compute=float32"),
    ((*FULL, "precision.dynamic_loss_scale=true"), "float16 gradients", "precision.dynamic_loss_scale=false"),
    ((*TWO, "parallel.schedule=interleaved"), "one way of its own", "parallel.schedule=1f1b"),
    (("parallel.recompute=[blocks.1.0]",), "all blocks or none", "parallel.recompute=true"),
    (("ipu.keep_activations=[blocks.1.0]",), "all activations are kept", "parallel.recompute=true"),
    (("engine.compile=true",), "layouts and kernels of its own", "engine.compile=false"),
    (("engine.memory_format=channels_last",), "layouts and kernels of its own", "engine.memory_format=auto"),
    (("log.trace=3",), "does not see", "log.trace=0"),
    ((*TWO, "ipu.overlap_io=true"), "Overlapped IO is not supported", "parallel.schedule=sharded"),
    (("ipu.available_memory_proportion=[]",), "1 stages have 1 IPUs", "give one number"),
    (("ipu.io_tiles=33",), "even numbers", "ipu.io_tiles=34"),
    ((*TWO, "ipu.overlap_io=true"), "Overlapped IO is not supported", "ipu.overlap_io=null"),
    (("ipu.overlap_io=true", "batch.micro=64"), "an update has only one", "ipu.overlap_io=null"),
    ((*TWO, "ipu.evaluation_iterations=1"), "needs at least 2 batches", "ipu.evaluation_iterations=null"),
    ((*TWO, "batch.micro=32"), "needs 2 x 2 - 1 = 3", "batch.micro=16"),
    (("parallel.stages=4", "batch.micro=16"), "needs 2 x 4 - 1 = 7", "batch.micro=8"),
    (("data.image_sizes=[[0, 20], [3, 28]]",), "another program to compile", "model.init_from"),
    ((*TWO, "ipu.available_memory_proportion=[0.1, 0.2, 0.3]"), "2 stages have 2 IPUs", "one for each stage"),
    (("parallel.stages=3",), "powers of two", "use 2 or 4"),
    (("parallel.replicas=3", "batch.global=96"), "powers of two", "use 2 or 4"),
]


@pytest.mark.parametrize(("overrides", "reason", "remedy"), RULES)
def test_what_is_refused_and_why(overrides, reason, remedy):
    line = refusal(*overrides)
    assert reason in line and remedy in line
    if "=" in remedy:  # it is enough
        check(*overrides, remedy)


def test_an_optimizer_without_a_form_is_refused_by_name():
    class Adagrad(Optimizer):
        name: str = "adagrad"

    made = recipe().model_copy(update={"optimizer": Adagrad()})
    with pytest.raises(ConfigError, match=r"^optimizer.name adagrad on IPUs: .*; use one of lars, lamb, sgd, rmsprop$"):
        ipu.check(made, divide(recipe()))


def test_a_pipeline_is_filled_by_smaller_micro_batches_or_by_a_larger_batch():
    """3 micro batches fill two stages, 7 fill four. Mixing takes a partner, so a micro batch has two images or more."""
    assert "64 = 32 micro x 2 x 1 replicas" in refusal(*TWO, "batch.micro=32")
    check(*TWO, "batch.global=96", "batch.micro=32")
    check("parallel.stages=4", "batch.global=56", "batch.micro=8")
    assert "needs 2 x 4 - 1 = 7" in refusal("parallel.stages=4", "batch.global=48", "batch.micro=8")
    small = ("batch.global=4", "batch.micro=4", *TWO)
    assert "use batch.global=12 or" in refusal(*small)
    check(*small, "batch.global=12")
    assert "use batch.micro=1 or" in refusal(*small, "data.mixup=0")
    check(*small, "data.mixup=0", "batch.micro=1")
    assert "use batch.global=24, fewer replicas or" in refusal(*small, "batch.global=8", "parallel.replicas=2")


def test_dividing_a_batch_checks_the_rules_on_ipus_only():
    """So `--dry-run` and the launcher refuse what the engine would."""
    with pytest.raises(ConfigError, match="gradient on IPUs: PopTorch has no LARS"):
        divide(recipe("optimizer.trust=gradient"))
    divide(recipe("run.device=cpu", "optimizer.trust=gradient", "optimizer.clip_norm=1", "average.step_decay=0.9"))


# poprun's default is one IPU a replica, which a recipe of two stages cannot use.
COMMAND = (
    r"gives each replica 1 IPU, but parallel.stages is 2; start it as `poprun --num-replicas 64 --ipus-per-replica 2 "
    r"--num-instances N python train.py ...` \(N divides 64 and is 2 or more\), or use parallel.stages=auto"
)


@pytest.mark.parametrize(
    ("launched", "overrides", "words"),
    [
        (Launched(64, 64, 1), (), COMMAND),
        (Launched(8, 8, 2), (), None),
        (Launched(64, 32, 2), (), None),
        (Launched(64, 64, 2), (), "64 replicas x 2 IPUs = 128, but PopTorch takes a power of two up to 64"),
        (Launched(12, 6, 2), (), "6 replicas x 2 IPUs = 12"),
        (Launched(8, 4, 4), (), "gives each replica 4 IPUs, but parallel.stages is 2"),
        (Launched(8, 4, 2), ("parallel.replicas=4",), "started 8 replicas, but parallel.replicas is 4"),
        (Launched(8, 4, 2), ("parallel.replicas=8",), None),
    ],
)
def test_what_poprun_started_fits_the_recipe(launched, overrides, words):
    made = recipe(*TWO, *overrides)
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        ipu.check_launched(made, launched)


@pytest.mark.parametrize("text", ["", "two", "0", "-1"])
def test_the_launcher_says_how_many_ipus_a_replica_has(text):
    assert ipu.stages_of_launcher({"POPDIST_NUM_IPUS_PER_REPLICA": "4"}) == 4
    assert ipu.stages_of_launcher({"POPDIST_NUM_TOTAL_REPLICAS": "4"}) is None
    with pytest.raises(ConfigError, match="no number above 0"):
        ipu.stages_of_launcher({"POPDIST_NUM_IPUS_PER_REPLICA": text})
