"""Stages: what is computed again has the bits of what is kept, and holds less; compiled blocks
never compile again.

Compiling is by Dynamo and AOTAutograd with the interpreter behind them: they decide what is
compiled anew, and need no compiler.
"""

import functools

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from common.errors import ConfigError
from engines.stage import Stage, blocks_to_recompute, boundaries, compile_stages
from models import timm_model
from models.base import BlockList
from models.efficientnet import build
from models.meta import without_memory
from models.native import library, patching
from models.normalization import BatchNormAct
from models.stochastic import RANDOM_LAYERS, DropPaths
from parallel.work import Boundary
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "image_size": 16, "classes": 10}
RANDOM = {"dropout": 0.3, "drop_path": 0.5}
IMAGES = Boundary((4, 3, 16, 16), torch.uint8)
FEW = ("preprocess", "stem", "blocks.0.0", "blocks.1.0")  # one of which has stochastic depth


def model_of(**keys):
    return build(Model(**{**SMALL, **RANDOM, **keys}), seed=0)


def stage_of(recompute=(), names=None, **keys):
    whole = model_of(**keys)
    return Stage(whole.part(names or whole.names), whole.draws, recompute), whole.draws


def three_steps(stage, draws, size=16):
    """Outputs, added gradients and statistics of 3 steps of 2 micro batches, in both of the layouts
    in which they come: forward passes, then their backward passes in order, as GPipe has it."""
    outputs = []
    kept = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for number in range(2):
            draws.step = step
            draws.micro_batch = number
            images = torch.randint(
                0, 256, (4, 3, size, size), dtype=torch.uint8, generator=generator
            )
            layout = torch.channels_last if number else torch.contiguous_format
            outputs.append(stage(images.contiguous(memory_format=layout)))
            kept.append(outputs[-1].detach().clone())
        draws.step = 8
        draws.micro_batch = 3
        for output in outputs[-2:]:
            output.square().sum().backward()
    return [*kept, *(parameter.grad for parameter in stage.parameters()), *stage.buffers()]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("norm", "recomputed"), [("group", ["blocks.1.0", "head"]), ("batch", None)]
)
def test_recomputation_changes_no_bit(norm, recomputed):
    """Although draws stand at another step by then, and running statistics have moved on."""
    again, draws = stage_of(frozenset(recomputed or model_of().names), norm=norm)
    assert_same(three_steps(again, draws), three_steps(*stage_of(norm=norm)))
    assert (draws.step, draws.micro_batch) == (8, 3)
    assert all(
        module.moves_statistics for module in again.modules() if isinstance(module, BatchNormAct)
    )


def test_recomputation_repeats_the_mask_of_each_call_of_one_layer():
    """Of a model of timm, whose blocks call their stochastic depth twice."""
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    keys = {
        "name": "timm",
        "architecture": "edgenext_xx_small",
        "classes": 10,
        "image_size": 32,
        "drop_path": 0.5,
    }
    model = timm_model.TimmFamily.build(Model(**keys), 0)
    names = [f"stages.{number}" for number in range(1, 4)]
    results = []
    for recompute in (frozenset(), frozenset(names)):
        model.zero_grad()
        stage = Stage(model.part(names), model.draws, recompute)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(8, 24, 8, 8, generator=generator, requires_grad=True)
        outputs = []
        for number in range(2):
            model.draws.micro_batch = number
            outputs.append(stage(x))
        for output in outputs:
            output.square().sum().backward()
        results.append([*outputs, x.grad, *(parameter.grad for parameter in stage.parameters())])
    assert_same(*results)


@pytest.mark.parametrize("recompute", [(), ("stem", "pooling")])
def test_a_stage_may_end_with_a_block_without_parameters(recompute):
    """As a ConvNeXt's that is cut before its classifier, behind the pooling."""
    whole = model_of()
    blocks = BlockList(
        [("preprocess", whole.preprocess), ("stem", whole.stem), ("pooling", torch.nn.AvgPool2d(2))]
    )
    stage = Stage(blocks, whole.draws, recompute)
    stage.compile(backend="eager")
    stage.dry_pass(torch.zeros(IMAGES.shape, dtype=IMAGES.dtype))
    stage.uncompile()
    found = three_steps(stage, whole.draws)
    whole.zero_grad()
    assert_same(found, three_steps(blocks, whole.draws))


@functools.lru_cache(maxsize=None)
def mixer():
    """A Mixer of timm, which takes longer to draw than to train: no test changes its weights."""
    keys = {
        "name": "timm",
        "architecture": "mixer_s32_224",
        "classes": 10,
        "image_size": 64,
        "drop_path": 0.5,
    }
    return timm_model.TimmFamily.build(Model(**keys), 0)


def mixer_stage(recompute=frozenset()):
    """Two blocks of a Mixer of timm, which call their stochastic depth twice; gradients of stages
    before are gone."""
    model = mixer().train()
    model.zero_grad()
    return Stage(model.part(MIXER), model.draws, recompute), model.draws


MIXER = ("blocks.6", "blocks.7")
MIXED = (8, 4, 512)  # what enters them


def mixer_steps(stage, draws):
    """Outputs and gradients of 4 micro batches, two at a time between their passes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for first in (0, 2):
        inputs = [torch.randn(MIXED, generator=generator).requires_grad_() for _ in range(2)]
        outputs = []
        for number, x in enumerate(inputs):
            draws.micro_batch = first + number
            outputs.append(stage(x))
        found += [output.detach().clone() for output in outputs]
        for output in outputs:
            output.square().sum().backward()
        found += [x.grad for x in inputs]
    return [*found, *(parameter.grad for parameter in stage.parameters())]


def saved_bytes(stage, model):
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(torch.zeros(4, 3, 64, 64, dtype=torch.uint8))
    assert output.requires_grad
    return sum(size for place, size in storages.items() if place not in parameters)


def test_recomputation_keeps_the_inputs_of_blocks_only():
    model = model_of()
    with without_memory():
        meta = model_of()
    kept = saved_bytes(Stage(model, model.draws, frozenset()), model)
    inputs = boundaries(
        [[name] for name in model.names],
        meta,
        Boundary((4, 3, 64, 64), torch.uint8),
        torch.bfloat16,
    )
    assert inputs[0].dtype == torch.uint8 and {each.dtype for each in inputs[1:]} == {
        torch.bfloat16
    }
    assert tuple(inputs[-1].shape) == (4, 10)
    recomputed = saved_bytes(Stage(model, model.draws, frozenset(model.names)), model)
    # The images, and the inputs of all blocks but the stem, which is computed again with the cast
    # of the images.
    assert recomputed == 4 * 3 * 64 * 64 + sum(
        4 * torch.Size(each.shape).numel() for each in inputs[2:-1]
    )
    assert recomputed < kept / 5
    model.eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(Stage(model, model.draws, frozenset(model.names))(images), model(images))


@pytest.mark.parametrize("recomputed", [False, True])
def test_within_a_stage_activations_have_its_layout_and_between_stages_none(recomputed):
    """In float64: sums over the pixels go another way.

    What two stages exchange, gradients too, is contiguous.
    """
    plain = model_of().double()
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    plain(images).square().sum().backward()

    model = model_of().double()
    model.block("preprocess").memory_format = torch.channels_last
    layouts = {}
    for name in model.names:
        model.block(name).register_forward_pre_hook(
            lambda _, x, name=name: layouts.update({name: _layout(x[0])})
        )
    names = frozenset(model.names if recomputed else ())
    first, second = (
        Stage(model.part(part), model.draws, names, torch.channels_last)
        for part in (model.names[:4], model.names[4:])
    )
    sent = first(images)
    received = sent.detach().requires_grad_()
    output = second(received)
    output.square().sum().backward()
    sent.backward(received.grad)
    assert [_layout(each) for each in (sent, received, received.grad, output)] == [
        "contiguous"
    ] * 3 + ["other"]
    assert set(list(layouts.values())[1:]) == {"channels last"}
    torch.testing.assert_close(output, plain(images), rtol=1e-9, atol=0)
    for (name, one), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)


def _layout(x):
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return "channels last"
    return "contiguous" if x.dim() == 4 else "other"


def test_which_blocks_are_meant():
    names = ["preprocess", "stem", "head"]
    assert [blocks_to_recompute(names, each) for each in (True, False, ["stem"])] == [
        set(names),
        set(),
        {"stem"},
    ]
    with pytest.raises(
        ConfigError, match=r"^parallel.recompute: blocks.9 is not a block; the blocks are pre"
    ):
        blocks_to_recompute(names, ["blocks.9"])


@pytest.fixture
def fresh_compiler():
    """A process keeps programs, and the limit of their number, for ever."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


@pytest.fixture
def compiled(fresh_compiler, monkeypatch):
    """compiled(stage, backend): compiled by compile_stages for images of two sizes; the note."""

    def compile(stage, backend):
        by_backend = stage.compile
        monkeypatch.setattr(stage, "compile", lambda mode: by_backend(mode, backend))
        sizes = [[IMAGES], [IMAGES._replace(shape=(4, 3, 24, 24))]]
        scored = [IMAGES._replace(shape=(7, 3, 16, 16))]
        return compile_stages({0: stage}, sizes, scored, torch.device("cpu"), "default")[0]

    return compile


@pytest.mark.parametrize(
    ("recompute", "norm", "backend"),
    [
        pytest.param((), "group", "aot_eager", marks=pytest.mark.slow),
        (("blocks.0.0",), "batch", "eager"),
    ],
)
def test_no_step_compiles_anything_after_the_dry_passes(compiled, recompute, norm, backend):
    """Though step and micro batch move on, which random layers draw by, and images have two sizes.

    Bitwise: the same kernels in the same order.
    """
    expected = three_steps(*stage_of(recompute, FEW, norm=norm))
    stage, draws = stage_of(recompute, FEW, norm=norm)
    assert compiled(stage, backend).startswith("engine.compile: the model compiled in ")
    programs = counters["stats"]["unique_graphs"]
    assert programs > 0 and not counters["graph_break"]
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    with torch._dynamo.config.patch(error_on_recompile=True):
        with torch.no_grad():
            assert torch.equal(stage.eval()(images), stage_of((), FEW, norm=norm)[0].eval()(images))
        stage.train()
        assert_same(three_steps(stage, draws), expected)
        three_steps(stage, draws, size=24)
    assert counters["stats"]["unique_graphs"] == programs
    assert all(layer.mask is None for layer in stage.modules() if isinstance(layer, RANDOM_LAYERS))


def test_blocks_behind_others_are_compiled_for_what_enters_them_and_share_programs(fresh_compiler):
    """Blocks that look alike share one, whatever their rates of stochastic depth are."""
    stage, _ = stage_of((), ("blocks.5.0", "blocks.5.1", "blocks.5.2"), depth=0.6)
    stage.compile(backend="eager")
    x = torch.randn(4, 32, 2, 2)
    stage.dry_pass(torch.zeros_like(x))
    assert counters["stats"]["unique_graphs"] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        x.requires_grad_()
        stage(x).sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("recompute", "backend"),
    [(MIXER[:1], "eager"), pytest.param((), "aot_eager", marks=pytest.mark.slow)],
)
def test_compiled_blocks_have_the_mask_of_each_call_of_one_layer(
    fresh_compiler, recompute, backend
):
    """And both blocks one program, for all micro batches."""
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    stage, draws = mixer_stage(recompute)
    stage.compile(backend=backend)
    stage.dry_pass(torch.zeros(MIXED))
    assert not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(mixer_steps(stage, draws), mixer_steps(*mixer_stage(recompute)))


def test_a_compiled_block_drops_nothing_in_its_frozen_modules(fresh_compiler):
    """As in a block of which another part is trained."""
    pytest.importorskip("torch.utils.flop_counter", reason="models of timm need torch 2.1")
    results = []
    for compiles in (False, True):
        stage, draws = mixer_stage()
        for layer in stage.modules():
            if isinstance(layer, (DropPaths, *RANDOM_LAYERS)):
                layer.eval()
        if compiles:
            stage.compile(backend="eager")
            stage.dry_pass(torch.zeros(MIXED))
        results.append(mixer_steps(stage, draws))
    assert_same(*results)


def test_a_dry_pass_that_fails_moves_no_running_statistics(monkeypatch):
    """As where a compiler fails at the last of some blocks."""
    stage, _ = stage_of((), FEW, norm="batch")
    before = {name: buffer.clone() for name, buffer in stage.named_buffers()}

    def fail(module, inputs):
        raise RuntimeError("no program for this block")

    stage._sequences[-1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no program"):
        stage.dry_pass(torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8))
    for name, buffer in stage.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_the_mode_is_torch_compiles(monkeypatch):
    modes = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: modes.append(options) or function
    )
    stage_of((), FEW)[0].compile("max-autotune-no-cudagraphs")
    assert modes and all(
        each == {"mode": "max-autotune-no-cudagraphs", "dynamic": False} for each in modes
    )


def test_without_a_compiler_the_model_stays_as_it_is(compiled):
    def missing(graph, inputs):
        raise RuntimeError("no working compiler found\nmore")

    stage, draws = stage_of((), FEW)
    note = compiled(stage, missing)
    assert (
        note.startswith("engine.compile: the model stays uncompiled: ")
        and "no working compiler found" in note
    )
    assert "\n" not in note
    assert_same(three_steps(stage, draws), three_steps(*stage_of((), FEW)))


def test_channels_last_activations_travel_between_stages_without_a_copy():
    """As [N, H, W, C], which both stages see as channels-last; one process with all blocks has the
    same bits."""
    fault = library.fault()
    if fault:
        pytest.skip(f"no functions for CPUs here: {fault}")
    whole = model_of()
    patching.patch(whole)
    cut = len(FEW)
    parts = [whole.names[:cut], whole.names[cut:]]
    first, second = (
        Stage(whole.part(names), whole.draws, (), torch.channels_last) for names in parts
    )
    images = torch.randint(0, 256, tuple(IMAGES.shape), dtype=torch.uint8)

    sent = first(images)
    with without_memory():
        found = boundaries(parts, model_of(), IMAGES, torch.float32, torch.channels_last)
    assert [tuple(each.shape) for each in found] == [
        tuple(IMAGES.shape),
        tuple(sent.shape),
        (4, 10),
    ]
    assert sent.is_contiguous() and sent.shape[-1] == 8

    received = sent.detach().requires_grad_()
    logits = second(received)
    logits.square().sum().backward()
    assert received.grad.is_contiguous()
    sent.backward(received.grad)
    found = [logits, *(parameter.grad.clone() for parameter in whole.parameters())]
    whole.zero_grad()
    expected = whole(images)
    expected.square().sum().backward()
    assert_same(found, [expected, *(parameter.grad for parameter in whole.parameters())])
