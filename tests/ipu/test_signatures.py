"""Binds the double to the table of PopTorch's signatures; what the product calls, the double binds to it."""

import functools
import importlib
import inspect
import re

import pytest

from tests.ipu.double import signatures

pytestmark = pytest.mark.ipu

# The double takes these from the table, and binds every call to it.
BOUND = re.compile(r"poptorch\.(Options|TensorLocationSettings|AsynchronousDataAccessor|optim\.[A-Za-z]+\.__init__)")


def functions(table, path):
    """(dotted name, function) of every function that a class of the table has, and the classes in it."""
    for name, found in vars(table).items():
        if inspect.isclass(found):
            yield from functions(found, f"{path}.{name}")
        elif inspect.isfunction(found):
            yield f"{path}.{name}", found


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]


@pytest.mark.parametrize("package", ["poptorch", "popdist", "horovod"])
def test_the_double_has_the_real_signatures(double, package):
    for name, function in functions(getattr(signatures, package), package):
        parts = name.split(".")
        length = 2 if parts[:2] in (["popdist", "poptorch"], ["horovod", "torch"]) else 1
        if not BOUND.match(name):
            found = functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
            assert parameters(found) == parameters(function), name


def test_the_double_has_no_other_methods(double):
    own, real = (vars(each.PoplarExecutor) for each in (double, signatures.poptorch))
    assert {each for each in own if each[0] != "_"} < set(real)
    for wrong in (lambda made: made.enableOverlap(1), lambda made: made.Training.gradientAccumulation()):
        with pytest.raises((AttributeError, TypeError)):
            wrong(double.Options())
