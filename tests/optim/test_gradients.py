"""Where a step's gradients are added up: running sums and trees, in float32 whatever the compute
dtype."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from optim import gradients as product
from optim.gradients import Gradients, TreeSum
from optim.layout import Layout

SHAPES = {"a.weight": (3, 5), "a.bias": (7,), "b.weight": (2, 2), "b.bias": (33,)}
PARTS = (("a.weight", "a.bias"), ("b.weight", "b.bias"))
MICRO_BATCHES = 5
CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=["as on CPUs", "as on GPUs"])
def device_kind(request, monkeypatch):
    """The CPU takes gradients one by one, or as a GPU takes them, with the same sums."""
    if request.param == "as on GPUs":
        monkeypatch.setattr(product, "_ONE_BY_ONE", ())


def gradients_of(dtype, *order):
    """With its parameters."""
    parameters = {
        name: nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SHAPES.items()
    }
    return Gradients(parameters, Layout(parameters), *(order or (None, ()))), parameters


def gradient(name, number):
    generator = torch.Generator().manual_seed(100 * list(SHAPES).index(name) + number)
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (number - 2)


def backward(parameters, names, number):
    """A backward pass whose gradients are those of micro batch `number`, added to what is there as
    autograd does."""
    loss = sum(
        (parameters[name] * gradient(name, number).to(parameters[name].dtype)).sum()
        for name in names
    )
    loss.backward()


@every_dtype
@pytest.mark.parametrize("collected", [(), (3,)], ids=["together", "one before the others"])
def test_a_running_sum_adds_micro_batches_as_they_come(dtype, collected, device_kind):
    """The exchange asks for single gradients while the backward pass still runs; nothing is added
    twice."""
    gradients, parameters = gradients_of(dtype)
    for _ in range(2):  # the step before leaves nothing
        gradients.zero()
        for number in range(MICRO_BATCHES):
            backward(parameters, SHAPES, number)
            for place in collected:
                gradients.collect(place)
            gradients.accumulate()
    for view, name in zip(gradients.views, SHAPES):
        expected = torch.zeros(SHAPES[name])
        for number in range(MICRO_BATCHES):
            expected += gradient(name, number).to(dtype).float()
        assert torch.equal(view, expected), name


@every_dtype
@pytest.mark.parametrize("order", ["together", "one part behind"])
def test_a_tree_adds_each_part_as_a_tree_of_its_own(dtype, order, device_kind):
    """Under the interleaved schedule a part's backward passes come between those of another."""
    gradients, parameters = gradients_of(dtype, [MICRO_BATCHES], PARTS)
    for _ in range(2):
        gradients.zero()
        passes = [(number, part) for number in range(MICRO_BATCHES) for part in (1, 0)]
        if order == "one part behind":
            passes.sort(key=lambda each: each[0] + 2 * (each[1] == 0))
        for number, part in passes:
            backward(parameters, PARTS[part], number)
            gradients.accumulate(part)
    for view, name in zip(gradients.views, SHAPES):
        assert torch.equal(view.flatten(), tree_sum(leaves_of(name, dtype))), name


@every_dtype
def test_several_subtrees_have_a_sum_each_and_their_number_changes_between_steps(dtype):
    """A step that was broken off leaves nothing."""
    gradients, parameters = gradients_of(dtype, (2, 1), PARTS)
    for counts, passes in (((2, 1), 3), ((1, 2, 2), 5), ((2, 2, 1), 2), ((4,), 4), ((1, 3), 4)):
        gradients.set_leaves(counts)
        gradients.zero()
        for number, names in itertools.product(range(passes), enumerate(PARTS)):
            backward(parameters, names[1], number)
            gradients.accumulate(names[0])
        if passes == sum(counts):
            ends = list(itertools.accumulate(counts))
            for place, name in enumerate(SHAPES):
                views = [Layout(parameters).views(each)[place].flatten() for each in gradients.sums]
                leaves = leaves_of(name, dtype)
                expected = [tree_sum(leaves[end - count : end]) for count, end in zip(counts, ends)]
                assert len(views) == len(counts) and all(map(torch.equal, views, expected)), name
        assert gradients.sums[0] is gradients.flat


def leaves_of(name, dtype):
    return torch.stack(
        [gradient(name, number).to(dtype).float().flatten() for number in range(MICRO_BATCHES)]
    )


# The tree of micro batches: exact enough, the same for every number of replicas, and small.


def tree_sum(leaves):
    tree = TreeSum(leaves.shape[1], CPU)
    tree.begin(len(leaves))
    for leaf in leaves:
        tree.leaf().add_(leaf)
        tree.add()
    return tree.total


def random_leaves(count, length=257):
    """Of many magnitudes, so that almost every order of the additions has other last bits."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-6, 7, (count, length), generator=generator)
    return torch.randn(count, length, generator=generator) * 2.0**exponents


def perfect_tree(sums):
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2])]
    return sums[0]


@pytest.mark.parametrize("count", [*range(1, 25), 96])
def test_any_power_of_two_of_replicas_gives_the_bits_of_one_and_errors_are_those_of_pairwise_summation(
    count,
):
    """Higham 1993: depth * eps/2 * sum of magnitudes, to first order; no binary tree is less
    deep."""
    leaves = random_leaves(count)
    found = tree_sum(leaves)
    for replicas in (2, 4, 8):
        if count % replicas == 0:
            assert torch.equal(
                perfect_tree([tree_sum(part) for part in leaves.chunk(replicas)]), found
            ), replicas
    bound = math.ceil(math.log2(count)) * 2.0**-24 * leaves.double().abs().sum(0) * 1.001
    assert ((found.double() - leaves.double().sum(0)).abs() <= bound).all()


def test_the_tree_is_the_documented_one():
    a = random_leaves(7)
    b = random_leaves(6)
    assert torch.equal(tree_sum(a), ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + a[6]))
    assert torch.equal(tree_sum(b), ((b[0] + b[1]) + b[2]) + ((b[3] + b[4]) + b[5]))


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 23, 24, 31, 96])
def test_buffers_are_few_and_serve_all_steps(count):
    tree = TreeSum(5, CPU)
    seen = {}
    for step in range(3):
        tree.begin(count)
        for number in range(count):
            leaf = tree.leaf()
            assert leaf.dtype == torch.float32 and leaf.shape == (5,) and not leaf.any()
            seen[id(leaf)] = leaf
            leaf += step + number
            tree.add()
        assert torch.equal(tree.total, torch.full((5,), step * count + count * (count - 1) / 2))
    assert len(seen) == math.floor(math.log2(count)) + 1


class Operators(TorchDispatchMode):
    """Lists the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_on_a_gpu_few_kernels_take_in_a_model_whatever_strides_gradients_have():
    """cuDNN's of a 1 x 1 kernel are channels-last ones, which differ where dimensions have one
    element."""
    shape = (8, 4, 1, 1)
    parameters = {
        str(number): nn.Parameter(torch.empty(shape, device="meta").half()) for number in range(64)
    }
    gradients = Gradients(parameters, Layout(parameters), None, ())
    for _ in range(2):
        for parameter in parameters.values():
            made = torch.empty(shape, device="meta", memory_format=torch.channels_last)
            parameter.grad = made.half()
        with Operators() as called:
            gradients.accumulate()
        assert all(parameter.grad is None for parameter in parameters.values())
    kernels = [
        name
        for name in called.names
        if name in ("_foreach_copy_", "copy_", "add_", "_foreach_add_")
    ]
    assert kernels == ["_foreach_copy_", "add_"]
