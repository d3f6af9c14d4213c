"""The double's options: frozen after use, typed, and blind to nothing."""

import pytest
import torch

from tests.ipu.nets import Net

pytestmark = pytest.mark.ipu


def test_options_chain(double):
    made = double.Options().deviceIterations(2).replicationFactor(4).modelName("a").logDir("b")
    assert (made.device_iterations, made.replication_factor, made.model_name, made.log_dir) == (2, 4, "a", "b")


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made.deviceIterations(2),
        lambda made: made.Training.gradientAccumulation(2),
        lambda made: made.Precision.setPartialsType(torch.half),
        lambda made: made.Distributed.disable(),
        lambda made: made.TensorLocations.numIOTiles(32),
        lambda made: made._Popart.set("autoRecomputation", 3),
        lambda made: setattr(made, "device_iterations", 2),
    ],
)
def test_used_options_are_frozen(double, change):
    made = double.Options()
    double.inferenceModel(Net(), made)
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        change(made)
    change(made.clone())


def test_an_executor_keeps_its_own_options(double):
    made = double.Options()
    assert double.inferenceModel(Net(), made).options.output_mode == double.OutputMode.All
    assert made.output_mode == double.OutputMode.Default


@pytest.mark.parametrize("name", ["enableOverlap", "setOverlapMode", "Optimizer"])
def test_an_unknown_name_is_an_error(double, name):
    with pytest.raises(AttributeError):
        getattr(double.Options(), name)
    with pytest.raises(AttributeError):
        getattr(double.Options().Training, name)


def test_an_unknown_session_option_is_an_error(double):
    double.Options()._Popart.set("defaultPrefetchBufferingDepth", 3)
    with pytest.raises(RuntimeError, match="prefetchDepth"):
        double.Options()._Popart.set("prefetchDepth", 3)


@pytest.mark.parametrize("tiles", [0, 30, 33, 194])
def test_io_tiles_are_even_and_within_bounds(double, tiles):
    with pytest.raises(AssertionError, match="even number between 32 and 192"):
        double.Options().TensorLocations.numIOTiles(tiles)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda poptorch: poptorch.Options().deviceIterations(2.0),
        lambda poptorch: poptorch.Options().randomSeed("1"),
        lambda poptorch: poptorch.Options().outputMode("all"),
        lambda poptorch: poptorch.Options().outputMode(poptorch.OutputMode.EveryN),
        lambda poptorch: poptorch.Options().setAvailableMemoryProportion({"0": 0.1}),
        lambda poptorch: poptorch.Options().setExecutionStrategy("pipelined"),
        lambda poptorch: poptorch.Options().TensorLocations.setOptimizerLocation(False),
        lambda poptorch: poptorch.Options().toDict(),
    ],
)
def test_values_are_checked(double, wrong):
    with pytest.raises(AssertionError):
        wrong(double)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda poptorch: poptorch.Options().Precision.setPartialsType(torch.bfloat16),
        lambda poptorch: poptorch.Options().Training.accumulationAndReplicationReductionType(
            poptorch.ReductionType.NoReduction
        ),
    ],
)
def test_choices_are_checked(double, wrong):
    with pytest.raises(ValueError):
        wrong(double)


def test_the_later_of_partials_and_dithering_wins(double):
    made = double.Options()
    made.Precision.setPartialsType(torch.half)
    made.Training.setConvolutionDithering(True)
    assert made._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    made.Precision.setPartialsType(torch.half)
    assert made._Popart.options["convolutionOptions"] == {"partialsType": "half"}


def test_a_seed_seeds_torch_as_well(double):
    made = double.Options().randomSeed(5)
    assert made.exists("random_seed")
    assert torch.initial_seed() == 5


def test_the_compiler_is_told_everything(double):
    made = double.Options().outputMode(double.OutputMode.Sum).setAvailableMemoryProportion({"IPU1": 0.2})
    made.setExecutionStrategy(double.ShardedExecution()).enableSyntheticData(True).enableExecutableCaching("cache")
    made.TensorLocations.setOptimizerLocation(double.TensorLocationSettings().useReplicatedTensorSharding(True))
    told = made.toDict()
    assert told["execution_mode"] == 1
    assert told["available_memory_proportion"] == {1: 0.2}
    assert told["syntheticDataMode"] == 2
    assert (told["cachePath"], told["enableEngineCaching"]) == ("cache", True)
    assert told["location_optimizer"] == {"useReplicatedTensorSharding": 1}
    assert told["gradient_accumulation"] == told["num_distributed_processes"] == 1


def test_profiling_and_engine_options_are_one_dictionary(double):
    made = double.Options()
    made._Popart.setEngineOptions({"target.syncReplicasIndependently": "true"})
    made.enableProfiling("folder")
    engine = made._Popart.options["engineOptions"]
    assert engine["target.syncReplicasIndependently"] == "true"
    assert engine["autoReport.directory"] == "folder"
