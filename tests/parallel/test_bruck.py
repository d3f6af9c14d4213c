"""All-gather and all-to-all in few rounds: by definition, for any number of replicas."""

import pytest
import torch

from parallel import bruck
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

GROUP = object()


def exchange(rank, size):
    """Sizes of replica r: r, and one that is empty."""
    sizes = [0 if replica == 2 else replica + 1 for replica in range(size)]
    parts = bruck.all_gather(torch.full((sizes[rank],), rank), sizes, GROUP)
    return parts, bruck.all_to_all(10 * torch.arange(size) + rank, GROUP)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16])
def test_all_have_what_each_has_given(size):
    for rank, (parts, numbers) in enumerate(threads.run(size, exchange)):
        for replica, part in enumerate(parts):
            assert_bitwise_equal(part, torch.full((0 if replica == 2 else replica + 1,), replica))
        assert_bitwise_equal(numbers, 10 * rank + torch.arange(size))
