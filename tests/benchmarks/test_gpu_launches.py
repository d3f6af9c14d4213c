"""What counts as a launch, a copy and a synchronisation, by programs whose counts are known; and what ours counts."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import gpu_launches
from benchmarks.gpu_launches import META, Launches
from optim.gradients import Gradients
from optim.layout import Layout

X = torch.empty(4, 8, device=META)


def counted(program):
    """Launches, copies and synchronisations."""
    with Launches() as found:
        program()
    return tuple(sum(each.values()) for each in (found.launches, found.copies, found.synchronisations))


def many(count, shape, dtype=torch.float32, **options):
    return [torch.empty(shape, dtype=dtype, device=META, **options) for _ in range(count)]


def convolved(bias):
    """Forward, a sum, its backward pass (ones and a view), then gradients of input, weight and perhaps bias."""
    x, weight, shift = (
        torch.empty(shape, device=META, requires_grad=True) for shape in ((2, 3, 8, 8), (4, 3, 3, 3), 4)
    )
    F.conv2d(x, weight, shift if bias else None).sum().backward()


def pinned():
    return torch.zeros(3).pin_memory()


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (lambda: torch.zeros(3).add(1).sum().item(), (0, 0, 0)),  # on the host
        (lambda: torch.empty_like(X.view(8, 4).t()[1:].detach().unsqueeze(0)), (0, 0, 0)),
        (lambda: F.silu(X + X).mul_(2), (3, 0, 0)),
        (lambda: convolved(bias=False), (5, 0, 0)),
        (lambda: convolved(bias=True), (6, 0, 0)),
        (lambda: torch.cat([X] * 129), (2, 0, 0)),
        (lambda: X.half(), (1, 0, 0)),
        (lambda: X.sum().item(), (1, 0, 1)),
        (lambda: X.sum().cpu(), (1, 1, 1)),
        (lambda: torch.tensor([1.0, 2.0], device=META), (0, 1, 1)),
        (lambda: torch.zeros(3).to(META, non_blocking=True), (0, 1, 1)),
        (lambda: pinned().to(META), (0, 1, 1)),
        (lambda: pinned()[1:].to(META, non_blocking=True), (0, 1, 0)),
        (lambda: X[0].copy_(torch.zeros(8).pin_memory(), non_blocking=True), (0, 1, 0)),
        (lambda: X[torch.tensor([1, 2])], (0, 1, 1)),
        (lambda: X * torch.tensor(2.0), (1, 0, 0)),  # a number of the host is an argument of the kernel
    ],
)
def test_programs_count_what_they_start(program, expected):
    assert counted(program) == expected


@pytest.mark.parametrize(
    ("program", "launches"),
    [
        (lambda: torch._foreach_add_(many(129, 5), many(129, 5)), 3),  # 64 pairs each
        (lambda: torch._foreach_add(many(97, 5), many(97, 5)), 3),  # 48 of three lists
        (lambda: torch._foreach_mul_(many(110, 5), 2.0), 1),
        (lambda: torch._foreach_mul_(many(1, 321 * 65536), 2.0), 2),  # 320 chunks each
        (lambda: torch._foreach_mul_(many(2, 320 * 65536), 2.0), 2),
        (lambda: torch._foreach_add_(many(129, 5), many(129, 5, torch.float16)), 129),  # torch takes one by one
        (lambda: torch._foreach_copy_(many(129, 5), many(129, 5, torch.float16)), 3),
        (lambda: torch._foreach_copy_(many(2, (5, 2)), [each.t() for each in many(2, (2, 5))]), 2),
    ],
)
def test_lists_of_tensors_take_as_many_launches_as_their_addresses_and_chunks_need(program, launches):
    with Launches() as found:
        program()
    assert sum(found.launches.values()) - sum(found.launches[name] for name in ("empty", "t")) == launches


def test_a_triton_kernel_is_one_launch():
    jit = pytest.importorskip("triton.runtime.jit")

    def kernel(x):
        pass

    kernel = jit.JITFunction(kernel)  # not triton.jit, which makes an interpreted one in tests

    with Launches() as found:
        kernel[(7,)](X)
        kernel[(3,)](X)
    assert found.launches == {"triton kernel": 2}


def test_gradients_of_channels_last_convolutions_have_the_layout_of_their_input():
    """As cuDNN gives them; meta's contiguous ones would be copied by the next layer."""
    x = torch.empty(2, 16, 8, 8, device=META).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.empty(4, 16, 1, 1, device=META, requires_grad=True)
    with Launches():
        y = F.conv2d(x, weight)
        dx, _ = torch.autograd.grad(y, [x, weight], torch.empty_like(y))
    assert dx.is_contiguous(memory_format=torch.channels_last)


def test_an_update_is_more_than_its_micro_batches_and_counts_are_of_one_micro_batch():
    def update(count):
        for _ in range(count):
            X.add(1)
            X.sum().item()
        X.mul(2)

    counts = gpu_launches.per_micro_batch(gpu_launches.Side("side", 1, update))
    assert counts == {"launches": {"add": 1, "sum": 1}, "copies": {}, "synchronisations": {"_local_scalar_dense": 1}}


# What the product counts.

TINY = ("model.name=efficientnet_b0", "model.width=0.25", "model.depth=0.4", "model.image_size=32", "model.classes=10")


_PLAIN = ("parallel.recompute=true", "data.mixup=0", "data.cutmix=null")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), _PLAIN], ids=len)
def test_a_micro_batch_waits_for_nothing_and_is_accumulated_by_few_kernels(changes):
    """Labels are copied, and shares where images are mixed; once in eight micro batches the keys of their masks. With
    recomputation dropout's masks are not drawn again."""
    counts = gpu_launches.per_micro_batch(gpu_launches.ours("channels_last", "torch", 4, *TINY, *changes))
    assert counts["synchronisations"] == {}
    assert counts["copies"] == {"_to_copy": 1.125 if "data.mixup=0" in changes else 2.125}
    launches = counts["launches"]
    assert launches["index_select"] == 0.125  # one draw of masks
    assert launches["_foreach_copy_"] <= 3 and launches["add_"] == 3  # gradients, the loss, and hits


def test_scores_wait_for_nothing():
    counts = gpu_launches.per_micro_batch(gpu_launches.evaluation(4, *TINY, "engine.kernels=torch"))
    assert (counts["copies"], counts["synchronisations"]) == ({"_to_copy": 1}, {})


def test_on_a_gpu_few_kernels_take_in_a_model_whatever_strides_gradients_have():
    """cuDNN's of a 1 x 1 kernel are channels-last ones, which differ where dimensions have one element."""
    parameters = {str(number): nn.Parameter(torch.empty(8, 4, 1, 1, device="meta").half()) for number in range(64)}
    gradients = Gradients(parameters, Layout(parameters), None, ())
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.empty(8, 4, 1, 1, device="meta", memory_format=torch.channels_last).half()
        with Launches() as counted:
            gradients.accumulate()
        assert all(parameter.grad is None for parameter in parameters.values())
    assert counted.launches == {"_foreach_copy_": 1, "add_": 1}
