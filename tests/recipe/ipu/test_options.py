"""A recipe on IPUs: the one right value of each option and its source; what is refused, and what to
do then."""

import re

import pytest

from common.errors import ConfigError
from recipe.batch import divide
from recipe.division import Batch
from recipe.ipu import options as ipu_options
from recipe.ipu import rules
from recipe.ipu.optimizers import Name
from recipe.ipu.options import Chain
from recipe.loading import load
from recipe.optimization import Optimizer
from tests.conftest import QUICKSTART, ROOT

TRUST = "optimizer.trust=momentum"
TWO = "parallel.stages=2"
# Every switch of the section that is off by default.
EVERYTHING = (
    "ipu.available_memory_proportion=[0.1]", "ipu.partials=float", "ipu.convolution_dithering=true",
    "ipu.shard_optimizer_state=true", "ipu.executable_cache=cache", "ipu.synthetic_data=true", "ipu.profile=profile",
    "ipu.exchange_memory_target=memory", "parallel.recompute=true", "precision.dynamic_loss_scale=true",
    "ipu.keep_activations=[blocks.2.3]",
)  # fmt: skip
PIPELINED = Chain("poptorch.PipelinedExecution")
SHARDED = Chain("poptorch.ShardedExecution")
STRATEGY = "Options.setExecutionStrategy"
TILES = "Options.TensorLocations.numIOTiles"
STOCHASTIC = "Options.Precision.enableStochasticRounding"
PARTIALS = "Options.Precision.setPartialsType"
REDUCTION = "Options.Training.setMeanAccumulationAndReplicationReductionStrategy"
POST, RUNNING = (Name(f"poptorch.MeanReductionStrategy.{name}") for name in ("Post", "Running"))
MEMORY = "Options.setAvailableMemoryProportion"
ITERATIONS = "Options.deviceIterations"
HALF = Name("torch.half")
FLOAT = Name("torch.float")
GROUPS = "groupNormStridedChannelGrouping"
ENGINE = "engineOptions"
PREFETCH = "defaultPrefetchBufferingDepth"
PORTABLE = {"target.deterministicWorkers": "portable", "opt.enableMultiAccessCopies": "false"}


def small(*overrides):
    """Digits on one IPU: 16 micro batches of 4 an update."""
    trust = () if any(text.startswith("optimizer.name") for text in overrides) else (TRUST,)
    return load(QUICKSTART, ["run.device=ipu", "batch.micro=4", *trust, *overrides])


def options(recipe, model="training", served=1, under_poprun=False):
    """{call: argument, or name of a session option: its value} of a model."""
    make = {
        "training": ipu_options.training_settings,
        "evaluation": ipu_options.evaluation_settings,
    }[model]
    found = {}
    for setting in make(recipe, divide(recipe), served, under_poprun):
        key = setting.arguments[0] if setting.call == "Options._Popart.set" else setting.call
        assert key not in found, f"{key} is set twice"
        found[key] = setting.arguments[-1]
    return found


@pytest.mark.parametrize(
    ("overrides", "training", "evaluation"),
    [
        # Other values make other channels a group (weights would fit no other device), or let
        # replicas drift apart.
        ("", {GROUPS: False, ENGINE: PORTABLE}, {GROUPS: False, ENGINE: PORTABLE}),
        (
            "ipu.prefetch_depth=5",
            {PREFETCH: 5, "disableOptimizerStateTensorStreams": None},
            {PREFETCH: 5},
        ),
        # PopTorch overlaps I/O in ShardedExecution only, on tiles of their own, and only turns of a
        # loop.
        ("ipu.io_tiles=64", {STRATEGY: SHARDED, TILES: 64}, {STRATEGY: SHARDED, TILES: 64}),
        (
            f"{TWO} parallel.schedule=sharded",
            {STRATEGY: SHARDED, TILES: 32},
            {STRATEGY: SHARDED, TILES: 32},
        ),
        (
            f"{TWO} parallel.schedule=1f1b",
            {STRATEGY: PIPELINED, TILES: None},
            {STRATEGY: PIPELINED, TILES: None},
        ),
        ("ipu.overlap_io=false", {TILES: None}, {TILES: None}),
        # Accumulators are float32 and hold a sum. Without them replicas add float16, which a sum
        # may overflow.
        ("batch.micro=64", {TILES: None, REDUCTION: RUNNING}, {TILES: 32}),
        ("ipu.evaluation_iterations=1", {TILES: 32, ITERATIONS: 1}, {TILES: None, ITERATIONS: 1}),
        (
            "",
            {STOCHASTIC: True, PARTIALS: HALF, REDUCTION: POST},
            {STOCHASTIC: False, PARTIALS: HALF},
        ),
        ("precision.rounding=nearest", {STOCHASTIC: False}, {STOCHASTIC: False}),
        (
            "precision.weights=float32 precision.compute=float32",
            {STOCHASTIC: False, PARTIALS: FLOAT},
            {},
        ),
        ("ipu.partials=float", {PARTIALS: FLOAT}, {PARTIALS: FLOAT}),
        # PopART's RecomputationType: 0 none, 1 standard, 3 pipeline, 4 all.
        (TWO, {"autoRecomputation": 0, "explicitRecomputation": None}, {"autoRecomputation": None}),
        (f"{TWO} parallel.recompute=true", {"autoRecomputation": 3}, {"autoRecomputation": None}),
        ("parallel.recompute=true", {"autoRecomputation": 1, "explicitRecomputation": True}, {}),
        ("parallel.recompute=true ipu.keep_activations=[blocks.1.0]", {"autoRecomputation": 4}, {}),
        ("", {"autoRecomputation": None, "explicitRecomputation": None}, {}),
        (
            f"{TWO} ipu.available_memory_proportion=[0.1,0.3]",
            {MEMORY: {"IPU0": 0.1, "IPU1": 0.3}},
            {},
        ),
        (f"{TWO} ipu.available_memory_proportion=[0.1]", {MEMORY: {"IPU0": 0.1, "IPU1": 0.1}}, {}),
        # The seed goes to torch and to PopART as 64 bits.
        (
            "run.seed=9223372036854775807",
            {"Options.randomSeed": 2**63 - 1},
            {"Options.randomSeed": None},
        ),
        # Filling and draining a pipeline takes less than a fifth of the rounds.
        ("", {}, {ITERATIONS: 4, "Options.outputMode": Name("poptorch.OutputMode.All")}),
        ("parallel.stages=4", {}, {ITERATIONS: 16, "Options.Training.gradientAccumulation": None}),
    ],
)
def test_each_option_has_the_one_right_value(overrides, training, evaluation):
    recipe = small(*overrides.split())
    for model, expected in (("training", training), ("evaluation", evaluation)):
        found = options(recipe, model)
        assert {key: found.get(key) for key in expected} == expected
        overlaps = (
            ipu_options.overlaps(recipe, divide(recipe))
            if model == "training"
            else ipu_options.evaluation_overlaps(recipe)
        )
        assert overlaps == (TILES in found)


def test_notes_are_about_what_has_no_effect():
    """State is divided within an instance (Compiler.cpp); a pipeline prefetches only."""
    assert (
        ipu_options.notes(small(), 1, 1)
        == ipu_options.notes(small("ipu.shard_optimizer_state=true"), 4, 4)
        == ()
    )
    for override, words in (
        (TWO, "3 micro batches are prefetched.*parallel.schedule=sharded"),
        (
            "ipu.shard_optimizer_state=true",
            "^ipu.shard_optimizer_state has no effect.*start fewer instances$",
        ),
        ("log.noise_scale=true", "log.noise_scale: not measured"),
        ("ipu.synthetic_data=true", "nothing is learned"),
    ):
        (note,) = ipu_options.notes(small(override), 1, 1)
        assert re.search(words, note)


def test_ipus_of_the_pod_that_stay_idle_are_named():
    recipe = load(ROOT / "configs" / "pod256.yaml")
    idle = "128 of 256 IPUs are used: 64 replicas of 2 (ipu.pod)"
    assert idle in ipu_options.notes(recipe, replicas=64, served=4)
    assert idle not in ipu_options.notes(recipe, replicas=128, served=4)


def test_poprun_brings_the_replicas_itself():
    """popdist's options raise where replicationFactor is called (PopTorch 3.4,
    tests/popdist_test.py)."""
    recipe = load(ROOT / "configs" / "pod16.yaml", [TRUST, "parallel.replicas=8"])
    for model in ("training", "evaluation"):
        assert options(recipe, model, served=8)["Options.replicationFactor"] == 8
        assert "Options.replicationFactor" not in options(
            recipe, model, served=4, under_poprun=True
        )


def test_switches_are_off_unless_asked_for_and_options_that_replace_each_other_come_in_the_right_order():
    """setPartialsType writes the whole dictionary of convolutions; enableProfiling adds to the
    engine's."""
    switches = {
        "Options.enableProfiling": "profile",
        "Options.enableExecutableCaching": "cache",
        "Options.enableSyntheticData": True,
        "Options.Training.setAutomaticLossScaling": True,
        "convolutionOptions": {"partialsType": "float", "enableConvDithering": "true"},
        ENGINE: {**PORTABLE, "opt.internalExchangeOptimisationTarget": "memory"},
    }
    assert options(small()).keys() & switches.keys() == {ENGINE}
    recipe = small(*EVERYTHING)
    found = options(recipe)
    assert {name: found[name] for name in switches} == switches
    sharded = (
        "poptorch.TensorLocationSettings().useOnChipStorage(True).useReplicatedTensorSharding(True)"
    )
    assert str(found["Options.TensorLocations.setOptimizerLocation"]) == sharded
    order = list(found)
    assert order.index("convolutionOptions") > order.index(PARTIALS)
    assert order.index("Options.enableProfiling") > order.index("engineOptions")
    settings = ipu_options.training_settings(recipe, divide(recipe), 1, False)
    assert [each.arguments for each in settings if each.main_only] == [("profile",)]


FULL = ("precision.compute=float32", "precision.weights=float32")


def check(*overrides):
    made = small(*overrides)
    batch = made.batch
    replicas = made.parallel.replicas or 1
    accumulation = batch.global_ // (batch.micro * replicas)
    rules.check(
        made, Batch(batch.global_, batch.micro, accumulation, replicas, made.parallel.stages)
    )


# Overrides; a part of the reason; the remedy, which must be enough.
RULES = [
    (("optimizer.trust=gradient",), "PopTorch has no LARS", "optimizer.trust=momentum"),
    (
        ("optimizer.trust=gradient", "optimizer.nesterov=true"),
        "no LARS, and its LAMB divides by the momentum's norm and has no Nesterov momentum",
        "optimizer.nesterov=false optimizer.trust=momentum",
    ),
    (("optimizer.eps=1e-6",), "LAMB, whose trust ratio has no epsilon", "optimizer.eps=0"),
    (
        ("optimizer.name=sgd", "optimizer.nesterov=true"),
        "not divided by accumulation",
        "optimizer.nesterov=false",
    ),
    (
        ("optimizer.name=muon",),
        "PopTorch has no such optimizer",
        "use one of lars, lamb, sgd, rmsprop",
    ),
    (("optimizer.clip_norm=1",), "cannot clip", "optimizer.clip_norm=null"),
    (
        ("average.step_decay=0.99",),
        "leave the device after every update",
        "average.step_decay=null",
    ),
    (("exchange.method=gtopk",), "PopART exchanges gradients itself", "exchange.method=dense"),
    (("exchange.bits=8",), "PopART exchanges gradients itself, in float32", "exchange.bits=null"),
    (("exchange.delay=1",), "from the gradients of its own step", "exchange.delay=0"),
    (("exchange.order=tree",), "in which order", "exchange.order=fast"),
    (("model.norm=batch",), "running statistics", "model.norm=group"),
    (("data.source=folder", "data.reader=dali"), "by worker processes", "data.reader=torch"),
    (("data.bad_images=skip",), "whole micro batches", "data.bad_images=error"),
    (("precision.compute=bfloat16",), "float16 and float32 only", "precision.compute=float16"),
    (
        ("precision.compute=float32",),
        "in the format that it computes in",
        "precision.compute=float16",
    ),
    (
        ("precision.weights=float32",),
        "in the format that it computes in",
        "precision.compute=float32",
    ),
    (
        (*FULL, "precision.dynamic_loss_scale=true"),
        "float16 gradients",
        "precision.dynamic_loss_scale=false",
    ),
    (
        ("optimizer.name=sgd", "precision.dynamic_loss_scale=true"),
        "keeps SGD's momentum multiplied by the scale",
        "precision.dynamic_loss_scale=false",
    ),
    ((TWO, "parallel.schedule=interleaved"), "one way of its own", "parallel.schedule=1f1b"),
    (("parallel.recompute=[blocks.1.0]",), "all blocks or none", "parallel.recompute=true"),
    (("ipu.keep_activations=[blocks.1.0]",), "all activations are kept", "parallel.recompute=true"),
    (("engine.compile=true",), "layouts and kernels of its own", "engine.compile=false"),
    (
        ("engine.memory_format=channels_last",),
        "layouts and kernels of its own",
        "engine.memory_format=auto",
    ),
    (("log.trace=3",), "does not see", "log.trace=0"),
    (("log.profile=3",), "torch.profiler does not see", "log.profile=0"),
    (("log.memory=true",), "CUDA's memory", "log.memory=false"),
    ((TWO, "ipu.overlap_io=true"), "Overlapped IO is not supported", "parallel.schedule=sharded"),
    (("ipu.available_memory_proportion=[]",), "1 stages have 1 IPUs", "give one number"),
    (("ipu.io_tiles=33",), "even numbers", "ipu.io_tiles=34"),
    ((TWO, "ipu.overlap_io=true"), "Overlapped IO is not supported", "ipu.overlap_io=null"),
    (("ipu.overlap_io=true", "batch.micro=64"), "an update has only one", "ipu.overlap_io=null"),
    (
        (TWO, "ipu.evaluation_iterations=1"),
        "needs at least 2 batches",
        "ipu.evaluation_iterations=null",
    ),
    ((TWO, "batch.micro=32"), "needs 2 x 2 - 1 = 3", "batch.micro=16"),
    (("parallel.stages=4", "batch.micro=16"), "needs 2 x 4 - 1 = 7", "batch.micro=8"),
    # mixing needs two images
    ((TWO, "batch.global=4"), "4 = 4 micro x 1 x 1 replicas", "batch.global=12"),
    ((TWO, "batch.global=4", "data.mixup=0"), "needs 2 x 2 - 1 = 3", "batch.micro=1"),
    ((TWO, "batch.global=8", "parallel.replicas=2"), "fewer replicas", "batch.global=24"),
    (("data.loss=bce",), "never compiled by PopTorch", "data.loss=cross_entropy"),
    (("data.image_sizes=[[0, 20], [3, 28]]",), "another program to compile", "model.init_from"),
    (
        (TWO, "ipu.available_memory_proportion=[0.1, 0.2, 0.3]"),
        "2 stages have 2 IPUs",
        "one for each stage",
    ),
    (("parallel.stages=3",), "powers of two", "use 2 or 4"),
    (("parallel.replicas=3", "batch.global=96"), "powers of two", "use 2 or 4"),
]


@pytest.mark.parametrize(("overrides", "reason", "remedy"), RULES)
def test_what_is_refused_and_why(overrides, reason, remedy):
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert (
        reason in str(caught.value)
        and remedy in str(caught.value)
        and "\n" not in str(caught.value)
    )
    if "=" in remedy:  # it is enough
        check(*overrides, *remedy.split())


def test_an_optimizer_without_a_form_is_refused_by_name():
    class Adagrad(Optimizer):
        name: str = "adagrad"

    made = small().model_copy(update={"optimizer": Adagrad()})
    with pytest.raises(
        ConfigError,
        match=r"^optimizer.name adagrad on IPUs: .*; use one of lars, lamb, sgd, rmsprop$",
    ):
        rules.check(made, divide(small()))


def test_dividing_a_batch_checks_the_rules_on_ipus_only():
    """So `--dry-run` and the launcher refuse what the engine would."""
    with pytest.raises(ConfigError, match="gradient on IPUs: PopTorch has no LARS"):
        divide(small("optimizer.trust=gradient"))
    divide(
        small(
            "run.device=cpu",
            "optimizer.trust=gradient",
            "optimizer.clip_norm=1",
            "average.step_decay=0.9",
        )
    )
