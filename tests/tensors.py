"""Nested dictionaries of tensors, as state dicts are, compared bit for bit."""

import torch


def flat(tree, prefix=""):
    """A nested dictionary of tensors as {"/a/b": tensor}."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    return {
        name: leaf
        for key, branch in tree.items()
        for name, leaf in flat(branch, f"{prefix}/{key}").items()
    }


def assert_bitwise_equal(actual, expected):
    """The same names, dtypes and bytes."""
    actual = flat(actual)
    expected = flat(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].numpy().tobytes() == tensor.numpy().tobytes(), name
