"""Binds the double, and what the product calls, to the table of PopTorch's signatures."""

import ast
import functools
import importlib
import inspect
import re

import pytest

from tests.conftest import ROOT
from tests.ipu.double import signatures

pytestmark = pytest.mark.ipu

PRODUCT = sorted([*ROOT.glob("engines/ipu_*.py"), *ROOT.glob("recipe/ipu*.py")])


def functions(table, path):
    """(dotted name, function) of every function that a class of the table has, and the classes in it."""
    for name, found in vars(table).items():
        if inspect.isclass(found):
            yield from functions(found, f"{path}.{name}")
        elif inspect.isfunction(found):
            yield f"{path}.{name}", found


TABLE = {
    name: function
    for package in ("poptorch", "popdist", "horovod")
    for name, function in functions(getattr(signatures, package), package)
}
# The double takes these from the table, and binds every call to it.
BOUND = re.compile(r"poptorch\.(Options|TensorLocationSettings|AsynchronousDataAccessor|optim\.[A-Za-z]+\.__init__)")


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]


def test_the_double_has_the_real_signatures_and_no_other_methods(double):
    for name, function in TABLE.items():
        parts = name.split(".")
        length = 2 if parts[:2] in (["popdist", "poptorch"], ["horovod", "torch"]) else 1
        if not BOUND.match(name):
            found = functools.reduce(getattr, parts[length:], importlib.import_module(".".join(parts[:length])))
            assert parameters(found) == parameters(function), name
    assert set(double.__all__) <= set(vars(signatures.poptorch))
    assert {each for each in vars(double.PoplarExecutor) if each[0] != "_"} < set(
        vars(signatures.poptorch.PoplarExecutor)
    )
    for wrong in (lambda made: made.enableOverlap(1), lambda made: made.Training.gradientAccumulation()):
        with pytest.raises((AttributeError, TypeError)):
            wrong(double.Options())


def dotted(node):
    """a.b.c of an expression, None where it is something else."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def unknown(source):
    """Attributes of their modules, names of theirs in texts, and methods in camel case that the table lacks."""
    names, methods = set(), set()
    for node in ast.walk(ast.parse(source)):
        text = node.value if isinstance(node, ast.Constant) else dotted(node)
        if isinstance(text, str) and re.fullmatch(r"(poptorch|popdist|horovod|Options)(\.\w+)+", text):
            names.add(re.sub(r"^Options", "poptorch.Options", text))
        elif isinstance(node, ast.Attribute) and re.match(r"[a-z]+[a-z0-9]*[A-Z]", node.attr):
            methods.add(node.attr)
    return sorted({name for name in names if not _in_table(name)} | (methods - {name.split(".")[-1] for name in TABLE}))


def _in_table(name):
    try:
        return functools.reduce(getattr, name.split("."), signatures)
    except AttributeError:
        return False


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.name)
def test_the_product_calls_what_the_table_has(path):
    assert unknown(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("poptorch.DataLoaderMode.Async; poptorch.optim; self.executor.setOptimizer(1); plan.learning_rate()", []),
        ("poptorch.optim.LARS", ["poptorch.optim.LARS"]),
        ("poptorch.DataLoaderMode.Fast", ["poptorch.DataLoaderMode.Fast"]),
        ("horovod.torch.alltoall()", ["horovod.torch.alltoall"]),
        ("('Options.Training.gradientAccumulation', 'Options.enableOverlap')", ["poptorch.Options.enableOverlap"]),
        ("self.executor.copyWeights()", ["copyWeights"]),
    ],
)
def test_other_names_are_found(source, expected):
    assert unknown(source) == expected
