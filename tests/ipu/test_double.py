"""The double's executors: what they refuse, how they split a call, and when weights are copied."""

import pytest
import torch
from torch.nn import functional

from tests.ipu.nets import Net, assert_close, batch, options, weights

pytestmark = [pytest.mark.ipu, pytest.mark.filterwarnings("ignore:Positional args are being deprecated")]


class Forward(torch.nn.Module):
    """A model made of a function of its input; it has one weight, to be trainable."""

    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.function = function

    def forward(self, inputs):
        return self.function(inputs * self.weight)


def train(poptorch, model, made, optimizer=None):
    optimizer = optimizer or poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, made, optimizer)


def staged(poptorch, ipus=(0, 1)):
    model = Net()
    for layer, ipu in zip((model.first, model.second), ipus):
        poptorch.BeginBlock(layer, user_id=f"on {ipu}", ipu_id=ipu)
    return model


# Blocks and stages


def test_a_module_begins_one_block_in_place(double):
    layer = torch.nn.Linear(1, 1)
    names = list(layer.state_dict())
    assert double.BeginBlock(layer, ipu_id=0) is layer
    assert list(layer.state_dict()) == names
    with pytest.raises(double.Error, match="module has already been assigned to a block"):
        double.BeginBlock(layer, ipu_id=1)


@pytest.mark.parametrize(("accumulation", "right"), [(2, False), (3, True)])
def test_training_pipeline_needs_an_accumulation_of_two_stages_less_one(double, accumulation, right):
    executor = train(double, staged(double), options(double, accumulation=accumulation))
    if right:
        executor(*batch(6))
        return
    with pytest.raises(double.Error, match=r"gradientAccumulation must be greater than or equal.* \(3\)"):
        executor(*batch(4))


@pytest.mark.parametrize(("iterations", "right"), [(1, False), (2, True)])
def test_inference_pipeline_needs_as_many_iterations_as_stages(double, iterations, right):
    executor = double.inferenceModel(staged(double), options(double, iterations=iterations))
    if right:
        executor(*batch(4))
        return
    with pytest.raises(double.Error, match=r"deviceIterations must be greater than or equal.* \(2\)"):
        executor(*batch(4))


def test_sharded_stages_need_no_accumulation(double):
    made = options(double).setExecutionStrategy(double.ShardedExecution())
    train(double, staged(double), made)(*batch(4))


def test_blocks_of_a_pipeline_keep_the_order_of_their_ipus(double):
    with pytest.raises(double.Error, match="ipu_ids must increase"):
        train(double, staged(double, ipus=(1, 0)), options(double, accumulation=8))(*batch(8))


def test_the_number_of_ipus_is_a_power_of_two(double):
    with pytest.raises(double.Error, match=r"use of 6 IPUs, however PopTorch must reserve a minimum of 8"):
        train(double, staged(double), options(double, replicas=3, accumulation=3))(*batch(9))


def test_a_process_has_64_ipus(double):
    with pytest.raises(double.Error, match=r"Too many IPUs requested \(128\)"):
        double.inferenceModel(Net(), options(double, replicas=128))(*batch(128))


def test_a_stage_is_its_ipu_unless_blocks_are_named(double):
    model = Net()
    double.BeginBlock(model.first, user_id="a")
    with pytest.raises(AssertionError, match="no IPU was specified for block a"):
        double.inferenceModel(model, options(double))(*batch(1))
    named = double.PipelinedExecution(double.Stage("a"), "b")
    double.BeginBlock(model.second, user_id="b")
    assert double.inferenceModel(model, options(double, iterations=2).setExecutionStrategy(named))(*batch(2))


def test_nothing_runs_after_a_block_that_ended(double):
    def forward(inputs):
        with double.Block("a", ipu_id=0):
            inputs = inputs + 1
        return inputs + 1

    model = Forward(forward)
    model.forward = lambda inputs: forward(inputs)
    with pytest.raises(double.Error, match="No active Block"):
        double.inferenceModel(model)(torch.ones(2, 4))


# Overlapped input and output


def overlapped(poptorch):
    mode = poptorch.OverlapMode.OverlapAccumulationLoop
    model = Forward(None)
    model.forward = lambda inputs: poptorch.set_overlap_for_output(
        poptorch.set_overlap_for_input(inputs, mode) * 2, poptorch.OverlapMode.OverlapAccumulationLoop
    )
    return model


def test_a_pipeline_overlaps_no_input(double):
    with pytest.raises(double.Error, match=r"Overlapped IO is not supported with poptorch\.PipelinedExecution"):
        double.inferenceModel(overlapped(double))(torch.ones(2, 4))


def test_overlap_needs_tiles_and_an_output_mode(double):
    made = double.Options().setExecutionStrategy(double.ShardedExecution())
    with pytest.raises(double.Error, match="No IO tiles allocated"):
        double.inferenceModel(overlapped(double), made)(torch.ones(2, 4))
    made = made.clone().outputMode(double.OutputMode.Final)
    made.TensorLocations.numIOTiles(32)
    with pytest.raises(double.Error, match="Unsupported output mode for overlapped IO"):
        double.inferenceModel(overlapped(double), made)(torch.ones(2, 4))
    made = made.clone().outputMode(double.OutputMode.Sum)
    assert torch.equal(double.inferenceModel(overlapped(double), made)(torch.ones(2, 4)), torch.full((2, 4), 2.0))


def test_only_inputs_and_outputs_overlap(double):
    model = Forward(None)
    mode = double.OverlapMode.OverlapAccumulationLoop
    model.forward = lambda inputs: double.set_overlap_for_input(inputs + 1, mode) * 2
    made = double.Options().setExecutionStrategy(double.ShardedExecution())
    made.TensorLocations.numIOTiles(32)
    with pytest.raises(double.Error, match="not a tensor input"):
        double.inferenceModel(model, made)(torch.ones(2, 4))


# What a device cannot do


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: torch.as_tensor(x.detach().numpy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
    ],
)
def test_values_do_not_shape_a_program(double, function):
    with pytest.raises(double.Error):
        double.inferenceModel(Forward(function))(torch.ones(2, 4))


def test_numbers_of_64_bits_have_32_on_the_device(double):
    seen = []

    def forward(counts, values):
        seen.extend([counts.dtype, values.dtype])
        return counts.long() + 1, values.double()

    model = torch.nn.Identity()
    model.forward = forward
    counts, values = double.inferenceModel(model)(torch.arange(3), torch.ones(3, dtype=torch.float64))
    assert seen[:2] == [torch.int32, torch.float32]
    assert (counts.dtype, values.dtype) == (torch.int32, torch.float32)
    assert counts.tolist() == [1, 2, 3]


# Losses


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (lambda mark, x: x.sum(), "Couldn't find a loss"),
        (lambda mark, x: (mark(x.sum(), "none"), mark(x.mean(), "none")), "Multiple independent losses"),
        (lambda mark, x: mark(functional.mse_loss(x, x.detach() + 1) * 2, "sum"), None),
        (lambda mark, x: functional.mse_loss(x, x.detach() + 1), None),
    ],
)
def test_there_is_one_final_loss(double, loss, error):
    executor = train(double, Forward(lambda x: loss(double.identity_loss, x)), options(double))
    if error is None:
        executor(torch.ones(2, 4))
        return
    with pytest.raises(double.Error, match=error):
        executor(torch.ones(2, 4))


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 8.0), ("mean", 1.0)])
def test_identity_loss_reduces(double, reduction, expected):
    assert double.identity_loss(torch.ones(2, 4), reduction) == expected


# How a call is split


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("All", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("Final", [6, 7]),
        ("Sum", [0 + 2 + 4 + 6, 1 + 3 + 5 + 7]),
        ("EveryN", [2, 3, 6, 7]),
    ],
)
def test_successive_micro_batches_go_to_successive_replicas(double, mode, expected):
    """Two replicas, four iterations, one image each: replica 0 has the even ones, and each mode follows from that."""
    period = 2 if mode == "EveryN" else None
    made = options(double, replicas=2, iterations=4).outputMode(double.OutputMode[mode], period)
    model = torch.nn.Identity()
    assert double.inferenceModel(model, made)(torch.arange(8, dtype=torch.int32)).tolist() == expected


def test_statistics_that_come_back_are_those_of_replica_0(double):
    """Momentum 1 keeps the last micro batch's mean: of four for two replicas, replica 0 sees the first and third."""
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(4, momentum=1.0), Forward(lambda x: double.identity_loss(x, "sum"))
    )
    inputs, _ = batch(8)
    executor = train(double, model, options(double, replicas=2, accumulation=2))
    executor(inputs)
    torch.testing.assert_close(executor.state_dict()["0.running_mean"], inputs[4:6].mean(0))


def test_default_output_is_all_in_inference_and_final_in_training(double):
    assert double.inferenceModel(Net(), options(double, iterations=2))(*batch(4))[1].shape == (2,)
    assert train(double, Net(), options(double, iterations=2))(*batch(4))[1].shape == ()


def test_the_batch_divides_into_micro_batches(double):
    with pytest.raises(AssertionError, match=r"batch dimension \(13\) must be a multiple of .*= 12"):
        train(double, Net(), options(double, replicas=2, accumulation=3, iterations=2))(*batch(13))


def test_inputs_stay_as_compiled(double):
    executor = double.inferenceModel(Net())
    executor(*batch(4))
    with pytest.raises(double.Error, match="Shape mismatch"):
        executor(*batch(5))
    inputs, labels = batch(4)
    with pytest.raises(double.Error, match="Data type mismatch"):
        executor(inputs.double(), labels)
    with pytest.raises(double.Error, match="must be tensors"):
        executor(inputs, 3)


@pytest.mark.parametrize("reduction", ["Mean", "Sum"])
def test_gradients_are_combined_over_accumulation_and_replicas(double, reduction):
    """Against plain torch: the mean (or sum) of twelve gradients, a step, and again for the second iteration."""
    model, reference = Net(double.identity_loss), Net()
    inputs, labels = batch(48)
    made = options(double, replicas=2, accumulation=6, iterations=2)
    made.Training.accumulationAndReplicationReductionType(double.ReductionType[reduction])
    executor = train(double, model, made)
    executor(inputs, labels)
    stepper = torch.optim.SGD(reference.parameters(), lr=0.1)
    for part in torch.arange(48).split(24):
        stepper.zero_grad()
        for micro in part.split(2):
            loss = reference(inputs[micro], labels[micro])[1]
            (loss / 12 if reduction == "Mean" else loss).backward()
        stepper.step()
    assert_close(weights(executor), weights(reference), rtol=1e-5, atol=1e-6)  # sums in another order


# Weights


def host_view(parameter):
    """The host's memory of a parameter, which can be read without asking the device."""
    return parameter.detach().numpy()


def test_the_host_is_stale_until_it_is_read(double):
    model = Net(double.identity_loss)
    view = host_view(model.first.weight)
    executor = train(double, model, options(double))
    before = view.copy()
    executor(*batch(4))
    assert (view == before).all()
    model.first.weight.sum()
    assert (view != before).any()


@pytest.mark.parametrize("read", ["copyWeightsToHost", "state_dict", "detachFromDevice", "destroy"])
def test_reading_copies_weights_back(double, read):
    model = Net(double.identity_loss)
    view = host_view(model.first.weight)
    executor = train(double, model, options(double))
    before = view.copy()
    executor(*batch(4))
    getattr(executor, read)()
    assert (view != before).any()


@pytest.mark.parametrize("send", [None, "copyWeightsToDevice", "load_state_dict"])
def test_the_device_is_stale_until_it_is_written(double, send):
    model, zeros = Net(), {name: torch.zeros_like(tensor) for name, tensor in Net().state_dict().items()}
    executor = double.inferenceModel(model)
    before = executor(*batch(4))[0]
    if send == "load_state_dict":
        executor.load_state_dict(zeros)
    else:
        model.load_state_dict(zeros)
        if send:
            executor.copyWeightsToDevice()
    after = executor(*batch(4))[0]
    assert torch.equal(after, before) if send is None else not after.any()


def test_modules_are_in_the_mode_they_were_compiled_in(double):
    model = torch.nn.Dropout(0.5).eval()
    executor = double.inferenceModel(model)
    executor(torch.ones(64))
    model.train()
    assert executor(torch.ones(64)).all()


def test_compiling_draws_no_random_numbers_and_moves_no_statistics(double):
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    before, state = weights(model), torch.get_rng_state()
    double.inferenceModel(model).compile(torch.randn(8, 4, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert_close(weights(model), before, rtol=0, atol=0)


# Devices


def test_two_models_do_not_share_ipus(double):
    model = Net(double.identity_loss)
    training, inference = train(double, model, options(double)), double.inferenceModel(model)
    training(*batch(4))
    with pytest.raises(double.Error, match="Failed to acquire"):
        inference(*batch(4))
    training.detachFromDevice()
    inference(*batch(4))
    with pytest.raises(double.Error, match="Failed to acquire"):
        training(*batch(4))
    inference.detachFromDevice()
    training(*batch(4))
    assert training.isAttachedToDevice()
    assert not inference.isAttachedToDevice()


def test_inference_sees_what_training_learnt(double):
    model = Net(double.identity_loss)
    training, inference = train(double, model, options(double)), double.inferenceModel(model)
    first = inference(*batch(4))[1]
    inference.detachFromDevice()
    for seed in range(5):
        training(*batch(4, seed=0 * seed))
    training.detachFromDevice()
    assert inference(*batch(4))[1] < first


@pytest.mark.parametrize("method", ["copyWeightsToHost", "copyWeightsToDevice", "attachToDevice", "detachFromDevice"])
def test_what_is_not_compiled_has_no_device(double, method):
    with pytest.raises(double.Error, match="Model has not been compiled or has been destroyed"):
        getattr(double.inferenceModel(Net()), method)()


def test_a_model_is_trained_by_one_executor(double):
    model = Net(double.identity_loss)
    executor = train(double, model, options(double))
    with pytest.raises(RuntimeError, match="already been wrapped"):
        train(double, model, options(double))
    executor(*batch(4))
    executor.destroy()
    assert type(model) is Net
    assert not executor.isCompiled()
    train(double, model, options(double))


def test_inference_accumulates_nothing(double):
    with pytest.raises(double.Error, match=r"gradientAccumulation to 1"):
        double.inferenceModel(Net(), options(double, accumulation=2))
