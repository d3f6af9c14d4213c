"""The double refuses what PopTorch's own Python layer refuses, so that a test of the engine would
find it.

Each refusal was read in the published source of PopTorch 3.4: python/options.py, ops.py,
__init__.py, _optimizer_attributes.py.
"""

import pytest
import torch

pytestmark = pytest.mark.ipu


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [
        ("deviceIterations", "1", 1),
        ("replicationFactor", 2.0, 2),
        ("Training.gradientAccumulation", "8", 8),
        ("randomSeed", None, 0),
        ("outputMode", "all", None),
        ("setAvailableMemoryProportion", 0.1, {"IPU0": 0.1}),
        ("TensorLocations.numIOTiles", 31, 32),
        ("TensorLocations.numIOTiles", 33, 34),
        ("TensorLocations.numIOTiles", 194, 192),
    ],
)
def test_arguments_of_another_type_or_range(method, wrong, right, double):
    def call(value):
        place = double.Options()
        for name in method.split("."):
            place = getattr(place, name)
        place(value)

    with pytest.raises(AssertionError):
        call(wrong)
    call(double.OutputMode.All if right is None else right)


def test_a_module_that_begins_two_blocks(double):
    layer = torch.nn.Linear(2, 2)
    double.BeginBlock(layer, "first", 0)
    with pytest.raises(double.Error, match="already been assigned to a block"):
        double.BeginBlock(layer, "second", 1)


def test_a_model_that_is_wrapped_twice(double):
    model = torch.nn.Linear(2, 2)
    optimizer = double.optim.SGD(model.parameters(), lr=0.1)
    wrapped = double.trainingModel(model, double.Options(), optimizer)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        double.trainingModel(model, double.Options(), optimizer)
    wrapped.destroy()
    double.trainingModel(model, double.Options(), optimizer)


def test_optimizers_that_ipus_cannot_run(double, caplog):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        double.trainingModel(model, double.Options(), torch.optim.Adagrad(model.parameters()))

    class Own(double.optim.SGD):
        def step(self, closure=None):
            raise AssertionError("never called")

    double.trainingModel(torch.nn.Linear(2, 2), double.Options(), Own(model.parameters(), lr=0.1))
    assert "never run" in caplog.text
