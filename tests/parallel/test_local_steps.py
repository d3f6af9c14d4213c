"""Local steps: when means are taken, of what, and what the outer optimizer makes of them."""

from types import SimpleNamespace

import pytest
import torch

from parallel.exchange import Setup
from parallel.local_steps import LocalSteps
from recipe.exchange import Exchange
from tests.parallel import threads
from tests.tensors import assert_bitwise_equal

LENGTH = 12
EVERY = 4
OUTER = {"outer": "nesterov", "outer_lr": 0.7, "outer_momentum": 0.9}


class Weights:
    """A replica's weights, float32."""

    def __init__(self):
        self.flat = torch.linspace(-1, 1, LENGTH)

    def own_state(self):
        return {"weights": self.flat}

    def store(self, start, end, values, index):
        self.flat[start:end] = values


def moved(rank, step):
    """What a replica's own update adds to its weights."""
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * rank + step))


def trained(rank, size, steps, keys):
    """A replica's weights after each step, and its exchange."""
    weights = Weights()
    section = Exchange(method="local", local_steps=EVERY, **keys)
    processes = SimpleNamespace(replica_group="replicas")
    setup = Setup(
        batch=None,
        processes=processes,
        gradients=None,
        places=(),
        collect=None,
        group="replicas",
        steps_per_epoch=None,
        weights=weights,
    )
    made = LocalSteps(setup, section)
    made._thread = None  # ranks are threads here; one beside them is for the engine's tests
    found = []
    for step in range(steps):
        gradient = moved(rank, step)
        made(gradient, step, torch.tensor(1.0))
        weights.flat.add_(gradient / size)  # the buffer has a sum over replicas
        made.after_update(step)
        found.append(weights.flat.clone())
    return found, made


def by_hand(size, steps, fragments=1, dense_steps=0, outer=None, delay=0, **_):
    """The same in float64: weights of each replica after each step."""
    weights = [torch.linspace(-1, 1, LENGTH).double() for _ in range(size)]
    anchor = weights[0].clone()
    velocity = torch.zeros(LENGTH).double()
    found = []
    history = {}
    for step in range(steps):
        own = [moved(rank, step).double() for rank in range(size)]
        if step < dense_steps:
            own = [sum(own) / size] * size
        weights = [each + change for each, change in zip(weights, own)]
        if step < dense_steps:
            anchor = weights[0].clone()
        history[step] = [each.clone() for each in weights]
        for number in range(fragments):
            sent = step - delay
            if sent >= dense_steps and (sent + 1 + number * EVERY // fragments) % EVERY == 0:
                part = slice(number * LENGTH // fragments, (number + 1) * LENGTH // fragments)
                mean = sum(each[part] for each in history[sent]) / size
                if outer is not None:
                    way = anchor[part] - mean
                    velocity[part] = OUTER["outer_momentum"] * velocity[part] + way
                    mean = anchor[part] - OUTER["outer_lr"] * (
                        way + OUTER["outer_momentum"] * velocity[part]
                    )
                    anchor[part] = mean
                for each, then in zip(weights, history[sent]):
                    each[part] += mean - then[part]
        found.append([each.clone() for each in weights])
    return found


CASES = [
    {},
    {"fragments": 3},
    {"dense_steps": 3},
    {"delay": 1},
    {"delay": 3, "fragments": 3, "dense_steps": 2},
    OUTER,
    {**OUTER, "fragments": 4, "dense_steps": 2},
    {**OUTER, "delay": 2, "fragments": 2},
]


@pytest.mark.parametrize("keys", CASES, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_where_the_definition_has_them(size, keys):
    """To the rounding of some ten float32 additions of values below 16; and equal where they should
    be, to the bit."""
    ranks = threads.run(size, trained, 11, keys)
    for step, wanted in enumerate(by_hand(size, 11, **keys)):
        for (found, _), each in zip(ranks, wanted):
            torch.testing.assert_close(found[step].double(), each, rtol=0, atol=16 * 2**-20)
    if not keys.get("fragments") and not keys.get("delay"):
        for step in (EVERY - 1, 2 * EVERY - 1):
            assert all(torch.equal(found[step], ranks[0][0][step]) for found, _ in ranks)
            assert not torch.equal(ranks[0][0][step + 1], ranks[1][0][step + 1])
    states = [made.common_state() for _, made in ranks]
    assert_bitwise_equal(states[0], states[-1])
    assert ("anchor" in states[0]) == ("outer_momentum" in states[0]) == ("outer" in keys)


@pytest.mark.parametrize(("bits", "bound"), [(8, 0.02), (4, 0.35)])
def test_in_few_bits_what_is_rounded_off_is_kept(bits, bound):
    """After a mean all replicas are equal, within half of two steps of the exact mean: a step is a
    127th, or a 7th, of the longest way, here some 5. What is not sent of the ways is what replicas
    keep."""
    ranks = threads.run(3, trained, EVERY, {"bits": bits})
    found = [weights[-1] for weights, _ in ranks]
    assert all(torch.equal(each, found[0]) for each in found)
    exact = by_hand(3, EVERY)[-1][0]
    assert 0 < (found[0].double() - exact).abs().max() < 2.5 * bound
    kept = sum(made.state()["residual"].double() for _, made in ranks) / 3
    torch.testing.assert_close(found[0].double() + kept, exact, rtol=0, atol=1e-5)
