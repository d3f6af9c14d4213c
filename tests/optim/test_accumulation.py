"""The tree of micro batches: exact enough, the same for every number of replicas, and small."""

import math

import pytest
import torch

from optim.accumulation import TreeSum

CPU = torch.device("cpu")


def tree_sum(leaves, tree=None):
    tree = tree or TreeSum(leaves.shape[1], len(leaves), CPU)
    for leaf in leaves:
        tree.leaf().add_(leaf)
        tree.add()
    return tree.total.clone()


def random_leaves(count, length=257):
    """Of many magnitudes, so that almost every order of the additions has other last bits."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-6, 7, (count, length), generator=generator)
    return torch.randn(count, length, generator=generator) * 2.0**exponents


def perfect_tree(sums):
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2])]
    return sums[0]


@pytest.mark.parametrize("count", [*range(1, 25), 32, 48, 96])
def test_any_power_of_two_of_replicas_gives_the_bits_of_one(count):
    leaves = random_leaves(count)
    expected = tree_sum(leaves)
    for replicas in (2, 4, 8):
        if count % replicas == 0:
            assert torch.equal(perfect_tree([tree_sum(part) for part in leaves.chunk(replicas)]), expected), replicas


def test_the_tree_is_the_documented_one():
    a = random_leaves(7)
    seven = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + a[6])
    assert torch.equal(tree_sum(a), seven)
    b = random_leaves(6)
    assert torch.equal(tree_sum(b), ((b[0] + b[1]) + b[2]) + ((b[3] + b[4]) + b[5]))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 23, 96])
def test_error_is_that_of_pairwise_summation(count):
    """Higham 1993: depth * eps/2 * sum of magnitudes, to first order; no binary tree is less deep."""
    leaves = random_leaves(count)
    depth = math.ceil(math.log2(count))
    bound = depth * 2.0**-24 * leaves.double().abs().sum(0) * 1.001
    assert ((tree_sum(leaves).double() - leaves.double().sum(0)).abs() <= bound).all()


def test_small_gradients_beside_a_large_one_are_not_lost():
    """One large micro batch and 1023 small ones: each alone is less than half a unit of the large one's last place."""
    leaves = torch.full((1024, 3), 2.0**-25)
    leaves[0] = 1.0
    running = torch.zeros(3)
    for leaf in leaves:
        running += leaf
    exact = leaves.double().sum(0)
    assert torch.equal(running, torch.ones(3))  # all lost
    assert (tree_sum(leaves).double() - exact).abs().max() < 0.05 * (running.double() - exact).abs().min()


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 23, 24, 31, 96])
def test_buffers_are_few_and_serve_all_steps(count):
    tree, seen = TreeSum(5, count, CPU), {}
    for step in range(3):
        for number in range(count):
            leaf = tree.leaf()
            assert leaf.dtype == torch.float32 and leaf.shape == (5,) and not leaf.any()
            seen[id(leaf)] = leaf
            leaf += step + number
            tree.add()
        assert torch.equal(tree.total, torch.full((5,), step * count + count * (count - 1) / 2))
    assert len(seen) == math.floor(math.log2(count)) + 1


def test_a_second_step_has_the_bits_of_a_first():
    leaves, tree = random_leaves(12), TreeSum(257, 12, CPU)
    tree_sum(random_leaves(13)[:12], tree)
    assert torch.equal(tree_sum(leaves, tree), tree_sum(leaves))


def test_calls_out_of_order_are_refused():
    tree = TreeSum(4, 2, CPU)
    with pytest.raises(AssertionError, match=r"leaf\(\) comes first"):
        tree.add()
    tree.leaf()
    with pytest.raises(AssertionError, match=r"add\(\) ends a leaf"):
        tree.leaf()
    tree.add()
    with pytest.raises(AssertionError, match="1 of 2 micro batches"):
        _ = tree.total
