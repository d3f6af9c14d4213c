"""The communication hook: against DDP's own means, and nothing is lost."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel.ddp_hook import SparseState, sparse_hook
from tests import world

pytestmark = pytest.mark.multiprocess
STEPS = 6


def gradients(rank, size, hook):
    """Gradients after each of some backward passes, what each replica would have had alone, and its residuals."""
    torch.manual_seed(0)
    # 1.2 MB a matrix: the first bucket holds one, whatever the cap.
    module = nn.Sequential(nn.Linear(200, 1500), nn.Tanh(), nn.Linear(1500, 200))
    model = DistributedDataParallel(module, bucket_cap_mb=1)
    made = SparseState(**hook) if hook is not None else None
    if made is not None:
        model.register_comm_hook(made, sparse_hook)
    found, own = [], []
    for step in range(STEPS):
        images = torch.randn(8, 200, generator=torch.Generator().manual_seed(10 * step + rank))
        alone = torch.autograd.grad(module(images).square().sum(), list(module.parameters()))
        own.append(torch.cat([each.flatten() for each in alone]).double())
        model.zero_grad()
        model(images).square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in module.parameters()]).double())
    residuals = [exchange.residual.double() for exchange in made.exchanges.values()] if made is not None else []
    return found, own, residuals


@pytest.mark.parametrize("hook", [{"density": 1.0}, {"density": 0.1, "dense_steps": STEPS}], ids=["all", "dense"])
def test_what_is_sent_whole_is_ddps_own_mean(hook):
    """To the rounding of float32 sums of two."""
    (expected, _, _), _ = world.run(2, gradients, None)
    (found, _, _), (others, _, _) = world.run(2, gradients, hook)
    for one, two, three in zip(found, others, expected):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("pattern", ["gather", "tree", "owners"])
@pytest.mark.parametrize("size", [2, 3])
def test_nothing_is_lost_and_few_values_arrive(size, pattern):
    """Sum of means over replicas = sum of results + what waits in the residuals; each has the same result."""
    ranks = world.run(size, gradients, {"density": 0.05, "pattern": pattern})
    results = ranks[0][0]
    assert all(torch.equal(one, two) for found, _, _ in ranks for one, two in zip(found, results))
    due = sum(torch.stack(own).sum(0) for _, own, _ in ranks) / size
    waiting = sum(sum(part.sum() for part in residuals) for _, _, residuals in ranks)
    # Residuals lie in the order of buckets, so sums are compared; of float32 values, to a millionth of
    # the sum of their magnitudes.
    scale = due.abs().sum()
    assert abs(torch.stack(results).sum() + waiting - due.sum()) < 1e-6 * scale
    assert len(ranks[0][2]) > 1, "there were several buckets"
    sent = [(result != 0).double().mean().item() for result in results]
    assert min(sent[:2]) > 0.5 and max(sent[2:]) < 0.2


@pytest.mark.parametrize(("key", "value"), [("density", 0.0), ("density", 1.5), ("dense_steps", 1)])
def test_impossible_settings_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        SparseState(**{"density": 0.1, key: value}, group=object())
