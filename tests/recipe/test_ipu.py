"""A recipe on IPUs: the one right value of each option, and where it comes from."""

import re

import pytest

from recipe import ipu
from recipe.batch import divide
from recipe.ipu import Chain, Name
from recipe.loading import load
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
PIPELINED, SHARDED = Chain("poptorch.PipelinedExecution"), Chain("poptorch.ShardedExecution")
STRATEGY, TILES = "Options.setExecutionStrategy", "Options.TensorLocations.numIOTiles"
STOCHASTIC, PARTIALS = "Options.Precision.enableStochasticRounding", "Options.Precision.setPartialsType"
REDUCTION = "Options.Training.setMeanAccumulationAndReplicationReductionStrategy"
POST, RUNNING = (Name(f"poptorch.MeanReductionStrategy.{name}") for name in ("Post", "Running"))
MEMORY, ITERATIONS = "Options.setAvailableMemoryProportion", "Options.deviceIterations"
HALF, FLOAT = Name("torch.half"), Name("torch.float")


def pod(name, replicas, *overrides):
    return load(ROOT / "configs" / f"{name}.yaml", [TRUST, f"parallel.replicas={replicas}", *overrides])


def small(*overrides):
    """Digits on one IPU: 16 micro batches of 4 an update."""
    return load(QUICKSTART, ["run.device=ipu", TRUST, "batch.micro=4", *overrides])


def options(recipe, model="training", served=1, under_poprun=False):
    """{call: argument, or name of a session option: its value} of a model."""
    make = {"training": ipu.training_settings, "evaluation": ipu.evaluation_settings}[model]
    found = {}
    for setting in make(recipe, divide(recipe), served, under_poprun):
        key = setting.arguments[0] if setting.call == "Options._Popart.set" else setting.call
        assert key not in found, f"{key} is set twice"
        found[key] = setting.arguments[-1]
    return found


def test_pod256_is_128_replicas_of_a_two_stage_pipeline():
    """16 micro batches of 3 images, 128 times, are 6144. The rest is compared with docs/ipu.md in test_plan.py."""
    found = options(pod("pod256", 128), served=8, under_poprun=True)
    assert found["Options.Training.gradientAccumulation"] == 6144 // (3 * 128)
    assert (found[ITERATIONS], found[STRATEGY], found[STOCHASTIC], found[PARTIALS]) == (1, PIPELINED, True, HALF)
    assert TILES not in found, "PopTorch refuses I/O tiles in a pipeline"
    assert "disableOptimizerStateTensorStreams" not in found, "momentum could not leave the device"
    # The other value makes other channels a group (weights would fit no other device), or lets replicas drift apart.
    for each in (found, options(pod("pod256", 128), "evaluation")):
        assert each["groupNormStridedChannelGrouping"] is False
        assert each["engineOptions"]["target.deterministicWorkers"] == "portable"


@pytest.mark.parametrize(
    ("overrides", "training", "evaluation"),
    [
        # PopTorch overlaps I/O in ShardedExecution only, on tiles of their own, and only turns of a loop.
        ("ipu.io_tiles=64", {STRATEGY: SHARDED, TILES: 64}, {STRATEGY: SHARDED, TILES: 64}),
        (f"{TWO} parallel.schedule=sharded", {STRATEGY: SHARDED, TILES: 32}, {STRATEGY: SHARDED, TILES: 32}),
        (f"{TWO} parallel.schedule=1f1b", {STRATEGY: PIPELINED, TILES: None}, {STRATEGY: PIPELINED, TILES: None}),
        ("ipu.overlap_io=false", {TILES: None}, {TILES: None}),
        # Accumulators are float32 and hold a sum. Without them replicas add float16, which a sum may overflow.
        ("batch.micro=64", {TILES: None, REDUCTION: RUNNING}, {TILES: 32}),
        ("ipu.evaluation_iterations=1", {TILES: 32, ITERATIONS: 1}, {TILES: None, ITERATIONS: 1}),
        ("", {STOCHASTIC: True, PARTIALS: HALF, REDUCTION: POST}, {STOCHASTIC: False, PARTIALS: HALF}),
        ("precision.rounding=nearest", {STOCHASTIC: False}, {STOCHASTIC: False}),
        ("precision.weights=float32 precision.compute=float32", {STOCHASTIC: False, PARTIALS: FLOAT}, {}),
        ("ipu.partials=float", {PARTIALS: FLOAT}, {PARTIALS: FLOAT}),
        # PopART's RecomputationType: 0 none, 1 standard, 3 pipeline, 4 all.
        (TWO, {"autoRecomputation": 0, "explicitRecomputation": None}, {"autoRecomputation": None}),
        (f"{TWO} parallel.recompute=true", {"autoRecomputation": 3}, {"autoRecomputation": None}),
        ("parallel.recompute=true", {"autoRecomputation": 1, "explicitRecomputation": True}, {}),
        ("parallel.recompute=true ipu.keep_activations=[blocks.1.0]", {"autoRecomputation": 4}, {}),
        ("", {"autoRecomputation": None, "explicitRecomputation": None}, {}),
        (f"{TWO} ipu.available_memory_proportion=[0.1,0.3]", {MEMORY: {"IPU0": 0.1, "IPU1": 0.3}}, {}),
        (f"{TWO} ipu.available_memory_proportion=[0.1]", {MEMORY: {"IPU0": 0.1, "IPU1": 0.1}}, {}),
        # The seed goes to torch and to PopART as 64 bits.
        ("run.seed=9223372036854775807", {"Options.randomSeed": 2**63 - 1}, {"Options.randomSeed": None}),
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
        overlaps = ipu.overlaps(recipe, divide(recipe)) if model == "training" else ipu.evaluation_overlaps(recipe)
        assert overlaps == (TILES in found)


def test_notes_are_about_what_has_no_effect():
    """State is divided within an instance (Compiler.cpp); a pipeline prefetches only."""
    assert ipu.notes(small(), 1) == ipu.notes(small("ipu.shard_optimizer_state=true"), 4) == ()
    for override, words in (
        (TWO, "3 micro batches are prefetched.*parallel.schedule=sharded"),
        ("ipu.shard_optimizer_state=true", "^ipu.shard_optimizer_state has no effect.*start fewer instances$"),
        ("log.noise_scale=true", "log.noise_scale: not measured"),
        ("ipu.synthetic_data=true", "nothing is learned"),
    ):
        (note,) = ipu.notes(small(override), 1)
        assert re.search(words, note)


def test_poprun_brings_the_replicas_itself():
    """popdist's options raise where replicationFactor is called (PopTorch 3.4, tests/popdist_test.py)."""
    recipe = pod("pod16", 8)
    for model in ("training", "evaluation"):
        assert options(recipe, model, served=8)["Options.replicationFactor"] == 8
        assert "Options.replicationFactor" not in options(recipe, model, served=4, under_poprun=True)


def test_switches_are_off_unless_asked_for_and_options_that_replace_each_other_come_in_the_right_order():
    """setPartialsType writes the whole dictionary of convolutions; enableProfiling adds to the engine's."""
    off = {"Options.enableProfiling", "Options.enableExecutableCaching", "Options.enableSyntheticData",
           "Options.TensorLocations.setOptimizerLocation", "Options.Training.setAutomaticLossScaling",
           "Options.setAvailableMemoryProportion", "convolutionOptions"}  # fmt: skip
    assert not off & set(options(small()))
    recipe = small(*EVERYTHING)
    found = options(recipe)
    assert off <= set(found)
    assert found["Options.enableExecutableCaching"] == "cache" and found["Options.enableSyntheticData"] is True
    sharded = "poptorch.TensorLocationSettings().useOnChipStorage(True).useReplicatedTensorSharding(True)"
    assert str(found["Options.TensorLocations.setOptimizerLocation"]) == sharded
    assert found["convolutionOptions"] == {"partialsType": "float", "enableConvDithering": "true"}
    assert found["engineOptions"]["opt.internalExchangeOptimisationTarget"] == "memory"
    order = list(found)
    assert order.index("convolutionOptions") > order.index(PARTIALS)
    assert order.index("Options.enableProfiling") > order.index("engineOptions")
    settings = ipu.training_settings(recipe, divide(recipe), 1, False)
    assert [each.arguments for each in settings if each.main_only] == [("profile",)]


def test_every_source_is_a_key_of_a_recipe_or_a_reason():
    recipe = small(TWO, *EVERYTHING)
    sections = recipe.model_dump(by_alias=True)
    for setting in ipu.training_settings(recipe, divide(recipe), 2, False):
        for source in re.split("; ", setting.source):
            if not source.startswith(("always: ", "under poprun ")):
                for key in source.split(", "):
                    section, _, name = key.partition(".")
                    assert name in sections[section], f"{setting.call} comes from {source}"


def test_every_key_of_the_section_has_an_effect():
    """On options of a model, or on what the engine asks; but for `pod`, which plans and the launcher ask."""
    changed = {
        "available_memory_proportion": "[0.2]", "partials": "float", "convolution_dithering": "true",
        "shard_optimizer_state": "true", "executable_cache": "there", "synthetic_data": "true", "profile": "there",
        "io_tiles": "64", "overlap_io": "false", "prefetch_depth": "5", "keep_activations": "[blocks.1.0]",
        "exchange_memory_target": "cycles", "evaluation_iterations": "9",
    }  # fmt: skip
    assert set(changed) == set(type(small().ipu).model_fields) - {"pod"}
    plain = small("parallel.recompute=true")
    for key, value in changed.items():
        other = small("parallel.recompute=true", f"ipu.{key}={value}")
        assert any(options(other, model) != options(plain, model) for model in ("training", "evaluation")), key
