"""Compiled blocks: no step compiles again, gradients are those of blocks that are not compiled, nothing else moves.

By Dynamo and AOTAutograd with the interpreter behind them: they decide what is compiled anew, and need no compiler.
"""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from engines.compilation import compile_stages
from engines.stage import Stage
from models.efficientnet import build
from models.stochastic import RANDOM_LAYERS
from parallel.work import Boundary
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.3, "image_size": 16, "classes": 10}
RANDOM = {"dropout": 0.3, "drop_path": 0.5}
IMAGES = Boundary((4, 3, 16, 16), torch.uint8)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """A process keeps programs, and the limit of their number, for ever."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def stage_of(recompute=(), **keys):
    model = build(Model(**{**SMALL, **RANDOM, **keys}), seed=0)
    names = model.names if recompute == "all" else recompute
    return model, Stage(model, model.draws, frozenset(names))


def three_steps(model, stage, size=16):
    """Outputs and added gradients of 3 steps of 2 micro batches; images in both of the layouts in which they come."""
    outputs = []
    for step in range(3):
        model.draws.step = step
        generator = torch.Generator().manual_seed(step)
        for number in range(2):
            model.draws.micro_batch = number
            images = torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8, generator=generator)
            layout = torch.channels_last if number else torch.contiguous_format
            outputs.append(stage(images.contiguous(memory_format=layout)))
            outputs[-1].square().sum().backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found, expected):
    for one, other in zip(found[0], expected[0]):
        assert torch.equal(one, other)
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize(
    ("recompute", "norm", "backend"),
    [
        pytest.param((), "group", "aot_eager", marks=pytest.mark.slow),
        *(("all", "batch", "eager"), (("blocks.2.0",), "group", "eager")),
    ],
)
def test_no_step_compiles_anything_after_the_dry_pass(recompute, norm, backend):
    """Though step and micro batch move on, which random layers draw by. Bitwise: the same kernels in the same order."""
    expected = three_steps(*stage_of(recompute, norm=norm))
    model, stage = stage_of(recompute, norm=norm)
    stage.compile(backend)
    stage.dry_pass(torch.zeros(IMAGES.shape, dtype=IMAGES.dtype))
    programs = counters["stats"]["unique_graphs"]
    assert programs > 0 and not counters["graph_break"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = three_steps(model, stage)
    assert counters["stats"]["unique_graphs"] == programs
    assert_same(found, expected)
    assert all(layer.mask is None for layer in model.modules() if isinstance(layer, RANDOM_LAYERS))


def test_a_dry_pass_leaves_no_trace():
    model, stage = stage_of("all", norm="batch")
    model.draws.step, model.draws.micro_batch = 5, 2
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: pytest.fail("a hook ran"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stage.dry_pass(torch.full(IMAGES.shape, 200, dtype=torch.uint8))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.draws.step, model.draws.micro_batch) == (5, 2)


def test_blocks_that_look_alike_share_a_program():
    """Whatever their rates of stochastic depth are."""
    model, stage = stage_of(depth=0.6)
    stage.compile("eager")
    stage.dry_pass(torch.zeros(IMAGES.shape, dtype=IMAGES.dtype))
    blocks = [repr(model.block(name)) for name in model.names[1:]]
    assert counters["stats"]["unique_graphs"] == len(set(blocks)) < len(blocks)


def test_evaluation_is_not_compiled():
    model, stage = stage_of()
    stage.compile("eager")
    model.eval()
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(stage(images), model(images))
    assert counters["stats"]["unique_graphs"] == 0


def test_all_sizes_of_images_are_compiled_before_the_first_step(monkeypatch):
    model, stage = stage_of()
    compiled = stage.compile
    monkeypatch.setattr(stage, "compile", lambda: compiled("eager"))
    sizes = [[IMAGES], [IMAGES._replace(shape=(4, 3, 24, 24))]]
    (note,) = compile_stages({0: stage}, sizes, torch.device("cpu"))
    assert note.startswith("engine.compile: the model compiled in ")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (16, 24):
            three_steps(model, stage, size)


def test_an_engine_that_does_not_train_compiles_nothing_yet(monkeypatch):
    _, stage = stage_of()
    monkeypatch.setattr(stage, "dry_pass", lambda x: pytest.fail("passed"))
    assert compile_stages({0: stage}, (), torch.device("cpu")) == ()


def test_where_there_is_no_compiler_the_model_stays_as_it_is(monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("no working compiler found\nmore")

    expected = three_steps(*stage_of())
    model, stage = stage_of()
    compiled = stage.compile
    monkeypatch.setattr(stage, "compile", lambda: compiled(missing))
    (note,) = compile_stages({0: stage}, [[IMAGES]], torch.device("cpu"))
    assert note.startswith("engine.compile: the model stays uncompiled: ") and "no working compiler found" in note
    assert "\n" not in note
    assert_same(three_steps(model, stage), expected)


def test_a_stage_behind_another_is_compiled_for_what_enters_it():
    model = build(Model(**{**SMALL, **RANDOM}), seed=0)
    names = model.names[3:]
    stage = Stage(model.part(names), model.draws, frozenset())
    x = torch.randn(4, *_channels_and_pixels(model, model.names[:3]))
    stage.compile("eager")
    stage.dry_pass(torch.zeros_like(x))
    with torch._dynamo.config.patch(error_on_recompile=True):
        x.requires_grad_()
        stage(x).sum().backward()
    assert x.grad.abs().sum() > 0


def _channels_and_pixels(model: nn.Module, names):
    with torch.no_grad():
        return model.part(names)(torch.zeros(IMAGES.shape, dtype=IMAGES.dtype)).shape[1:]
