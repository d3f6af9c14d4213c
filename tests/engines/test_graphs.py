"""Recorded passes give the bits of the stage; without a GPU, by the recorder for CPUs."""

from dataclasses import replace

import pytest
import torch

from engines import graphs
from engines.graphs import Graphed
from tests.engines import worlds
from tests.engines.recording import Recorder, on_cpus
from tests.engines.test_stage import (
    assert_same,
    mixer_stage,
    mixer_steps,
    model_of,
    stage_of,
    three_steps,
)
from tests.engines.worlds import TREE, alone, case, outcome, single
from tests.tensors import assert_bitwise_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(graphs, "_WARM_UP", 1)


def graphed(recorder=None, **keys):
    stage, draws = stage_of(**keys)
    recorder = recorder or (graphs.recorder if DEVICE == "cuda" else Recorder())
    found = Graphed(stage, recorder).to(DEVICE)
    return found, draws


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"recompute": frozenset(model_of().names)},
        {"recompute": {"blocks.1.0"}, "norm": "batch"},
    ],
    ids=["kept", "computed again", "moving statistics"],
)
def test_recorded_passes_have_the_bits_of_the_stage(keys):
    """With two micro batches between their passes, masks of their own, and running statistics,
    which move as often.

    The first micro batch is computed without.
    """
    recorder = Recorder()
    found, draws = graphed(recorder, **keys)
    plain, others = stage_of(**keys)
    assert_same(three_steps(found, draws), three_steps(plain, others))
    assert not found.lines and (DEVICE == "cuda" or recorder.replays == 2 * (2 + 5))


def passes(part, draws, count, in_flight=1, size=16):
    """Gradients of x and of the parameters after each of some micro batches; x enters at a later
    stage."""
    found = []
    generator = torch.Generator().manual_seed(0)
    for first in range(0, count, in_flight):
        outputs = []
        for number in range(first, first + in_flight):
            draws.step = 0
            draws.micro_batch = number
            x = (
                torch.randn(4, *ENTERING, size, size, generator=generator)
                .to(DEVICE)
                .requires_grad_()
            )
            outputs.append((x, part(x)))
        for x, output in outputs:
            for parameter in part.parameters():
                parameter.grad = None
            output.square().mean().backward()
            found += [
                output.detach().clone(),
                x.grad,
                *(parameter.grad.clone() for parameter in part.parameters()),
            ]
    return found


LATER = ("blocks.1.0", "blocks.2.0")
ENTERING = (model_of().block("blocks.1.0").conv_pw.in_channels,)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_later_stage_gives_the_gradient_of_what_enters(in_flight):
    """Recordings are as many as micro batches between their passes, and used again; another size
    has its own."""
    recorder = Recorder()
    found, draws = graphed(recorder, names=LATER)
    plain, others = stage_of(names=LATER)
    plain.to(DEVICE)
    for size in (16, 8, 16):
        assert_same(
            passes(found, draws, 6, in_flight, size), passes(plain, others, 6, in_flight, size)
        )
        assert len(found.recordings) == in_flight
    # each is tried once, and all but the first start it
    assert recorder.replays == 2 * 3 * (in_flight + 5)


def test_micro_batches_beyond_the_recordings_are_computed_without(monkeypatch):
    monkeypatch.setattr(graphs, "_RECORDINGS", 2)
    found, draws = graphed(names=LATER)
    plain, others = stage_of(names=LATER)
    assert_same(passes(found, draws, 8, 4), passes(plain.to(DEVICE), others, 8, 4))
    assert len(found.recordings) == len(found._free) == 2


def test_recorded_passes_have_the_mask_of_each_call_of_one_layer():
    """Of a model of timm.

    The first two micro batches are computed without, and begin the recordings.
    """
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    stage, draws = mixer_stage()
    recorder = Recorder()
    found = Graphed(stage, recorder)
    assert_same(mixer_steps(found, draws), mixer_steps(*mixer_stage()))
    assert not found.lines and recorder.replays > 4


def test_evaluation_is_not_recorded():
    recorder = Recorder()
    found, draws = graphed(recorder, names=LATER)
    passes(found, draws, 3)
    before = recorder.replays
    found.eval()
    x = torch.randn(4, *ENTERING, 16, 16, device=DEVICE)
    with torch.no_grad():
        assert torch.equal(found(x), found.stage(x))
        found.train()
        found(x)
    assert recorder.replays == before


def test_hooks_and_gradients_of_the_parameters_see_no_recording():
    """A gradient that is there is added to."""
    found, draws = graphed(names=LATER)
    plain, others = stage_of(names=LATER)
    results = []
    for part, own in ((found, draws), (plain.to(DEVICE), others)):
        passes(part, own, 3)
        before = [parameter.grad.clone() for parameter in part.parameters()]
        own.micro_batch = 7
        generator = torch.Generator().manual_seed(1)
        part(torch.randn(4, *ENTERING, 16, 16, generator=generator).to(DEVICE)).mean().backward()
        results.append([*before, *(parameter.grad for parameter in part.parameters())])
    assert_same(*results)


class Wrong(Recorder):
    """Its recordings start nothing, once they were made."""

    def __call__(self):
        record = super().__call__()

        def wrong(work):
            results, _ = record(work)
            for result in results:
                result.mul_(2)
            return results, lambda: None

        return wrong


def failing():
    def record(work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    return record


@pytest.mark.parametrize(
    ("recorder", "why"),
    [(Wrong(), "output is not what it is without"), (failing, "stream is capturing")],
)
def test_what_cannot_be_recorded_is_computed_without_and_a_line_says_why(recorder, why):
    found, draws = graphed(recorder, names=LATER)
    plain, others = stage_of(names=LATER)
    assert_same(passes(found, draws, 4), passes(plain.to(DEVICE), others, 4))
    (line,) = found.lines
    assert (
        line.startswith("engine.graphs: passes are not recorded: ")
        and why in line
        and "\n" not in line
    )


@pytest.mark.parametrize("recorder", [Wrong(), failing])
def test_a_recording_that_fails_leaves_running_statistics_as_they_would_be(recorder):
    found, draws = graphed(recorder, norm="batch")
    plain, others = stage_of(norm="batch")
    three_steps(found, draws)
    three_steps(plain, others)
    assert found.lines
    for name, buffer in plain.named_buffers():
        assert torch.equal(found.stage.get_buffer(name).cpu(), buffer), name


# In an engine -------------------------------------------------------------------------------------


def graphed_trains(processes, overrides, options=None):
    """A case: worlds.trains with recordings, of which some were started."""
    with on_cpus() as recorder:
        found = worlds.trains(processes, overrides, options)
    assert recorder.replays > 15
    return found


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("parallel.recompute=true", "model.norm=batch"),
        pytest.param((TREE,), marks=pytest.mark.slow),  # two replicas below are in that order
        pytest.param(("model.train=classifier", "model.depth=0.3"), marks=pytest.mark.slow),
        pytest.param(("model.train=[blocks.6]", "parallel.recompute=true"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_engine_learns_the_same_with_recordings(overrides):
    """Weights, momenta, averages, norms and scores, bit for bit; images of another size in the
    second of two steps.

    Frozen blocks drop nothing: neither branches, for which blocks must repeat, nor the means of the
    head.
    """
    options = {"sizes": (16, 24), "steps": 2}
    results, digests, state = graphed_trains(single(), overrides, options)
    expected = worlds.trains(single(), overrides, options)
    assert_bitwise_equal(state[2], expected[2][2])
    assert (results, digests) == expected[:2]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "run",
    [
        case(2, 1, graphed_trains, ("parallel.schedule=1f1b", "parallel.recompute=true")),
        case(2, 1, graphed_trains, ("parallel.schedule=gpipe",), slow=True),
        case(1, 2, graphed_trains, (TREE,)),
    ],
)
def test_stages_and_replicas_learn_the_same_with_recordings(run):
    """With two replicas in the order of a tree, whose bits do not depend on them."""
    results, scores, state = outcome(run)
    expected = alone(TREE) if run.replicas == 2 else alone()
    assert_bitwise_equal(state, expected[2])
    assert (results, scores) == expected[:2]


def test_there_are_none_where_they_do_not_pay_or_are_not_wanted():
    """With few micro batches, an exchange that begins in the last backward pass is worth more."""
    engine = worlds.engine_of(single(), ())
    assert engine._training_stages is engine._part.parts  # on a CPU
    with on_cpus(graphs._FEW):
        for overlaps, accumulation, keys, graphed in (
            (True, 3, (), False),
            (True, 4, (), True),
            (False, 1, (), True),
            (False, 8, ("engine.graphs=never",), False),
        ):
            recipe = worlds.recipe_of(keys)
            few = replace(engine.batch, accumulation=accumulation)
            found = graphs.recorded(
                engine._part.parts,
                recipe.engine.graphs,
                accumulation=few.accumulation,
                device=engine.device,
                overlaps=overlaps,
            )
            assert (found is not engine._part.parts) == graphed


def test_a_line_reports_once_what_could_not_be_recorded():
    with on_cpus(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(graphs, "recorder", failing)
        engine = worlds.engine_of(single(), (), steps_per_epoch=2)
        worlds.train(engine)
    (line,) = engine.balance(3)
    assert line.startswith("engine.graphs: ") and not engine.balance(3)
