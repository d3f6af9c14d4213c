"""A stage that computes its activations again gives the bits of one that keeps them, and holds less."""

import pytest
import torch

from engines.stage import Stage, blocks_to_recompute, boundaries
from models.efficientnet import build
from models.normalization import BatchNormAct
from parallel.work import Boundary
from recipe.config import Model
from recipe.errors import ConfigError

SMALL = {"name": "efficientnet_b0", "width": 0.25, "depth": 0.1, "image_size": 16, "classes": 10, "dropout": 0.3}


def model_of(**keys):
    return build(Model(**{**SMALL, "drop_path": 0.5, **keys}), seed=0)


def pass_through(stage, model, micro_batches=2):
    """Forward passes of several micro batches, then their backward passes in order, as GPipe has it."""
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for number in range(micro_batches):
        images = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=generator)
        model.draws.step, model.draws.micro_batch = 7, number
        outputs.append(stage(images))
    model.draws.step, model.draws.micro_batch = 8, 3
    for output in outputs:
        output.square().sum().backward()
    return outputs


@pytest.mark.parametrize(("norm", "recomputed"), [("group", ["blocks.1.0", "head"]), ("batch", None)])
def test_recomputation_changes_no_bit(norm, recomputed):
    """Although draws stand at another step by then, and running statistics have moved on."""
    plain, again = model_of(norm=norm), model_of(norm=norm)
    names = frozenset(again.names if recomputed is None else recomputed)
    expected = pass_through(Stage(plain, plain.draws, frozenset()), plain)
    found = pass_through(Stage(again, again.draws, names), again)
    for one, other in zip(expected, found):
        assert torch.equal(one, other)
    for (name, one), other in zip(plain.named_parameters(), again.parameters()):
        assert torch.equal(one.grad, other.grad), name
    for (name, one), other in zip(plain.named_buffers(), again.buffers()):
        assert torch.equal(one, other), name
    assert (again.draws.step, again.draws.micro_batch) == (8, 3)
    assert all(module.moves_statistics for module in again.modules() if isinstance(module, BatchNormAct))


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
    with torch.device("meta"):
        meta = model_of()
    kept = saved_bytes(Stage(model, model.draws, frozenset()), model)
    inputs = boundaries([[name] for name in model.names], meta, Boundary((4, 3, 64, 64), torch.uint8), torch.bfloat16)
    assert inputs[0].dtype == torch.uint8 and {each.dtype for each in inputs[1:]} == {torch.bfloat16}
    assert tuple(inputs[-1].shape) == (4, 10)
    recomputed = saved_bytes(Stage(model, model.draws, frozenset(model.names)), model)
    # The images, and the inputs of all blocks but the stem, which is computed again with the cast of the images.
    assert recomputed == 4 * 3 * 64 * 64 + sum(4 * torch.Size(each.shape).numel() for each in inputs[2:-1])
    assert recomputed < kept / 5
    model.eval()
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(Stage(model, model.draws, frozenset(model.names))(images), model(images))


@pytest.mark.parametrize("recomputed", [False, True])
def test_within_a_stage_activations_have_its_layout_and_between_stages_none(recomputed):
    """In float64: sums over the pixels go another way. What two stages exchange, gradients too, is contiguous."""
    plain = model_of().double()
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    plain(images).square().sum().backward()

    model = model_of().double()
    model.block("preprocess").memory_format = torch.channels_last
    layouts = {}
    for name in model.names:
        model.block(name).register_forward_pre_hook(lambda _, x, name=name: layouts.update({name: _layout(x[0])}))
    names = frozenset(model.names if recomputed else ())
    first, second = (
        Stage(model.part(part), model.draws, names, torch.channels_last) for part in (model.names[:4], model.names[4:])
    )
    sent = first(images)
    received = sent.detach().requires_grad_()
    output = second(received)
    output.square().sum().backward()
    sent.backward(received.grad)
    assert [_layout(each) for each in (sent, received, received.grad, output)] == ["contiguous"] * 3 + ["other"]
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
    assert blocks_to_recompute(names, True) == frozenset(names)
    assert blocks_to_recompute(names, False) == frozenset()
    assert blocks_to_recompute(names, ["stem"]) == {"stem"}
    with pytest.raises(ConfigError, match=r"^parallel.recompute: blocks.9 is not a block; the blocks are pre"):
        blocks_to_recompute(names, ["blocks.9"])
