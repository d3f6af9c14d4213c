"""Training on IPUs, through the double of PopTorch, is training on the CPU: weights, momenta,
scores and resumes."""

import builtins
import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import evaluate
from common.errors import ConfigError
from data.sources import open_source
from engines import base, factory
from engines.base import one_step
from optim import schedule
from parallel.topology import Topology
from recipe import loading
from recipe.batch import divide, lengths
from recipe.ipu import options, rules
from tests.conftest import QUICKSTART, TINY
from tests.recipe.ipu.test_options import EVERYTHING
from tests.tensors import assert_bitwise_equal
from training.checkpoint import CheckpointFolder
from training.loop import TrainingError
from training.run import run

pytestmark = [pytest.mark.ipu, pytest.mark.usefixtures("double")]

FLOAT32 = ("precision.compute=float32", "precision.weights=float32")
LARS = ("optimizer.trust=momentum", "optimizer.trust_coefficient=0.01")
PIPELINE = ("parallel.stages=2", "parallel.split=auto", "parallel.replicas=2")
IPU = ("run.device=ipu", *FLOAT32, "batch.micro=4", "data.workers=0")
MIXED = ("data.mixup=0.3", "data.cutmix=0.85", "data.label_smoothing=0.1")


def for_cpu(overrides):
    """The same recipe for a single process on the CPU; IPUs measure no noise scale, so neither has
    one."""
    kept = [text for text in overrides if not text.startswith(("parallel.", "ipu."))]
    return [*kept, "run.device=cpu", "log.noise_scale=false"]


def trained(recipe):
    """The newest state of a finished run, and its events without times."""
    run(recipe)
    content = CheckpointFolder(Path(recipe.run.output, "checkpoints"), 2, True).load_newest(
        warn=pytest.fail
    )
    return content["engine"], events(recipe.run.output)


@functools.lru_cache(maxsize=None)
def on_cpu(*overrides):
    """State and events of that run, and the state that it started from; computed once for each
    recipe."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = loading.load(QUICKSTART, [*TINY, *for_cpu(overrides), f"run.output={folder}/cpu"])
        return (*trained(recipe), first_state(recipe))


def first_state(recipe):
    return factory.create(recipe, divide(recipe, 1)).state_dict()


def events(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def moved(state, other, part, start=None):
    """|state - other| over |other - start|, over all tensors of a part together."""
    names = other[part].keys()
    assert state[part].keys() == names
    difference, movement = (
        torch.cat(
            [(one[name].double() - (two[name].double() if two else 0)).flatten() for name in names]
        ).norm()
        for one, two in ((state[part], other[part]), (other[part], start and start[part]))
    )
    return (difference / movement).item()


SHORT = ("run.steps=4", "schedule.warmup_steps=1")
LONG = ("run.steps=10", "schedule.warmup_steps=4", "log.every_steps=5")
DECAY = ("optimizer.weight_decay=0.01",)
STILL = ("optimizer.momentum=0",)
SHARDED = ("parallel.stages=2", "parallel.split=auto", "parallel.schedule=sharded")


@pytest.mark.parametrize(
    ("own", "parallel"),
    [
        pytest.param((*LARS, *DECAY, *MIXED, *LONG), PIPELINE, id="lars"),
        pytest.param(
            ("optimizer.name=sgd", *DECAY, "schedule.peak=0.05", *SHORT), PIPELINE, id="sgd"
        ),
        pytest.param(
            ("optimizer.name=rmsprop", *DECAY, "schedule.peak=0.02", *SHORT), PIPELINE, id="rmsprop"
        ),
        pytest.param(
            ("optimizer.name=lamb", *DECAY, "schedule.peak=0.01", *SHORT), PIPELINE, id="lamb"
        ),
        pytest.param(
            ("optimizer.name=rmsprop", *STILL, "schedule.peak=0.02", *SHORT),
            PIPELINE,
            id="no momentum",
        ),
        pytest.param((*LARS, *SHORT), ("parallel.stages=1",), id="one stage, whose input overlaps"),
        pytest.param((*LARS, *SHORT), SHARDED, id="sharded, so that input overlaps"),
    ],
)
def test_updates_are_those_of_the_cpu(tiny, tmp_path, own, parallel):
    """The arithmetic is the same but for the order of sums.

    Of what the weights moved, and of the momentum, which is a difference of large numbers, that is
    more.
    """
    state, found = trained(tiny(*IPU, *own, *parallel, f"run.output={tmp_path}/ipu"))
    expected, wanted, start = on_cpu(*IPU, *own)
    assert moved(state, expected, "weights", start) < 1e-4
    for slot in slots(expected):
        assert moved(state, expected, slot) < 1e-3
    assert moved(expected, start, "weights") > 1e-4, "nothing was learned"
    for ours, theirs in zip(found, wanted):
        assert ours["event"] == theirs["event"]
        for key in theirs.keys() & {"loss", "top1", "top5", "lr", "images"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4), key


def slots(state):
    return state.keys() - {"weights", "loss_scale", "averages", "buffers", "noise_scale"}


# Epochs of three steps: the one average of the first is there when a run goes on after step 4, the
# second comes then.
GLYPHS = "data.source=glyphs data.train_images=150 data.validation_images=20 batch.global=48 batch.micro=4"
SAVED = "checkpoint.keep_last=7 checkpoint.every_epochs=0.1 average.epoch_decay=0.5 run.steps=7 log.every_steps=2"
LAMB = "optimizer.name=lamb schedule.peak=0.05 schedule.warmup_steps=2"
RESUMED = (*IPU, *MIXED, *GLYPHS.split(), *SAVED.split(), *LAMB.split())
KINDS = {"ipu": (*RESUMED, *PIPELINE), "cpu": for_cpu(RESUMED)}


def engine_of(recipe, rank=0):
    """The engine of one of the instances, each of which serves all replicas."""
    batch = divide(recipe)
    place = Topology(batch.replicas, 1, rank, 0, batch.replicas)
    return factory.create(recipe, batch, factory.connect(recipe, place))


@pytest.mark.parametrize(("first", "second"), [("ipu", "ipu"), ("ipu", "cpu"), ("cpu", "ipu")])
def test_what_one_engine_saved_another_goes_on_from(tiny, tmp_path, first, second):
    """On IPUs to the bit: with its averages, its momentum, and LAMB's count of updates, which left
    the device and entered another program. Weights, momenta and averages mean the same to a CPU."""
    expected, _ = trained(tiny(*KINDS[first], f"run.output={tmp_path}"))
    assert float(expected["averages"]["epoch_average"]["count"]) == 2
    saved = torch.load(
        CheckpointFolder(tmp_path / "checkpoints", 7, True).path(4), weights_only=True
    )["engine"]
    recipe = tiny(*KINDS[second])
    engine = engine_of(recipe)
    engine.load_state_dict(saved)
    source = open_source(recipe.data, recipe.model.classes, "train")
    batches = engine.training_batches(source, range(4, 7))
    rate = schedule.create(recipe, lengths(recipe, len(source)))
    for step in range(4, 7):
        engine.train_step(batches, one_step(step), rate(step))
        if (step + 1) % 3 == 0:
            engine.end_epoch()
    batches.close()
    found = engine.state_dict()
    engine.close()
    if first == second:
        assert_bitwise_equal(found, expected)
    assert moved(found, expected, "weights") < 1e-5
    for slot in slots(expected):
        assert moved(found, expected, slot) < 1e-3
    one, other = (each["averages"]["epoch_average"] for each in (found, expected))
    assert moved(one, other, "weights") < 1e-5


def evaluated(engine, recipe):
    source = open_source(recipe.data, recipe.model.classes, "validation")
    batches = engine.evaluation_batches(source, len(source))
    total, _ = base.total(
        [engine.evaluate_step(batch) for batch in batches], (), engine.processes, engine.device
    )
    batches.close()
    return total


def test_every_image_is_scored_once_with_the_weights_in_use(tiny):
    """Between updates, with an average, and after other weights were loaded; 360 images in calls of
    7 x 8."""
    recipe = tiny(
        *IPU, *LARS, *PIPELINE, "batch.evaluation=7", "average.epoch_decay=0.5", "batch.global=48"
    )
    engine = engine_of(recipe)
    source = open_source(recipe.data, recipe.model.classes, "train")
    batches = engine.training_batches(source, range(2))
    seen = []
    for step in range(2):
        engine.train_step(batches, one_step(step), 1.0)
        engine.end_epoch()
        total = evaluated(engine, recipe)
        state = engine.state_dict()
        with engine.using("epoch_average"):
            averaged = evaluated(engine, recipe)
        seen.append((total, averaged, state))
    batches.close()
    first, last = (each[2]["weights"]["stem.conv_stem.weight"] for each in seen)
    assert not torch.equal(first, last)
    cpu = tiny(*for_cpu((*IPU, *LARS)), "average.epoch_decay=0.5")
    other = engine_of(cpu)
    for total, averaged, state in seen:
        other.load_state_dict(state)
        for found, weights in ((total, "trained"), (averaged, "epoch_average")):
            with other.using(weights):
                expected = evaluated(other, cpu)
            assert (found.images, found.top1, found.top5) == (360, expected.top1, expected.top5)
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    engine.load_weights(seen[0][2]["weights"])
    assert evaluated(engine, recipe).loss == seen[0][0].loss
    engine.close()


def test_half_weights_stay_half(tiny, tmp_path, capsys, caplog):
    """float16 arithmetic, weights and momentum, loss scale and stochastic rounding: what pods
    run."""
    half = ("run.device=ipu", "data.workers=0", "batch.micro=4", *LARS, *SHORT)
    state, found = trained(tiny(*half, *PIPELINE, f"run.output={tmp_path}"))
    for part in ("weights", "momentum_buffer"):
        assert {tensor.dtype for tensor in state[part].values()} == {torch.float16}
        assert all(tensor.isfinite().all() for tensor in state[part].values())
    assert caplog.text == "", "PopTorch warned"
    expected, wanted, _ = on_cpu(*IPU, *LARS, *SHORT)
    assert 1e-5 < moved(state, expected, "weights") < 5e-3  # eleven bits, 4e-4, some updates deep
    assert found[-1]["top1"] == pytest.approx(wanted[-1]["top1"], abs=0.2)
    capsys.readouterr()
    score = ["--checkpoint", str(tmp_path), "--output", f"{tmp_path}/scores"]
    assert (
        evaluate.main(score)
        == evaluate.main([*score, "run.device=cpu", "precision.compute=float32"])
        == 0
    )
    assert capsys.readouterr().out.count(f"trained weights: top1 {found[-1]['top1']:.2%} ") == 2


def test_weights_that_are_lost_end_the_run(tiny, tmp_path):
    """IPUs make every update; the run does not go on for hours without a weight, and saves none of
    it."""
    recipe = tiny(
        *IPU, *LARS, "schedule.peak=1e30", "checkpoint.every_epochs=0.01", f"run.output={tmp_path}"
    )
    with pytest.raises(
        TrainingError, match=r"^step \d: the (loss is nan|weights are not finite).*schedule.peak"
    ):
        run(recipe)
    saved = CheckpointFolder(tmp_path / "checkpoints", 2, True).load_newest(warn=pytest.fail)
    assert saved is None or all(
        tensor.isfinite().all() for tensor in saved["engine"]["weights"].values()
    )


def test_synthetic_data_leaves_the_first_weights(tiny, tmp_path, capsys):
    """Nothing comes back from a device that makes its own images; a note at the start says so."""
    recipe = tiny(
        *IPU, *LARS, "ipu.synthetic_data=true", "run.steps=3", f"run.output={tmp_path}/ipu"
    )
    state, _ = trained(recipe)
    cpu = tiny(*for_cpu((*IPU, *LARS)))
    assert all(
        torch.equal(state["weights"][name], tensor)
        for name, tensor in first_state(cpu)["weights"].items()
    )
    assert "synthetic data: nothing is learned" in capsys.readouterr().out


def test_blocks_and_states_that_do_not_fit_are_refused(tiny):
    recipe = tiny(
        *IPU, *LARS, "parallel.recompute=true", "ipu.keep_activations=[blocks.0.0, nonsense]"
    )
    with pytest.raises(
        ConfigError, match=r"^ipu.keep_activations: nonsense is not a block; the blocks are preproc"
    ):
        engine_of(recipe)
    engine = engine_of(tiny(*IPU, *LARS))
    state = engine.state_dict()
    for part in ("loss_scale", "momentum_buffer"):
        with pytest.raises(ValueError, match=f"{part} is missing"):
            engine.load_state_dict({key: value for key, value in state.items() if key != part})
    with pytest.raises(ValueError, match=r"stem.conv_stem.weight is \[1\]"):
        engine.load_weights({"stem.conv_stem.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="nothing is unknown"):
        engine.load_weights({"nothing": torch.zeros(1)})
    engine.close()


def test_poptorchs_own_refusal_is_shown(tiny, monkeypatch):
    """Where it cannot be imported, and what its release needs."""
    imported = builtins.__import__

    def refuse(name, *arguments, **keywords):
        assert name != "poptorch", "only compatible with PyTorch version 2.0.1"
        return imported(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        ConfigError, match=r"only compatible with PyTorch version 2.0.1.*requirements-ipu"
    ) as error:
        factory.connect(tiny(*IPU, *LARS), Topology())
    assert f"torch {torch.__version__}" in str(error.value)


CUT = (*PIPELINE, "parallel.split=[blocks.3.0]")
SWITCHES = (*EVERYTHING, "ipu.keep_activations=[blocks.2.0]", "parallel.schedule=sharded")


@pytest.mark.parametrize("overrides", [("batch.micro=24", "data.mixup=0"), (*CUT, *SWITCHES)])
def test_poptorch_is_given_the_options_of_the_plan(tiny, double, overrides):
    """In their order, with PopTorch's objects for their names; the recorder refuses calls that
    PopTorch lacks."""
    recipe = tiny("run.device=ipu", "batch.micro=4", "data.workers=0", *LARS, *overrides)
    batch = divide(recipe)
    for rank in (0, 1):
        engine = engine_of(recipe, rank)
        for name, plan in (
            ("training", options.training_settings),
            ("evaluation", options.evaluation_settings),
        ):
            calls = [path for path, _ in engine._options[name].calls]
            settings = plan(recipe, batch, batch.replicas, False)
            assert calls == [each.call for each in settings if rank == 0 or not each.main_only]
    blocks = engine._module.model
    begun = [name for name in blocks.names if blocks.get_submodule(name)._forward_pre_hooks]
    assert begun == [
        each.arguments[0]
        for each in options.model_calls(recipe, batch, True)
        if "BeginBlock" in each.call
    ]
    made = engine._options["training"]
    assert made.value("Precision.setPartialsType") is (
        torch.float if recipe.ipu.partials else torch.half
    )
    assert made.value("outputMode") is double.OutputMode.Sum
    kind = double.PipelinedExecution if rules.pipelined(recipe) else double.ShardedExecution
    assert type(made.value("setExecutionStrategy")) is kind
    if recipe.ipu.shard_optimizer_state:
        calls = made.value("TensorLocations.setOptimizerLocation").calls
        assert [path.split(".")[1] for path, _ in calls] == [
            "useOnChipStorage",
            "useReplicatedTensorSharding",
        ]


@pytest.mark.parametrize(
    ("missing", "replicas", "line"),
    [
        # evaluate.py: its instances would all score everything.
        ("", 2, "^poprun started 2 replicas, but this command computes with one; start it without"),
        (
            "popdist",
            1,
            "^poprun needs popdist, .* cannot be imported: .*; install it from the Poplar SDK",
        ),
        (
            "horovod",
            1,
            "^poprun needs horovod, .* cannot be imported: .*; install it by pip .requirements-ipu.txt",
        ),
    ],
)
def test_instances_that_cannot_join_end_in_a_line(tiny, monkeypatch, missing, replicas, line):
    numbers = {
        "NUM_TOTAL_REPLICAS": replicas,
        "NUM_LOCAL_REPLICAS": replicas,
        "NUM_IPUS_PER_REPLICA": 1,
    }
    for name, value in {**numbers, "REPLICA_INDEX_OFFSET": 0, "LOCAL_INSTANCE_INDEX": 0}.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=line):
        factory.connect(tiny(*IPU, *LARS), Topology())
