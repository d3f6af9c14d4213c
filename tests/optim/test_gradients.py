"""Where a step's gradients are added up: running sums and trees, in float32 whatever the compute dtype."""

import pytest
import torch
from torch import nn

from optim.accumulation import TreeSum
from optim.gradients import Gradients
from optim.layout import Layout

SHAPES = {"a.weight": (3, 5), "a.bias": (7,), "b.weight": (2, 2), "b.bias": (33,)}
PARTS = (("a.weight", "a.bias"), ("b.weight", "b.bias"))
MICRO_BATCHES = 5


def parameters_of(dtype):
    return {name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()}


def gradient(name, number):
    generator = torch.Generator().manual_seed(100 * list(SHAPES).index(name) + number)
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (number - 2)


def backward(parameters, names, number):
    """A backward pass whose gradients are those of micro batch `number`, added to what is there as autograd does."""
    loss = sum((parameters[name] * gradient(name, number).to(parameters[name].dtype)).sum() for name in names)
    loss.backward()


def summed(gradients, name):
    return gradients.views[list(SHAPES).index(name)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [0, 1])
def test_a_running_sum_adds_micro_batches_as_they_come(dtype, step):
    parameters = parameters_of(dtype)
    gradients = Gradients(parameters, Layout(parameters), None, ())
    for _ in range(step + 1):  # the step before leaves nothing
        gradients.zero()
        for number in range(MICRO_BATCHES):
            backward(parameters, SHAPES, number)
            gradients.accumulate()
    for name in SHAPES:
        expected = torch.zeros(SHAPES[name])
        for number in range(MICRO_BATCHES):
            expected += gradient(name, number).to(dtype).float()
        assert torch.equal(summed(gradients, name), expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["together", "one part behind"])
def test_a_tree_adds_each_part_as_a_tree_of_its_own(dtype, order):
    """Under the interleaved schedule a part's backward passes come between those of another."""
    parameters = parameters_of(dtype)
    gradients = Gradients(parameters, Layout(parameters), MICRO_BATCHES, PARTS)
    for _ in range(2):
        gradients.zero()
        passes = [(number, part) for number in range(MICRO_BATCHES) for part in (1, 0)]
        if order == "one part behind":
            passes.sort(key=lambda each: each[0] + 2 * (each[1] == 0))
        for number, part in passes:
            backward(parameters, PARTS[part], number)
            gradients.accumulate(part)
    for name in SHAPES:
        tree = TreeSum(gradient(name, 0).numel(), MICRO_BATCHES, torch.device("cpu"))
        for number in range(MICRO_BATCHES):
            tree.leaf().copy_(gradient(name, number).to(dtype).flatten())
            tree.add()
        assert torch.equal(summed(gradients, name).flatten(), tree.total), name


def test_one_gradient_may_be_taken_in_before_the_others():
    """What the exchange asks for while the backward pass still runs; the rest comes after, and nothing twice."""
    parameters = parameters_of(torch.bfloat16)
    gradients = Gradients(parameters, Layout(parameters), None, ())
    gradients.zero()
    backward(parameters, SHAPES, 0)
    gradients.collect(3)
    assert torch.equal(summed(gradients, "b.bias"), gradient("b.bias", 0).bfloat16().float())
    assert not summed(gradients, "a.weight").any()
    gradients.accumulate()
    for name in SHAPES:
        assert torch.equal(summed(gradients, name), gradient(name, 0).bfloat16().float()), name
