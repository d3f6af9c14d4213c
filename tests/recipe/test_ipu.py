"""What recipes mean on IPUs: the one right value of each option, and that every name is one PopTorch knows."""

import ast
import re

import pytest

from recipe import ipu
from recipe.batch import divide
from recipe.ipu import Chain, Name
from recipe.loading import load
from tests.conftest import QUICKSTART, ROOT

TRUST = "optimizer.trust=momentum"
# Methods of poptorch.Options, with the parts of it that have methods of their own (PopTorch 3.4, python/options.py).
OPTIONS = {
    "Options": "deviceIterations enableExecutableCaching enableProfiling enableStableNorm enableSyntheticData "
    "outputMode randomSeed replicationFactor setAvailableMemoryProportion setExecutionStrategy",
    "Options.Precision": "enableStochasticRounding setPartialsType",
    "Options.Training": "accumulationAndReplicationReductionType gradientAccumulation setAutomaticLossScaling "
    "setMeanAccumulationAndReplicationReductionStrategy",
    "Options.TensorLocations": "numIOTiles setOptimizerLocation",
    "Options._Popart": "set",
}
# PopART's session options that PopTorch takes, of those that we set (popart_compiler/source/SessionOptions.cpp).
SESSION = {
    "accumulateOuterFragmentSettings.schedule", "autoRecomputation", "convolutionOptions",
    "defaultPrefetchBufferingDepth", "disableGradAccumulationTensorStreams", "engineOptions", "explicitRecomputation",
    "groupNormStridedChannelGrouping", "replicatedCollectivesSettings.mergeAllReduceCollectives",
    "replicatedCollectivesSettings.prepareScheduleForMergingCollectives",
    "scheduleNonWeightUpdateGradientConsumersEarly",
}  # fmt: skip
NAMES = {
    "poptorch.MeanReductionStrategy.Post", "poptorch.MeanReductionStrategy.Running", "poptorch.OutputMode.All",
    "poptorch.OutputMode.Sum", "poptorch.ReductionType.Mean", "torch.float", "torch.half",
}  # fmt: skip
STARTS = {"poptorch.PipelinedExecution", "poptorch.ShardedExecution", "poptorch.TensorLocationSettings"}
EVERYTHING = (
    "ipu.available_memory_proportion=[0.1]", "ipu.partials=float", "ipu.convolution_dithering=true",
    "ipu.shard_optimizer_state=true", "ipu.executable_cache=cache", "ipu.synthetic_data=true", "ipu.profile=profile",
    "ipu.exchange_memory_target=memory", "parallel.recompute=true", "precision.dynamic_loss_scale=true",
    "ipu.keep_activations=[blocks.2.3]",
)  # fmt: skip


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
    assert found["Options.Training.gradientAccumulation"] * 3 * 128 == 6144
    assert found["Options.deviceIterations"] == 1
    assert found["Options.setExecutionStrategy"] == Chain("poptorch.PipelinedExecution")
    assert found["Options.Training.accumulationAndReplicationReductionType"] == Name("poptorch.ReductionType.Mean")
    assert found["Options.Precision.enableStochasticRounding"] is True
    assert found["Options.Precision.setPartialsType"] == Name("torch.half")
    assert found["Options.outputMode"] == Name("poptorch.OutputMode.Sum")
    assert found["defaultPrefetchBufferingDepth"] == 3
    assert "Options.TensorLocations.numIOTiles" not in found, "PopTorch refuses I/O tiles in a pipeline"


def test_four_stages_of_pod16_have_an_ipu_each():
    recipe = pod("pod16_4stages", 4, "ipu.available_memory_proportion=[0.1]")
    found = options(recipe, served=4)
    assert found["Options.setAvailableMemoryProportion"] == dict.fromkeys(("IPU0", "IPU1", "IPU2", "IPU3"), 0.1)
    assert found["Options.Training.gradientAccumulation"] * 4 * 4 == 6144
    assert options(recipe, "evaluation")["Options.deviceIterations"] >= 4


def test_memory_proportions_go_to_their_ipus():
    found = options(pod("pod256", 128, "ipu.available_memory_proportion=[0.1, 0.3]"))
    assert found["Options.setAvailableMemoryProportion"] == {"IPU0": 0.1, "IPU1": 0.3}


def test_one_stage_moves_data_while_it_computes():
    """PopTorch overlaps I/O in ShardedExecution, on tiles of their own, and sums or returns all outputs."""
    for model in ("training", "evaluation"):
        found = options(small(), model)
        assert found["Options.setExecutionStrategy"] == Chain("poptorch.ShardedExecution")
        assert found["Options.TensorLocations.numIOTiles"] == 32
    assert ipu.overlaps(small(), divide(small())) and ipu.evaluation_overlaps(small())
    assert ipu.notes(small(), 1) == ()


def test_a_sharded_model_overlaps_where_a_pipeline_cannot():
    sharded, pipeline = (small("parallel.stages=2", f"parallel.schedule={name}") for name in ("sharded", "1f1b"))
    assert options(sharded)["Options.setExecutionStrategy"] == Chain("poptorch.ShardedExecution")
    assert options(sharded)["Options.TensorLocations.numIOTiles"] == 32
    assert options(pipeline)["Options.setExecutionStrategy"] == Chain("poptorch.PipelinedExecution")
    for model in ("training", "evaluation"):
        assert "Options.TensorLocations.numIOTiles" not in options(pipeline, model)
    assert not ipu.overlaps(pipeline, divide(pipeline)) and not ipu.evaluation_overlaps(pipeline)
    (note,) = ipu.notes(pipeline, 1)
    assert "3 micro batches are prefetched" in note and "parallel.schedule=sharded" in note


def test_state_is_sharded_over_the_replicas_of_an_instance_only():
    """Compiler.cpp: with several processes the sharding domain is each process's replicas."""
    (note,) = ipu.notes(small("ipu.shard_optimizer_state=true"), 1)
    assert note.startswith("ipu.shard_optimizer_state has no effect") and note.endswith("start fewer instances")
    assert ipu.notes(small("ipu.shard_optimizer_state=true"), 4) == ()


@pytest.mark.parametrize("overrides", [("ipu.overlap_io=false",), ("batch.micro=64",)])
def test_no_overlap_where_it_is_not_wanted_or_there_is_no_loop(overrides):
    recipe = small(*overrides)
    assert not ipu.overlaps(recipe, divide(recipe))
    assert "Options.TensorLocations.numIOTiles" not in options(recipe)


def test_a_single_batch_of_evaluation_is_no_loop():
    assert not ipu.evaluation_overlaps(small("ipu.evaluation_iterations=1"))
    found = options(small("ipu.evaluation_iterations=1"), "evaluation")
    assert found["Options.deviceIterations"] == 1 and "Options.TensorLocations.numIOTiles" not in found


def test_io_tiles_are_the_recipes():
    assert options(small("ipu.io_tiles=64"))["Options.TensorLocations.numIOTiles"] == 64


def test_poprun_brings_the_replicas_itself():
    """popdist's options raise where replicationFactor is called (PopTorch 3.4, tests/popdist_test.py)."""
    recipe = pod("pod16", 8)
    for model in ("training", "evaluation"):
        assert options(recipe, model, served=8)["Options.replicationFactor"] == 8
        assert "Options.replicationFactor" not in options(recipe, model, served=4, under_poprun=True)


def test_gradients_are_summed_in_float32_or_averaged_as_they_come():
    """Accumulators are float32 and hold a sum. Without them replicas add float16, which a sum may overflow."""
    key = "Options.Training.setMeanAccumulationAndReplicationReductionStrategy"
    assert options(small())[key] == Name("poptorch.MeanReductionStrategy.Post")
    assert options(small("batch.micro=64"))[key] == Name("poptorch.MeanReductionStrategy.Running")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), True),
        (("precision.rounding=nearest",), False),
        (("precision.weights=float32", "precision.compute=float32"), False),
    ],
)
def test_only_half_weights_are_rounded_at_random_and_only_in_training(overrides, expected):
    recipe = small(*overrides)
    assert options(recipe)["Options.Precision.enableStochasticRounding"] is expected
    assert options(recipe, "evaluation")["Options.Precision.enableStochasticRounding"] is False


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "half"),
        (("ipu.partials=float",), "float"),
        (("precision.weights=float32", "precision.compute=float32"), "float"),
    ],
)
def test_partials_follow_the_arithmetic(overrides, expected):
    for model in ("training", "evaluation"):
        assert options(small(*overrides), model)["Options.Precision.setPartialsType"] == Name(f"torch.{expected}")


def test_dithering_keeps_the_partials():
    """setPartialsType and setConvolutionDithering each write the whole dictionary: it is written last, with both."""
    recipe = small("ipu.convolution_dithering=true", "ipu.partials=float")
    assert options(recipe)["convolutionOptions"] == {"partialsType": "float", "enableConvDithering": "true"}
    order = list(options(recipe))
    assert order.index("convolutionOptions") > order.index("Options.Precision.setPartialsType")
    assert "convolutionOptions" not in options(small())


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


def test_groups_are_those_of_torch_and_replicas_round_alike():
    """The other value of the option makes other channels a group: weights would fit no other device."""
    for model in ("training", "evaluation"):
        found = options(pod("pod256", 128), model)
        assert found["groupNormStridedChannelGrouping"] is False
        assert found["engineOptions"]["target.deterministicWorkers"] == "portable"


def test_momentum_can_leave_the_device():
    found = options(pod("pod256", 128))
    assert found["disableGradAccumulationTensorStreams"] is True
    assert "disableOptimizerStateTensorStreams" not in found


def test_profiling_adds_to_the_engines_options_on_one_process():
    """enableProfiling writes into the dictionary that is there, so it must come after it (python/options.py)."""
    recipe = small("ipu.profile=there", "ipu.exchange_memory_target=memory")
    settings = ipu.training_settings(recipe, divide(recipe), 1, False)
    calls = [each.arguments[0] if each.call == "Options._Popart.set" else each.call for each in settings]
    assert calls.index("Options.enableProfiling") > calls.index("engineOptions")
    assert [each.arguments for each in settings if each.main_only] == [("there",)]
    assert options(recipe)["engineOptions"]["opt.internalExchangeOptimisationTarget"] == "memory"


def test_switches_are_off_unless_asked_for():
    off = {"Options.enableProfiling", "Options.enableExecutableCaching", "Options.enableSyntheticData",
           "Options.TensorLocations.setOptimizerLocation", "Options.Training.setAutomaticLossScaling",
           "Options.setAvailableMemoryProportion"}  # fmt: skip
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


@pytest.mark.parametrize("model", [ipu.training_settings, ipu.evaluation_settings])
@pytest.mark.parametrize(
    "overrides", [(), ("parallel.stages=2",), EVERYTHING, ("parallel.stages=2", *EVERYTHING), ("batch.micro=64",)]
)
def test_every_name_is_poptorchs_and_every_value_plain(model, overrides):
    recipe = small(*overrides)
    for setting in model(recipe, divide(recipe), 2, False):
        part, _, method = setting.call.rpartition(".")
        assert method in OPTIONS[part].split(), setting.call
        if part == "Options._Popart":
            assert setting.arguments[0] in SESSION
        for value in setting.arguments:
            if isinstance(value, Name):
                assert value.path in NAMES
            elif isinstance(value, Chain):
                assert value.start in STARTS
            else:
                assert ast.literal_eval(repr(value)) == value


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ipu.available_memory_proportion=[]", "one or more numbers"),
        ("ipu.available_memory_proportion=[0]", "above 0"),
        ("ipu.available_memory_proportion=[1.5]", "at most 1"),
        ("ipu.io_tiles=33", "even"),
        ("ipu.io_tiles=30", "greater than or equal to 32"),
        ("ipu.io_tiles=194", "less than or equal to 192"),
    ],
)
def test_values_that_poptorch_would_refuse(text, words):
    with pytest.raises(Exception, match=words):
        small(text)
