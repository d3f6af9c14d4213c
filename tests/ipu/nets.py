"""Small models for the tests of the double, and what plain torch makes of them."""

import torch
from torch.nn import functional


class Net(torch.nn.Module):
    """Two linear layers on [n, 4] and their loss; `mark` marks the loss for the device."""

    def __init__(self, mark=None):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(4, 5)
        self.second = torch.nn.Linear(5, 3)
        self.mark = mark

    def forward(self, inputs, labels):
        scores = self.second(self.first(inputs).relu())
        loss = functional.cross_entropy(scores, labels.long())
        return scores, loss if self.mark is None else self.mark(loss, "none")


def batch(size, seed=0):
    """(inputs [size, 4], labels [size] int64)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator)


def options(poptorch, replicas=1, accumulation=1, iterations=1):
    """Options of that many micro batches a call."""
    made = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    made.Training.gradientAccumulation(accumulation)
    return made


def weights(model):
    """{name: copy} of parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_close(actual, expected, **tolerance):
    """Compares two dicts of tensors key by key."""
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], **tolerance)
