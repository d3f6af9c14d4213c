"""Parameters that no loss of an update depends on, against the optimizers of torch and timm."""

import pytest
import timm.optim
import torch
from torch import nn

from engines.own_loop import DistributedOptimizer
from models.families import build
from recipe.config import Model
from tests import world
from tests.tensors import assert_bitwise_equal

MOMENTUM = 0.9
DECAY = 0.1
LR = 0.5
STEPS = 8
SECTIONS = {
    "sgd": {"name": "sgd", "momentum": MOMENTUM, "weight_decay": DECAY, "skip": []},
    "lars": {
        "name": "lars",
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "trust_coefficient": 0.1,
        "skip": [],
    },
    "rmsprop": {
        "name": "rmsprop",
        "momentum": MOMENTUM,
        "weight_decay": DECAY,
        "eps": 1e-3,
        "alpha": 0.9,
        "skip": [],
    },
    "lamb": {"name": "lamb", "weight_decay": DECAY, "eps": 1e-3, "skip": []},
    "adamw": {"name": "adamw", "weight_decay": DECAY, "eps": 1e-3, "skip": []},
}
LIBRARIES = {
    "sgd": lambda each: torch.optim.SGD(each, lr=LR, momentum=MOMENTUM, weight_decay=DECAY),
    "lars": lambda each: timm.optim.Lars(
        each, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, trust_coeff=0.1
    ),
    "rmsprop": lambda each: timm.optim.RMSpropTF(
        each, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, eps=1e-3, alpha=0.9
    ),
    "lamb": lambda each: timm.optim.Lamb(
        each, lr=LR, weight_decay=DECAY, eps=1e-3, max_grad_norm=None
    ),
    "adamw": lambda each: torch.optim.AdamW(each, lr=LR, weight_decay=DECAY, eps=1e-3),
}
NEVER = frozenset()
# updates whose loss depends on it: between them its momentum stands still
AT_TIMES = frozenset((0, 1, 4))


class Network(nn.Module):
    """Two layers, the second of which a loss may leave out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x, both):
        return self.second(self.first(x)) if both else self.first(x)


def loss_of(module, step, both, rank=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (module(torch.randn(4, 8, generator=generator), both) - 1).square().mean()


@pytest.mark.parametrize("weights", ["float32", "float16"])
@pytest.mark.parametrize("used", [NEVER, AT_TIMES], ids=["never", "at times"])
@pytest.mark.parametrize("name", SECTIONS)
def test_an_optimizer_leaves_alone_what_has_no_gradient_as_the_library_does(name, used, weights):
    """AdamW counts each parameter's updates in torch, all updates here: used at times, its steps
    are others."""
    module = Network()
    expected = Network()
    precision = {"weights": weights, **({"rounding": "nearest"} if weights == "float16" else {})}
    optimizer = DistributedOptimizer(module, {"optimizer": SECTIONS[name], "precision": precision})
    start = {key: each.clone() for key, each in module.state_dict().items()}
    library = LIBRARIES[name](expected.parameters())
    before = None
    for step in range(STEPS):
        library.zero_grad()
        loss_of(expected, step, step in used).backward()
        library.step()
        before = {
            key: each["second.weight"] for key, each in optimizer.weights.state_dict().items()
        }
        optimizer.backward(loss_of(module, step, step in used))
        assert optimizer.step(lr=LR)
        after = {key: each["second.weight"] for key, each in optimizer.weights.state_dict().items()}
        if step not in used:
            assert_bitwise_equal(after, before)
    changed = not torch.equal(module.second.weight, start["second.weight"])
    assert changed == bool(used) and not torch.equal(module.first.weight, start["first.weight"])
    if weights == "float32" and not (name == "adamw" and used):
        for one, other in zip(module.parameters(), expected.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_zeros_is_a_gradient_and_so_is_that_of_one_micro_batch():
    """Weight decay acts then, as in torch's own optimizers."""
    module = Network()
    optimizer = DistributedOptimizer(module, {"optimizer": SECTIONS["sgd"]}, accumulation=2)
    weight = module.second.weight.detach().clone()
    for both in (False, True):
        optimizer.backward(0 * loss_of(module, 0, both))
    optimizer.step(lr=LR)
    torch.testing.assert_close(
        module.second.weight, (1 - LR * DECAY) * weight, rtol=0, atol=2.0**-10
    )
    weight = module.second.weight.detach().clone()
    optimizer.backward(loss_of(module, 0, True))
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.backward(loss_of(module, 0, False))
    optimizer.step(lr=LR)
    assert torch.equal(module.second.weight, weight), "passes that were forgotten count for nothing"


EXCHANGES = (
    {},
    {"method": "topk", "density": 0.3},
    {"bits": 8},
    {"method": "local", "local_steps": 2},
)
# by update, the replicas that use the second layer
USED_BY = {0: (0, 1), 1: (0,), 2: (), 3: (1,), 4: (), 5: (0, 1)}


def replica(rank, size):
    """For each exchange: the weights and this replica's state before and after each update."""
    found = []
    for exchange in EXCHANGES:
        for name in ("lars", "sgd"):
            module = Network()
            sections = {
                "optimizer": SECTIONS[name],
                "precision": {"weights": "float32"},
                "exchange": exchange,
            }
            optimizer = DistributedOptimizer(module, sections)

            def second(optimizer=optimizer):
                kept = {**optimizer.weights.own_state(), **optimizer._exchange.own_state()}
                return {
                    key: optimizer.weights.by_name(flat)["second.weight"]
                    for key, flat in kept.items()
                }

            states = [second()]
            for step, users in USED_BY.items():
                optimizer.backward(loss_of(module, step, rank in users, rank))
                assert optimizer.step(lr=0.1)
                states.append(second())
            found.append(states)
    return found


@pytest.mark.multiprocess
def test_what_one_replica_uses_is_used_and_what_none_does_stays_whatever_the_exchange():
    """Values that were not sent yet stay where they are, too.

    With the dense exchange the weights are those of one process that has the images of both.
    """
    first, second = world.run(2, replica)
    for number, (one, other) in enumerate(zip(first, second)):
        for step, users in USED_BY.items():
            for states in (one, other):
                if not users:
                    assert_bitwise_equal(states[step + 1], states[step])
                else:
                    assert not torch.equal(states[step + 1]["weights"], states[step]["weights"]), (
                        number,
                        step,
                    )
            if number < 6 or step % 2:
                assert torch.equal(one[step + 1]["weights"], other[step + 1]["weights"]), (
                    number,
                    step,
                )
    for number, name in enumerate(("lars", "sgd")):
        module = Network()
        sections = {"optimizer": SECTIONS[name], "precision": {"weights": "float32"}}
        optimizer = DistributedOptimizer(module, sections, accumulation=2)
        for step, users in USED_BY.items():
            for rank in range(2):
                optimizer.backward(loss_of(module, step, rank in users, rank))
            optimizer.step(lr=0.1)
        torch.testing.assert_close(
            first[number][-1]["weights"], module.second.weight, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_every_parameter_of_a_recipes_model_has_a_gradient_in_each_backward_pass(norm):
    """So the training engine needs none of this, also where drop path leaves out every block."""
    section = Model(
        name="efficientnet_b0",
        width=0.25,
        depth=0.1,
        image_size=32,
        norm=norm,
        drop_path=0.9,
        classes=3,
    )
    model = build(section, seed=0).train()
    model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []
