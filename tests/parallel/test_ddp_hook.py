"""The communication hook: against DDP's own means, and nothing is lost."""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.ddp_hook import SparseState, sparse_hook
from tests import world

STEPS = 6


def flat(tensors):
    return torch.cat([each.flatten() for each in tensors])


def gradients(rank, size, hooks):
    """Of each hook: gradients after each of some backward passes, the sum of those of this replica
    alone, residuals.

    Replicas but the first return a digest of the gradients: what they return goes through a file.
    """
    results = []
    for hook in hooks:
        torch.manual_seed(0)
        # 1.2 MB a matrix: the first bucket holds one, whatever the cap.
        module = nn.Sequential(nn.Linear(200, 1500), nn.Tanh(), nn.Linear(1500, 200))
        model = DistributedDataParallel(module, bucket_cap_mb=1)
        made = SparseState(**hook or {"density": 1.0})
        if hook is not None:
            model.register_comm_hook(made, sparse_hook)
        found = []
        own = 0.0
        for step in range(STEPS):
            images = torch.randn(8, 200, generator=torch.Generator().manual_seed(10 * step + rank))
            own += flat(
                torch.autograd.grad(module(images).square().sum(), list(module.parameters()))
            ).double()
            model.zero_grad()
            model(images).square().sum().backward()
            found.append(flat(each.grad for each in module.parameters()))
        residuals = [exchange.residual.clone() for exchange in made.exchanges.values()]
        digest = hashlib.sha256(torch.stack(found).numpy()).hexdigest()
        results.append((digest, found if rank == 0 else None, own, residuals))
    return results


WHOLE = [{"density": 1.0}, {"density": 0.1, "dense_steps": STEPS}]
SPARSE = [
    {"density": 0.05, **more}
    for more in ({}, {"pattern": "tree"}, {"pattern": "owners", "wire": torch.float16})
]


@pytest.mark.multiprocess
def test_whole_gradients_are_ddps_means_and_of_sparse_ones_nothing_is_lost():
    """To the rounding of float32 sums; each replica has the same result, of which few values are
    not zero."""
    size = 3
    ((_, expected, *_), *_), *results = zip(*world.run(size, gradients, [None, *WHOLE, *SPARSE]))
    for number, ranks in enumerate(results):
        _, found, _, residuals = ranks[0]
        assert len({digest for digest, *_ in ranks}) == 1
        if number < len(WHOLE):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            continue
        due = sum(own for _, _, own, _ in ranks) / size
        waiting = sum(sum(part.double().sum() for part in kept) for *_, kept in ranks)
        # Residuals lie in the order of buckets, so sums are compared; of float32 values, to a
        # millionth of the sum of their magnitudes.
        assert abs(torch.stack(found).double().sum() + waiting - due.sum()) < 1e-6 * due.abs().sum()
        assert len(residuals) > 1, "there were several buckets"
        sent = [(result != 0).double().mean().item() for result in found]
        assert min(sent[:2]) > 0.5 and max(sent[2:]) < 0.2


def halves(rank, size):
    """Means of float16 gradients, in dense steps and in one that sends everything as well."""
    made = SparseState(density=1.0)
    return [
        made.average(torch.full((4,), 4e4, dtype=torch.float16), bucket=0, last=True)
        for _ in range(3)
    ]


@pytest.mark.multiprocess
def test_means_of_half_gradients_do_not_overflow_though_their_sums_would():
    for found in world.run(2, halves):
        assert torch.stack(found).tolist() == [[4e4] * 4] * 3


@pytest.mark.parametrize(("key", "value"), [("density", 0.0), ("density", 1.5), ("dense_steps", 1)])
def test_impossible_settings_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        SparseState(**{"density": 0.1, key: value}, group=object())
