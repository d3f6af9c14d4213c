"""Compiled blocks: no step compiles again, gradients are those of blocks that are not compiled, nothing else moves.

By Dynamo and AOTAutograd with the interpreter behind them: they decide what is compiled anew, and need no compiler.
"""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from engines.stage import Stage, compile_stages
from models.efficientnet import build
from models.stochastic import RANDOM_LAYERS
from parallel.work import Boundary
from recipe.config import Model

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "image_size": 16, "classes": 10}
RANDOM = {"dropout": 0.3, "drop_path": 0.5}
IMAGES = Boundary((4, 3, 16, 16), torch.uint8)
BLACK = torch.zeros(IMAGES.shape, dtype=IMAGES.dtype)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    """A process keeps programs, and the limit of their number, for ever."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = limit


def stage_of(recompute=(), names=("preprocess", "stem", "blocks.0.0", "blocks.1.0"), **keys):
    """A stage of few blocks, one of which has stochastic depth."""
    whole = build(Model(**{**SMALL, **RANDOM, **keys}), seed=0)
    return Stage(whole.part(names), whole.draws, frozenset(names if recompute == "all" else recompute)), whole.draws


def three_steps(stage, draws, size=16):
    """Outputs and added gradients of 3 steps of 2 micro batches; images in both of the layouts in which they come."""
    outputs = []
    for step in range(3):
        draws.step = step
        generator = torch.Generator().manual_seed(step)
        for number in range(2):
            draws.micro_batch = number
            images = torch.randint(0, 256, (4, 3, size, size), dtype=torch.uint8, generator=generator)
            layout = torch.channels_last if number else torch.contiguous_format
            outputs.append(stage(images.contiguous(memory_format=layout)))
            outputs[-1].square().sum().backward()
    return outputs, [parameter.grad for parameter in stage.parameters()] + list(stage.buffers())


def assert_same(found, expected):
    for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("recompute", "norm", "backend"),
    [pytest.param((), "group", "aot_eager", marks=pytest.mark.slow), (("blocks.0.0",), "batch", "eager")],
)
def test_no_step_compiles_anything_after_the_dry_pass(recompute, norm, backend):
    """Though step and micro batch move on, which random layers draw by. Bitwise: the same kernels in the same order."""
    expected = three_steps(*stage_of(recompute, norm=norm))
    stage, draws = stage_of(recompute, norm=norm)
    stage.compile(backend)
    stage.dry_pass(BLACK)
    programs = counters["stats"]["unique_graphs"]
    assert programs > 0 and not counters["graph_break"]
    images = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():  # evaluation is not compiled
        assert torch.equal(stage.eval()(images), stage_of(norm=norm)[0].eval()(images))
    stage.train()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = three_steps(stage, draws)
    assert counters["stats"]["unique_graphs"] == programs
    assert_same(found, expected)
    assert all(layer.mask is None for layer in stage.modules() if isinstance(layer, RANDOM_LAYERS))


def test_blocks_behind_others_are_compiled_for_what_enters_them_and_share_programs():
    """Blocks that look alike share one, whatever their rates of stochastic depth are."""
    stage, _ = stage_of(names=("blocks.5.0", "blocks.5.1", "blocks.5.2"), depth=0.6)
    stage.compile("eager")
    x = torch.randn(4, 32, 2, 2)
    stage.dry_pass(torch.zeros_like(x))
    assert counters["stats"]["unique_graphs"] == 2
    with torch._dynamo.config.patch(error_on_recompile=True):
        x.requires_grad_()
        stage(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_all_sizes_of_images_are_compiled_before_the_first_step(monkeypatch):
    stage, draws = stage_of()
    compiled = stage.compile
    monkeypatch.setattr(stage, "compile", lambda: compiled("eager"))
    sizes = [[IMAGES], [IMAGES._replace(shape=(4, 3, 24, 24))]]
    (note,) = compile_stages({0: stage}, sizes, CPU)
    assert note.startswith("engine.compile: the model compiled in ")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for size in (16, 24):
            three_steps(stage, draws, size)


def test_without_a_compiler_the_model_stays_as_it_is(monkeypatch):
    def missing(graph, inputs):
        raise RuntimeError("no working compiler found\nmore")

    expected = three_steps(*stage_of())
    stage, draws = stage_of()
    compiled = stage.compile
    monkeypatch.setattr(stage, "compile", lambda: compiled(missing))
    (note,) = compile_stages({0: stage}, [[IMAGES]], CPU)
    assert note.startswith("engine.compile: the model stays uncompiled: ") and "no working compiler found" in note
    assert "\n" not in note
    assert_same(three_steps(stage, draws), expected)
