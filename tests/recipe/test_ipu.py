"""A recipe on IPUs: the one right value of each option, and where it comes from."""

import re

import pytest

from recipe import ipu
from recipe.batch import divide
from recipe.ipu import Chain, Name
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT

TRUST = "optimizer.trust=momentum"
FULL = ("precision.weights=float32", "precision.compute=float32")
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


def pod(name, replicas, *overrides):
    return load(ROOT / "configs" / f"{name}.yaml", [TRUST, f"parallel.replicas={replicas}", *overrides])


def small(*overrides):
    """Digits on one IPU: 16 micro batches of 4 an update."""
    return load(QUICKSTART, ["run.device=ipu", TRUST, "batch.micro=4", *overrides])


def options(recipe, model="training", served=1, under_poprun=False):
    """{call: argument, or "call name": value of a session option} of a model."""
    make = {"training": ipu.training_settings, "evaluation": ipu.evaluation_settings}[model]
    found = {}
    for setting in make(recipe, divide(recipe), served, under_poprun):
        key = setting.call
        if key == "Options._Popart.set":
            key = setting.arguments[0]
        assert key not in found, f"{key} is set twice"
        found[key] = setting.arguments[-1]
    return found


def test_pod256_is_128_replicas_of_a_two_stage_pipeline():
    """16 micro batches of 3 images, 128 times, are 6144; the learning rate may change after each 6144."""
    found = options(pod("pod256", 128), served=8, under_poprun=True)
    expected = {
        "Options.Training.gradientAccumulation": 6144 // (3 * 128),
        "Options.deviceIterations": 1,
        STRATEGY: PIPELINED,
        "Options.Training.accumulationAndReplicationReductionType": Name("poptorch.ReductionType.Mean"),
        STOCHASTIC: True,
        PARTIALS: Name("torch.half"),
        "Options.outputMode": Name("poptorch.OutputMode.Sum"),
        "defaultPrefetchBufferingDepth": 3,
        "disableGradAccumulationTensorStreams": True,
    }
    assert {key: found[key] for key in expected} == expected
    assert TILES not in found, "PopTorch refuses I/O tiles in a pipeline"
    assert "disableOptimizerStateTensorStreams" not in found, "momentum could not leave the device"
    # The other value makes other channels a group (weights would fit no other device), or lets replicas drift apart.
    for each in (found, options(pod("pod256", 128), "evaluation")):
        assert each["groupNormStridedChannelGrouping"] is False
        assert each["engineOptions"]["target.deterministicWorkers"] == "portable"


def test_memory_proportions_go_to_their_ipus():
    key = "Options.setAvailableMemoryProportion"
    found = options(pod("pod16_4stages", 4, "ipu.available_memory_proportion=[0.1]"), served=4)
    assert found[key] == dict.fromkeys(("IPU0", "IPU1", "IPU2", "IPU3"), 0.1)
    assert found["Options.Training.gradientAccumulation"] * 4 * 4 == 6144
    assert options(pod("pod256", 128, "ipu.available_memory_proportion=[0.1, 0.3]"))[key] == {"IPU0": 0.1, "IPU1": 0.3}


@pytest.mark.parametrize(
    ("overrides", "strategy", "tiles"),
    [
        # PopTorch overlaps I/O in ShardedExecution only, on tiles of their own, and only turns of a loop.
        ((), SHARDED, (32, 32)),
        (("ipu.io_tiles=64",), SHARDED, (64, 64)),
        (("parallel.stages=2", "parallel.schedule=sharded"), SHARDED, (32, 32)),
        (("parallel.stages=2", "parallel.schedule=1f1b"), PIPELINED, (None, None)),
        (("ipu.overlap_io=false",), SHARDED, (None, None)),
        (("batch.micro=64",), SHARDED, (None, 32)),
        (("ipu.evaluation_iterations=1",), SHARDED, (32, None)),
    ],
)
def test_data_moves_during_computation_where_it_can(overrides, strategy, tiles):
    recipe = small(*overrides)
    found = [options(recipe, model) for model in ("training", "evaluation")]
    assert [each[STRATEGY] for each in found] == [strategy, strategy]
    assert tuple(each.get(TILES) for each in found) == tiles
    assert (ipu.overlaps(recipe, divide(recipe)), ipu.evaluation_overlaps(recipe)) == tuple(map(bool, tiles))


def test_notes_are_about_what_has_no_effect():
    """State is divided within an instance (Compiler.cpp); a pipeline prefetches only."""
    assert ipu.notes(small(), 1) == ()
    (note,) = ipu.notes(small("parallel.stages=2"), 1)
    assert "3 micro batches are prefetched" in note and "parallel.schedule=sharded" in note
    (note,) = ipu.notes(small("ipu.shard_optimizer_state=true"), 1)
    assert note.startswith("ipu.shard_optimizer_state has no effect") and note.endswith("start fewer instances")
    assert ipu.notes(small("ipu.shard_optimizer_state=true"), 4) == ()
    (note,) = ipu.notes(small("log.noise_scale=true"), 1)
    assert "log.noise_scale: not measured" in note


def test_poprun_brings_the_replicas_itself():
    """popdist's options raise where replicationFactor is called (PopTorch 3.4, tests/popdist_test.py)."""
    recipe = pod("pod16", 8)
    for model in ("training", "evaluation"):
        assert options(recipe, model, served=8)["Options.replicationFactor"] == 8
        assert "Options.replicationFactor" not in options(recipe, model, served=4, under_poprun=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {STOCHASTIC: True, PARTIALS: Name("torch.half"), REDUCTION: Name("poptorch.MeanReductionStrategy.Post")}),
        (("precision.rounding=nearest",), {STOCHASTIC: False}),
        (FULL, {STOCHASTIC: False, PARTIALS: Name("torch.float")}),
        (("ipu.partials=float",), {PARTIALS: Name("torch.float")}),
        # Accumulators are float32 and hold a sum. Without them replicas add float16, which a sum may overflow.
        (("batch.micro=64",), {REDUCTION: Name("poptorch.MeanReductionStrategy.Running")}),
    ],
)
def test_formats_of_numbers(overrides, expected):
    recipe = small(*overrides)
    training, evaluation = options(recipe), options(recipe, "evaluation")
    assert {key: training[key] for key in expected} == expected
    assert evaluation[STOCHASTIC] is False and evaluation[PARTIALS] == training[PARTIALS]


def test_options_that_replace_each_other_come_in_the_right_order():
    """setPartialsType writes the whole dictionary of convolutions; enableProfiling adds to the engine's."""
    recipe = small(*EVERYTHING)
    order = list(options(recipe))
    assert options(recipe)["convolutionOptions"] == {"partialsType": "float", "enableConvDithering": "true"}
    assert order.index("convolutionOptions") > order.index(PARTIALS)
    assert order.index("Options.enableProfiling") > order.index("engineOptions")
    assert options(recipe)["engineOptions"]["opt.internalExchangeOptimisationTarget"] == "memory"
    settings = ipu.training_settings(recipe, divide(recipe), 1, False)
    assert [each.arguments for each in settings if each.main_only] == [("profile",)]


@pytest.mark.parametrize(
    ("overrides", "expected", "explicit"),
    [
        # PopART's RecomputationType: 0 none, 1 standard, 3 pipeline, 4 all.
        (("parallel.stages=2",), 0, None),
        (("parallel.stages=2", "parallel.recompute=true"), 3, None),
        (("parallel.stages=2", "parallel.recompute=true", "parallel.schedule=sharded"), 1, True),
        (("parallel.recompute=true",), 1, True),
        (("parallel.recompute=true", "ipu.keep_activations=[blocks.1.0]"), 4, True),
        ((), None, None),
    ],
)
def test_recomputation(overrides, expected, explicit):
    found = options(small(*overrides))
    assert (found.get("autoRecomputation"), found.get("explicitRecomputation")) == (expected, explicit)
    assert "autoRecomputation" not in options(small(*overrides), "evaluation")


def test_switches_are_off_unless_asked_for():
    off = {"Options.enableProfiling", "Options.enableExecutableCaching", "Options.enableSyntheticData",
           "Options.TensorLocations.setOptimizerLocation", "Options.Training.setAutomaticLossScaling",
           "Options.setAvailableMemoryProportion", "convolutionOptions"}  # fmt: skip
    assert not off & set(options(small()))
    asked = options(small(*EVERYTHING))
    assert off <= set(asked)
    assert asked["Options.enableExecutableCaching"] == "cache" and asked["Options.enableSyntheticData"] is True
    location = asked["Options.TensorLocations.setOptimizerLocation"]
    assert str(location) == (
        "poptorch.TensorLocationSettings().useOnChipStorage(True).useReplicatedTensorSharding(True)"
    )


def test_the_seed_is_the_runs():
    """poptorch.Options.randomSeed passes it to torch.manual_seed and to PopART as 64 bits."""
    assert options(small("run.seed=9223372036854775807"))["Options.randomSeed"] == 2**63 - 1
    assert "Options.randomSeed" not in options(small(), "evaluation")


def test_evaluation_fills_the_pipeline():
    """At the default a pipeline's filling and draining takes less than a fifth of the rounds."""
    for stages in (1, 2, 4):
        iterations = options(small(f"parallel.stages={stages}"), "evaluation")["Options.deviceIterations"]
        assert iterations >= stages and (stages - 1) / (iterations + stages - 1) < 0.2
    assert options(small("ipu.evaluation_iterations=5"), "evaluation")["Options.deviceIterations"] == 5
    assert options(small(), "evaluation")["Options.outputMode"] == Name("poptorch.OutputMode.All")
    assert not any("Options.Training" in key for key in options(small(), "evaluation"))


def test_every_source_is_a_key_of_a_recipe_or_a_reason():
    recipe = small("parallel.stages=2", *EVERYTHING)
    sections = recipe.model_dump(by_alias=True)
    for setting in ipu.training_settings(recipe, divide(recipe), 2, False):
        for source in re.split("; ", setting.source):
            if source.startswith(("always: ", "under poprun ")):
                continue
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
