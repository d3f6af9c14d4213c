"""Cut points that a recipe names, and what is refused of them, whatever the number of processes."""

import pytest
import torch

from common.errors import ConfigError
from engines import cuts
from models.efficientnet import build
from parallel.processes import Processes
from parallel.topology import Topology
from recipe.batch import divide
from recipe.checks import bound_to_cut

CPU = torch.device("cpu")


def blocks_of(model, recipe):
    return cuts.Blocks(model, recipe.model, recipe.parallel, divide(recipe))


@pytest.fixture
def parts(tiny):
    """parts(stages, *overrides): of the first of `stages` processes, and the note; no other process
    is needed."""

    def divided(stages, *overrides, change=lambda model: model):
        recipe = tiny(*overrides)
        processes = Processes(Topology(), CPU)
        processes.topology = Topology(1, stages)
        model = change(build(recipe.model, 0))
        return model, *cuts.parts(
            blocks_of(model, recipe), processes, CPU, bound=bound_to_cut(recipe, 1)
        )

    return divided


def test_named_cuts_are_taken_and_one_process_computes_all_parts_as_one(parts):
    named = ("parallel.stages=2", "parallel.split=[blocks.2.0]")
    model, found, note = parts(2, *named)
    place = model.names.index("blocks.2.0")
    assert found == [model.names[:place], model.names[place:]] and note == ""
    for overrides in (named, ("parallel.stages=3",), ()):
        model, found, note = parts(1, *overrides)
        assert found == [model.names] and note == ""


def test_a_counted_cut_computes_nothing_and_does_not_depend_on_free_memory(parts, monkeypatch):
    """As for layers whose kernels run on devices only."""

    def uncomputed(model):
        model.block("head").register_forward_pre_hook(lambda *_: pytest.fail("was computed"))
        return model

    split = ("parallel.stages=2", "exchange.method=gtopk", "batch.micro=2")
    expected = parts(2, *split)[1:]
    monkeypatch.setattr(cuts, "memory_of", lambda device: 1)
    assert parts(2, *split, change=uncomputed)[1:] == expected
    counted = ("parallel.stages=2", "parallel.split=counted", "batch.micro=2")
    _, found, note = parts(2, *counted)
    assert found == expected[0] and note.startswith(
        f"split [{found[1][0]}] (counted): stages take "
    )
    assert note != parts(2, *counted, change=lambda model: model.half())[2]  # half the bytes
    assert "no cut fits" in parts(2, "parallel.stages=2")[2]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("parallel.split=[blocks.9.9]",),
            r"^parallel.split: blocks.9.9 is not a block; the blocks are preprocess, ",
        ),
        (
            ("parallel.split=[stem]",),
            r"^parallel.split: the stage of preprocess has no parameters; cut further behind",
        ),
        (
            ("parallel.stages=3", "parallel.split=[blocks.3.0,blocks.1.0]"),
            r"^parallel.split: .* a stage empty; order",
        ),
        (
            ("parallel.stages=40",),
            r"^parallel.stages: 40 parts are more than the \d+ blocks that have parameters$",
        ),
        (
            ("parallel.stages=6", "parallel.schedule=interleaved", "batch.micro=2"),
            r"^parallel.stages: 12 parts are more than the \d+ blocks",
        ),
    ],
)
def test_cuts_that_make_no_stages_are_refused(parts, tiny, overrides, message):
    """By one process too, and where blocks cannot be timed."""
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=message):
            parts(processes, "parallel.stages=2", *overrides)
    recipe = tiny("parallel.stages=2", *overrides)
    with pytest.raises(ConfigError, match=message):
        cuts.counted(blocks_of(build(recipe.model, 0), recipe))
